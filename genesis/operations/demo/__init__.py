"""`genesis demo`: the whole path from raw text to a trained model in minutes, on text that every Python includes."""
