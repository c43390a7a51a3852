"""The part of the doctor that kills a run: its resumed run must end as one that was not killed, bit for bit.

The ranks of all three runs are forked from this process, which has imported everything and has computed nothing: a
process of its own would spend most of its time on imports. The process must not have used the device, whose context no
fork survives.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from genesis.base.errors import RunEndedError
from genesis.base.parent import end_with_forker
from genesis.data.window import AccumulationWindow
from genesis.model.key_blocks import count_key_blocks
from genesis.operations.doctor.fits import SIZES, build_module, build_trainer, random_windows
from genesis.operations.doctor.probe import Probe, Task
from genesis.operations.doctor.training import VARIANTS, build_rank_environments, join_ranks, needs_group
from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.checkpoint import find_latest, read_tensors

_SIZE: Final = "resumed"
_SAVE_EVERY: Final = 2
_KILL_AT: Final = 5
"""A step after the second save has begun, which waits for the first: there is a checkpoint to resume from."""
_END_AT: Final = 6
_POLL_SECONDS: Final = 0.02


class _KillSelf(pl.Callback):
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: AccumulationWindow, batch_idx: int
    ) -> None:
        if trainer.global_step == _KILL_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_and_resume(probe: Probe, mode: str, variant: str = "ddp", num_ranks: int = 1) -> None:
    """Kills a run by SIGKILL, resumes it, and compares its end, bit for bit, with a run that was not killed.

    Args:
        probe: The probe of the part.
        mode: The mode of the saves.
        variant: A name in `VARIANTS`.
        num_ranks: The number of ranks.

    Raises:
        RunEndedError: A run failed that nobody killed.
    """
    directory = Path(probe.task.directory)
    longest = SIZES[_SIZE].longest_document
    probe.figure("longest document", longest, "tokens")
    probe.figure("blocks of keys in it", count_key_blocks(longest))
    ranks = [Task(probe.task.kind, _SIZE, probe.task.directory, rank, num_ranks) for rank in range(num_ranks)]
    _run(ranks, variant, mode, "straight")
    statuses = _run(ranks, variant, mode, "killed", is_killed=True)
    found = ", ".join(map(str, statuses))
    probe.check("SIGKILL ended the run", -signal.SIGKILL in statuses, f"exit status {found}")
    saved = find_latest(directory / "killed")
    if saved is None:
        probe.check("a checkpoint was left", False)
        return
    probe.figure("newest checkpoint after the kill", saved.name)
    _run(ranks, variant, mode, "killed")
    ends = [find_latest(directory / name) for name in ("straight", "killed")]
    if any(end is None or end.name != f"step-{_END_AT:08d}" for end in ends):
        found = ", ".join("no checkpoint" if end is None else end.name for end in ends)
        probe.check("both runs reached their end", False, found)
        return
    straight, killed = (read_tensors(end) for end in ends if end is not None)
    wrong = [name for name in straight if name not in killed or not torch.equal(straight[name], killed[name])]
    probe.figure("tensors compared", len(straight))
    probe.figure("bytes of a save", sum(tensor.nbytes for tensor in straight.values()))
    probe.check("the resumed run ends bit for bit as one that was not killed", not wrong, ", ".join(wrong[:3]))


def _run(ranks: list[Task], variant: str, mode: str, name: str, *, is_killed: bool = False) -> list[int]:
    """Trains a run on forked ranks and returns their exit statuses. One that fails unasked ends all others."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_fit, args=(rank, variant, mode, name, is_killed, environment))
        for rank, environment in zip(ranks, build_rank_environments(len(ranks)), strict=True)
    ]
    for process in processes:
        process.start()
    try:
        while None in (found := [process.exitcode for process in processes]):
            if any(found) and not is_killed:
                break
            time.sleep(_POLL_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if any(found) and not is_killed:  # before the others were killed
        number, status = next((number, status) for number, status in enumerate(found) if status)
        raise RunEndedError(f"rank {number} of the {name} run ended with status {status}")
    return [process.exitcode or 0 for process in processes]


def _fit(task: Task, variant: str, mode: Any, name: str, is_killed: bool, environment: Mapping[str, str]) -> None:
    """Trains as one rank: from the newest checkpoint, if any, to the run's end or its own kill."""
    end_with_forker()
    os.environ.update(environment)
    if needs_group(task, variant):
        join_ranks(task, f"store-{name}-{is_killed}")
    pl.seed_everything(0, verbose=False)  # so that the state of generators in checkpoints is also compared
    # The straight run saves its end alone: what it is compared with saves on the way, which must change nothing.
    every_n_steps = _END_AT if name == "straight" else _SAVE_EVERY
    checkpoint = AsyncProcessCheckpoint(run_dir=Path(task.directory) / name, every_n_steps=every_n_steps, mode=mode)
    callbacks: list[pl.Callback] = [checkpoint, *([_KillSelf()] if is_killed else [])]
    build, _ = VARIANTS[variant]
    trainer = build_trainer(task, build(), _END_AT, callbacks, enable_checkpointing=True)
    latest = checkpoint.latest()
    trainer.fit(build_module(task), datamodule=random_windows(SIZES[task.size], task.rank), ckpt_path=latest)
    if dist.is_initialized():
        dist.destroy_process_group()
