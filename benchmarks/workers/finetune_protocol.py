"""The work of the benchmark `finetune`, which every contender does on the same rows, in the same order.

This module imports only the standard library and the protocol, because workers of other projects import it.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["lora", "full", "dpo", "kto", "reward", "grpo"]
"""What is trained: adapters, the whole model, adapters on pairs of answers (by DPO, KTO, or as a reward model), or
adapters by GRPO on answers that the contender writes itself.

In KTO both answers of a pair are single ones, the chosen a good one, and each is the mismatched answer of the other.
"""
PAIR_KINDS = ("dpo", "kto", "reward")

BETA = 0.1
"""The beta of DPO and KTO, and its default in TRL."""

GROUP_SIZE = 4
"""Answers to a prompt in GRPO."""

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Row:
    """A sequence of whole or cut conversations.

    Args:
        input_ids: The tokens.
        labels: For each token the same token if it is learned, otherwise `IGNORE_INDEX`, as Hugging Face has them.
        seq_lengths: The lengths of the conversations, which attention does not cross.
    """

    input_ids: list[int]
    labels: list[int]
    seq_lengths: list[int]


@dataclass(frozen=True)
class FinetuneWorkload:
    """The training that every contender runs.

    Args:
        kind: What is trained.
        model: The directory of the model, in Hugging Face's layout.
        adapter: The directory of the adapters to start with, in PEFT's format; None if all weights are trained.
        rows: The file of the rows of all steps. In those of pairs, chosen and rejected answers alternate, each after
            its prompt, whose tokens are not learned. In that of GRPO, each record has a prompt of one message.
        losses: The file to which the contender appends the loss of each step.
        optimizer: The keyword arguments of AdamW: lr, betas, eps, weight_decay.
        max_grad_norm: The norm to which gradients are clipped.
        batch_size: The rows of a step; in those of pairs, two for each; in GRPO the answers.
        tokens_per_window: The tokens of a step that is timed.
        num_threads: Threads of each contender.
        num_warmup_steps: Steps before the first burst: those whose losses are compared, and those that only warm up.
        num_steps: The rows in the file are enough for this many steps.
        answer_tokens: Tokens of each answer in GRPO, which no end of a turn makes shorter.
    """

    kind: Kind
    model: str
    adapter: str | None
    rows: str
    losses: str
    optimizer: dict[str, Any]
    max_grad_norm: float
    batch_size: int
    tokens_per_window: int
    num_threads: int
    num_warmup_steps: int
    num_steps: int
    device: str = "cpu"
    memory_bytes: int | None = None
    answer_tokens: int = 0

    def to_json(self) -> str:
        """Returns the one line that `finetune_from_json` reads."""
        return json.dumps(asdict(self))


def finetune_from_json(text: str) -> FinetuneWorkload:
    """Returns the workload that `FinetuneWorkload.to_json` wrote."""
    return FinetuneWorkload(**json.loads(text))


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Writes the rows, one in a line."""
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Returns the rows that `write_rows` wrote."""
    return [Row(**json.loads(line)) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def read_batches(workload: FinetuneWorkload) -> Iterator[list[Row]]:
    """Yields the rows of each step."""
    rows = read_rows(workload.rows)
    for start in range(0, len(rows), workload.batch_size):
        yield rows[start : start + workload.batch_size]


def score_text(text: str) -> float:
    """Returns the reward of an answer in GRPO: the share of vowels."""
    return sum(character in "aeiou" for character in text) / (len(text) + 1)


def count_prompt(row: Row) -> int:
    """Returns the number of tokens before the first learned one."""
    return next(index for index, label in enumerate(row.labels) if label != IGNORE_INDEX)


def append_loss(workload: FinetuneWorkload, loss: float) -> None:
    """Appends the loss of a step, in nats per learned token, or per pair; of KTO per answer."""
    with Path(workload.losses).open("a", encoding="utf-8") as file:
        file.write(f"{loss!r}\n")
