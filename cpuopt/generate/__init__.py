"""Text from a model behind a cache."""
