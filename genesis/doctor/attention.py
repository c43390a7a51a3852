"""The part of the doctor that runs every proof of a fit's start."""

from genesis.doctor.machine import run_proofs
from genesis.doctor.probe import Probe
from genesis.train.device_proofs import ATTENTION_PROOF


def run_all_proofs(probe: Probe) -> None:
    """Runs the proofs of the checkpoint engine and of training."""
    run_proofs(probe, (ATTENTION_PROOF,))
