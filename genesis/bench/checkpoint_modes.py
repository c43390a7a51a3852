"""The ways to save that `genesis bench checkpoint` compares, and which of them a machine can run."""

import os
from collections.abc import Sequence

from genesis.base.errors import UserError
from genesis.bench.workers.checkpoint_protocol import Mode

BASELINE = "baseline"
BASELINE_SPARING = "baseline-sparing-a-core"
OVERLAPPED = "process-overlapped"
WITHOUT_PLAN_CACHE = "process-overlapped-without-plan-cache"
OWN_CORE = "process-overlapped-own-core"

MODES = (
    Mode(BASELINE, "saves nothing", "none"),
    Mode("sync", "the training thread digests, writes and commits", "genesis"),
    Mode("thread", "the state is copied at once; a thread writes the copy", "genesis", "thread"),
    Mode("process", "the state is copied at once; a writer process writes the copy", "genesis", "process"),
    Mode("process-pinned", "the same, copied from the GPU to pinned memory", "genesis", "process", is_pinned=True),
    Mode(
        OVERLAPPED,
        "the state is copied during the next forward and backward; a writer process writes the copy",
        "genesis",
        "process",
        "overlapped",
        is_pinned=True,
    ),
    Mode("torch-sync", "`dcp.save`", "torch"),
    Mode("torch-thread", "`dcp.async_save`, AsyncCheckpointerType.THREAD", "torch", "thread"),
    Mode("torch-process", "`dcp.async_save`, AsyncCheckpointerType.PROCESS", "torch", "process"),
    Mode(
        WITHOUT_PLAN_CACHE,
        "process-overlapped, whose ranks agree on a plan at each save",
        "genesis",
        "process",
        "overlapped",
        is_pinned=True,
        has_plan_cache=False,
    ),
    Mode(BASELINE_SPARING, "saves nothing, and leaves one core alone", "none", has_own_cores=True),
    Mode(
        OWN_CORE,
        "process-overlapped, the writer on a core of its own",
        "genesis",
        "process",
        "overlapped",
        is_pinned=True,
        has_own_cores=True,
    ),
)
_EXTRAS = (WITHOUT_PLAN_CACHE, BASELINE_SPARING, OWN_CORE)


def name_default_modes(num_ranks: int) -> list[str]:
    """Returns the default modes: the ways to save on one rank; plan caching on and off on several ranks."""
    if num_ranks > 1:
        return [BASELINE, OVERLAPPED, WITHOUT_PLAN_CACHE]
    return [mode.name for mode in MODES if mode.name not in _EXTRAS]


def choose_modes(
    names: Sequence[str], device: str, num_ranks: int, *, has_adapter: bool = False
) -> tuple[list[Mode], dict[str, str]]:
    """Returns the modes that can run, and for each other mode the reason why it cannot.

    Args:
        names: Names of modes in `MODES`.
        device: `cpu` or `cuda`.
        num_ranks: Number of ranks of each mode.
        has_adapter: Whether adapters are trained, and saves hold them alone.

    Raises:
        UserError: A name is unknown or repeated, or the baseline is missing.
    """
    known = {mode.name: mode for mode in MODES}
    for name in names:
        if name not in known:
            raise UserError(f"--modes has {name!r}; there are {', '.join(known)}")
        if names.count(name) > 1:
            raise UserError(f"--modes has {name!r} more than once: name it once")
    if BASELINE not in names:
        raise UserError(f"--modes has no {BASELINE!r}, with which the others are compared: add it")
    left_out = {
        name: reason for name in names if (reason := _find_obstacle(known[name], device, num_ranks, has_adapter))
    }
    return [known[name] for name in names if name not in left_out], left_out


def _find_obstacle(mode: Mode, device: str, num_ranks: int, has_adapter: bool) -> str | None:
    if has_adapter and mode.saver == "torch":
        return "saves the base beside the adapters"
    if mode.name == "process-pinned" and device == "cpu":
        return "needs CUDA: on the CPU no memory is pinned"
    if mode.name == WITHOUT_PLAN_CACHE and num_ranks == 1:
        return "needs several ranks (--ranks 2): a single rank makes its plan without communication"
    if mode.has_own_cores and num_ranks > 1:
        return "needs one rank (--ranks 1)"
    if mode.has_own_cores and len(os.sched_getaffinity(0)) < 2:
        return "needs two cores"
    return None
