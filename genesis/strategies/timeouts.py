"""How long a collective may take: longer than `HangWatch` waits, which names the rank that the others wait for.

Torch gives each process group a limit of its own, of 10 minutes for nccl and 30 for gloo, whatever the limit of the
default group is. So the limit is set on every group after it is made. The rendezvous keeps the usual limit: a rank that
never starts is found as soon as before.
"""

import math
import warnings
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from genesis.base.errors import UserError

DEFAULT_SECONDS: Final = 1800.0
_GRACE_SECONDS: Final = 300.0
"""The time in which `HangWatch` writes its report, and more."""
_MOST_SECONDS: Final = 1e8


def read_timeout(given: float | None) -> timedelta:
    """Returns the limit with which ranks meet.

    Args:
        given: The option `timeout_seconds` of a strategy.

    Raises:
        UserError: It is not a positive number of seconds.
    """
    if given is not None and not 0.0 < given <= _MOST_SECONDS:
        raise UserError(f"timeout_seconds is {given}: give a positive number of seconds, up to {_MOST_SECONDS:.0f}")
    return timedelta(seconds=DEFAULT_SECONDS if given is None else given)


def choose_timeout(given: float | None, hang_seconds: float | None) -> float:
    """Returns the limit of collectives in seconds. Pure.

    Args:
        given: The option `timeout_seconds` of a strategy; None to follow `hang_seconds`.
        hang_seconds: After how long at most `HangWatch` ends a run that hangs; None without one.

    Example:
        >>> choose_timeout(None, None), choose_timeout(None, 7200.0), choose_timeout(600.0, 7200.0)
        (1800.0, 7500.0, 600.0)
    """
    if given is not None:
        return given
    if hang_seconds is None:
        return DEFAULT_SECONDS
    return min(_MOST_SECONDS, max(DEFAULT_SECONDS, math.ceil(hang_seconds + _GRACE_SECONDS)))


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Sets the limit of a group's collectives; does nothing for groups of backends without one."""
    if dist.get_backend(group) not in ("gloo", "nccl"):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a group that TORCH_DISTRIBUTED_DEBUG wraps keeps its limit
        _set_pg_timeout(timedelta(seconds=seconds), group)
