"""Pairs of random answers, and a decoder that rates them."""

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from genesis.data.loader import SequenceFormat
from genesis.data.pair_windows import build_pair_window
from genesis.data.pairs import Answer, Pair
from genesis.data.window import AccumulationWindow
from genesis.model.adapter import AdapterConfig, attach_adapters, init_adapters
from genesis.model.decoder import Decoder
from tests.train.support import TINY

SEQ_LEN = 16
FORMAT = SequenceFormat(SEQ_LEN, 0, np.full(TINY.vocab_size, 3, np.int32), np.dtype("<u2"))


def make_pairs(count: int, seed: int = 0) -> list[Pair]:
    """Returns pairs of a few tokens, of very different lengths."""
    random = np.random.default_rng(seed)
    pairs = []
    for number in range(count):
        prompt = random.integers(1, TINY.vocab_size, random.integers(1, 6))
        answers = []
        for _ in range(2):
            tokens = np.concatenate((prompt, random.integers(1, TINY.vocab_size, random.integers(1, 10))))
            answers.append(Answer(tokens, np.arange(len(tokens)) >= len(prompt)))
        pairs.append(Pair(number, *answers))
    return pairs


def window_of(
    pairs: list[Pair],
    micro_batch_size: int,
    *,
    is_padded: bool = False,
    num_missing: int = 0,
    is_valued: bool = False,
) -> AccumulationWindow:
    given = [*pairs, *[None] * num_missing]
    return build_pair_window(given, FORMAT, micro_batch_size, len(pairs), is_padded=is_padded, is_valued=is_valued)


def make_decoder(seed: int = 0, std: float = 0.3) -> Decoder:
    """Returns a decoder whose answers differ much in probability."""
    decoder = Decoder(replace(TINY))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, std, generator=generator)
    return decoder


def make_adapted(
    base: Decoder, seed: int = 1, *, dora: bool = False, dropout: float = 0.0, include_experts: tuple[str, ...] = ()
) -> Decoder:
    """Returns the base with adapters whose update is not zero."""
    decoder = copy.deepcopy(base)
    config = AdapterConfig(rank=3, alpha=6.0, dora=dora, dropout=dropout, include_experts=include_experts)
    attach_adapters(decoder, config)
    init_adapters(decoder, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0.0, 0.2, generator=generator)
    return decoder


def slow_log_prob(decoder: Decoder, answer: Answer) -> Tensor:
    """Returns the log-probability of an answer: one forward for it alone, and the softmax of each position."""
    tokens = torch.from_numpy(answer.tokens)
    logits = decoder(tokens[None, :-1])
    log_probs = torch.log_softmax(logits[0], dim=-1)
    picked = [log_probs[place, token] for place, token in enumerate(tokens[1:].tolist()) if answer.has_label[place + 1]]
    return torch.stack(picked).sum()
