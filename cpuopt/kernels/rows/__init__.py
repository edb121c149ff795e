"""Kernels for few rows, as generation has them: a weight streams through once; what is small starts no threads."""
