"""Reads token files of other tools in place, and makes corpora of them."""
