"""What kernel files are made of: SIMD, tiles, math, threads."""
