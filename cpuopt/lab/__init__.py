"""Instruments for the kernel engineer: A/B comparison, tuning, machine code, records, whole steps beside a peer."""
