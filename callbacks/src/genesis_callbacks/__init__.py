"""Lightning callbacks for honest training runs, and the checkpoint engine under them.

Nothing of Lightning is imported here: a writer process that imports the engine must start in a moment. So the callbacks
are found when they are first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genesis_callbacks.async_process_checkpoint import AsyncProcessCheckpoint
    from genesis_callbacks.skip_aware_lr import SkipAwareLR
    from genesis_callbacks.token_counters import TokenCounters

__version__ = "0.1.0"

__all__ = ["AsyncProcessCheckpoint", "SkipAwareLR", "TokenCounters"]

_HOMES = {
    "AsyncProcessCheckpoint": "genesis_callbacks.async_process_checkpoint",
    "SkipAwareLR": "genesis_callbacks.skip_aware_lr",
    "TokenCounters": "genesis_callbacks.token_counters",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
