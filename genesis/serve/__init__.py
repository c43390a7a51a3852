"""A page and an OpenAI-compatible server over the checkpoints of a run."""
