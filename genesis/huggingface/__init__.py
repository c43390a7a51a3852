"""Hugging Face's layout: a table for each family of models, and how a directory in that layout is read and written."""
