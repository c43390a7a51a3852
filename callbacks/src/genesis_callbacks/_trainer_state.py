"""Reads the state of a Lightning Trainer through its public getters, for a save and for a restore."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from operator import is_
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from ._compat import hparams_name, loader_generators, read_fetch_generators, read_loader_states
from ._data_position import write_states
from ._state_dicts import LiveStateDict, read_loop_state
from .base.checkpoint_errors import CheckpointError
from .base.local_shards import LocalShard, local_shards
from .checkpoint.collect import (
    SWAPPED_PREFIX,
    NamedModel,
    canonical_name,
    name_parameters,
)
from .checkpoint.device import read_rng_state
from .checkpoint.job import ChangedPartsError
from .checkpoint.known_tensors import KnownTensors
from .checkpoint.save_target import Snapshot
from .checkpoint.state import RankRole, record_role
from .checkpoint.tagged_json import encode_tagged

_LIGHTNING_VERSION = version("lightning")  # it reads a file each time


def read_rank_role(strategy: Any) -> RankRole:
    """Returns this rank's role, as the strategy gives it. No communication.

    The data rank is the `rank` of Lightning's `distributed_sampler_kwargs`, by which samplers and data modules choose
    their share of the data. Under DDP and FSDP2 it is the global rank; under tensor parallelism a whole group has the
    same one. The stage is the strategy's attribute `pipeline_stage`, an int. A strategy that cuts the model into stages
    has this attribute; without it the stage is 0.

    Args:
        strategy: The Trainer's, once it has set up its environment.

    Raises:
        CheckpointError: One of them is not a whole number from 0.
    """
    sampler = getattr(strategy, "distributed_sampler_kwargs", None)
    data_rank = getattr(strategy, "global_rank", 0) if sampler is None else sampler["rank"]
    stage = getattr(strategy, "pipeline_stage", 0)
    for name, value in (("data rank", data_rank), ("pipeline_stage", stage)):
        # The role becomes the key of the rank's section in the checkpoint. `type`, because a bool is an int, too.
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"the {name} of {type(strategy).__name__} is {value!r}: it must be a whole number from 0"
            )
    return RankRole(data_rank, stage)


@runtime_checkable
class HasRankState(Protocol):
    """A data module whose `state_dict` differs between ranks, for example by the position in the rank's data.

    A restore passes the states of all data ranks through `combine_rank_states` and gives the result to
    `load_state_dict`, on every rank and at any world size. Other data modules get the state that a rank with their data
    rank saved, or rank 0's.
    """

    def combine_rank_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns one state for `load_state_dict` from one for each data rank that saved, in their order."""


class SnapshotCache:
    """Values that the snapshots of one fit share, because training waits for each snapshot.

    It holds tensors: drop it after the fit.

    Attributes:
        state_dict: Reads the module's state dict.
        tensors: Names and blocks of the tensors.
        idle_loops: State of the loops that do not run in a fit; None until it is read.
        role: The entry for this rank's role in its section; None until the strategy is asked for it.
    """

    def __init__(self) -> None:
        self.state_dict = LiveStateDict()
        self.tensors = KnownTensors(is_late=True)
        self.idle_loops: dict[str, dict[str, Any]] | None = None
        self.role: dict[str, Any] | None = None


def read_counters(trainer: Trainer) -> dict[str, int]:
    """Returns the clocks of all callbacks with a method `checkpoint_counters`, and `step`. No communication.

    The method returns clock name to its value, the same on every rank; `step` is Lightning's global step.
    """
    counters: dict[str, int] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it
        read = getattr(callback, "checkpoint_counters", None)
        if read is not None:
            counters.update(read())
    return {**counters, "step": trainer.global_step}


def _copy_dicts(state: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy_dicts(value) if type(value) is dict else value for key, value in state.items()}


def _read_loops(trainer: Trainer, cache: SnapshotCache) -> dict[str, Any]:
    # Lightning turns every number of a loop's progress into a dict by dataclasses.asdict, which is slow.
    if cache.idle_loops is None:
        cache.idle_loops = {
            "validate_loop": trainer.validate_loop.state_dict(),
            "test_loop": trainer.test_loop.state_dict(),
            "predict_loop": trainer.predict_loop.state_dict(),
        }
    return {"fit_loop": read_loop_state(trainer.fit_loop), **_copy_dicts(cache.idle_loops)}


def read_trainer_state(
    trainer: Trainer, module: LightningModule, live: Mapping[str, Any], cache: SnapshotCache
) -> dict[str, Any]:
    """Returns the dict that Lightning would save, with live tensors in `state_dict` and no optimizer states.

    Callbacks and module see this dict in their `on_save_checkpoint` hooks, as they would see Lightning's. It is not
    made by `dump_checkpoint`, which gathers and copies tensors. No communication.

    Args:
        trainer: The run's.
        module: The run's.
        live: The module's state dict, made with `keep_vars=True`; it stays as it is.
        cache: Serves one fit, from snapshot to snapshot.
    """
    state: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": _LIGHTNING_VERSION,
        "state_dict": dict(live),
        "loops": _read_loops(trainer, cache),
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }
    # The loop's own state has the loaders one batch ahead where Lightning prefetches.
    write_states(state["loops"]["fit_loop"], read_loader_states(trainer))
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it
    for callback in callbacks:
        callback_state = callback.state_dict()
        if callback_state:
            state["callbacks"][callback.state_key] = callback_state
    precision = trainer.precision_plugin
    precision_state = precision.state_dict()
    if precision_state:
        state[type(precision).__qualname__] = precision_state
    precision.on_save_checkpoint(state)
    datamodule = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it
    for owner in (module, datamodule):
        if owner is not None and owner.hparams:
            if hparams_name(owner) is not None:
                state[owner.CHECKPOINT_HYPER_PARAMS_NAME] = hparams_name(owner)
            state[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
    if datamodule is not None:
        datamodule_state = datamodule.state_dict()
        if datamodule_state:
            state[type(datamodule).__qualname__] = datamodule_state
    # Lightning's order: callbacks first, the module last, so that the module may overrule them.
    for callback in callbacks:
        callback.on_save_checkpoint(trainer, module, state)
    module.on_save_checkpoint(state)
    return state


@dataclass(frozen=True)
class _Swapped:
    """Values that `on_save_checkpoint` hooks put in the place of the model's own, as weight averaging does.

    Attributes:
        values: Key of the state dict to the replacing value.
        names: The name under which each tensor among the values is stored, by `id`.
        tensors: The same tensors by that name, and whether each replaces a buffer.
    """

    values: dict[str, Any] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    tensors: dict[str, tuple[Tensor, bool]] = field(default_factory=dict)

    def parts(self) -> list[LocalShard]:
        """Returns what this rank holds of these tensors: the replicas of all ranks are stored once."""
        return [
            part
            for name, (tensor, is_buffer) in self.tensors.items()
            for part in local_shards(name, tensor, "buffer" if is_buffer else "parameter")
        ]


def _find_swapped(live: Mapping[str, Any], given: Mapping[str, Any], model: NamedModel) -> _Swapped:
    """Returns the values that hooks replaced, from the state dict before and after the hooks.

    Args:
        live: The state dict before the hooks.
        given: The state dict after the hooks.
        model: The live model's tensors by name.
    """
    # By identity: an average has equal values at the first step, and is another tensor all the same.
    swapped = _Swapped({key: value for key, value in given.items() if key in live and value is not live[key]})
    for key, value in swapped.values.items():
        if isinstance(value, Tensor) and key in model.names:
            name = SWAPPED_PREFIX + model.names[key]
            known, _ = swapped.tensors.setdefault(name, (value, not isinstance(live[key], nn.Parameter)))
            # Tied tensors share their elements, and then one name.
            if known is value or (known.data_ptr() == value.data_ptr() and known.shape == value.shape):
                swapped.names[id(value)] = name
    return swapped


def _name_parameters(module: LightningModule, model: NamedModel, optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """Returns the canonical names of at least the optimizers' parameters, by `id`: walking the module costs more."""
    names = {id(tensor): name for name, tensor in model.tensors.items()}
    updated = [map(id, group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
    return names if names.keys() >= set(chain.from_iterable(updated)) else name_parameters(module)


def take_snapshot(
    trainer: Trainer,
    module: LightningModule,
    rank: int,
    cache: SnapshotCache | None = None,
    *,
    has_optimizer: bool = True,
    rng_state: Any = None,
) -> Snapshot:
    """Returns what this rank gives to a save: live tensors by canonical name, and everything else as plain JSON.

    No communication, and no step of an optimizer.

    Args:
        trainer: The run's.
        module: The run's.
        rank: This rank.
        cache: Serves one fit, from snapshot to snapshot. With a cache, a part of the work is left to `Snapshot.whole`.
        has_optimizer: Whether the optimizers' state is saved.
        rng_state: Of an earlier moment, as `read_rng_state` gave it; None: of now.

    Raises:
        UnsupportedStateError: Something cannot be saved without pickle; the message names its key.
    """
    is_late = cache is not None
    cache = cache or SnapshotCache()
    if cache.role is None:
        cache.role = record_role(read_rank_role(trainer.strategy))
    # keep_vars, because names are found by identity, and a detached copy would be another object. The state dict is
    # taken before the hooks: WeightAveraging puts its average there, and the run has to continue with the live model.
    live = cache.state_dict.read(module)
    state = read_trainer_state(trainer, module, live, cache)
    given = state.pop("state_dict")
    if len(given) == len(live) and all(map(is_, given, live)) and all(map(is_, given.values(), live.values())):
        known, swapped = cache.tensors.find_model(live), _Swapped()
    else:  # a key that a hook took away is not saved, one that it added is
        known = cache.tensors.find_model({key: live.get(key, value) for key, value in given.items()})
        swapped = _find_swapped(live, given, known.model)
    model = known.model
    del state["optimizer_states"]
    saved_optimizers = trainer.optimizers if has_optimizer else []
    optimizers = [
        cache.tensors.find_optimizer(index, optimizer, lambda: _name_parameters(module, model, saved_optimizers))
        for index, optimizer in enumerate(saved_optimizers)
    ]
    # Copies that nobody else has: they are encoded later, while training continues.
    own: dict[str, Any] = {"rng": read_rng_state() if rng_state is None else rng_state}
    content = {
        "trainer": state,
        "model_extras": model.extras,
        "optimizers": [optimizer.section for optimizer in optimizers],
        "rng": None,
        **cache.role,
    }
    if len(model.names) > len(model.tensors):  # readers without the module need the keys of tied tensors
        content["model_keys"] = {canonical_name(key): name for key, name in model.names.items()}
    own_generators = loader_generators(trainer)
    if own_generators:
        own["loader_generators"] = [generator.get_state() for generator in own_generators]
    fetch_generators = read_fetch_generators(trainer)
    if fetch_generators is not None:
        own["rng_of_fetch"] = fetch_generators
    stored = known.stored
    if swapped.values:
        content["swapped"] = swapped.values
        stored = stored | swapped.names
    path = f"state.{rank}"
    section: Any
    section, tensors = encode_tagged(content, path, stored)
    shared = cache.tensors.share(known, optimizers, swapped.parts())
    parts = [*shared.parts, *_list_parts(tensors)]

    def finish() -> Snapshot:
        if cache.state_dict.has_missed_change():
            raise ChangedPartsError("a module has other parameters or buffers than this rank had found")
        if cache.tensors.has_missed_change():
            raise ChangedPartsError("an optimizer has other tensors in its state than this rank had found")
        own_section: Any
        own_section, own_tensors = encode_tagged(own, path)
        return replace(snapshot, section=section | own_section, parts=[*parts, *_list_parts(own_tensors)], finish=None)

    step, counters = trainer.global_step, read_counters(trainer)
    snapshot = Snapshot(step, counters, parts, section, has_optimizer, shared, finish)
    return snapshot if is_late else snapshot.whole()


def _list_parts(tensors: Mapping[str, Tensor]) -> list[LocalShard]:
    return [part for name, tensor in tensors.items() for part in local_shards(name, tensor, "state")]
