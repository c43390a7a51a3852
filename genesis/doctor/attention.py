"""The part of the doctor that runs every proof from the start of a fit."""

from genesis.doctor.machine import run_proofs
from genesis.doctor.probe import Probe
from genesis.model.device_proofs import ATTENTION_PROOF, CACHED_ATTENTION_PROOF, linear_attention_proofs


def run_all_proofs(probe: Probe) -> None:
    """Runs the proofs of the checkpoint engine and of attention."""
    run_proofs(probe, (ATTENTION_PROOF, CACHED_ATTENTION_PROOF, *linear_attention_proofs()))
