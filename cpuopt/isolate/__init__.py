"""Child processes that may crash or hang; requests and answers are JSON lines.

`process` starts one and talks to it, `child` does so for a process that runs users' kernels, and `serve` is the loop
that answers inside.
"""
