"""Gives the live tensors of a model and its optimizers their canonical names.

`model.<fqn>` for parameters and persistent buffers, `optimizer.<i>.<fqn of the parameter>.<key>` for optimizer
state, `swapped.<fqn>` for what a callback puts in a model tensor's place in checkpoints (an average). Wrappers leave
no trace in a name, and tied parameters have one name, so that any strategy finds what any other saved. Optimizer
state is found by the identity of its parameter, never by its position. Nothing here communicates or takes a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .errors import UnsupportedStateError
from .manifest import Manifest, TensorRecord
from .plan import LocalShard, PartsCache

MODEL_PREFIX = "model."
SWAPPED_PREFIX = "swapped."
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@lru_cache(maxsize=1 << 16)  # the same names at every save, while training waits
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
        extras: What a state dict holds beside tensors (`_extra_state`), by canonical name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)


def name_model(state_dict: Mapping[str, Any]) -> NamedModel:
    """Returns what a state dict holds, by canonical name.

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


def model_parts(model: NamedModel, cache: PartsCache | None = None) -> list[LocalShard]:
    """Returns what this rank holds of the model's tensors."""
    cache = cache or PartsCache()
    tensors = {MODEL_PREFIX + name: tensor for name, tensor in model.tensors.items()}
    return cache.local_shards(tensors, lambda tensor: "parameter" if isinstance(tensor, nn.Parameter) else "buffer")


def name_parameters(module: nn.Module) -> dict[int, str]:
    """Returns the canonical name of each parameter, by its `id`."""
    return {id(parameter): canonical_name(name) for name, parameter in module.named_parameters()}


def read_mesh(module: nn.Module) -> dict[str, int]:
    """Returns axis name to size of the device meshes that the parameters live on; empty where none is sharded.

    Not the strategy's mesh: the code that shards the model may have made another one, as hybrid sharding does.
    """
    mesh: dict[str, int] = {}
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            axes = parameter.device_mesh
            names = axes.mesh_dim_names or tuple(f"axis_{axis}" for axis in range(axes.ndim))
            mesh.update(zip(names, axes.shape, strict=True))
    return mesh


def state_holder(optimizer: Optimizer) -> Optimizer:
    """Returns whose state this rank really holds: under ZeRO-1 the inner optimizer, with this rank's parameters."""
    # By what ZeroRedundancyOptimizer offers: its package compiles TorchScript at import, with warnings.
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) and hasattr(optimizer, "consolidate_state_dict") else optimizer


def _name_of(parameter: Tensor, names: Mapping[int, str], index: int) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise UnsupportedStateError(
            f"optimizer {index} updates a tensor of shape {list(parameter.shape)} that is no parameter of the model"
        )
    return name


def name_groups(index: int, optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Returns the names of each group's parameters, for the run's optimizer number `index`.

    Raises:
        UnsupportedStateError: It updates a tensor that is not the model's.
    """
    return [[_name_of(parameter, names, index) for parameter in group["params"]] for group in optimizer.param_groups]


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer's state by name.

    Attributes:
        tensors: Full name to live tensor, those that this rank holds.
        section: The rest, for the state section: groups with their parameters' names, values that are no tensors, and
            whether there is any state yet.
    """

    tensors: dict[str, Tensor]
    section: dict[str, Any]


def name_optimizer(index: int, optimizer: Optimizer, names: Mapping[int, str]) -> NamedOptimizer:
    """Returns the state of the run's optimizer number `index`, as this rank holds it.

    Raises:
        UnsupportedStateError: It updates a tensor that is not the model's, or its state has keys that are no plain
            names.
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


def optimizer_parts(optimizer: NamedOptimizer, cache: PartsCache | None = None) -> list[LocalShard]:
    """Returns what this rank holds of an optimizer's state."""
    cache = cache or PartsCache()
    return cache.local_shards(optimizer.tensors, lambda _: "optimizer")


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
    """Returns an empty state tensor: placed as its parameter where it has its shape, whole on this rank otherwise."""
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
    """Makes an optimizer's state have exactly the tensors that were saved, and returns the names of those made here.

    What is there already with the saved shape and dtype stays as it is; what is made is empty, to be filled by a
    restore. No step is taken. State that was not saved is dropped, so that "no state yet" comes back as no state yet.

    Args:
        index: Number of the optimizer in the run.
        optimizer: The live one.
        names: Of the model's parameters, by `id`.
        manifest: What was saved.
        values: Parameter name to key to value: what was saved beside tensors.
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
