"""The contenders of the benchmark `step` that run in our own environment, one process each."""
