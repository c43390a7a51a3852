"""The checkpoint engine: saves that are all there or not there, and restores that are what was saved.

It knows torch, not Lightning. A directory of checkpoints holds one `step-XXXXXXXX` for each commit; a name in it
that the engine did not give is never counted nor touched.
"""

from .best import find_best
from .digest import digest_chunk, digest_tensor
from .drift import Difference, DriftPolicy, DriftWarning, check_drift, find_drift, format_differences
from .errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryInUseError,
    DriftError,
    SaveFailedError,
    UnreadableCheckpointError,
    UnsupportedStateError,
)
from .lineage import DirectoryLock, QuarantineWarning, find_latest, list_committed
from .manifest import ChunkRecord, FileRecord, Manifest, TensorRecord, read_manifest
from .pipeline import save_blocking
from .plan import LocalShard, TensorShard, local_shards
from .ranks import Ranks
from .restore import check_restored, read_tensors, restore_shards
from .retain import CommittedCheckpoint, Retention, plan_removals
from .save_target import RetentionWarning, RunMetadata, SaveTarget, Snapshot
from .verify import VerifyLevel, verify

__all__ = [
    "CheckpointError",
    "ChunkRecord",
    "CorruptCheckpointError",
    "Difference",
    "DirectoryInUseError",
    "DirectoryLock",
    "DriftError",
    "DriftPolicy",
    "DriftWarning",
    "FileRecord",
    "CommittedCheckpoint",
    "LocalShard",
    "Manifest",
    "RunMetadata",
    "TensorShard",
    "QuarantineWarning",
    "Ranks",
    "Retention",
    "RetentionWarning",
    "SaveFailedError",
    "SaveTarget",
    "Snapshot",
    "TensorRecord",
    "UnreadableCheckpointError",
    "UnsupportedStateError",
    "VerifyLevel",
    "check_drift",
    "check_restored",
    "digest_chunk",
    "digest_tensor",
    "find_best",
    "find_drift",
    "find_latest",
    "format_differences",
    "list_committed",
    "local_shards",
    "plan_removals",
    "read_manifest",
    "read_tensors",
    "restore_shards",
    "save_blocking",
    "verify",
]
