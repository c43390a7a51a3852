"""A rank's writer process: `python -m genesis_callbacks.checkpoint.writer DESCRIPTOR`, started by `WriterProcess`.

It holds no process group and sees no accelerator. It ends when the trainer's end of the channel does, after the job
in hand.
"""

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from .channel import IGNORED_SIGNALS, READY, Channel
from .job import WriteJob, perform
from .stage import SharedBuffer

_NICENESS = 10
_AUTOGROUP = Path("/proc/self/autogroup")
_STATUS = Path("/proc/self/status")
_OWN_MEMORY = ("RssAnon:", "RssFile:")  # not RssShmem, where the copies of tensors lie


def serve(channel: Channel) -> None:
    """Does one job after the other until the trainer is gone.

    A message is (job, size of a new shared buffer or None); the buffer's descriptor comes with it. An answer is
    (outcome, bytes of memory that this process holds for itself), and so is the word that it is ready.
    """
    trainer = os.getppid()
    buffer: SharedBuffer | None = None
    with contextlib.suppress(OSError):
        channel.send((READY, read_own_memory_bytes()))
    while True:
        try:
            (job, num_bytes), descriptors = channel.receive()
        except EOFError:
            return
        assert isinstance(job, WriteJob)
        if num_bytes is not None:
            if buffer is not None:
                buffer.close()
            buffer = SharedBuffer(num_bytes, descriptors[0])
        assert buffer is not None
        outcome = perform(job, buffer, lambda: channel.is_ended() or os.getppid() != trainer)
        try:
            channel.send((outcome, read_own_memory_bytes()))
        except OSError:
            return


def read_own_memory_bytes() -> int:
    """Returns what this process holds in memory, the shared buffer aside; 0 where the kernel does not tell."""
    try:
        fields = [line.split() for line in _STATUS.read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0
    return sum(int(field[1]) * 1024 for field in fields if field and field[0] in _OWN_MEMORY)


def _give_way() -> None:
    """Lowers this process's priority against the trainer's.

    Where Linux groups processes by session (autogroup), niceness counts within a session alone, and this process has
    one of its own: then the group must be nice.
    """
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        _AUTOGROUP.write_text(str(_NICENESS))


def main() -> None:
    """Makes a quiet process of this one and serves."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _give_way()
    torch.set_num_threads(1)
    serve(Channel(socket.socket(fileno=int(sys.argv[1]))))
    sys.stderr.flush()
    os._exit(0)  # there is nothing to tidy, and torch takes its time


if __name__ == "__main__":
    main()
