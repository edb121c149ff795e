"""The judge of untrusted kernels: rules on their text, a sandbox, private cases, verdicts."""
