"""The models that cpuopt brings."""
