"""A data loader whose position in the epoch is saved: a resumed run gets exactly the batches that would have come.

    loader = ResumableLoader(dataset, batch_size=32, shuffle=True, seed=7, num_workers=4)

It takes the place of torch's `DataLoader` for a dataset with a length. Lightning saves and restores its state.
Everything about a batch follows from the seed, the epoch and the batch's number: which samples it has, and what the
generators of torch, Python and numpy draw while it is made (augmentation, masking in `collate_fn`). So it does not
depend on the number of workers, on what they had fetched ahead, or on when the run was stopped. Making a batch draws
nothing from the generators of the training.

Does it communicate? No: every rank computes the same order and takes its part.
"""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from .base.errors import UserError

__all__ = ["ResumableLoader"]

_ORDER, _CONTENT = 0, 1  # so that the order and the samples draw different numbers from one seed
_PASSED_ON = (
    *("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context"),
    "worker_init_fn",
)
_Key = tuple[int, int, tuple[int, ...]]
"""An epoch, the number of a batch in it, and the indices of the batch's samples."""


class ResumableLoader:
    """Batches of a dataset, in an order that depends on the seed and the epoch, from any position on.

    Each rank of a process group gets its part of the same order. So that all have as many batches, the order is filled
    up by samples from its beginning, as torch's `DistributedSampler` does; with `drop_last` the last samples of the
    order, which do not fill a batch on every rank, are left out of the epoch.

    An iteration after the first begins the next epoch, and one after `load_state_dict` continues where the state was
    taken. Not thread-safe.

    Args:
        dataset: Has `__len__` and `__getitem__`, or `__getitems__` for the indices of a batch.
        batch_size: Samples of a batch on one rank.
        shuffle: Whether each epoch has an order of its own; otherwise it is that of the dataset.
        seed: For the order and for all that is random in samples.
        drop_last: Whether batches that are not full are left out.
        collate_fn: Makes a batch of a list of samples; torch's default by default.
        num_replicas: Number of ranks with different data; by default that of the process group, 1 without one.
        rank: This rank's number among them, likewise. Under tensor parallelism give both, by the data axis of the mesh.
        options: Further arguments of torch's `DataLoader`: `num_workers`, `pin_memory`, `persistent_workers` ...

    Attributes:
        dataset, batch_size, drop_last, num_workers: As given.

    Raises:
        UserError: The dataset has no length, or a number has no meaning.
        TypeError: An option decides the order, which is decided here.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        **options: Any,
    ) -> None:
        if not (hasattr(dataset, "__len__") and (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"))):
            raise UserError(
                f"a {type(dataset).__name__} has no length and no samples by number, so its position cannot be "
                "continued: give a dataset with __len__ and __getitem__, or use torchdata's StatefulDataLoader"
            )
        if batch_size < 1 or seed < 0:
            raise UserError(f"batch_size is {batch_size} and seed {seed}: give at least 1, and at least 0")
        for name in options.keys() - set(_PASSED_ON):
            raise TypeError(
                f"ResumableLoader has no argument {name!r}: the order follows from shuffle and seed; for a sampler of "
                "your own use torchdata's StatefulDataLoader"
            )
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_workers: int = options.get("num_workers", 0)
        self._shuffle, self._seed = shuffle, seed
        self._given_ranks = num_replicas, rank
        self._epoch = self._num_batches = 0
        self._continues = True
        self._iteration = 0
        self._keys: list[_Key] = []
        # A generator of its own: torch draws the seed of workers from it, and not from that of the training.
        self._loader: DataLoader[Any] = DataLoader(
            _Batches(dataset, seed, collate_fn or default_collate),
            batch_size=None,
            sampler=_Keys(self),
            collate_fn=_as_it_is,
            generator=torch.Generator(),
            **options,
        )

    # ---- the order

    def _read_ranks(self) -> tuple[int, int]:
        """Returns the number of ranks and this one's."""
        num, rank = self._given_ranks
        is_grouped = dist.is_available() and dist.is_initialized()
        num = num if num is not None else dist.get_world_size() if is_grouped else 1
        rank = rank if rank is not None else dist.get_rank() if is_grouped else 0
        if not 0 <= rank < num:
            raise UserError(f"rank is {rank} and num_replicas {num}: give both, the rank from 0 to {num - 1}")
        return num, rank

    def __len__(self) -> int:
        """Returns the number of batches in an epoch, on each rank."""
        num_replicas, _ = self._read_ranks()
        num_samples = len(self.dataset)
        if self.drop_last:
            return num_samples // (self.batch_size * num_replicas)
        return -(-num_samples // (self.batch_size * num_replicas))

    def _plan(self, epoch: int, first: int) -> list[_Key]:
        """Returns the batches of this rank from number `first` on."""
        num_replicas, rank = self._read_ranks()
        num_samples = len(self.dataset)
        order: Sequence[int] = range(num_samples)
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch, _ORDER)).permutation(num_samples).tolist()
        num_filled = -(-num_samples // num_replicas) * num_replicas
        own = [order[position % num_samples] for position in range(rank, num_filled, num_replicas)]
        size = self.batch_size
        return [(epoch, number, tuple(own[number * size : (number + 1) * size])) for number in range(first, len(self))]

    # ---- iteration and state

    def __iter__(self) -> Iterator[Any]:
        """Begins the next epoch, or continues after `load_state_dict`."""
        if not self._continues:
            self._epoch, self._num_batches = self._epoch + 1, 0
        self._continues = False
        self._iteration += 1
        return self._iterate(self._iteration, self._epoch, self._num_batches)

    def _iterate(self, iteration: int, epoch: int, first: int) -> Iterator[Any]:
        self._keys = self._plan(epoch, first)
        for number, batch in enumerate(self._loader, start=first):
            if iteration == self._iteration:  # not an iterator that was left for another one
                self._num_batches = number + 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batch that was given out last, and what the order depends on."""
        return {"epoch": self._epoch, "batch": self._num_batches, **self._describe()}

    def _describe(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self.drop_last,
            "num_samples": len(self.dataset),
            "global_batch_size": self.batch_size * self._read_ranks()[0],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next iteration continue where the state was taken.

        A state of another order is not taken, with a warning: `AsyncProcessCheckpoint` then refuses to continue.
        """
        for name, live in self._describe().items():
            saved = state_dict.get(name)
            if saved != live:
                warnings.warn(
                    f"the position of ResumableLoader is not restored: {name} is {live!r}, but {saved!r} was saved",
                    UserWarning,
                    stacklevel=2,
                )
                return
        self._epoch, self._num_batches = state_dict["epoch"], state_dict["batch"]
        self._continues = True


class _Keys:
    """The sampler of torch's loader: what the next iteration asks of the dataset."""

    def __init__(self, owner: ResumableLoader) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._owner._keys)

    def __len__(self) -> int:
        return len(self._owner)


class _Batches(Dataset[Any]):
    """The dataset of torch's loader: a whole batch for a key, made with generators of its own."""

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._seed, self._collate = dataset, seed, collate

    def __getitem__(self, key: _Key) -> Any:
        epoch, number, indices = key
        if get_worker_info() is not None:  # a worker has no other use for its generators
            _seed_generators((self._seed, epoch, _CONTENT, number, *indices[:1]))
            return self._make(indices)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()
        _seed_generators((self._seed, epoch, _CONTENT, number, *indices[:1]))
        try:
            return self._make(indices)
        finally:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])

    def _make(self, indices: tuple[int, ...]) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(list(indices)))
        return self._collate([self._dataset[index] for index in indices])


def _seed_generators(entropy: tuple[int, ...]) -> None:
    words = np.random.SeedSequence(entropy).generate_state(3, np.uint64)
    # The generator of the CPU alone: `torch.manual_seed` would reach for the accelerator, whose generator trains.
    torch.default_generator.manual_seed(int(words[0]) >> 1)
    random.seed(int(words[1]))
    np.random.seed(int(words[2]) & 0xFFFFFFFF)


def _as_it_is(batch: Any) -> Any:
    return batch
