"""`genesis checkpoint list|show|verify|diff|prune|repair|to-lightning`: a run's checkpoints.

Exit status: 0 success, 1 a problem was found, 2 invalid arguments. Commands that only read take no lock and may run
during training; `prune` and `repair --apply` refuse to run while a training run holds the directory.
"""
