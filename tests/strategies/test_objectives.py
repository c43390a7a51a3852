"""Objectives where ranks share rows, matrices or layers: every gradient and figure beside those of one process."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from genesis.data.window import IGNORE_INDEX, AccumulationWindow
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import Decoder
from genesis.objectives import DPO, GSPO, KTO, Distillation
from genesis.objectives.distillation_loss import TeacherClasses
from genesis.objectives.objective import Objective
from genesis.objectives.policy_gradient import (
    ADVANTAGE,
    IS_FINISHED,
    IS_FIRST,
    LONGEST,
    NUM_ASKED,
    OLD_LOG_PROB,
    OLD_TOKEN_LOG_PROB,
    REWARD,
    SPREAD,
    TEMPERATURE,
)
from genesis.objectives.reference import ReferenceLogProbs
from genesis.objectives.teacher import Teacher
from genesis.objectives.vocabulary import WHOLE, Vocabulary
from genesis.strategies import Sharded
from genesis.strategies.context_parallel import ContextExchange, ContextVocabulary
from genesis.strategies.cut_vocabulary import CutVocabulary
from genesis.strategies.degrees import AXIS_NAMES, Degrees
from genesis.strategies.tensor_parallel import RowShare
from genesis.train.module import GenesisModule
from genesis_callbacks.testing import run_ranks
from tests.algorithms import algorithm_of
from tests.objectives.support import make_pairs, window_of
from tests.strategies.test_pipeline import distance
from tests.strategies.test_tensor_parallel import DENSE, FillAdapters, Recorder
from tests.train.support import GLOBAL_BATCH_SIZE, KeepGradients, build_trainer, run_in_turn, whole, window_of_rank

DEEP = replace(DENSE, num_layers=4)
LORA = AdapterConfig(rank=4, alpha=8.0)


def share_pairs(rank: int, world_size: int) -> AccumulationWindow:
    size = GLOBAL_BATCH_SIZE // world_size
    return window_of(make_pairs(GLOBAL_BATCH_SIZE)[rank * size : (rank + 1) * size], 1, is_padded=True)


def share_single_answers(rank: int, world_size: int) -> AccumulationWindow:
    size = GLOBAL_BATCH_SIZE // world_size
    answers = [one._replace(value=one.number % 2) for one in make_pairs(GLOBAL_BATCH_SIZE)]
    return window_of(answers[rank * size : (rank + 1) * size], 1, is_padded=True, is_valued=True)


def share_text(rank: int, world_size: int) -> AccumulationWindow:
    return window_of_rank(0, rank, world_size)


def share_answers(rank: int, world_size: int) -> AccumulationWindow:
    """Returns rows whose labels are answers with rewards, and probabilities near those of a new model."""
    window = window_of_rank(0, rank, world_size)
    micro_batches = []
    for number, one in enumerate(window.micro_batches, start=rank * GLOBAL_BATCH_SIZE // world_size):
        length = (one.labels != IGNORE_INDEX).sum(1)
        value = torch.full((1,), float(number % 3 - 1))
        extra = {ADVANTAGE: value, OLD_LOG_PROB: length * (-4.1 - 0.1 * value), TEMPERATURE: torch.tensor([0.9])}
        extra |= {REWARD: value + 2.0, SPREAD: value + 1.0, IS_FINISHED: (value > 0).float()}
        extra |= {IS_FIRST: torch.zeros(1), NUM_ASKED: torch.ones(1), LONGEST: torch.tensor([40.0])}
        extra[OLD_TOKEN_LOG_PROB] = (one.labels != IGNORE_INDEX) * (-4.1 - 0.1 * value)
        micro_batches.append(replace(one, extra=extra))
    return replace(window, micro_batches=tuple(micro_batches))


def teach() -> Distillation:
    objective = Distillation(teacher="built here", top_k=7, temperature=2.0, teacher_share=0.6)
    decoder = Decoder(replace(DENSE, dim=16, num_layers=1))
    decoder.init_weights(3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(6.0)
    objective.loaded_teacher = Teacher(decoder, vocab_size=61, top_k=7, temperature=2.0)
    return objective


def refer() -> DPO:
    objective = DPO(sft_weight=0.3)
    generator = torch.Generator().manual_seed(4)
    objective.log_probs = ReferenceLogProbs(-40.0 * torch.rand((GLOBAL_BATCH_SIZE, 2), generator=generator))
    return objective


Case = tuple[Callable[[], Objective], Callable[[int, int], AccumulationWindow], AdapterConfig | None]
CASES: dict[str, Case] = {
    "preferences": (refer, share_pairs, None),
    "preferences of adapters": (lambda: DPO(length_normalisation=True, beta=5.0), share_pairs, LORA),
    "preferences of single answers": (lambda: KTO(beta=0.5), share_single_answers, LORA),
    "distillation": (teach, share_text, None),
    "answers": (lambda: GSPO(clip_low=0.2, clip_high=0.3), share_answers, None),
    "answers of adapters": (lambda: GSPO(clip_low=0.2, clip_high=0.3, kl=0.5), share_answers, LORA),
}


def train(name: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """Trains one step and validates, and returns what all ranks must agree on."""
    build, share, adapter = CASES[name]
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    axes = {axis: (options or {}).get(f"{kind}_parallel", 1) for axis, kind in AXIS_NAMES.items()}
    degrees = Degrees(**axes).resolve(world_size)
    window = share(degrees.data_rank(rank), degrees.data_world_size)
    keep = KeepGradients()
    trainer = build_trainer(
        "auto" if options is None else Sharded(**options),
        world_size,
        1,
        [keep, FillAdapters()],
        val_check_interval=1,
        check_val_every_n_epoch=None,
    )
    module = GenesisModule(DEEP, algorithm_of(name="adamw", lr=1e-2), adapter=adapter, objective=build())
    loaders: list[Any] = [DataLoader([window], batch_size=None) for _ in range(2)]  # type: ignore[arg-type]
    validates = name.startswith(("preferences", "distillation"))  # answers are validated without a forward
    trainer.fit(module, loaders[0], loaders[1] if validates else None)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    wanted = {key: value for key, value in logged.items() if key.startswith(("train/", "validation/"))}
    wanted.pop("train/scale_factor", None)
    return {
        "gradients": keep.gradients,
        "logged": wanted,
        "weights": {key: whole(parameter) for key, parameter in module.named_parameters()},
    }


@cache
def expected(name: str) -> dict[str, Any]:
    """What one process computes."""
    (found,) = run_ranks(run_in_turn, 1, train, [(name, None)])[0]
    return found


# ---- the vocabulary of a distillation


def distil(
    top_k: int, vocabulary: Vocabulary, hidden: Tensor, weight: Tensor
) -> tuple[list[Tensor], Tensor, Tensor, int]:
    """Returns the four sums, the gradients of hidden states and weight, and the size of the largest tensor."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(16, (2, 8), generator=generator)
    labels[0, ::3] = IGNORE_INDEX
    scores = torch.randn((2, 8, 16), generator=generator).log_softmax(-1)
    log_probs, ids = scores.topk(top_k)
    rest = (1.0 - log_probs.exp().sum(-1)).log() if top_k < 16 else torch.full((2, 8), -torch.inf)
    classes = TeacherClasses(ids.int(), log_probs, rest)
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    with Recorder() as recorder:
        sums = vocabulary.sum_distillation(hidden, weight, labels, classes, temperature=2.0, share=0.6)
        sums.loss.mul(3.0).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [one.detach() for one in sums], hidden.grad, weight.grad, recorder.largest


def distil_by_axes(top_k: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn((2, 8, 4), generator=generator), torch.randn((16, 4), generator=generator)
    sums, of_hidden, of_weight, _ = distil(top_k, WHOLE, hidden, weight)
    share, exchange = RowShare(group), ContextExchange(group)
    own = hidden.chunk(2, 1)[group.rank()]
    cut = distil(top_k, CutVocabulary(share), own, weight.chunk(2)[group.rank()])
    assert top_k == 16 or cut[3] < 16 * 16, "no rank has the logits of the whole vocabulary"
    tokens = distil(top_k, ContextVocabulary(exchange, WHOLE), own, weight)
    dist.all_reduce(tokens[2])
    for found, found_weight in ((cut, of_weight.chunk(2)[group.rank()]), (tokens, of_weight)):
        torch.testing.assert_close(found[0], sums)
        torch.testing.assert_close(found[1:3], (of_hidden.chunk(2, 1)[group.rank()], found_weight))


@pytest.mark.parametrize("top_k", [1, 5, 16])
def test_ranks_that_share_tokens_or_a_vocabulary_distil_as_one(top_k: int) -> None:
    run_ranks(distil_by_axes, 2, top_k)


# ---- a step


TP2: dict[str, Any] = {"tensor_parallel": 2}
CP2: dict[str, Any] = {"context_parallel": 2}
PP2: dict[str, Any] = {"pipeline_parallel": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        (2, [TP2, CP2, PP2, PP2 | {"stages_per_rank": 2, "activation_checkpointing": "block"}]),
        (4, [TP2, CP2, TP2 | CP2, TP2 | PP2, CP2 | PP2]),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_every_gradient_and_figure_of_an_objective_is_that_of_one_process(
    name: str, world_size: int, layouts: list[dict[str, Any]]
) -> None:
    wanted = expected(name)
    assert all(float(gradient.abs().max()) > 0.0 for gradient in wanted["gradients"].values())
    found = run_ranks(run_in_turn, world_size, train, [(name, options) for options in layouts], timeout_seconds=300.0)
    for options, *of_ranks in zip(layouts, *found, strict=True):
        names = {key for of_rank in of_ranks for key in of_rank["gradients"]}
        assert names == wanted["gradients"].keys()
        for of_rank in of_ranks:
            assert distance(of_rank["gradients"], wanted["gradients"]) <= 1e-5, options
            assert of_rank["logged"] == pytest.approx(wanted["logged"], rel=2e-5, abs=1e-5), options
