"""Checkpoints: their bytes, the disk that retention needs, and the interval that loses the least time."""

import math
from dataclasses import dataclass

from genesis.operations.plan.layout import Workload
from genesis.operations.plan.recipe import SaveOptions
from genesis.operations.plan.state import Model


@dataclass(frozen=True)
class CheckpointBill:
    """What checkpoints take.

    Args:
        checkpoint_bytes: Bytes of one checkpoint over all ranks.
        base_bytes: Bytes of the frozen base, which is stored once beside checkpoints of adapters.
        num_kept: Checkpoints on disk at the same time, with the one that is being written; None if all stay.
        disk_bytes: Bytes of these and of the base; None if the number of steps is not known, either.
    """

    checkpoint_bytes: int
    base_bytes: int
    num_kept: int | None
    disk_bytes: int | None


def count_checkpoints(model: Model, workload: Workload, saves: SaveOptions, num_steps: int | None) -> CheckpointBill:
    """Returns the bytes of a run's checkpoints. Every tensor is stored once, however many ranks hold it."""
    weights = states = base = 0
    for parameter in model.parameters:
        size = parameter.num_elements * parameter.element_bytes
        if not parameter.is_trained and workload.adapter is not None:
            base += size
            continue
        weights += size
        if not parameter.is_trained:  # such as the bias that balances experts
            continue
        states += sum(parameter.list_moment_bytes(workload.optimizer))
    checkpoint = weights + (states if saves.has_optimizer else 0)
    num_kept = _count_kept(saves, num_steps)
    disk = None if num_kept is None else num_kept * checkpoint + base
    return CheckpointBill(checkpoint, base, num_kept, disk)


def _count_kept(saves: SaveOptions, num_steps: int | None) -> int | None:
    """Returns how many checkpoints exist at once: those that stay, and one that is being written."""
    every, written = saves.every_n_steps, 1
    num_saves = None if num_steps is None or not every else num_steps // every
    if saves.keep_last is None:
        return None if num_saves is None else num_saves + written
    extra = 0
    if saves.keep_every_n_steps:
        if num_steps is None:
            return None
        extra = num_steps // math.lcm(saves.keep_every_n_steps, every or 1)
    kept = saves.keep_last + extra
    return (kept if num_saves is None else min(kept, num_saves)) + written


@dataclass(frozen=True)
class Interval:
    """The interval between saves that loses the least time.

    Args:
        young_seconds: By Young's first-order estimate.
        daly_seconds: By Daly's estimate of higher order.
        lost_share: Share of the time that saves and repeated work take at Daly's interval, without restarts.

    References:
        Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM 17 (1974).
        Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
        Systems 22 (2006), equation 37.
    """

    young_seconds: float
    daly_seconds: float
    lost_share: float


def find_interval(save_seconds: float, failure_seconds: float) -> Interval:
    """Returns the best interval.

    Args:
        save_seconds: Time by which one save delays training: the stall, not the write in the background.
        failure_seconds: Mean time between failures of the whole run.

    Example:
        >>> round(find_interval(save_seconds=5.0, failure_seconds=6 * 3600.0).young_seconds)
        465
    """
    young = math.sqrt(2.0 * save_seconds * failure_seconds)
    if save_seconds >= 2.0 * failure_seconds:
        daly = failure_seconds
    else:
        ratio = save_seconds / (2.0 * failure_seconds)
        daly = young * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_seconds
    lost = save_seconds / (daly + save_seconds) + (daly + save_seconds) / (2.0 * failure_seconds)
    return Interval(young, daly, min(1.0, lost))
