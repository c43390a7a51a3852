"""A directory of torch's distributed checkpoint (DCP), read by its `.metadata`.

Lightning's ModelParallelStrategy writes such directories. The unpickler accepts only DCP's own records and refuses any
other name.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genesis_callbacks.base.errors import numbered

from ...base.checkpoint_errors import CorruptCheckpointError
from ...base.errors import UserError
from ...base.manifest import DCP_METADATA_NAME
from ...base.untrusted import path_below
from ..dcp_metadata import InertRecord, InertTensorRecord, read_dcp_metadata
from .stored import Contents, StoredBlock, StoredTensor, measure
from .torch_format import load_plain

LIGHTNING_META_NAME = "meta.pt"
_OPTIMIZER_KEY = re.compile(r"optim(?:izer)?s?(?:_(\d+))?")


def _read_tensors(metadata: InertRecord) -> tuple[dict[str, StoredTensor], list[str]]:
    """Returns the tensors by their flat name, and the problems found."""
    infos: dict[str, list[Any]] = defaultdict(list)
    for index, info in vars(metadata)["storage_data"].items():
        infos[index.fqn].append(info)
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for name, record in vars(metadata)["state_dict_metadata"].items():
        if not isinstance(record, InertTensorRecord):
            continue
        shape = tuple(record.size)
        blocks = tuple(
            StoredBlock(info.relative_path, info.offset, info.length, is_archive=True) for info in infos[name]
        )
        tensors[name] = StoredTensor(shape, record.properties.arguments[0], blocks)
        # Overlaps are not checked: DCP's planner prevents them, and comparing all pairs of blocks takes seconds with
        # many ranks.
        num_elements = sum(math.prod(chunk.sizes) for chunk in record.chunks)
        if num_elements != math.prod(shape):
            problems.append(f"{name}: {num_elements:,} of its {numbered(math.prod(shape), 'elements')} are there")
        if len(blocks) < len(record.chunks):
            problems.append(f"{name}: {len(blocks):,} of its {numbered(len(record.chunks), 'blocks')} were written")
    return tensors, problems


def _check_files(path: Path, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Returns a problem for each file that is missing, too short or outside of the checkpoint, with its tensors."""
    names_by_file: dict[str, set[str]] = defaultdict(set)
    ends: dict[str, int] = defaultdict(int)
    for name, tensor in tensors.items():
        for block in tensor.blocks:
            names_by_file[block.file].add(name)
            ends[block.file] = max(ends[block.file], block.offset + block.num_bytes)
    problems = []
    for file, names in sorted(names_by_file.items()):
        whose = f"with parts of {numbered(len(names), 'tensors')}, such as {min(names)}"
        try:
            path_below(path, file, path / DCP_METADATA_NAME)
        except UserError as error:
            problems.append(str(error))
            continue
        if not (path / file).is_file():
            problems.append(f"{file} is missing, {whose}")
        elif (path / file).stat().st_size < ends[file]:
            size = (path / file).stat().st_size
            problems.append(f"{file} has {size:,} bytes where at least {ends[file]:,} were written, {whose}")
    return problems


def read_dcp(path: Path) -> Contents:
    """Returns the content of a directory of DCP; missing parts are listed in `problems`.

    Raises:
        CheckpointError: `meta.pt`, which Lightning adds, holds an object that is not plain data.
        CorruptCheckpointError: `.metadata` cannot be read.
    """
    metadata = read_dcp_metadata(path)
    try:
        tensors, problems = _read_tensors(metadata)
        places = vars(metadata).get("planner_data") or {}
    except (KeyError, AttributeError, TypeError, IndexError) as error:
        raise CorruptCheckpointError(f"{DCP_METADATA_NAME} lacks {error}") from error
    problems += _check_files(path, tensors)
    model: dict[str, StoredTensor] = {}
    optimizers: dict[int, dict[str | int, dict[str, StoredTensor]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        head, *rest = places.get(name) or name.split(".")
        inner = ".".join(map(str, rest))
        optimizer = _OPTIMIZER_KEY.fullmatch(str(head))
        if optimizer is None:
            model[inner if head == "state_dict" else name] = tensor
        elif inner.startswith("state."):
            parameter, _, key = inner.removeprefix("state.").rpartition(".")
            optimizers[int(optimizer[1] or 0)][parameter][key] = tensor
    meta = path / LIGHTNING_META_NAME
    step = load_plain(meta).get("global_step") if meta.exists() else None
    return Contents(path, "dcp", model, optimizers, measure(path), step, tuple(problems))
