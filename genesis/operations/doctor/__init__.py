"""`genesis doctor`: tests correctness and speed of a machine's devices, each part in a process of its own."""
