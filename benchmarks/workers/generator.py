"""The generator of the benchmark `versions`: one part of generation over and over, in one thread.

It runs this file under the imports of either version, so that it uses only what both have:

    draw       the next tokens of texts from logits that are there, by the batch that serves and generates
    forward    the decoder's forward of one token a text over a cache
    step       both, as `genesis generate` does them
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from genesis.generate.batch import Batch, Request
from genesis.generate.sample import SamplingOptions
from genesis.model.decoder import Decoder, DecoderConfig, KVCache

_VOCAB_SIZE, _PROMPT_TOKENS, _NEW_TOKENS = 49_152, 64, 192
_SHAPE = DecoderConfig(
    dim=256, num_layers=8, num_heads=8, num_kv_heads=2, ffn_dim=768, max_seq_len=1024, vocab_size=_VOCAB_SIZE
)
_SPREAD = 3.0
"""Deviation of the logits: a few hundred tokens have 90% of the probability."""


@dataclass(frozen=True)
class GenerateTask:
    """What is generated: the part, so many texts together, and how their tokens are drawn."""

    part: str
    num_rows: int
    sampling: dict[str, Any]


class _FixedLogits(nn.Module):
    """In place of a decoder: its forward costs nothing."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(max_seq_len=_SHAPE.max_seq_len, vocab_size=_VOCAB_SIZE)
        self.output_weight = torch.empty(0)
        self.logits = torch.randn(num_rows, _VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * _SPREAD

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        return self.logits[: len(input_ids)]


def _build_decoder() -> Decoder:
    decoder = Decoder(_SHAPE).eval()
    decoder.init_weights(0)
    return decoder


def run_batch(task: GenerateTask, decoder: Any, num_new: int, *, has_cache: bool) -> Iterator[int]:
    """Yields the tokens of one step after another; texts that end are replaced."""
    batch = Batch(decoder, task.num_rows, set(), has_cache=has_cache)
    sampling = SamplingOptions(**task.sampling)
    number = 0
    while True:
        while batch.num_free:
            batch.add(Request([7] * (_PROMPT_TOKENS if has_cache else 1), num_new, sampling, number))
            number += 1
        yield len(batch.step())


def run_forward(task: GenerateTask) -> Iterator[int]:
    """Yields the tokens of one forward after another; the caches are emptied when they are long."""
    decoder, ones = _build_decoder(), torch.ones(task.num_rows, dtype=torch.int64)
    input_ids = torch.full((task.num_rows, 1), 7)
    while True:
        cache = KVCache(_SHAPE, task.num_rows, _SHAPE.max_seq_len, "cpu", torch.float32)
        decoder(torch.full((task.num_rows, _PROMPT_TOKENS), 7), cache=cache)
        # Texts differ in length, as they do where requests arrive at different times.
        cache.advance(torch.arange(task.num_rows) + _PROMPT_TOKENS - task.num_rows)
        for _ in range(_NEW_TOKENS):
            decoder(input_ids, cache=cache)
            cache.advance(ones)
            yield task.num_rows


def run(task: GenerateTask) -> Iterator[int]:
    """Yields the tokens of what a task asks for, without end."""
    if task.part == "forward":
        return run_forward(task)
    if task.part == "draw":
        return run_batch(task, _FixedLogits(task.num_rows).eval(), 16, has_cache=False)
    return run_batch(task, _build_decoder(), _NEW_TOKENS, has_cache=True)


def serve(tasks: list[GenerateTask]) -> None:
    """Works in turns on one core until the parent sends `quit`: `3 0.5` is half a second of the fourth task."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    running: dict[int, Iterator[int]] = {}
    _say({"ready": True})
    for line in sys.stdin:
        word, _, seconds = line.strip().partition(" ")
        if word == "quit":
            return
        steps = running.setdefault(int(word), run(tasks[int(word)]))
        begin_seconds, num_tokens = time.perf_counter(), 0
        while (elapsed_seconds := time.perf_counter() - begin_seconds) < float(seconds):
            num_tokens += next(steps)
        _say({"tokens": num_tokens, "seconds": elapsed_seconds})


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        serve([GenerateTask(**task) for task in json.loads(sys.argv[1])])
