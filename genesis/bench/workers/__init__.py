"""The contenders of `genesis bench step` that run in our own environment, one process each."""
