"""Ranks for the doctor, forked from a process that computes nothing, so that they need no import of their own.

They train on the CPU with gloo and without a port. A fork is safe only while the process has no threads of OpenMP and
no CUDA context: so the server that forks them is forked itself before the doctor computes.
"""

import json
import multiprocessing
import os
import sys
import time
import traceback
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from genesis.base.parent import end_with_forker
from genesis.operations.doctor.recipe import Build, Options

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
    """A process that waits for work, and forks the ranks of each.

    Args:
        build: Builds the recipe.
        directory: An empty directory.
    """

    def __init__(self, build: Build, directory: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, its = context.Pipe()
        self._server = context.Process(target=_serve, args=(build, directory, its))
        self._server.start()
        its.close()

    def train(self, options: Options, num_ranks: int, limit_seconds: float) -> list[Step]:
        """Trains on some ranks, and returns the steps.

        Raises:
            RuntimeError: A rank failed, or did not end in time; the message has its last line.
        """
        self._pipe.send((dict(options), num_ranks, limit_seconds))
        try:
            steps, failure = self._pipe.recv()
        except EOFError as error:
            raise RuntimeError("the process that starts ranks has ended") from error
        if failure is not None:
            raise RuntimeError(failure)
        return [Step(*step) for step in steps]

    def close(self) -> None:
        """Ends the server, and with it its ranks."""
        self._pipe.close()
        self._server.kill()
        self._server.join()


def _serve(build: Build, directory: Path, pipe: Connection) -> None:
    """Forks ranks until the doctor ends. This process itself never computes."""
    end_with_forker()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for number in count():
        try:
            options, num_ranks, limit_seconds = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(_run_ranks(build, directory / f"ranks-{number}", options, num_ranks, limit_seconds))


def _run_ranks(
    build: Build, directory: Path, options: Options, num_ranks: int, limit_seconds: float
) -> tuple[list[Step], str | None]:
    """Returns the steps of the first rank, and what failed."""
    directory.mkdir()
    context = multiprocessing.get_context("fork")
    ranks = {}
    for rank in range(num_ranks):
        mine, its = context.Pipe(duplex=False)
        process = context.Process(target=_begin_rank, args=(build, directory, rank, num_ranks, options, its))
        process.start()
        its.close()
        ranks[mine] = rank, process
    end = time.monotonic() + limit_seconds
    steps: list[Step] = []
    failure = None
    waiting = list(ranks)
    while waiting and failure is None:
        ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            late = ", ".join(str(ranks[pipe][0]) for pipe in waiting)
            failure = f"ranks {late} did not end within {limit_seconds:.0f} s"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            waiting.remove(pipe)
            rank, process = ranks[pipe]
            try:
                answer = json.loads(pipe.recv())
            except EOFError:
                process.join()
                answer = {"error": f"ended with status {process.exitcode}"}
            if "error" in answer:
                failure = failure or f"rank {rank}: {answer['error']}"
            elif rank == 0:
                steps = [Step(*step) for step in answer["steps"]]
    for _, process in ranks.values():
        if failure is not None:
            process.kill()
        process.join()
    return steps, failure


def _begin_rank(build: Build, directory: Path, rank: int, num_ranks: int, options: Options, pipe: Connection) -> None:
    end_with_forker()
    with (directory / f"rank-{rank}.log").open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    answer: dict[str, Any]
    try:
        answer = {"steps": _train(build, directory, rank, num_ranks, options)}
    except BaseException as error:  # SystemExit of a refused option, too: the parent reports it
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    sys.stderr.flush()
    pipe.send(json.dumps(answer))
    pipe.close()
    os._exit(0)


def _train(build: Build, directory: Path, rank: int, num_ranks: int, options: Options) -> list[Step]:
    torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    if num_ranks > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "NODE_RANK": 0}
        os.environ |= {name: str(number) for name, number in numbers.items()}
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=rank, world_size=num_ranks)
    keep = _KeepSteps()
    build(options).fit(keep)
    if num_ranks > 1:
        dist.destroy_process_group()
    return keep.steps
