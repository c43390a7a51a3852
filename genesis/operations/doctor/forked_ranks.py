"""Two ranks for the doctor, forked before this process computes anything, so that they need no import of their own.

They train on the CPU with gloo and without a port. A fork is safe only while the process has no threads of OpenMP and
no CUDA context.
"""

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from genesis.base.parent import end_with_forker
from genesis.operations.doctor.recipe import Build, Options

NUM_RANKS: Final = 2
_POLL_SECONDS: Final = 0.05
_LOGGED: Final = ("train/loss", "train/grad_norm")


class Step(NamedTuple):
    """The figures of one step, over all ranks."""

    loss: float
    grad_norm: float


class _KeepSteps(pl.Callback):
    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if trainer.global_step:
            self._keep(trainer)

    def on_train_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self._keep(trainer)

    def _keep(self, trainer: pl.Trainer) -> None:
        loss, norm = (float(trainer.logged_metrics[name]) for name in _LOGGED)
        self.steps.append(Step(loss, norm))


class ForkedRanks:
    """Ranks that wait for their work.

    Args:
        build: Builds the recipe.
        directory: An empty directory.
    """

    def __init__(self, build: Build, directory: Path) -> None:
        self._directory = directory
        context = multiprocessing.get_context("fork")
        self._ranks = []
        self._pipes: list[Connection] = []
        for rank in range(NUM_RANKS):
            mine, its = context.Pipe()
            process = context.Process(target=_serve, args=(build, directory, rank, its), daemon=True)
            process.start()
            its.close()
            self._ranks.append(process)
            self._pipes.append(mine)

    def train(self, single: Options, sharded: Options, limit_seconds: float) -> tuple[list[Step], list[Step]]:
        """Trains on one rank, then on two, and returns the steps of both.

        Raises:
            RuntimeError: A rank failed, or did not end in time; the message has its last line.
        """
        for rank, pipe in enumerate(self._pipes):
            pipe.send({"single": dict(single) if rank == 0 else None, "sharded": dict(sharded)})
        end = time.monotonic() + limit_seconds
        answers: list[Mapping[str, Any]] = []
        for rank, pipe in enumerate(self._pipes):
            while not pipe.poll(_POLL_SECONDS):
                if not self._ranks[rank].is_alive() and not pipe.poll():
                    raise RuntimeError(f"rank {rank} ended with status {self._ranks[rank].exitcode}")
                if time.monotonic() > end:
                    raise RuntimeError(f"rank {rank} did not end within {limit_seconds:.0f} s")
            answer = json.loads(pipe.recv())
            if "error" in answer:
                raise RuntimeError(f"rank {rank}: {answer['error']}")
            answers.append(answer)
        first = answers[0]
        return [Step(*step) for step in first["single"]], [Step(*step) for step in first["sharded"]]

    def close(self) -> None:
        """Ends the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._ranks:
            process.kill()
            process.join()


def _serve(build: Build, directory: Path, rank: int, pipe: Connection) -> None:
    end_with_forker()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with (directory / f"rank-{rank}.log").open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        work = pipe.recv()
    except EOFError:
        os._exit(0)
    try:
        answer = _train(build, directory, rank, work)
    except BaseException as error:  # SystemExit of a refused option, too: the parent reports it
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    sys.stderr.flush()
    pipe.send(json.dumps(answer))
    pipe.close()
    os._exit(0)


def _train(build: Build, directory: Path, rank: int, work: Mapping[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(max(1, torch.get_num_threads() // NUM_RANKS))
    steps = {}
    environment = dict(os.environ)
    if work["single"] is not None:
        steps["single"] = _fit(build, work["single"])
    os.environ.clear()  # what the launcher of the first fit has set
    os.environ |= {
        **environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "NODE_RANK": "0",
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
    }
    dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=rank, world_size=NUM_RANKS)
    steps["sharded"] = _fit(build, work["sharded"])
    dist.destroy_process_group()
    return steps


def _fit(build: Build, options: Options) -> list[Step]:
    keep = _KeepSteps()
    build(options).fit(keep)
    return keep.steps
