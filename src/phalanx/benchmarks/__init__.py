"""The benchmarks of a file: their variants, run as processes, and their results."""
