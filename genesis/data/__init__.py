"""The path from text to windows: preparation, the order of sequences, the loader."""
