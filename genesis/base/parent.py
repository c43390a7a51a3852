"""Ties a rank to the process that started it.

If a launcher ends before its ranks have met, each rank would wait for the others until the process group's timeout, and
a later process that listens on the same port would take the rank for one of its own. The launcher is rank 0 itself
under Lightning and the agent under torchrun; `srun` ends its tasks without help, and an unknown launcher may end early
on purpose.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import Literal

from genesis.base.errors import RunEndedError

LAUNCHER_NAME = "GENESIS_LAUNCHER"
"""Environment variable with the process id of the rank 0 that started this rank."""

NONCE_NAME = "GENESIS_START_NONCE"
"""Environment variable with the random number that rank 0 chooses for each start of further ranks."""

LauncherKind = Literal["lightning", "torchrun", "unknown"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_HAS_DEATH_SIGNAL = sys.platform == "linux"


def launcher_kind(environment: Mapping[str, str] = os.environ) -> LauncherKind:
    """Returns the launcher that started this process as one of its ranks."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    return "lightning" if NONCE_NAME in environment else "unknown"


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a known launcher, other than this process itself, has started this process as a rank."""
    kind = launcher_kind(environment)
    # With Lightning's launcher local rank 0 is the launcher.
    return kind == "torchrun" or (kind == "lightning" and environment.get("LOCAL_RANK", "0") != "0")


def end_with_parent() -> None:
    """Makes this rank end at once when its launcher ends. Without a known launcher the call has no effect.

    Call it as early as possible, and again before the ranks meet. The kernel watches the parent's *thread* that
    started this process: both launchers start ranks from their main thread.

    Raises:
        RunEndedError: The launcher has already ended.
    """
    if not is_launched():
        return
    _set_death_signal(signal.SIGKILL)  # a handler in Python would not run while the rendezvous waits in C++
    # A parent that ended before sends no signal. torchrun does not name its agent's process, so that the agent's end
    # between its fork and this line goes unnoticed: then the comparison of starts refuses the rank.
    launcher = os.environ.get(LAUNCHER_NAME)
    if launcher_kind() == "lightning" and str(os.getppid()) != launcher:
        raise RunEndedError(
            f"rank 0 (process {launcher}) ended while rank {os.environ['LOCAL_RANK']} started: restart the run"
        )


def end_with_forker(number: int = signal.SIGKILL) -> None:
    """Makes this process, which has just been forked, get a signal when the thread that forked it ends."""
    _set_death_signal(number)


def outlive_parent() -> None:
    """Undoes `end_with_parent`, for ranks whose launcher is itself a rank that may end normally before them.

    torchrun's agent outlives its ranks and must supervise them, so that these ranks keep ending with the agent.
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
