"""Lightning callbacks for honest training runs, and the checkpoint engine under them.

Nothing of Lightning is imported until a callback is asked for: a writer process that imports the engine must start
in a moment.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_CALLBACK_MODULES = {
    "AsyncProcessCheckpoint": ".async_process_checkpoint",
    "CheckpointVerification": ".checkpoint_verification",
    "SkipAwareLR": ".skip_aware_lr",
    "TokenCounters": ".token_counters",
}
__all__ = ["AsyncProcessCheckpoint", "CheckpointVerification", "SkipAwareLR", "TokenCounters"]


def __getattr__(name: str) -> Any:
    """Returns a callback class, importing its module (and Lightning) on first use."""
    if name not in _CALLBACK_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_CALLBACK_MODULES[name], __name__), name)
