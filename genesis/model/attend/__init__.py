"""Attention by one of several kernels, each in a file of its own; `table` chooses one and calls it."""
