"""The program `genesis`. Ctrl-C ends it with one line from the start on, before anything else is imported.

While it imports, nothing is garbage: collections, each of which looks at all objects, would take a third of the time.
"""

import gc
import importlib
import os
import signal
from types import FrameType

INTERRUPTED = 130
"""The status that a shell reports for a program ended by SIGINT."""


def end_early(number: int, frame: FrameType | None) -> None:
    """Ends this process, which has done nothing yet: a KeyboardInterrupt would be printed with a traceback."""
    os.write(2, b"genesis: interrupted\n")
    os._exit(INTERRUPTED)


def end_imports() -> None:
    """Lets Python collect garbage, in a program that `run` has begun; what the imports have made is left out of it."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def run() -> int:
    """Runs the command line of this process and returns the exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's `&` ignores it in scripts
        signal.signal(signal.SIGINT, end_early)
    gc.disable()
    status: int = importlib.import_module("genesis.cli.main").main()
    return status
