"""`genesis serve`."""
