"""Decide which rank runs the matrix transforms of each matrix, and estimate the cost of that assignment."""
