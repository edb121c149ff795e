"""Programs as data: values and calls, and the passes over them: reverse mode, rewrites, memory planning."""
