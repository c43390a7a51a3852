"""The workings of torch and Lightning on which this package relies, in one place, with a test for each.

What only the reading of state dicts needs is in `_state_dicts`, likewise with tests. `tests/private_names.py` of the
repository lists every private name of other packages that any module uses.
This module does not import Lightning, so that the engine may use it: trainers and strategies are arguments.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from .base.chunk_table import ChunkTable
from .base.manifest import TensorRecord
from .base.pickled_rows import RowPickler, as_dict, as_list, count, encode, fill, refer

Offsets = tuple[int, ...]
LoadCheckpoint = Callable[..., dict[str, Any]]

MemoryLayout = tuple[int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]

ChooseCheckpoint = Callable[[Any, Any, Callable[[Any], Any]], Any]
_PROFILES = ("start", "stop")
_LISTENERS = "_action_listeners"
_NameListener = Callable[[str], None]
_VALIDATES = ("run", "increment_progress_to_evaluation_end")


def memory_layout(tensor: Tensor) -> MemoryLayout:
    """Returns address, shape, strides, type and lazy conjugation and negation of a tensor that is not a DTensor.

    The result changes when the tensor gets other data, and also when it is transposed in place.
    """
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns the tensor that holds the elements of this rank: the tensor itself, or the shard of a DTensor."""
    # `_local_tensor` and not `to_local()`, which makes a new view with an autograd node for every call.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class LayoutGuard:
    """The `memory_layout` of many plain tensors at one time, for a quick comparison at a later time.

    It keeps no tensor alive. Any thread may use it, under any mode of autograd.

    Args:
        tensors: Different tensors that hold elements.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._layouts = list(map(memory_layout, tensors))
        self._addresses = [layout[0] for layout in self._layouts]
        self._guards = self._guard(tensors)

    @staticmethod
    def _guard(tensors: Sequence[Tensor]) -> TensorGuards:
        # It also compares the mode of autograd: so that is always the same.
        with torch.inference_mode(mode=False), torch.enable_grad():
            return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def has_addresses(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether the elements are where they were: a fourth of the time of the whole comparison."""
        return list(map(Tensor.data_ptr, tensors)) == self._addresses

    def has_forms(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether the layouts are the same, whatever the addresses."""
        # One call into C++ compares class, dtype, device, sizes, strides and dispatch keys (lazy conjugation and
        # negation among them) of all tensors; also whether they require a gradient, which belongs to no layout.
        with torch.inference_mode(mode=False), torch.enable_grad():
            if self._guards.check(*tensors):
                return True
        if [memory_layout(tensor)[1:] for tensor in tensors] != [layout[1:] for layout in self._layouts]:
            return False
        self._guards = self._guard(tensors)
        return True

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether the layouts are the same."""
        return self.has_addresses(tensors) and self.has_forms(tensors)


def write_counts(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the number of in-place writes to the data of each tensor, through any of its views.

    The count is 0 where torch does not count. Writes through `.data` are not counted.
    """
    return plain_write_counts([local_tensor(tensor) for tensor in tensors])


def plain_write_counts(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the `write_counts` of tensors of which none is a DTensor."""
    # The fast way first: this runs for every tensor of a snapshot while training waits.
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # tensors made under inference mode have no version
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def offset_in_file(tensor: Tensor) -> int:
    """Returns where the storage of a tensor that `torch.load` put on the meta device begins in its file, in bytes."""
    # torch's notes on serialization tell of this attribute.
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset


def build_dcp_metadata(tensors: Mapping[str, TensorRecord], checkpoint_id: str) -> bytes:
    """Returns the bytes of DCP's `.metadata`, so that stock `dcp.load` reads the directory.

    Args:
        tensors: The records of the checkpoint's own tensors.
        checkpoint_id: A name for people.
    """
    # A thousand ranks write half a million chunks: nothing here is done for each.
    rows = RowPickler()
    described, stored = [], []
    for name, tensor in tensors.items():
        table, fqn = ChunkTable.of(tensor.chunks), rows.share(name)
        files, byte_offsets, num_bytes = table.rows.T[:3]
        offsets = rows.call(torch.Size, table.offsets)
        chunks = fill(
            rows.record(ChunkStorageMetadata, offsets=offsets, sizes=rows.call(torch.Size, table.sizes)), len(table)
        )
        described_tensor = rows.record(
            TensorStorageMetadata,
            properties=[encode(TensorProperties(tensor.torch_dtype))],
            size=[encode(torch.Size(tensor.shape))],
            chunks=[as_list(chunks)],
        )
        described.append(fill([fqn, *described_tensor], 1))
        index = rows.record(MetadataIndex, fqn=[fqn], index=count(np.arange(len(table))), offset=offsets)
        paths = refer(rows.share_all(table.files)[files])
        place = rows.record(_StorageInfo, relative_path=paths, offset=count(byte_offsets), length=count(num_bytes))
        stored.append(fill([*index, *place], len(table)))
    parts = {name: (head, rest) if rest else (head,) for name in tensors for head, _, rest in [name.partition(".")]}
    return rows.finish(
        rows.record(
            Metadata,
            state_dict_metadata=[as_dict(b"".join(described))],
            planner_data=[encode(parts)],
            storage_data=[as_dict(b"".join(stored))],
            storage_meta=[encode(StorageMeta(checkpoint_id=checkpoint_id))],
            version=[encode(CURRENT_DCP_VERSION)],
        )
    )


def route_ckpt_path(connector: Any, choose: ChooseCheckpoint) -> None:
    """Makes every Trainer look for its `ckpt_path` by `choose(trainer, ckpt_path, original)`, by a method of the class.

    Lightning resolves "last" and "best" before the first hook, and knows the files of `ModelCheckpoint` alone. No part
    of a Trainer is known to a callback so early.

    Args:
        connector: The class of a Trainer's checkpoint connector.
        choose: Its last argument is Lightning's own way from a `ckpt_path` to the path to load, or None.
    """
    parse = connector._parse_ckpt_path

    @functools.wraps(parse)
    def chosen(self: Any, state_fn: Any, ckpt_path: Any, **keywords: Any) -> Any:
        return choose(self.trainer, ckpt_path, lambda path: parse(self, state_fn, path, **keywords))

    connector._parse_ckpt_path = chosen


class NothingToRestore(dict[str, Any]):
    """A Lightning checkpoint dict that is false, so that the Trainer skips every restoring step."""

    def __bool__(self) -> bool:
        return False


def route_load_checkpoint(strategy: Any, load: Callable[[LoadCheckpoint, str | Path], dict[str, Any]]) -> None:
    """Makes the Trainer's restore go through `load(original, path)`, by an attribute on the instance."""
    original: LoadCheckpoint = strategy.load_checkpoint

    def load_checkpoint(checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return load(lambda path: original(path, weights_only=weights_only), checkpoint_path)

    strategy.load_checkpoint = load_checkpoint


def hparams_name(owner: Any) -> str | None:
    """Returns the argument that held a module's hyperparameters ("kwargs": several), as Lightning names it."""
    name: str | None = getattr(owner, "_hparams_name", None)
    return name


def finish_before_hooks(trainer: Any, finish: Callable[[], None]) -> None:
    """Makes `finish()` run when training has ended, before any `on_train_end` hook, by an attribute on the fit's loop.

    Averaging callbacks give the model other weights in that hook. `Checkpoint` callbacks run last, so that a final save
    in this package's own `on_train_end` would store the average as the live model.
    """
    loop = trainer.fit_loop
    original: Callable[[], None] = loop.on_run_end

    def on_run_end() -> None:
        finish()
        original()

    loop.on_run_end = on_run_end


class _WatchedLoader:
    """Replaces the loader of a data fetcher, and keeps the state from before the newest fetch.

    Args:
        loader: The fetcher's.
        read_generators: Returns the state of the process's random generators.

    Attributes:
        states: The states of the loaders; None before the first fetch.
        generators: The state of the random generators; None before the first fetch.
    """

    def __init__(self, loader: Any, read_generators: Callable[[], dict[str, Any]]) -> None:
        self._loader = loader
        self._read_generators = read_generators
        self.states: list[dict[str, Any]] | None = None
        self.generators: dict[str, Any] | None = None

    def __iter__(self) -> "_WatchedLoader":
        iter(self._loader)
        return self

    def __next__(self) -> Any:
        # Without a length, Lightning fetches one batch ahead to know which batch is the last. A save between the two
        # would record a batch as consumed that was never trained. A deep copy, because loaders reuse their dicts.
        self.states = copy.deepcopy(self._loader._state_dicts())
        self.generators = self._read_generators()
        return next(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def reset(self) -> None:
        self._loader.reset()


def watch_loaders(trainer: Any, read_generators: Callable[[], dict[str, Any]]) -> None:
    """Makes `read_loader_states` exact for loaders without a length, of which Lightning fetches a batch ahead.

    It changes nothing for other loaders, and lasts as long as the fit's data fetcher.

    Args:
        trainer: The fit's.
        read_generators: Returns the state of the process's random generators, from which a fetch may draw.
    """
    fetcher = trainer.fit_loop._data_fetcher
    loader = fetcher._combined_loader
    is_ahead = fetcher.length is None and getattr(fetcher, "prefetch_batches", 0) > 0
    if is_ahead and not isinstance(loader, _WatchedLoader) and loader._state_dicts():
        fetcher._combined_loader = fetcher.iterator = _WatchedLoader(loader, read_generators)


def read_loader_states(trainer: Any) -> list[dict[str, Any]]:
    """Returns the state of each loader of the fit that has one, after the last batch that training received."""
    fetcher, loader = trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader
    if loader is None:
        return []
    watched = getattr(fetcher, "_combined_loader", None)
    if isinstance(watched, _WatchedLoader) and watched.states is not None:
        return watched.states
    states: list[dict[str, Any]] = loader._state_dicts()
    return states


def read_fetch_generators(trainer: Any) -> dict[str, Any] | None:
    """Returns the generators from before the batch that was fetched ahead; None if none was, or without a watch."""
    watched = getattr(trainer.fit_loop._data_fetcher, "_combined_loader", None)
    return watched.generators if isinstance(watched, _WatchedLoader) else None


def _samplers(loader: Any) -> list[Any]:
    return [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]


def list_loaders(trainer: Any) -> list[Any]:
    """Returns the fit's loaders."""
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader.flattened)


def loader_generators(trainer: Any) -> list[torch.Generator]:
    """Returns the random generators that the fit's loaders and their samplers own."""
    owners = [owner for one in list_loaders(trainer) for owner in (one, *_samplers(one))]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def load_loader_states(trainer: Any, states: Sequence[dict[str, Any]], epoch: int) -> None:
    """Gives the fit's loaders their states, within `epoch`, and restarts their iterators from there.

    Lightning does so before samplers know the epoch, and not at all if the loaders were built before the restore.

    Raises:
        RuntimeError: The number of loaders with a state differs from the number of states.
    """
    loop = trainer.fit_loop
    for loader in loop._combined_loader.flattened:
        for sampler in _samplers(loader):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)
    loop._combined_loader._load_state_dicts(list(states))
    loop._combined_loader_states_to_load = []  # else Lightning would load them once more, over these
    iter(loop._data_fetcher)  # an iterator that exists already ignores the new states


def begin_next_epoch(trainer: Any) -> None:
    """Makes a fit that resumes after an epoch's last batch begin the next epoch normally.

    To be called in `on_train_start`. Lightning would treat that epoch as unfinished: it would keep the loader's
    iterator, skip `on_train_epoch_start`, and count one epoch too few from then on.
    """
    loop = trainer.fit_loop
    epoch_loop = loop.epoch_loop
    if epoch_loop.restarted_on_train_batch_end:  # the save came before this batch was counted as completed
        epoch_loop.batch_progress.increment_completed()
        epoch_loop._batches_that_stepped += 1
    optimizations = (epoch_loop.automatic_optimization, epoch_loop.manual_optimization)
    for restarted in (epoch_loop.val_loop, *optimizations, epoch_loop, loop):
        restarted.on_iteration_done()


def read_ddp_options(strategy: Any) -> dict[str, Any]:
    """Returns the arguments that a DDPStrategy passes to DistributedDataParallel."""
    return dict(strategy._ddp_kwargs)


def compute_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the 2-norm of each tensor, by few kernels for many tensors, in float32 for 16-bit tensors."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(index)
    norms: dict[int, Tensor] = {}
    for (_, dtype), indices in by_kind.items():
        wide = torch.float32 if dtype.itemsize < torch.float32.itemsize else None
        found = torch._foreach_norm([tensors[index] for index in indices], 2, dtype=wide)
        norms |= dict(zip(indices, found, strict=True))
    return [norms[index] for index in range(len(tensors))]


def dump_memory_snapshot(device_module: Any, path: Path) -> bool:
    """Writes the allocator's blocks for torch's memory viewer; returns False for a device that cannot do it."""
    dump = getattr(getattr(device_module, "memory", None), "_dump_snapshot", None)
    if dump is None:
        return False
    dump(str(path))
    return True


def log_step_values(pl_module: Any, values: Mapping[str, Tensor]) -> None:
    """Logs tensors of one step as `log_dict(values, on_step=True, on_epoch=False, batch_size=1)` does, and faster.

    Lightning checks and moves what it keeps for a key at each call, which takes longer than all else in a log line. The
    first call for a key takes Lightning's way, later ones pass only the value on.
    """
    results, hook = pl_module.trainer._results, pl_module._current_fx_name
    new: dict[str, Tensor] = {}
    for name, value in values.items():
        key = f"{hook}.{name}"
        if results is not None and key in results:
            results.update_metrics(key, value, 1)
        else:
            new[name] = value
    if new:
        pl_module.log_dict(new, on_step=True, on_epoch=False, batch_size=1)


def listen_to_actions(trainer: Any, begin: _NameListener, end: _NameListener) -> None:
    """Makes `begin(name)` and `end(name)` run around each action of the Trainer's profiler.

    By attributes on the profiler, whatever its class is, so that it works as before. Lightning names every hook that it
    calls, each fetch of a batch and each save. Several may listen.
    """
    profiler = trainer.profiler
    listeners: list[tuple[_NameListener, _NameListener]] = vars(profiler).setdefault(_LISTENERS, [])
    listeners.append((begin, end))
    if len(listeners) > 1:
        return
    starts, stops = profiler.start, profiler.stop

    def start(action_name: str) -> None:
        starts(action_name)
        for one, _ in tuple(listeners):
            one(action_name)

    def stop(action_name: str) -> None:
        for _, one in tuple(reversed(listeners)):
            one(action_name)
        stops(action_name)

    profiler.start, profiler.stop = start, stop


def ignore_actions(trainer: Any, begin: _NameListener) -> None:
    """Ends the listening of `begin`, and gives the profiler its own methods back after the last listener."""
    own = vars(trainer.profiler)
    listeners = own.get(_LISTENERS, [])
    listeners[:] = [listener for listener in listeners if listener[0] != begin]
    if not listeners:
        for name in (*_PROFILES, _LISTENERS):
            own.pop(name, None)


def listen_to_backward(strategy: Any, within: Callable[[], AbstractContextManager[None]]) -> None:
    """Makes every backward of a strategy run within `within()`, by an attribute on the instance."""
    original = strategy.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        with within():
            return original(*args, **kwargs)

    strategy.backward = backward


def ignore_backward(strategy: Any) -> None:
    """Gives the strategy its own `backward` back; does nothing if nobody listens."""
    vars(strategy).pop("backward", None)


def shield_validation(
    trainer: Any,
    shield: Callable[[], AbstractContextManager[None]],
    *,
    validates_restored: bool = True,
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Makes a fit's validation run within `shield()`, by attributes on its loop.

    Lightning validates whenever a fit stops early. Who stops it by a signal waits for the save alone (`is_stopped`).

    A run that resumes from a save before a validation validates first. Lightning would only count that validation, by
    `increment_progress_to_evaluation_end`: its metrics, its mark of the best and EarlyStopping's view would be lost.
    For a fork (`validates_restored` false) they belong to the run that it leaves.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    validate = _within(loop.run, shield)
    loop.run = lambda: None if is_stopped() else validate()
    skip = _within(loop.increment_progress_to_evaluation_end, shield)  # it draws from the generators, too
    loop.increment_progress_to_evaluation_end = (lambda: _validate_restored(trainer)) if validates_restored else skip


def _validate_restored(trainer: Any) -> None:
    epoch_loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    # As Lightning validates after a batch, before it counts the batch for the loggers.
    is_first, epoch_loop.val_loop.restarting = connector._first_loop_iter, False
    epoch_loop._batches_that_stepped -= 1
    trainer.validating = True
    epoch_loop.val_loop.run()
    trainer.training = True
    epoch_loop._batches_that_stepped += 1
    connector._first_loop_iter = is_first


def _within(function: Callable[[], Any], shield: Callable[[], AbstractContextManager[None]]) -> Callable[[], Any]:
    def shielded() -> Any:
        with shield():
            return function()

    return shielded


def give_methods_back(trainer: Any) -> None:
    """Takes away what `route_load_checkpoint`, `finish_before_hooks` and `shield_validation` have put on a Trainer."""
    # Each is an attribute of an instance, which hides the method of the class.
    loop = trainer.fit_loop
    val_loop = loop.epoch_loop.val_loop
    replaced = ((trainer.strategy, "load_checkpoint"), (loop, "on_run_end"), *((val_loop, name) for name in _VALIDATES))
    for owner, name in replaced:
        vars(owner).pop(name, None)
