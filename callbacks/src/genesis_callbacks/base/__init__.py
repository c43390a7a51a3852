"""The base of both distributions: errors, files, locks, events and the directory of a run. No torch."""
