"""The part of the doctor that runs the proofs from the start of a fit."""

import torch

from genesis.base.device import read_capability
from genesis.model.attend.kernel import Place
from genesis.model.attend.table import KERNELS, MASK
from genesis.model.delta_kernel import PACKAGE, find_version
from genesis.model.device_proofs import CACHED_ATTENTION_PROOF, ProvedShape, attention_proof
from genesis.operations.doctor.machine import run_proofs
from genesis.operations.doctor.probe import Probe


def run_all_proofs(probe: Probe) -> None:
    """Runs the proofs of the checkpoint engine and of each kernel of attention that can run on the device."""
    device = torch.device(probe.task.kind)
    place = Place(device.type, read_capability(device), ProvedShape().dtype, ProvedShape().head_dim)
    proofs = []
    for name, kernel in KERNELS.items():
        obstacle = kernel.find_obstacle(place)
        if obstacle is not None:
            probe.note(f"attention by {name} is not proved: {obstacle}")
        elif name != MASK.name:  # with which the others are compared
            proofs.append(attention_proof(name, label=f"attention by {name}"))
    run_proofs(probe, (*proofs, CACHED_ATTENTION_PROOF))
    found = find_version()
    if found is not None:
        probe.note(
            f"{PACKAGE} {found} is installed: the first start with a model that has linear layers proves its kernels, "
            "which takes about a minute"
        )
