"""Matrix products on NumPy's BLAS: the honest ceiling to compare with. Its threads are those of the engine."""
