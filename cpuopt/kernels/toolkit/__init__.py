"""Building blocks of kernel files: SIMD, tiles, math, threads, numbers to choose from."""
