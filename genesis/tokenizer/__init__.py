"""Text to ids and back: training a tokenizer and using one."""
