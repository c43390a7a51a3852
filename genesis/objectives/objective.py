"""The protocol between the training step and what it minimises.

An objective turns the final hidden states of a micro-batch into *terms*, sums over one kind of *unit* each: tokens, or
pairs. The step divides the gradient of a term by the number of its units in the whole window, over all ranks and
micro-batches, so that an objective never divides by a number of its own micro-batch. What an objective also wants in
the log, it returns as *figures*.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from genesis.data.window import AccumulationWindow, MicroBatch
from genesis.model.decoder import Decoder

TOKENS: Final = "tokens"
"""The unit of valid labels, which every objective counts."""
BYTES: Final = "bytes"
"""The bytes of text behind the valid labels, which every objective counts; no term is divided by them."""


class HeadResult(NamedTuple):
    """The sums of one forward.

    Args:
        terms: By unit, the float32 sum whose gradient is divided by the window's number of this unit. The first one is
            the main term. Every forward of an objective returns the same units, also where a sum is empty.
        figures: Further sums for the log by name, without a graph.
    """

    terms: dict[str, Tensor]
    figures: dict[str, Tensor]


Number = TypeVar("Number", int, float)

Head = Callable[[Tensor, Tensor], HeadResult]
"""A function of the final hidden states and the output weight."""
SumHead = Callable[[Tensor, Tensor], Tensor]
"""A function of the same arguments that returns one sum."""


@dataclass(frozen=True)
class ObjectiveSums:
    """Sums over windows, over all ranks.

    Args:
        terms: By unit, as in `HeadResult`.
        figures: By name, as in `HeadResult`.
        counts: Number of each unit, as `Objective.count` names them.
    """

    terms: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "ObjectiveSums") -> "ObjectiveSums":
        return ObjectiveSums(
            _add(self.terms, other.terms), _add(self.figures, other.figures), _add(self.counts, other.counts)
        )


def _add(one: Mapping[str, Number], other: Mapping[str, Number]) -> dict[str, Number]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


class Objective(ABC):
    """What training minimises. An instance is shared by training and validation, and keeps no state between windows.

    Attributes:
        needs_pairs: Whether its windows are pairs of answers (`genesis.data.pairs`) instead of sequences.
        compares_forwards: Whether it compares the probabilities of a token in two forwards, so that both must compute a
            token alike beside any other tokens.
    """

    needs_pairs: bool = False
    compares_forwards: bool = False

    def count(self, window: AccumulationWindow) -> dict[str, int]:
        """Returns the number of each unit in this rank's window, with `TOKENS` and `BYTES` among them."""
        return {TOKENS: window.num_valid_tokens, BYTES: window.num_bytes}

    def prepare(self, decoder: Decoder, micro_batch: MicroBatch) -> MicroBatch:
        """Returns the micro-batch with what the head needs beside the labels, in `MicroBatch.extra`.

        Called before each forward, under `torch.no_grad`, on all ranks alike: it may run further forwards.
        """
        return micro_batch

    @abstractmethod
    def head(self, micro_batch: MicroBatch, cross_entropy: Callable[[Tensor], SumHead]) -> Head:
        """Returns the head of one forward.

        Args:
            micro_batch: The result of `prepare`.
            cross_entropy: The strategy's head for labels: the sum of -log p over the valid ones, in nats.
        """

    @abstractmethod
    def measure(self, sums: ObjectiveSums) -> dict[str, float]:
        """Returns the values of a log line by name; `loss` among them. `sums.counts` has at least one valid token."""


@torch.no_grad()
def prepare(objective: Objective, decoder: Decoder, micro_batch: MicroBatch) -> MicroBatch:
    """Returns the micro-batch as the objective's head needs it. Nothing that `Objective.prepare` does has a graph."""
    return objective.prepare(decoder, micro_batch)
