"""Runs a function on several gloo ranks: for tests of anything distributed, here and in other people's projects.

Ranks come from a fork server that has imported torch and Lightning once, because that import costs many seconds a
process, and meet through a file, so that no port is hunted. `fork_writers` saves the writers of mode `process` their
imports, too.
"""

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context, set_start_method
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .checkpoint import writer, writer_process, writer_start

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
_WRITER_POLL_SECONDS = 0.005
_start_real_writer = writer_process.start_writer


def preload(*modules: str) -> None:
    """Lets the fork server import `modules`, too, so that ranks need not; call it before the first ranks start.

    The fork server searches `PYTHONPATH` and skips what it does not find there: what pytest alone adds to `sys.path`
    is not enough.
    """
    _CONTEXT.set_forkserver_preload([*_PRELOADED, *modules])


_OWN_NAME = Path("/proc/self/comm")
_WRITER_NAME = "genesis-writer"
"""The name by which Genesis recognises a forked writer."""


def fork_writers(is_on: bool = True) -> None:
    """Lets trainers fork their writer processes instead of starting them: in this process, and on ranks started later.

    A writer that is started imports torch, which takes seconds. A forked one runs the same program in a session of its
    own with no descriptor but its channel; only its command line is its trainer's. Where a test is about the start
    of a writer, or about its command line, turn this off.
    """
    writer_process.start_writer = _fork_writer if is_on else _start_real_writer


class _ForkedWriter:
    """A forked child with the methods of `subprocess.Popen` that `WriterProcess` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline_seconds = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_seconds is not None and time.monotonic() > deadline_seconds:
                raise subprocess.TimeoutExpired("writer", timeout or 0.0)
            time.sleep(_WRITER_POLL_SECONDS)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _fork_writer(end: socket.socket) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)  # from Python 3.12 on
        ready, tell = os.pipe()
        pid = os.fork()
    if pid:
        os.close(tell)
        os.read(ready, 1)  # until the child has its own session, as a process of `Popen` has when that returns
        os.close(ready)
        return _ForkedWriter(pid)
    try:
        gc.freeze()  # the trainer's objects are not this process's garbage: it need not copy their pages
        os.setsid()
        if _OWN_NAME.exists():  # its command line is that of the rank, which it outlives for the save in hand
            _OWN_NAME.write_text(_WRITER_NAME, encoding="ascii")
        os.write(tell, b"1")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(end.fileno(), 3)  # then close the rest: a copy of the trainer's channel would hide the trainer's death
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        os.environ.update(writer_start.writer_environment())
        sys.argv[1:] = ["3"]
        writer.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # this process must never continue as the trainer from which it was forked


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
            forks_writers = writer_process.start_writer is _fork_writer
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
