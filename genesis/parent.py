"""Ties a rank to the process that started it.

A rank whose launcher ends before the ranks have met would wait for the others as long as the process group's timeout
allows, and whoever listens on its port next would take it for a rank of its own. Lightning's launcher is rank 0
itself, torchrun's is the agent; `srun` ends its tasks without help, and an unknown launcher may end early on purpose.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import Literal

from genesis.errors import RunEndedError

LAUNCHER_NAME = "GENESIS_LAUNCHER"
"""Environment variable with the process id of the rank 0 that started this rank."""

NONCE_NAME = "GENESIS_START_NONCE"
"""Environment variable with the number that rank 0 draws for each start of further ranks."""

LauncherKind = Literal["lightning", "torchrun", "unknown"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_HAS_DEATH_SIGNAL = sys.platform == "linux"


def launcher_kind(environment: Mapping[str, str] = os.environ) -> LauncherKind:
    """Returns who starts the ranks of which this process is one."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    return "lightning" if NONCE_NAME in environment else "unknown"


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Says whether a known launcher that is not this process has started this process as a rank."""
    kind = launcher_kind(environment)
    # With Lightning's launcher local rank 0 is the launcher.
    return kind == "torchrun" or (kind == "lightning" and environment.get("LOCAL_RANK", "0") != "0")


def end_with_parent() -> None:
    """Makes this rank end at once when its launcher does. Without a known launcher it does nothing.

    To be called as early as possible, and again before the ranks meet. The kernel watches the parent's *thread* that
    started this process: both launchers start ranks from their main thread.

    Raises:
        RunEndedError: The launcher is gone already.
    """
    if not is_launched():
        return
    _set_death_signal(signal.SIGKILL)  # a handler in Python would not run while the rendezvous waits in C++
    # A parent that ended before sends no signal. torchrun does not name its agent's process, so that the agent's end
    # between its fork and this line goes unnoticed: then the comparison of starts refuses the rank.
    launcher = os.environ.get(LAUNCHER_NAME)
    if launcher_kind() == "lightning" and str(os.getppid()) != launcher:
        raise RunEndedError(
            f"rank 0 (process {launcher}) ended while rank {os.environ['LOCAL_RANK']} started: start the run again"
        )


def outlive_parent() -> None:
    """Undoes `end_with_parent`, for ranks whose launcher is a rank that may come to its end before they do.

    torchrun's agent outlives its ranks: without it nobody looks after them, and they go on ending with it.
    """
    if is_launched() and launcher_kind() == "lightning":
        _set_death_signal(0)


def _set_death_signal(number: int) -> None:
    if not _HAS_DEATH_SIGNAL:
        return
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error_number)}")
