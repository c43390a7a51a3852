"""`genesis release`."""
