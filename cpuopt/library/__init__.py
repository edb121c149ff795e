"""What scripts and notebooks use: an engine with the command line's defaults, and results that show themselves."""
