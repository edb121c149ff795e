"""A CPU performance laboratory for LLM training, in Python with numba."""
