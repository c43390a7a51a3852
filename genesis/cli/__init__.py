"""The command line: a table of commands, and one module per group of them."""
