"""What everything else stands on; no module here imports a sibling package."""
