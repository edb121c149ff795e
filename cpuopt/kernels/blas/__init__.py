"""Matrix products on NumPy's BLAS: the baseline of a tuned library. Its threads are those of the engine."""
