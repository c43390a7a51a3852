"""An export made ready for the Hugging Face Hub."""
