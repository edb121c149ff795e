"""A process that may crash or hang, and who asks it: requests and answers are JSON lines."""
