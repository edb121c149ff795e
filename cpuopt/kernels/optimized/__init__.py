"""The fast kernels: vectorised, tiled, bitwise identical for any number of threads."""
