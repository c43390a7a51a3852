"""The contenders of `python -m benchmarks step` that run in our own environment, one process each."""
