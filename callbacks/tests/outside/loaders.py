"""Data of outside projects: a small set with augmentation, and a loader whose position can be saved."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from genesis_callbacks import ResumableLoader

NUM_SAMPLES = 16
BATCH_SIZE = 4


class Augmented(Dataset[Tensor]):
    """Points with noise that torch's global generator draws whenever one is read, as image augmentation does."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        point = torch.tensor([float(index), index % 3 - 1.0, 0.1 * index])
        return point / NUM_SAMPLES + 0.1 * torch.randn(3)


class Stream(IterableDataset[Tensor]):
    """The same points as a stream without a length, which knows where it stands."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        points = Augmented()
        while self.position < NUM_SAMPLES:
            self.position += 1
            yield points[self.position - 1]
        self.position = 0


class CountingLoader(DataLoader[Tensor]):
    """A loader that saves how many batches of the epoch it gave, and its generator as of the epoch's beginning.

    As torchdata's StatefulDataLoader does, it goes on exactly where it was: at an epoch's last step, at the end.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_given = 0
        self.start = 0
        self.generator_at_begin = self._read_generator()

    def _read_generator(self) -> Tensor | None:
        return None if self.generator is None else self.generator.get_state()

    def __iter__(self) -> Iterator[Tensor]:
        self.num_given, self.start = self.start, 0
        self.generator_at_begin = self._read_generator()
        batches = iter(self.batch_sampler)
        for _ in range(self.num_given):
            next(batches)
        return self._give(batches)

    def _give(self, batches: Iterator[list[int]]) -> Iterator[Tensor]:
        for indices in batches:
            self.num_given += 1
            yield torch.stack([self.dataset[index] for index in indices])

    def state_dict(self) -> dict[str, Any]:
        return {"num_given": self.num_given, "generator": self.generator_at_begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["num_given"]
        if self.generator is not None:
            self.generator.set_state(state["generator"])


class StreamLoader:
    """Batches of a stream, without a length, whose position can be saved."""

    def __init__(self) -> None:
        self.stream = Stream()

    def __iter__(self) -> Iterator[Tensor]:
        points = iter(self.stream)
        batches = iter(lambda: list(itertools.islice(points, BATCH_SIZE)), [])
        return map(torch.stack, batches)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.stream.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.stream.position = state["position"]


def build_plain_loader(num_workers: int = 0) -> DataLoader[Tensor]:
    """Returns a shuffling loader as everybody writes it."""
    return DataLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, num_workers=num_workers)


def build_own_generator_loader() -> DataLoader[Tensor]:
    """Returns a plain loader with a generator of its own, as torch's notes on reproducibility advise."""
    generator = torch.Generator().manual_seed(5)
    return DataLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, generator=generator)


def build_counting_loader() -> CountingLoader:
    """Returns a shuffling loader that can be saved."""
    generator = torch.Generator().manual_seed(5)
    return CountingLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, generator=generator)


def build_resumable_loader(num_workers: int = 0) -> ResumableLoader:
    """Returns the package's own loader in the place of a shuffling one."""
    return ResumableLoader(Augmented(), BATCH_SIZE, shuffle=True, seed=5, num_workers=num_workers)
