"""What fine-tuning on the fake device is made of: adapters, objectives, and the windows that an objective reads."""

from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from genesis.data.loader import SequenceFormat, build_window
from genesis.data.pair_windows import build_pair_window
from genesis.data.pairs import Answer, Pair
from genesis.data.window import AccumulationWindow
from genesis.model.adapter import BASE_FORMATS, AdapterConfig, BaseFormat
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.objectives import GSPO, policy_gradient
from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.distillation import Distillation
from genesis.objectives.objective import Objective
from genesis.objectives.preference import DPO
from genesis.objectives.reference import ReferenceLogProbs
from genesis.objectives.teacher import Teacher
from tests.fakecuda.combinations import NUM_MICRO_BATCHES

NUM_PAIRS: Final = 2
"""Pairs of a micro-batch."""
_RANK: Final = 8


def build_adapter(name: str) -> AdapterConfig | None:
    """Returns the adapters that a combination names, with dropout."""
    kind = name.split()[0]
    return None if kind == "none" else AdapterConfig(rank=_RANK, dropout=0.1, dora=kind == "dora")


def choose_base_format(name: str) -> BaseFormat:
    """Returns how the base that a combination names is stored."""
    return BASE_FORMATS.get(name.split()[-1], BaseFormat())


def build_objective(name: str, *, has_adapter: bool, shape: DecoderConfig) -> Objective:
    """Returns the objective that a combination names; without adapters, DPO reads a table of log-probabilities."""
    if name == "dpo":
        objective = DPO(sft_weight=0.1)
        if not has_adapter:
            objective.log_probs = ReferenceLogProbs(torch.zeros((NUM_MICRO_BATCHES * NUM_PAIRS, 2)))
        return objective
    if name == "gspo":
        return GSPO(kl=0.1 if has_adapter else 0.0)
    if name == "distillation":
        distillation = Distillation(teacher="a teacher", top_k=16)
        teacher = Decoder(replace(shape, dim=shape.dim // 2, num_layers=1)).to(torch.bfloat16)
        distillation.loaded_teacher = Teacher(teacher, vocab_size=shape.vocab_size, top_k=16, temperature=2.0)
        return distillation
    return CrossEntropy()


def build_tuning_window(
    objective: str, index: int, sequence_format: SequenceFormat, micro_batch_size: int
) -> AccumulationWindow:
    """Returns a window as the loader's thread makes it: pairs, answers, or rows of several documents."""
    if objective == "dpo":
        return build_pair_window(
            [_make_pair(number) for number in range(NUM_MICRO_BATCHES * NUM_PAIRS)],
            sequence_format,
            NUM_PAIRS,
            index + 1,
            is_padded=False,
        )
    rows = np.ones((NUM_MICRO_BATCHES * micro_batch_size, sequence_format.seq_len + 1), np.uint16)
    ends = np.zeros((len(rows), sequence_format.seq_len), np.bool_)
    if objective == "gspo":
        lengths = np.full(len(rows), sequence_format.seq_len - 20)
        has_label = np.zeros(rows.shape, np.bool_)
        has_label[:, 30 : sequence_format.seq_len - 20] = True
        window = build_window(rows, sequence_format, micro_batch_size, index + 1, ends, lengths, has_label)
        return replace(window, micro_batches=tuple(replace(m, extra=_answer_columns(m)) for m in window.micro_batches))
    ends[:, 49::50] = True
    return build_window(rows, sequence_format, micro_batch_size, index + 1, ends)


def _make_pair(number: int) -> Pair:
    """Returns a pair of answers of unequal lengths after a prompt of ten tokens."""
    answers = (np.ones(30 + number, np.int64), np.ones(50 - number, np.int64))
    return Pair(number, *(Answer(tokens, np.arange(len(tokens)) >= 10) for tokens in answers))


def _answer_columns(micro_batch: Any) -> dict[str, Tensor]:
    """Returns what `Rollouts` adds to a micro-batch of answers."""
    names = ("ADVANTAGE", "OLD_LOG_PROB", "REWARD", "SPREAD", "IS_FINISHED", "IS_FIRST", "NUM_ASKED")
    columns = {getattr(policy_gradient, name): torch.ones(len(micro_batch.labels)) for name in names}
    return {**columns, policy_gradient.TEMPERATURE: torch.ones(1)}
