"""A web page and an OpenAI-compatible server for the checkpoints of a run."""
