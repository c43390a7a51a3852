"""Distillation under the strategies: gradients of a step, equal on one rank and two, killed and resumed bit for bit."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from genesis.data.window import IGNORE_INDEX
from genesis.generate.teacher import find_teacher, load_teacher
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import Decoder
from genesis.objectives.distillation import Distillation
from genesis.objectives.objective import FitContext
from genesis.objectives.teacher import Teacher
from genesis.optim import AdamW
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification, SkipAwareLR, TokenCounters
from genesis_callbacks.testing import run_ranks
from tests.objectives.teachers import TEMPERATURE, TOP_K, make_cache, make_teacher
from tests.train.support import (
    TINY,
    KeepGradients,
    build_strategy,
    build_trainer,
    counters_of,
    loader,
    rows_of_step,
    whole,
)
from tests.train.test_ladder import DECODER, KILLED_BEFORE, STEPS, KillAll

SHARE = 0.6
OPTIONS = {"top_k": TOP_K, "temperature": TEMPERATURE, "teacher_share": SHARE}


class FiguresOf(pl.Callback):
    """Keeps what the training has logged at its end."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        names = ("loss", "cross_entropy", "teacher_divergence", "teacher_rest")
        self.figures = {name: float(trainer.callback_metrics[f"train/{name}"]) for name in names}


def climb(
    directory: str,
    corpus: str,
    strategy: str,
    mode: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    *callbacks: Any,
) -> dict[str, Any]:
    """Fits from the latest checkpoint in `directory` and returns what that came to."""
    settings = dict(settings)
    decoder = replace(DECODER, dropout=settings.pop("dropout", DECODER.dropout))
    adapter = settings.pop("adapter", None)
    objective = Distillation(**options)
    module = GenesisModule(
        decoder,
        AdamW(lr=3e-3),
        adapter=None if adapter is None else AdapterConfig(**adapter),
        objective=objective,
    )
    data = CorpusDataModule(corpus, seq_len=16, micro_batch_size=2, global_batch_size=8)
    checkpoint = AsyncProcessCheckpoint(run_dir=directory, every_n_steps=1, keep_last=2, mode=mode)  # type: ignore[arg-type]
    context = FitContext(
        data.training,
        tokenizer=Path(corpus),
        has_adapters=adapter is not None,
        is_training=True,
        recorded={},
        directory=Path(directory),
        find_teacher=find_teacher,
        load_teacher=load_teacher,
    )
    prepared = objective.prepare_fit(context)
    checkpoint.identity = {**data.training.identity, **prepared.identity}
    trainer = build_trainer(
        build_strategy(strategy),
        int(os.environ["WORLD_SIZE"]),
        STEPS,
        [TokenCounters(), SkipAwareLR(total_updates=STEPS), checkpoint, CheckpointVerification(), *callbacks],
        **{"gradient_clip_val": 1.0, **settings},
    )
    trainer.fit(module, data, ckpt_path=checkpoint.latest())
    return {
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
        "counters": counters_of(trainer).checkpoint_counters(),
        "position": data.training.cursor.position,
        "loss": module._training_log.last_loss,
        "restored": None if checkpoint.restore_report is None else checkpoint.restore_report.step,
        "failed": checkpoint.statistics.num_failed,
    }


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher") / "run", tiny_corpus)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, teacher: Path) -> Path:
    return make_cache(tmp_path_factory.mktemp("cache") / "cache", teacher, tiny_corpus)


@pytest.mark.parametrize(
    ("strategy", "world_size", "way"),
    [
        pytest.param("replicated", 1, "teacher", marks=pytest.mark.slow),
        pytest.param("replicated", 1, "cache", marks=pytest.mark.slow),
        pytest.param("replicated", 2, "cache", marks=pytest.mark.slow),
        pytest.param("full", 2, "teacher", marks=pytest.mark.slow),
        pytest.param("full", 2, "cache", marks=pytest.mark.slow),
        pytest.param("checkpointing", 2, "teacher", marks=pytest.mark.slow),
        pytest.param("tensor", 2, "teacher", marks=pytest.mark.slow),
        pytest.param("context", 2, "cache", marks=pytest.mark.slow),
        pytest.param("pipeline", 2, "teacher", marks=pytest.mark.slow),
    ],
)
def test_a_killed_distillation_climbs_on_bit_for_bit(
    tmp_path: Path, tiny_corpus: Path, teacher: Path, cache: Path, strategy: str, world_size: int, way: str
) -> None:
    options = {**OPTIONS, "teacher": str(teacher), "cache": str(cache) if way == "cache" else None}
    shared, run_dir = (str(tiny_corpus), strategy), tmp_path / "run"
    straight = run_ranks(climb, world_size, str(tmp_path / "straight"), *shared, "sync", options, {})
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(climb, world_size, str(run_dir), *shared, "process", options, {}, KillAll())
    resumed = run_ranks(climb, world_size, str(run_dir), *shared, "process", options, {})
    for one, other in zip(straight, resumed, strict=True):
        # The orphaned writers may or may not have finished the save of the last step.
        assert other["restored"] in (KILLED_BEFORE - 2, KILLED_BEFORE - 1)
        assert one["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
        for key in ("counters", "position", "loss", "failed"):
            assert one[key] == other[key]


@pytest.mark.slow
def test_teacher_and_cache_ranks_and_wrappers_give_the_same_weights(
    tmp_path: Path, tiny_corpus: Path, teacher: Path, cache: Path
) -> None:
    """Without dropout, whose masks differ between ranks."""
    ways = {"teacher": {**OPTIONS, "teacher": str(teacher)}, "cache": {**OPTIONS, "cache": str(cache)}}
    (one,) = run_ranks(
        climb, 1, str(tmp_path / "one"), str(tiny_corpus), "replicated", "sync", ways["teacher"], {"dropout": 0.0}
    )
    for strategy, world_size, way, is_equal in (
        ("replicated", 1, "cache", True),
        ("replicated", 2, "cache", False),
        ("full", 2, "teacher", False),
    ):
        found = run_ranks(
            *(climb, world_size, str(tmp_path / f"{strategy}-{world_size}-{way}"), str(tiny_corpus), strategy, "sync"),
            *(ways[way], {"dropout": 0.0}),
        )[0]
        for name, tensor in one["weights"].items():
            torch.testing.assert_close(
                found["weights"][name], tensor, rtol=0, atol=0 if is_equal else 1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.slow
def test_mixed_precision_and_adapters_distil(tmp_path: Path, tiny_corpus: Path, teacher: Path) -> None:
    def fit(name: str, strategy: str, **settings: Any) -> dict[str, Any]:
        options, settings = {**OPTIONS, "teacher": str(teacher)}, {"dropout": 0.0, **settings}
        return run_ranks(climb, 1, str(tmp_path / name), str(tiny_corpus), strategy, "sync", options, settings)[0]

    whole_precision = fit("float32", "replicated")
    for name, strategy in (("mixed", "replicated"), ("sharded", "full")):
        found = fit(name, strategy, precision="bf16-mixed")
        assert found["loss"] == pytest.approx(whole_precision["loss"], rel=1e-2)
        assert found["loss"] != whole_precision["loss"]
    adapted = fit("adapted", "replicated", adapter={"rank": 3, "alpha": 6.0})
    assert adapted["counters"]["updates"] == STEPS
    assert any(bool(tensor.any()) for name, tensor in adapted["weights"].items() if name.endswith("lora_B"))


def step(strategy: str, teacher_seed: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Runs one step on a window of uneven rows, and returns whole gradients and what was logged."""
    objective = Distillation(teacher="set below", **OPTIONS)
    objective.loaded_teacher = Teacher(
        build_teacher(teacher_seed), vocab_size=TINY.vocab_size, top_k=TOP_K, temperature=TEMPERATURE
    )
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    module = GenesisModule(TINY, AdamW(lr=1e-2), objective=objective)
    kept, figures = KeepGradients(), FiguresOf()
    trainer = build_trainer(build_strategy(strategy), world_size, 1, [TokenCounters(), SkipAwareLR(), kept, figures])
    trainer.fit(module, loader(1, rank, world_size))
    return kept.gradients, figures.figures


def build_teacher(seed: int) -> Decoder:
    """Returns a teacher of another width, with padding rows."""
    decoder = Decoder(replace(TINY, dim=48, ffn_dim=64, vocab_size=TINY.vocab_size + 3))
    decoder.init_weights(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(6.0)
    return decoder.eval()


def reference(teacher_seed: int) -> tuple[dict[str, Any], dict[str, float]]:
    """The mean over the valid tokens of the whole global batch, with full logits, in float64."""
    rows = rows_of_step(0)
    teacher, model = build_teacher(teacher_seed).double(), Decoder(TINY)
    model.init_weights(0)
    model.double()
    is_valid = rows.labels != IGNORE_INDEX
    logits = model(rows.input_ids, document_ids=rows.document_ids)[is_valid]
    with torch.no_grad():
        of_teacher = teacher(rows.input_ids, document_ids=rows.document_ids)[is_valid][:, : TINY.vocab_size]
    log_p, log_q = (of_teacher / TEMPERATURE).log_softmax(-1), (logits / TEMPERATURE).log_softmax(-1)
    top = log_p.topk(TOP_K).indices
    is_top = torch.zeros_like(log_p, dtype=torch.bool).scatter(1, top, True)
    rest_p, rest_q = (log.masked_fill(is_top, -torch.inf).logsumexp(1) for log in (log_p, log_q))
    terms = (log_p.exp() * (log_p - log_q)).masked_fill(~is_top, 0).sum(1) + rest_p.exp() * (rest_p - rest_q)
    cross_entropy = torch.nn.functional.cross_entropy(logits, rows.labels[is_valid])
    loss = (1 - SHARE) * cross_entropy + SHARE * TEMPERATURE**2 * terms.mean()
    loss.backward()
    gradients = {f"decoder.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    figures = {
        "loss": loss,
        "cross_entropy": cross_entropy,
        "teacher_divergence": terms.mean(),
        "teacher_rest": rest_p.exp().mean(),
    }
    return gradients, {name: float(value.detach()) for name, value in figures.items()}


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("single", 1),
        ("full", 2),
        pytest.param("replicated", 2, marks=pytest.mark.slow),
        pytest.param("hybrid", 4, marks=pytest.mark.slow),
    ],
)
def test_gradients_and_figures_of_a_step_equal_a_slow_reference_on_any_number_of_ranks(
    strategy: str, world_size: int
) -> None:
    wanted, wanted_figures = reference(3)
    for gradients, figures in run_ranks(step, world_size, strategy, 3):
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            difference = (gradient.double() - wanted[name]).norm() / wanted[name].norm()
            assert difference < 1e-5, name
        assert figures == pytest.approx(wanted_figures, rel=1e-5)
