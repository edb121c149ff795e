"""Instruments for the kernel engineer: is a kernel right, which of two is faster, how far is it from the roof."""
