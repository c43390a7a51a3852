"""The parts of the doctor, most important first. A part's code is imported in its own process."""

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

from genesis.operations.doctor.probe import PartFunction


@dataclass(frozen=True)
class Part:
    """A part of the doctor.

    Args:
        name: The part's name for `--parts`.
        summary: A description of the part for the table.
        limit_seconds: Time limit of the part on an idle machine.
        target: `module:function` below `genesis.operations.doctor`.
        arguments: Arguments of the function in addition to the probe.
    """

    name: str
    summary: str
    limit_seconds: float
    target: str
    arguments: tuple[Any, ...] = ()

    def load(self) -> PartFunction:
        """Imports the part's code and returns its function."""
        module_name, _, name = self.target.partition(":")
        function = getattr(importlib.import_module(f"genesis.operations.doctor.{module_name}"), name)
        return partial(_call, function, self.arguments)


def _call(function: Any, arguments: tuple[Any, ...], probe: Any) -> None:
    function(probe, *arguments)


PARTS = (
    Part("devices", "names, memory, drivers", 60, "machine:inspect_devices"),
    Part("proof", "what a fit proves at its start", 90, "attention:run_all_proofs"),
    Part(
        "resume-thread", "save, SIGKILL and resume, saves by a thread", 120, "killed_run:kill_and_resume", ("thread",)
    ),
    Part(
        "resume-process",
        "save, SIGKILL and resume, saves by a process",
        120,
        "killed_run:kill_and_resume",
        ("process",),
    ),
    Part("waits", "training steps, and where they wait for the device", 180, "training:watch_waits"),
    Part("ddp", "strategy replicated over all devices", 180, "training:train_on_all", ("ddp",)),
    Part("fsdp2", "strategy sharded over all devices", 180, "training:train_on_all", ("fsdp2",)),
    Part("copies", "bandwidths", 60, "machine:measure_copies"),
    Part("products", "products of matrices", 60, "machine:measure_products"),
    Part("speed", "tokens per second and peak memory", 180, "training:measure_training", (False,)),
    Part("compiled", "the same with compiled blocks", 300, "training:measure_training", (True,)),
    Part("disk", "the disk of the checkpoints", 120, "machine:measure_disk"),
)


def find_part(name: str) -> Part:
    """Returns the part in `PARTS` with a name."""
    return next(part for part in PARTS if part.name == name)
