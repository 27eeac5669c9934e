"""The assignment of matrices to ranks, its cost, and the same on paper for a mesh that is not here."""
