"""Text generation: one token at a time, with the keys and values of earlier tokens in a cache."""
