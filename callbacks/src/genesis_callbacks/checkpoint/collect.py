"""Gives the live tensors of a model and its optimizers their canonical names.

Names are `model.<fqn>` for parameters and persistent buffers, `optimizer.<i>.<fqn of the parameter>.<key>` for
optimizer state, and `swapped.<fqn>` for a tensor that a callback saves in place of a model's tensor (an average).
Wrappers leave no trace in a name, and tied parameters have one name, so that any strategy can restore the checkpoints
of any other. Optimizer state is found by the identity of its parameter, never by its position. No function here
communicates or takes an optimizer step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..base.checkpoint_errors import UnsupportedStateError
from ..base.local_shards import LocalShard, local_shards
from ..base.manifest import Manifest, TensorRecord

MODEL_PREFIX = "model."
SWAPPED_PREFIX = "swapped."
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@lru_cache(maxsize=1 << 16)  # cached: the names are the same at every save, while training waits
def canonical_name(fqn: str) -> str:
    """Returns `fqn` without the traces of torch.compile and activation checkpointing.

    Example:
        >>> canonical_name("blocks.0._orig_mod._checkpoint_wrapped_module.weight")
        'blocks.0.weight'
    """
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True)
class NamedModel:
    """A model's tensors by canonical name, without the prefix.

    Attributes:
        tensors: Live parameters and persistent buffers, tied ones once.
        names: Key of the state dict to canonical name; tied parameters have several keys for one name.
        extras: Entries of a state dict that are not tensors (`_extra_state`), by canonical name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)


def name_model(state_dict: Mapping[str, Any]) -> NamedModel:
    """Returns the content of a state dict, by canonical name.

    Args:
        state_dict: Made with `keep_vars=True`, so that ties show.

    Raises:
        UnsupportedStateError: Two different tensors would have the same name.
    """
    model = NamedModel()
    name_by_identity: dict[int, str] = {}
    for key, value in state_dict.items():
        name = canonical_name(key)
        if not isinstance(value, Tensor):
            model.extras[name] = value
            continue
        name = name_by_identity.setdefault(id(value), name)
        model.names[key] = name
        if model.tensors.setdefault(name, value) is not value:
            raise UnsupportedStateError(f"two different tensors of the model would both be called {name}")
    return model


def model_parts(model: NamedModel) -> list[LocalShard]:
    """Returns the parts of the model's tensors that this rank holds."""
    return [
        part
        for name, tensor in model.tensors.items()
        for part in local_shards(
            MODEL_PREFIX + name, tensor, "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        )
    ]


def name_parameters(module: nn.Module) -> dict[int, str]:
    """Returns the canonical name of each parameter, by its `id`."""
    return {id(parameter): canonical_name(name) for name, parameter in module.named_parameters()}


def read_mesh(module: nn.Module) -> dict[str, int]:
    """Returns axis name to size of the device meshes of the parameters; empty if no parameter is sharded.

    The strategy's mesh would not do: the code that shards the model may have made another one, as hybrid sharding does.
    """
    mesh: dict[str, int] = {}
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            axes = parameter.device_mesh
            names = axes.mesh_dim_names or tuple(f"axis_{axis}" for axis in range(axes.ndim))
            mesh.update(zip(names, axes.shape, strict=True))
    return mesh


def state_holder(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that holds this rank's state: under ZeRO-1 the inner one, with this rank's parameters."""
    # By its methods and not by its type: importing ZeroRedundancyOptimizer compiles TorchScript, with warnings.
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) and hasattr(optimizer, "consolidate_state_dict") else optimizer


def _name_of(parameter: Tensor, names: Mapping[int, str], index: int) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise UnsupportedStateError(
            f"optimizer {index} updates a tensor of shape {list(parameter.shape)}, which is not a parameter of the "
            "model: give it only parameters of the model"
        )
    return name


def name_groups(index: int, optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Returns the names of each group's parameters, for the run's optimizer number `index`.

    Raises:
        UnsupportedStateError: The optimizer updates a tensor that is not the model's.
    """
    return [[_name_of(parameter, names, index) for parameter in group["params"]] for group in optimizer.param_groups]


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer's state by name.

    Attributes:
        tensors: Full name to live tensor, for the tensors that this rank holds.
        section: The remaining state: groups with their parameters' names, values that are not tensors, and whether the
            optimizer has any state yet.
    """

    tensors: dict[str, Tensor]
    section: dict[str, Any]


def name_optimizer(index: int, optimizer: Optimizer, names: Mapping[int, str]) -> NamedOptimizer:
    """Returns the state of the run's optimizer number `index`, as this rank holds it.

    Raises:
        UnsupportedStateError: The optimizer updates a tensor that is not the model's, or its state has keys that are
            not plain names.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    holder = state_holder(optimizer)
    for parameter, state in holder.state.items():
        name = _name_of(parameter, names, index)
        for key, value in state.items():
            if not isinstance(key, str) or "." in key:
                raise UnsupportedStateError(
                    f"optimizer {index} has state {key!r} for {name}: keys must be names without dots"
                )
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}.{key}"] = value
            else:
                values.setdefault(name, {})[key] = value
    groups = [
        {**group, "params": in_group}
        for group, in_group in zip(optimizer.param_groups, name_groups(index, optimizer, names), strict=True)
    ]
    return NamedOptimizer(tensors, {"groups": groups, "values": values, "has_state": bool(holder.state)})


def optimizer_parts(optimizer: NamedOptimizer) -> list[LocalShard]:
    """Returns the parts of an optimizer's state that this rank holds."""
    return [part for name, tensor in optimizer.tensors.items() for part in local_shards(name, tensor, "optimizer")]


def recorded_optimizer_state(manifest: Manifest, index: int) -> dict[str, dict[str, TensorRecord]]:
    """Returns parameter name to state key to record, for optimizer number `index`."""
    prefix = f"optimizer.{index}."
    found: dict[str, dict[str, TensorRecord]] = {}
    for full_name, record in manifest.tensors.items():
        if full_name.startswith(prefix):
            name, _, key = full_name.removeprefix(prefix).rpartition(".")
            found.setdefault(name, {})[key] = record
    return found


def _build_state_tensor(parameter: Tensor, key: str, record: TensorRecord, group: Mapping[str, Any]) -> Tensor:
    """Returns an empty state tensor: sharded like its parameter if both have one shape, else whole on this rank."""
    dtype = record.torch_dtype
    if record.shape == tuple(parameter.shape) and key != "step":
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    # torch keeps step counters on the CPU except for kernels that read them on the device.
    is_on_device = bool(record.shape) or bool(group.get("capturable")) or bool(group.get("fused"))
    return torch.zeros(record.shape, dtype=dtype, device=parameter.device if is_on_device else "cpu")


def prepare_optimizer(
    index: int,
    optimizer: Optimizer,
    names: Mapping[int, str],
    manifest: Manifest,
    values: Mapping[str, Mapping[str, Any]],
) -> set[str]:
    """Gives an optimizer's state exactly the tensors that were saved, and returns the names of the new ones.

    Existing tensors with the saved shape and dtype are kept. New tensors are empty, and a restore fills them. No
    optimizer step is taken. State that was not saved is dropped: an optimizer saved without state is restored without
    state.

    Args:
        index: Number of the optimizer in the run.
        optimizer: The live optimizer.
        names: Names of the model's parameters, by `id`.
        manifest: The checkpoint's manifest.
        values: Parameter name to key to value, for saved values that are not tensors.
    """
    recorded = recorded_optimizer_state(manifest, index)
    made: set[str] = set()
    holder = state_holder(optimizer)
    for group in holder.param_groups:
        for parameter in group["params"]:
            name = _name_of(parameter, names, index)
            old = holder.state.pop(parameter, {})
            state: dict[str, Any] = dict(values.get(name, {}))
            for key, record in recorded.get(name, {}).items():
                tensor = old.get(key)
                if not isinstance(tensor, Tensor) or tensor.shape != record.shape or tensor.dtype != record.torch_dtype:
                    tensor = _build_state_tensor(parameter, key, record, group)
                    made.add(f"optimizer.{index}.{name}.{key}")
                state[key] = tensor
            if state:
                holder.state[parameter] = state
    return made
