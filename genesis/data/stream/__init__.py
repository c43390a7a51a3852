"""Training straight from raw shards: lanes, blocks of sequences, the workers that make them, and a rank's windows."""
