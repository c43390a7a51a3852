"""Converts a checkpoint of the engine to one portable `.ckpt` file in stock Lightning's format.

`torch.load(weights_only=True)`, `Model.load_from_checkpoint` and `Trainer.fit(ckpt_path=...)` read the file without
this package. This module does not import Lightning.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.checkpoint_errors import CheckpointError
from ..base.files import staged_file
from ..base.manifest import Manifest
from ..base.run_directory import COMMITTED_NAME
from .collect import MODEL_PREFIX, recorded_optimizer_state
from .lineage import find_latest
from .restore import read_recorded_tensors
from .sections import name_saved_groups
from .state import read_state
from .tagged_json import decode_tagged, named_tensors
from .verify import verify


def index_optimizer_state(groups: list[dict[str, Any]], state_by_name: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns a state dict for `Optimizer.load_state_dict`, keyed by index, from one keyed by parameter name.

    Args:
        groups: The saved groups: options, and parameter names under `params`.
        state_by_name: Parameter name to its state; parameters without state may be missing.

    Raises:
        CheckpointError: There is state of a parameter that is in no group.
    """
    names = [name for group in groups for name in group["params"]]
    index_by_name = {name: index for index, name in enumerate(names)}
    strangers = sorted(state_by_name.keys() - index_by_name.keys())
    if strangers:
        raise CheckpointError(f"the checkpoint has optimizer state of {strangers[0]}, which is in no saved group")
    return {
        "state": {index_by_name[name]: dict(state) for name, state in state_by_name.items()},
        "param_groups": [{**group, "params": [index_by_name[name] for name in group["params"]]} for group in groups],
    }


def read_optimizer_state(
    path: Path,
    manifest: Manifest,
    index: int,
    values: Mapping[str, Mapping[str, Any]],
    *,
    leave_out: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Returns parameter name to key to value, with full tensors, for the run's optimizer number `index`.

    Args:
        path: The checkpoint.
        manifest: Its manifest.
        index: Number of the optimizer.
        values: Parameter name to key to value, for saved values that are not tensors.
        leave_out: Names of parameters whose state is left out.
    """
    state = {name: dict(of_parameter) for name, of_parameter in values.items() if name not in leave_out}
    for name, records in recorded_optimizer_state(manifest, index).items():
        if name in leave_out:
            continue
        prefix = f"optimizer.{index}.{name}."
        tensors = read_recorded_tensors(path, manifest, [prefix + key for key in records])
        state.setdefault(name, {}).update({key: tensors[prefix + key] for key in records})
    return state


def read_lightning_checkpoint(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Returns the dict that Lightning would have saved at this step, with full tensors on the CPU. No communication.

    State that each rank saved separately (callbacks and loaders) is rank 0's, as in Lightning's own files. With
    averaging callbacks, `state_dict` holds the averages, and the weights in training are where those callbacks store
    them.

    Args:
        path: A checkpoint that verifies.
        manifest: Its manifest.

    Raises:
        CheckpointError: The checkpoint's state is not that of a Trainer.
        CorruptCheckpointError: A tensor or the state differs from the saved one.
    """
    sections = read_state(path, manifest)
    try:
        return _assemble(path, manifest, sections)
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:  # a state may have any structure
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path} holds no state of a Trainer ({reason}): read its weights by read_tensors instead"
        ) from error


def _assemble(path: Path, manifest: Manifest, sections: list[Any]) -> dict[str, Any]:
    content = _decode(path, manifest, {key: value for key, value in sections[0].items() if not key.startswith("rng")})
    recorded = [name for name in manifest.tensors if name.startswith(MODEL_PREFIX)]
    tensors = read_recorded_tensors(path, manifest, recorded)
    model = {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}
    keys = content.get("model_keys") or {name: name for name in model}
    state_dict = {key: model[name] for key, name in keys.items()} | content["model_extras"]
    state_dict |= {key: value for key, value in content.get("swapped", {}).items() if key in state_dict}
    optimizers = []
    for index, section in enumerate(content["optimizers"]):
        values: dict[str, Any] = {}
        for other in sections:  # each rank that held a part of the optimizer saved its own
            if name_saved_groups(other["optimizers"][index]["groups"]) != name_saved_groups(section["groups"]):
                raise CheckpointError(
                    f"{path} was saved by ranks that held different parts of the model, and Lightning's format numbers "
                    "an optimizer's parameters in an order that is not recorded: resume on one rank by "
                    "AsyncProcessCheckpoint, and convert what that saves"
                )
            values |= _decode(path, manifest, other["optimizers"][index]["values"])
        optimizers.append(index_optimizer_state(section["groups"], read_optimizer_state(path, manifest, index, values)))
    return {**content["trainer"], "state_dict": state_dict, "optimizer_states": optimizers}


def _decode(path: Path, manifest: Manifest, content: Any) -> Any:
    return decode_tagged(content, read_recorded_tensors(path, manifest, sorted(named_tensors(content))))


def _compact(value: Any) -> Any:
    """Returns plain containers whose tensors own no more memory than their elements: torch.save writes all of it."""
    if isinstance(value, Tensor):
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if type(value) is dict:
        return {key: _compact(item) for key, item in value.items()}
    return [_compact(item) for item in value] if type(value) is list else value


def export_lightning_checkpoint(source: Path | str, target: Path | str) -> Path:
    """Writes one `.ckpt` for stock Lightning and returns its path. Any process may call this; it does not communicate.

    The file holds the whole training state except the random generators: loops, callbacks, schedulers, optimizers,
    weights and hyperparameters. The file appears atomically, when it is complete.

    Args:
        source: A checkpoint, or a run's directory, of which the newest checkpoint that verifies is used.
        target: The file to write, which must not exist yet.

    Raises:
        CheckpointError: The checkpoint does not verify, the file exists or cannot be written, or the state holds a type
            that `torch.load(weights_only=True)` refuses; the message has the type.
    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise CheckpointError(f"{target} exists: give the name of a new file")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target} cannot be written, {target.parent} is no directory: make it, or give another")
    path = source if (source / COMMITTED_NAME).exists() else find_latest(source, quarantine_bad=False)
    if path is None:
        raise CheckpointError(f"there is no checkpoint in {source}: give a checkpoint, or a run's directory")
    content = _compact(read_lightning_checkpoint(path, verify(path, "full")))
    try:
        with staged_file(target, has_rivals=True) as part:
            torch.save(content, part)
            _check_loads(path, part)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a file that it cannot open or write
        reason = next(iter(str(error).splitlines()), "")
        raise CheckpointError(f"{target} cannot be written: {reason or type(error).__name__}") from error
    return target


def _check_loads(path: Path, file: Path) -> None:
    try:
        torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:  # torch raises UnpicklingError and other errors, depending on the content
        reason = str(error).partition("WeightsUnpickler error: ")[2].partition("\n")[0] or str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} holds state that torch.load(weights_only=True) refuses ({reason}): keep plain values and tensors "
            "in the state of callbacks and in the hyperparameters"
        ) from error
