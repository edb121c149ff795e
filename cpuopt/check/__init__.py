"""Correctness: test cases, conformance of kernels with their references, gradients, and the gate before a run."""
