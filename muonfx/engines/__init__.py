"""Training engines, each unmodified: a layout that the engine has made, and a thin face over it."""
