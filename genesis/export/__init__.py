"""Converts checkpoints to Hugging Face directories and back, each time with a proof."""
