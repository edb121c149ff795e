"""A program as data: values and calls, and the passes from one program to the next."""
