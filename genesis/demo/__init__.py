"""The whole road in minutes, on text that every Python has."""
