"""Output for people and tools: tables, progress, pages, traces. Nothing here computes a figure that a record lacks."""
