"""Runs a function on several gloo ranks: for tests of anything distributed, here and in other people's projects.

Ranks come from a fork server that has imported torch and Lightning once, because that import costs many seconds a
process, and meet through a file, so that no port is hunted. `fork_writers` saves the writers of mode `process` their
imports, too.
"""

import gc
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context, set_start_method
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .checkpoint import writer_process
from .checkpoint.forked_writer import fork_writer

__all__ = ["fork_writers", "preload", "run_ranks"]

_GRACE_SECONDS = 5.0
_SILENT = "died without a word"

_CONTEXT = get_context("forkserver")
_PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "lightning.pytorch",
    "genesis_callbacks.async_process_checkpoint",
    "genesis_callbacks.testing",
]
_CONTEXT.set_forkserver_preload(_PRELOADED)
_start_real_writer = writer_process.start_writer


def preload(*modules: str) -> None:
    """Lets the fork server import `modules`, too, so that ranks need not; call it before the first ranks start.

    The fork server searches `PYTHONPATH` and skips what it does not find there: what pytest alone adds to `sys.path`
    is not enough.
    """
    _CONTEXT.set_forkserver_preload([*_PRELOADED, *modules])


def fork_writers(is_on: bool = True) -> None:
    """Lets trainers fork their writer processes instead of starting them: in this process, and on ranks started later.

    A writer that is started imports torch, which takes seconds. A forked one runs the same program in a session of its
    own with no descriptor but its channel; only its command line is its trainer's. Where a test is about the start
    of a writer, or about its command line, turn this off.
    """
    writer_process.start_writer = fork_writer if is_on else _start_real_writer


def _serve_rank(
    rank: int,
    world_size: int,
    store: str,
    channel: Connection,
    forks_writers: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    gc.freeze()  # what the fork server has imported is no garbage of this rank, which need not look at it
    fork_writers(forks_writers)
    # The default start method, as in any new process. Otherwise the workers of a loader would come from another fork
    # server of this rank, which would import everything again.
    set_start_method(None, force=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), NODE_RANK="0")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        dist.barrier()  # a rank that ends at once would close connections that another one is still opening
        channel.send_bytes(pickle.dumps((True, function(*arguments))))
    except BaseException:
        channel.send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise
    finally:
        channel.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_seconds: float = 120.0
) -> list[Any]:
    """Returns what `function(*arguments)` returned on each of `world_size` gloo ranks, in rank order.

    Args:
        function: Importable by name; it finds the default process group initialised and `RANK`, `LOCAL_RANK` and
            `WORLD_SIZE` set, so that a Lightning Trainer with `devices=world_size` joins it.
        world_size: Number of processes.
        arguments: Picklable.
        timeout_seconds: All ranks together; whoever has not answered by then is killed.

    Raises:
        AssertionError: A rank raised, died or did not answer; the message names the rank and holds its traceback.
    """
    with tempfile.TemporaryDirectory() as directory:
        processes, channels = [], {}
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            store = str(Path(directory) / "store")
            forks_writers = writer_process.start_writer is fork_writer
            process = _CONTEXT.Process(
                target=_serve_rank, args=(rank, world_size, store, theirs, forks_writers, function, arguments)
            )
            process.start()
            theirs.close()
            processes.append(process)
            channels[ours] = rank
        sentinels = {process.sentinel: channel for process, channel in zip(processes, channels, strict=True)}
        answers, failures = _collect(channels, sentinels, timeout_seconds)
        for process in processes:
            process.join(timeout=_GRACE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
    if failures:
        raise AssertionError("\n".join(failures))
    return [answers[rank] for rank in range(world_size)]


def _collect(
    channels: dict[Connection, int], sentinels: dict[int, Connection], timeout_seconds: float
) -> tuple[dict[int, Any], list[str]]:
    """Returns the answers by rank, and what went wrong; after a failure the other ranks have little time left.

    Args:
        channels: Each rank's, which gives its answer.
        sentinels: The channel of each process by the process's sentinel: data workers of a rank that was killed hold
            its channel open for seconds.
        timeout_seconds: All ranks together.
    """
    answers: dict[int, Any] = {}
    failures: list[str] = []
    while channels:
        ready = wait([*channels, *sentinels], timeout=_GRACE_SECONDS if failures else timeout_seconds)
        if not ready:
            failures.append(f"ranks {sorted(channels.values())} did not answer within {timeout_seconds} s")
            break
        ended = [sentinels.pop(one) for one in ready if isinstance(one, int)]
        for channel in [channel for channel in channels if channel in ready or channel in ended]:
            rank = channels.pop(channel)
            try:
                # Plain pickle sends tensors by value; multiprocessing's own would share the memory of a rank that ends.
                has_succeeded, answer = pickle.loads(channel.recv_bytes()) if channel.poll() else (False, _SILENT)
            except EOFError:
                has_succeeded, answer = False, _SILENT
            if has_succeeded:
                answers[rank] = answer
            else:
                failures.append(f"rank {rank}: {answer}")
    return answers, failures
