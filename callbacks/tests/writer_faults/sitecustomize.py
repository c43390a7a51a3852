"""What a bad disk does to a writer process; its interpreter loads this at its start, being on its PYTHONPATH.

WRITER_FAULTS is a JSON list of [pattern of a path, operation, fault]: the operation ("open", "write", "fsync") on such
a file fails with that errno ("EIO", "ENOSPC"), or never returns ("hang").
"""

import errno
import json
import os
import re
import signal
import sys

paths: dict[int, str] = {}


def meet(path: str, operation: str) -> None:
    for pattern, wanted, fault in json.loads(os.environ["WRITER_FAULTS"]):
        if wanted == operation and re.search(pattern, path):
            while fault == "hang":
                signal.pause()
            raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))


def spoil() -> None:
    real_open, real_write, real_fsync = os.open, os.write, os.fsync

    def open_(path, *arguments, **keywords):
        meet(str(path), "open")
        descriptor = real_open(path, *arguments, **keywords)
        paths[descriptor] = str(path)
        return descriptor

    def write(descriptor, data):
        meet(paths.get(descriptor, ""), "write")
        return real_write(descriptor, data)

    def fsync(descriptor):
        meet(paths.get(descriptor, ""), "fsync")
        return real_fsync(descriptor)

    os.open, os.write, os.fsync = open_, write, fsync


if "genesis_callbacks.checkpoint.writer" in sys.orig_argv and "WRITER_FAULTS" in os.environ:
    spoil()
