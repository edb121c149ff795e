"""Compilation of kernels: numba's options, the compile cache, worker processes."""
