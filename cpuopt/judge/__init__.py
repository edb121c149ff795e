"""The judge of kernels that nobody vouches for: rules on their text, a closed process, private cases, verdicts."""
