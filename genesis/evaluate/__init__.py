"""Evaluates saved checkpoints, on benchmarks and held-out text, in a process separate from training."""
