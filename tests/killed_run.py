"""Runs the doctor's killed run in a process of its own, because its ranks are forked from one that computes nothing.

`python -m tests.killed_run TASK MODE VARIANT RANKS FINDINGS [planted]`; with `planted`, each process has other data.
"""

import os
import sys
from pathlib import Path

import numpy as np

from genesis.operations.doctor import fits
from genesis.operations.doctor.killed_run import kill_and_resume
from genesis.operations.doctor.probe import Probe, read_findings, task_from_json
from tests.commands import run_module


def kill_alone(probe: Probe, mode: str, variant: str = "ddp", num_ranks: int = 1, *words: str) -> None:
    """Does what `kill_and_resume` does."""
    path = Path(probe.task.directory) / "findings.json"
    done = run_module("tests.killed_run", probe.task.to_json(), mode, variant, str(num_ranks), path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    probe.findings = read_findings(path)


if __name__ == "__main__":
    task, mode, variant, num_ranks, findings, *words = sys.argv[1:]
    if words:
        right = np.random.default_rng
        fits.np.random.default_rng = lambda seed: right((*seed, os.getpid()))  # type: ignore[assignment]
    kill_and_resume(Probe(task_from_json(task), Path(findings)), mode, variant, int(num_ranks))
