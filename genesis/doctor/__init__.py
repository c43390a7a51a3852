"""`genesis doctor`: what a machine's devices do and how fast, each part in a process of its own."""
