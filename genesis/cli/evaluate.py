"""`genesis evaluate`."""
