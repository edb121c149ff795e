"""Is it right: cases, the conformance of kernels, gradients."""
