"""Kernels for few rows, as generation has them: a weight is read once, at the speed of memory."""
