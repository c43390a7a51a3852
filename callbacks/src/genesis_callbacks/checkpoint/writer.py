"""A rank's writer process: `python -m genesis_callbacks.checkpoint.writer DESCRIPTOR`, started by `WriterProcess`.

The process has no process group and no access to accelerators. When the trainer closes its end of the channel, or is
gone, the process finishes its current job and ends. A second argument is the trainer's process, where another process
has started the writer for it.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # else a third of the imports' time is spent on collections of objects that all stay

import torch

from .job import WriteJob, perform
from .stage import SharedBuffer
from .writer_start import IGNORED_SIGNALS, READY, Channel, watch_channel_itself

_NICENESS = 10
_AUTOGROUP = Path("/proc/self/autogroup")
_STATUS = Path("/proc/self/status")
_OWN_MEMORY = ("RssAnon:", "RssFile:")  # not RssShmem, which counts the copies of tensors


def serve(channel: Channel, is_orphan: Callable[[], bool] | None = None) -> None:
    """Performs one job after another until the trainer is gone: by `is_orphan`, or by default this process's parent.

    A message is (job, size of a new shared buffer or None). With it come the descriptor of the new buffer and one that
    holds the lock on the job's staging directory. An answer is (outcome, size of this process's own memory in bytes);
    the first message has `READY` as its outcome.
    """
    is_orphan = is_orphan or watch_parent()
    buffer: SharedBuffer | None = None
    with contextlib.suppress(OSError):
        channel.send((READY, read_own_memory_bytes()))
    while True:
        try:
            (job, num_bytes), descriptors = channel.receive(is_orphan=is_orphan)
        except EOFError:
            return
        assert isinstance(job, WriteJob)
        if num_bytes is not None:
            if buffer is not None:
                buffer.close()
            buffer = SharedBuffer(num_bytes, descriptors.pop(0))
        assert buffer is not None
        # Data workers that the trainer forked keep its end of the channel open after its death: then no end of file
        # comes.
        outcome = perform(job, buffer, lambda: channel.is_ended() or is_orphan())
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            channel.send((outcome, read_own_memory_bytes()))
        except OSError:
            return


def watch_parent() -> Callable[[], bool]:
    """Returns a function that says whether the trainer, the parent of this process, is gone."""
    trainer = os.getppid()
    return lambda: os.getppid() != trainer  # the kernel gives an orphan another parent


def watch_trainer(pid: int) -> Callable[[], bool]:
    """Returns a function that says whether the trainer `pid`, which is not this process's parent, is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return lambda: True
    ends = select.poll()
    ends.register(descriptor, select.POLLIN)
    return lambda: bool(ends.poll(0))


def read_own_memory_bytes() -> int:
    """Returns the memory of this process without the shared buffer, in bytes; 0 if the kernel does not report it."""
    try:
        fields = [line.split() for line in _STATUS.read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0
    return sum(int(field[1]) * 1024 for field in fields if field and field[0] in _OWN_MEMORY)


def _lower_priority() -> None:
    """Lowers this process's priority against the trainer's.

    If Linux groups processes by session (autogroup), niceness counts within a session only. This process has a session
    of its own, so the niceness of its group has to be set, too.
    """
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        _AUTOGROUP.write_text(str(_NICENESS))


def main() -> None:
    """Prepares this process to work in the background, and serves."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    gc.enable()
    _lower_priority()
    torch.set_num_threads(1)  # the cores belong to training
    descriptor, *trainer = map(int, sys.argv[1:])
    end = socket.socket(fileno=descriptor)
    watch_channel_itself(end)
    serve(Channel(end), watch_trainer(trainer[0]) if trainer else None)
    sys.stderr.flush()
    os._exit(0)  # skips torch's slow cleanup, which this process does not need


if __name__ == "__main__":
    main()
