"""Benchmarks and held-out text, from saved checkpoints, in a process of its own."""
