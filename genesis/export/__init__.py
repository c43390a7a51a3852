"""Out of the trainer and into it: checkpoints to Hugging Face directories and back, each with its proof."""
