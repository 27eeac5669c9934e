"""The assignment of matrices to ranks, and its cost."""
