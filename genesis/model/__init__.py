"""The model, its description and its way to and from other layouts."""
