"""The program `genesis`. Ctrl-C ends it with one line from the start on, before anything else is imported.

While it imports, nothing is garbage: collections, each of which looks at all objects, would take a third of the time.
"""

import gc
import importlib
import os

# `signal` imports enum first, which takes longer than all that precedes `run`: until its end Ctrl-C prints a traceback.
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]

INTERRUPTED = 130
"""The status that a shell reports for a program ended by SIGINT."""


def end_early(number: int, frame: object) -> None:
    """Ends this process, which has nothing left to undo: a KeyboardInterrupt would be printed with a traceback."""
    os.write(2, b"genesis: interrupted\n")
    os._exit(INTERRUPTED)


def end_imports() -> None:
    """Lets Python collect garbage, in a program that `run` has begun; what the imports have made is left out of it."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def run() -> int:
    """Runs the command line of this process and returns the exit status."""
    if getsignal(SIGINT) is default_int_handler:  # a shell's `&` ignores it in scripts
        signal(SIGINT, end_early)
    gc.disable()
    status: int = importlib.import_module("genesis.cli.main").main()
    if getsignal(SIGINT) is default_int_handler:  # Python's end takes long enough for an impatient Ctrl-C
        signal(SIGINT, end_early)
    return status
