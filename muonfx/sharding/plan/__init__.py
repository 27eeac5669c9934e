"""Who computes what, and what that costs."""
