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


def serve(channel: Channel) -> None:
    """Does one job after the other until the trainer is gone.

    A message is (job, size of a new shared buffer or None); the buffer's descriptor comes with it.
    """
    trainer = os.getppid()
    buffer: SharedBuffer | None = None
    with contextlib.suppress(OSError):
        channel.send(READY)
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
            channel.send(outcome)
        except OSError:
            return


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
