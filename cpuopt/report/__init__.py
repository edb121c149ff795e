"""What people see: tables, progress, files for other tools. Nothing here computes a figure that a record lacks."""
