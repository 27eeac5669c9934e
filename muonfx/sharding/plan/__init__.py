"""Decide which rank computes each matrix, and estimate the cost of this assignment."""
