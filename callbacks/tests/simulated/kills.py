"""Kills a run on the simulated device again and again; it must end as a run that nobody killed, bit for bit.

    cd callbacks/tests && python -m simulated.kills 50 --seed 1 --record ../../benchmarks/records/simulated-kills.md

Each committed checkpoint is compared, too, after each kill, with what was live at that step in the run never killed.
"""

import argparse
import contextlib
import os
import platform
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from genesis_callbacks.checkpoint import find_latest, list_committed, read_tensors
from genesis_callbacks.checkpoint.save_target import read_versions
from genesis_callbacks.testing import fork_writers, preload, run_ranks

from . import load
from .project import train

KINDS = ("start", "step", "copy", "save", "writer")
MEANINGS = {
    "start": "the process, while it starts or restores",
    "step": "the process, within a step, with kernels still under way",
    "copy": "the process, within a copy from the device to the shared buffer",
    "save": "the process, just after a save has begun",
    "writer": "its writer process, and some steps later the process",
}
DELAYS_US = ((150, 0), (0, 400), (150, 150))
EVERY_N_STEPS = 2
MAX_AFTER_STEPS = 5
STEPS_AFTER_WRITER = 3
STEPS_PER_KILL = MAX_AFTER_STEPS + STEPS_AFTER_WRITER


@dataclass(frozen=True)
class Kill:
    """One kill: its kind, at which step after the start, how long after that step's begin, and how late streams are."""

    kind: str
    after_steps: int
    seconds: float
    delays_us: tuple[int, int]


@dataclass(frozen=True)
class Ending:
    """The newest checkpoint that was found after a kill; 0 for none."""

    kill: Kill
    newest_step: int


def plan_kills(count: int, seed: int) -> list[Kill]:
    """Returns kills of all kinds in a random order."""
    chooser = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(count)]
    chooser.shuffle(kinds)
    return [
        Kill(kind, chooser.randint(1, MAX_AFTER_STEPS), chooser.random(), chooser.choice(DELAYS_US)) for kind in kinds
    ]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def find_writer() -> int | None:
    """Returns the process id of this process's writer: its child with a session of its own."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, (task / "children").read_text().split()):
                if os.getsid(child) == child:
                    return child
    return None


class Killer(Callback):
    """Carries one kill out, from within the process."""

    def __init__(self, kill: Kill, device) -> None:
        self.kill, self.device = kill, device
        self.first: int | None = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        step = trainer.global_step
        self.first = step if self.first is None else self.first
        due = self.first + self.kill.after_steps
        if self.kill.kind in ("copy", "save"):
            due += due % EVERY_N_STEPS == 0  # in the step whose end saves
        if self.kill.kind == "writer" and step == due + STEPS_AFTER_WRITER:
            die()
        if step != due:
            return
        if self.kill.kind == "step":
            threading.Timer(0.1 * self.kill.seconds, die).start()
        elif self.kill.kind == "copy":
            # Windows, losses and clocks are not copied to the host here: the next copies are those of the save.
            self.device.simulated_exit_in_copy(int(12 * self.kill.seconds))
        elif self.kill.kind == "writer":
            writer = find_writer()
            assert writer is not None
            os.kill(writer, signal.SIGKILL)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        # This callback comes before the one that saves.
        is_due = self.first is not None and trainer.global_step > self.first + self.kill.after_steps
        if self.kill.kind == "save" and is_due and trainer.global_step % EVERY_N_STEPS == 0:
            threading.Timer(0.01 * self.kill.seconds, die).start()


def run_once(run_dir: Path, max_steps: int, kill: Kill | None) -> dict[int, dict[str, Tensor]]:
    """Trains, from the newest checkpoint if there is one, and returns what was live after each step."""
    device = load(*(kill.delays_us if kill is not None else (0, 0)))
    callbacks = () if kill is None else (Killer(kill, device),)
    if kill is not None and kill.kind == "start":
        threading.Timer(1.5 * kill.seconds, die).start()
    checks = {"every_n_steps": EVERY_N_STEPS, "keep_last": 3, "mode": "process", "on_save_failure": "warn"}
    return train(run_dir, max_steps, callbacks=callbacks, latest=True, checks=False, **checks)["live"]


def find_differences(run_dir: Path, live: dict[int, dict[str, Tensor]]) -> Iterator[str]:
    """Yields each tensor of a committed checkpoint that is not what the run never killed held at that step."""
    for path, manifest in list_committed(run_dir / "checkpoints"):
        found = read_tensors(path)
        for name, tensor in live[manifest.step].items():
            if name not in found or not torch.equal(found[name], tensor):
                yield f"{path.name}: {name}"


def rehearse(directory: Path, kills: list[Kill], *, report=lambda text: print(text, flush=True)) -> list[Ending]:
    """Returns what was found after each kill.

    Raises:
        AssertionError: A checkpoint, or the end, is not what it is without kills; or a kill killed nothing.
    """
    max_steps = STEPS_PER_KILL * (len(kills) + 1)
    (live,) = run_ranks(run_once, 1, directory / "straight", max_steps, None, timeout_seconds=900)
    run_dir, endings = directory / "killed", []
    for kill in kills:
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(run_once, 1, run_dir, max_steps, kill, timeout_seconds=900)
        newest = find_latest(run_dir)
        step = 0 if newest is None else int(newest.name.removeprefix("step-"))
        endings.append(Ending(kill, step))
        report(f"{len(endings)} of {len(kills)}: {kill.kind}, newest step {step}")
        differences = list(find_differences(run_dir, live))
        assert differences == []
    run_ranks(run_once, 1, run_dir, max_steps, None, timeout_seconds=900)
    newest = find_latest(run_dir)
    assert newest is not None
    assert newest.name == f"step-{max_steps:08d}"
    assert list(find_differences(run_dir, live)) == []
    return endings


def write_record(path: Path, command: str, endings: list[Ending], seconds: float, num_tensors: int) -> None:
    """Writes what was done and found."""
    counts = Counter(ending.kill.kind for ending in endings)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(read_versions().items()))
    lines = [
        f"# {len(endings)} kills of a run on a simulated device",
        "",
        f"- command: `{command}`, in `callbacks/tests`",
        f"- date: {datetime.now(UTC).date()}",
        f"- hardware: {os.cpu_count()}-core {platform.machine()}, load average {os.getloadavg()[0]:.0f} at the end; no "
        "accelerator. The device is simulated (`callbacks/tests/simulated/device.cpp`): its memory is the host's, and "
        "its streams are threads that do copies and kernels late",
        f"- versions: {versions}",
        f"- work: a small model under AdamW, a save every {EVERY_N_STEPS} steps by a writer, overlapped staging",
        "- **verdict: equal**: after each kill every committed checkpoint, and at the end the newest, has the "
        f"{num_tensors} tensors of model and optimizer, bit for bit, that the run never killed held at that step",
        f"- {len(endings)} kills in {seconds / 60:.1f} minutes:",
        *(f"  - {counts[kind]} of {MEANINGS[kind]}" for kind in KINDS if counts[kind]),
        "",
        "| kill | of | streams late by, in microseconds (training's, the saves') | newest step after it |",
        "|---|---|---|---|",
        *(
            f"| {number} | {ending.kill.kind} | {', '.join(map(str, ending.kill.delays_us))} | {ending.newest_step} |"
            for number, ending in enumerate(endings, 1)
        ),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    preload("simulated.project")
    fork_writers()
    begin_seconds = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        endings = rehearse(Path(directory), plan_kills(options.count, options.seed))
        newest = find_latest(Path(directory) / "killed")
        assert newest is not None
        num_tensors = sum(not name.startswith("state.") for name in read_tensors(newest))
    command = f"python -m simulated.kills {options.count} --seed {options.seed} --record {options.record}"
    if options.record is not None:
        write_record(options.record, command, endings, time.monotonic() - begin_seconds, num_tensors)


if __name__ == "__main__":
    main()
