"""Genesis: train language models from raw text, with checkpoints that never lie."""

__version__ = "0.1.0"
