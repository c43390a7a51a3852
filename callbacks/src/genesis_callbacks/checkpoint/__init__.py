"""The checkpoint engine: a save is complete or does not exist, and a restore returns exactly the saved values.

The engine uses torch, but not Lightning; what reads manifests, and compares sizes and hashes, imports neither. A
checkpoint directory has one `step-XXXXXXXX` for each commit. The engine neither counts nor changes files and
directories with names that it did not give.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..base.checkpoint_errors import (
    BaseCheckpointError,
    CheckpointError,
    CorruptCheckpointError,
    DirectoryInUseError,
    DriftError,
    ExistingCheckpointsError,
    SaveFailedError,
    UnreadableCheckpointError,
    UnsupportedStateError,
)
from ..base.hashing import hash_bytes, hash_file
from ..base.manifest import (
    Ancestor,
    BaseReference,
    ChunkRecord,
    FileRecord,
    Manifest,
    TensorRecord,
    dtype_name,
    encode_manifest,
    read_committed_hash,
    read_manifest,
)
from ..base.run_directory import (
    COMMITTED_NAME,
    MANIFEST_NAME,
    PLACES_VARIABLE,
    checkpoint_name,
    is_checkpoint_name,
    is_staging_name,
    step_of,
)
from .best import Best, find_best, read_best, read_marked_names
from .commit import supersede
from .drift import Difference, DriftPolicy, DriftWarning, check_drift, compare_mappings, find_drift, format_differences
from .inventory import (
    InventoryEntry,
    Repair,
    apply_repair,
    find_problem,
    find_problems,
    newest_whole,
    plan_repairs,
    read_inventory,
    summarise_parts,
    trace_ancestors,
)
from .lineage import (
    DirectoryLock,
    QuarantineWarning,
    check_not_in_use,
    checkpoints_in,
    find_latest,
    list_checkpoints,
    list_committed,
)
from .retain import CommittedCheckpoint, Retention, apply_retention, name_bases, plan_removals
from .roles import pick_data_sections
from .state import read_state
from .tensor_places import find_base
from .verify import VerifyLevel, verify
from .writer_start import start_writer_early, writer_environment

if TYPE_CHECKING:
    from ..base.local_shards import LocalShard, TensorShard, local_shards
    from .compare import TensorComparison, compare_tensors
    from .contents import Contents, find_format, find_non_finite, read_contents
    from .device import PIN_PIECE_BYTES, PinError, build_stream, pin_memory, record_event, unpin_memory, working_on
    from .device_proof import DeviceProof, DeviceReport, prove_device
    from .digest import DIGEST_MODULUS, digest_chunk, digest_tensor
    from .file_memory import FILE_ALIGNMENT, NUM_COPIES, FileMemory, FileRoomError, Pass, find_file_memory
    from .lightning_file import export_lightning_checkpoint
    from .ranks import Ranks
    from .restore import check_restored, read_tensors, restore_shards
    from .save_once import save_blocking
    from .save_target import RetentionWarning, RunMetadata, SaveTarget, Snapshot
    from .scope import SaveScope, bind_scope
    from .tagged_json import encode_tagged
    from .writer_process import start_writers_by

_WITH_TORCH = (
    "compare",
    "contents",
    "device",
    "device_proof",
    "digest",
    "file_memory",
    "lightning_file",
    "plan",
    "ranks",
    "restore",
    "save_once",
    "save_target",
    "scope",
    "tagged_json",
    "writer_process",
)
"""The modules that import torch. The first use of a name in them does: a listing of checkpoints uses none."""

__all__ = [
    "Ancestor",
    "BaseCheckpointError",
    "BaseReference",
    "Best",
    "COMMITTED_NAME",
    "CheckpointError",
    "ChunkRecord",
    "CommittedCheckpoint",
    "Contents",
    "CorruptCheckpointError",
    "DIGEST_MODULUS",
    "DeviceProof",
    "DeviceReport",
    "Difference",
    "DirectoryInUseError",
    "DirectoryLock",
    "DriftError",
    "ExistingCheckpointsError",
    "DriftPolicy",
    "DriftWarning",
    "FILE_ALIGNMENT",
    "FileMemory",
    "FileRoomError",
    "InventoryEntry",
    "FileRecord",
    "LocalShard",
    "MANIFEST_NAME",
    "Manifest",
    "NUM_COPIES",
    "PIN_PIECE_BYTES",
    "PLACES_VARIABLE",
    "Pass",
    "PinError",
    "QuarantineWarning",
    "Ranks",
    "Repair",
    "Retention",
    "RetentionWarning",
    "RunMetadata",
    "SaveFailedError",
    "SaveScope",
    "SaveTarget",
    "Snapshot",
    "TensorComparison",
    "TensorRecord",
    "TensorShard",
    "UnreadableCheckpointError",
    "UnsupportedStateError",
    "VerifyLevel",
    "apply_repair",
    "apply_retention",
    "bind_scope",
    "build_stream",
    "check_drift",
    "check_not_in_use",
    "check_restored",
    "checkpoint_name",
    "checkpoints_in",
    "compare_mappings",
    "compare_tensors",
    "digest_chunk",
    "digest_tensor",
    "dtype_name",
    "encode_manifest",
    "encode_tagged",
    "export_lightning_checkpoint",
    "find_base",
    "find_best",
    "find_drift",
    "find_file_memory",
    "find_format",
    "find_latest",
    "find_non_finite",
    "find_problem",
    "find_problems",
    "format_differences",
    "hash_bytes",
    "hash_file",
    "is_checkpoint_name",
    "is_staging_name",
    "list_checkpoints",
    "list_committed",
    "local_shards",
    "name_bases",
    "newest_whole",
    "pick_data_sections",
    "pin_memory",
    "plan_removals",
    "plan_repairs",
    "prove_device",
    "read_best",
    "read_committed_hash",
    "read_contents",
    "read_inventory",
    "read_manifest",
    "read_marked_names",
    "read_state",
    "read_tensors",
    "record_event",
    "restore_shards",
    "save_blocking",
    "start_writer_early",
    "start_writers_by",
    "step_of",
    "summarise_parts",
    "supersede",
    "trace_ancestors",
    "unpin_memory",
    "verify",
    "working_on",
    "writer_environment",
]

if not TYPE_CHECKING:  # or a misspelt name would have the type Any

    def __getattr__(name: str) -> Any:
        """Returns a name of a module that imports torch."""
        if name in __all__:
            for module in _WITH_TORCH:
                found = getattr(importlib.import_module(f".{module}", __name__), name, None)
                if found is not None:
                    globals()[name] = found
                    return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
