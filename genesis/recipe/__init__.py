"""Recipes: their YAML, their imports, those that are shipped, and how long a run is."""
