"""Lightning callbacks for honest training runs, and the checkpoint engine under them.

Lightning is imported on the first use of a callback: a writer process, which imports the engine alone, must start
in a moment.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "AsyncProcessCheckpoint": ".async_process_checkpoint",
    "CheckpointVerification": ".checkpoint_verification",
    "DeviceWatch": ".device_watch",
    "GradientHealth": ".gradient_health",
    "HangWatch": ".hang_watch",
    "Heartbeat": ".heartbeat",
    "LossWatch": ".loss_watch",
    "MemoryWatch": ".memory_watch",
    "ResumableLoader": ".resumable_loader",
    "SaveScope": ".checkpoint.scope",
    "SkipAwareLR": ".skip_aware_lr",
    "StepTimer": ".step_timer",
    "Throughput": ".throughput",
    "TokenCounters": ".token_counters",
    "TraceSteps": ".trace_steps",
    "export_lightning_checkpoint": ".checkpoint.lightning_file",
}
__all__ = [*_MODULES]


def __dir__() -> list[str]:
    """Returns the public names, which are not imported yet."""
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    """Returns a callback class, importing its module (and Lightning) on first use, or what else is named above."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)
