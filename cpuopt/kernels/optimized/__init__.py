"""The fast kernels: vectorised, tiled, the same bits for any number of threads."""
