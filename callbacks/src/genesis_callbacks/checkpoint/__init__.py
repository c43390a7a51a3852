"""The checkpoint engine: a save is complete or does not exist, and a restore returns exactly the saved values.

The engine uses torch, but not Lightning; what reads manifests, and compares sizes and hashes, imports neither. A
checkpoint directory has one `step-XXXXXXXX` for each commit. The engine neither counts nor changes files and
directories with names that it did not give.

Here are the names for people who read checkpoints, or save some outside of a Trainer. All errors are in
`genesis_callbacks.base.checkpoint_errors`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..base.checkpoint_errors import CheckpointError, CorruptCheckpointError, SaveFailedError
from ..base.manifest import Manifest, read_manifest
from .best import find_best, read_best
from .drift import DriftPolicy, DriftWarning
from .lineage import QuarantineWarning, find_latest, list_checkpoints, list_committed
from .retain import Retention
from .verify import VerifyLevel, verify

if TYPE_CHECKING:
    from ..base.local_shards import local_shards
    from .contents import Contents, find_format, find_non_finite, read_contents
    from .digest import digest_chunk
    from .lightning_file import export_lightning_checkpoint
    from .pipeline import save_blocking
    from .ranks import Ranks
    from .restore import read_tensors
    from .save_target import RetentionWarning, RunMetadata, SaveTarget, Snapshot
    from .scope import SaveScope

_MODULES = {
    "Contents": ".contents",
    "Ranks": ".ranks",
    "RetentionWarning": ".save_target",
    "RunMetadata": ".save_target",
    "SaveScope": ".scope",
    "SaveTarget": ".save_target",
    "Snapshot": ".save_target",
    "digest_chunk": ".digest",
    "export_lightning_checkpoint": ".lightning_file",
    "find_format": ".contents",
    "find_non_finite": ".contents",
    "local_shards": "..base.local_shards",
    "read_contents": ".contents",
    "read_tensors": ".restore",
    "save_blocking": ".pipeline",
}
"""The names whose modules import torch, at their first use: a listing of checkpoints uses none."""

__all__ = [
    "CheckpointError",
    "Contents",
    "CorruptCheckpointError",
    "DriftPolicy",
    "DriftWarning",
    "Manifest",
    "QuarantineWarning",
    "Ranks",
    "Retention",
    "RetentionWarning",
    "RunMetadata",
    "SaveFailedError",
    "SaveScope",
    "SaveTarget",
    "Snapshot",
    "VerifyLevel",
    "digest_chunk",
    "export_lightning_checkpoint",
    "find_best",
    "find_format",
    "find_latest",
    "find_non_finite",
    "list_checkpoints",
    "list_committed",
    "local_shards",
    "read_best",
    "read_contents",
    "read_manifest",
    "read_tensors",
    "save_blocking",
    "verify",
]

if not TYPE_CHECKING:  # or a misspelt name would have the type Any

    def __getattr__(name: str) -> Any:
        """Returns a name of a module that imports torch."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name], __name__), name)
