"""Starts writer processes. Imports no torch: a writer can be started before its trainer has imported anything."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .channel import IGNORED_SIGNALS

_WRITER_MODULE = "genesis_callbacks.checkpoint.writer"


def writer_environment() -> dict[str, str]:
    """Returns the trainer's environment, without accelerators, with one thread, and with the path of this package."""
    # A process that sees an accelerator may open a context there, which takes memory from training.
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Blocks the signals that a writer ignores, in all processes that this thread starts in the block."""
    # A mask is inherited through exec: no signal can end the writer before its own code ignores them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_writer(end: socket.socket) -> subprocess.Popen[bytes]:
    """Starts a writer that serves `end`, in a session of its own, and returns its process."""
    # A new interpreter, and no fork: a fork of a process with threads and an accelerator's context may deadlock.
    # multiprocessing's spawn would import the main module, and with it Lightning, for many seconds.
    process = subprocess.Popen(
        # -P: no modules from the working directory, because its files may be untrusted.
        [sys.executable, "-P", "-m", _WRITER_MODULE, str(end.fileno())],
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=writer_environment(),
    )
    # The kernel ends a writer whose trainer has closed its end, until the writer watches that by itself: a writer that
    # hangs in its imports runs no code that could. A parent-death signal would follow the thread that starts it.
    with contextlib.suppress(OSError):
        fcntl.fcntl(end, fcntl.F_SETOWN, process.pid)
        fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_ASYNC)
    return process


def watch_channel_itself(end: socket.socket) -> None:
    """Ends what `start_writer` has asked of the kernel, in the writer: it watches its trainer from here on."""
    fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) & ~os.O_ASYNC)


class EarlyWriter(NamedTuple):
    """A writer that has no trainer yet, and the trainer's end of its channel."""

    end: socket.socket
    process: subprocess.Popen[bytes]


_early: list[EarlyWriter] = []


def start_writer_early() -> None:
    """Starts the writer that the first fit of this process takes, so that it imports torch beside this process.

    If no fit takes it, it ends with this process.
    """
    ours, theirs = socket.socketpair()
    with theirs, signals_blocked():
        _early.append(EarlyWriter(ours, start_writer(theirs)))


def take_early_writer() -> EarlyWriter | None:
    """Returns the writer that was started early; None if there is none, or another one has taken it."""
    return _early.pop() if _early else None
