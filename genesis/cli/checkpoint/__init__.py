"""`genesis checkpoint list|show|verify|diff|prune|repair|to-lightning`: a run's checkpoints.

Exit status 0 is good, 1 something bad was found, 2 misuse. What only reads takes no lock and may run beside a training;
`prune` and `repair --apply` refuse while a run holds the directory.
"""
