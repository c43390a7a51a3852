"""The training step and what it logs."""
