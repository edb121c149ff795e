"""Kernels for few rows, as generation has them: a weight streams through once; what is small starts no threads."""

SMALL = 512 << 10
"""Bytes below which one thread reads alone: to start others takes microseconds where they wait awake, 75 where not."""
