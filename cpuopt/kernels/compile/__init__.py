"""How a kernel becomes machine code: options, cache, processes that compile."""
