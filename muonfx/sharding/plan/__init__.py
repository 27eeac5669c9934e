"""Decide which rank orthogonalizes each matrix, and estimate the cost of that assignment."""
