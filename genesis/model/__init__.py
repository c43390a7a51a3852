"""The model, its parts and its description."""
