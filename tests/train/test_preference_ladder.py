"""DPO and KTO under strategies: equal on one rank and two, killed and resumed bit for bit, with adapters or without."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from genesis.data.manifest import read_manifest as read_corpus
from genesis.export.importing import save_weights
from genesis.model.adapter import BASE_FORMATS, AdapterConfig
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.recipe import build_decoder_config
from genesis.objectives import DPO, KTO
from genesis.optim import AdamW
from genesis.tokenizer.open import open_tokenizer
from genesis.train.adapter_base import build_scope, find_adapter_base
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification, SkipAwareLR, TokenCounters
from genesis_callbacks.checkpoint import find_latest, read_manifest, verify
from genesis_callbacks.testing import run_ranks
from tests.data.pair_corpora import SEQ_LEN, write_answer_corpus, write_pair_corpus
from tests.mixtures import mix
from tests.train.support import build_strategy, build_trainer, counters_of, whole
from tests.train.test_adapter_ladder import make_base
from tests.train.test_ladder import DECODER, KILLED_BEFORE, STEPS, KillAll

PAIR_DECODER = replace(DECODER, vocab_size=400, max_seq_len=SEQ_LEN)
LORA = {"rank": 3, "alpha": 6.0, "dropout": 0.2}
OPTIONS: dict[str, Any] = {"beta": 0.5, "label_smoothing": 0.1, "sft_weight": 0.2}
KTO_OPTIONS: dict[str, Any] = {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.8}


@pytest.fixture(scope="module")
def pair_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair_corpus(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def answer_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answer_corpus(tmp_path_factory.mktemp("answers"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, pair_corpus: Path) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "run", pair_corpus, PAIR_DECODER)


def write_base(directory: Path, pair_corpus: Path, config: DecoderConfig) -> Path:
    decoder = Decoder(config)
    decoder.init_weights(0)
    directory.mkdir()
    return save_weights(decoder.state_dict(), config, open_tokenizer(pair_corpus), directory / "checkpoints")


class KeepLog(pl.Callback):
    """Keeps the metrics of each step and of the validation."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
        if trainer.global_step:
            self.on_train_end(trainer)

    def on_train_end(self, trainer: Any, *arguments: Any) -> None:
        self.steps.append({name: float(value) for name, value in trainer.logged_metrics.items()})


def climb(
    directory: str,
    base: str,
    corpus: str,
    strategy: str,
    mode: str,
    adapter: dict[str, Any] | None,
    has_dropout: bool,
    *callbacks: Any,
) -> dict[str, Any]:
    """Fits from the latest checkpoint in `directory`, or from the base, and returns what that came to."""
    config = None if adapter is None else AdapterConfig(**adapter)
    # Ranks draw other masks than one rank does for the same rows.
    shape = build_decoder_config(read_manifest(Path(base)).recipe["model"]["decoder"], base)
    decoder = replace(shape, dropout=PAIR_DECODER.dropout if has_dropout else 0.0)
    # The base of adapters is the reference by switching them off; all weights need the pass.
    reference = base if config is None else None
    is_valued = read_corpus(Path(corpus)).has_values
    objective = KTO(**KTO_OPTIONS, reference=reference) if is_valued else DPO(**OPTIONS, reference=reference)
    objective.directory = Path(directory) / "reference"
    module = GenesisModule(decoder, AdamW(lr=3e-3), adapter=config, objective=objective)
    data = CorpusDataModule(corpus, seq_len=SEQ_LEN, micro_batch_size=2, global_batch_size=8)
    return fit_from_base(directory, base, strategy, mode, module, data, *callbacks)


def fit_from_base(
    directory: str,
    base: str,
    strategy: str,
    mode: str,
    module: GenesisModule,
    data: CorpusDataModule,
    *callbacks: Any,
) -> dict[str, Any]:
    """Fits a module, which may have adapters, from the latest checkpoint in `directory`, or from the base."""
    module.is_restored = True
    scope: dict[str, Any] = {}
    config = module.adapter_config
    if config is not None:
        found = find_adapter_base(base, None)
        module.base_format = found.format
        scope["scope"] = build_scope(found, has_magnitudes=config.dora, also_train=config.also_train)
    checkpoint = AsyncProcessCheckpoint(
        run_dir=directory,
        every_n_steps=1,
        keep_last=2,
        mode=mode,  # type: ignore[arg-type]
        restore="weights",
        **scope,
    )
    keep = KeepLog()
    trainer = build_trainer(
        build_strategy(strategy),
        int(os.environ["WORLD_SIZE"]),
        STEPS,
        [TokenCounters(), SkipAwareLR(total_updates=STEPS), keep, checkpoint, CheckpointVerification(), *callbacks],
        gradient_clip_val=1.0,
        val_check_interval=3,
        check_val_every_n_epoch=None,
    )
    trainer.fit(module, data, ckpt_path=checkpoint.latest() or Path(base))
    return {
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
        "counters": counters_of(trainer).checkpoint_counters(),
        "position": data.training.cursor.position,
        "restored": None if checkpoint.restore_report is None else checkpoint.restore_report.step,
        "failed": checkpoint.statistics.num_failed,
        "log": keep.steps,
    }


def figures_of(log: dict[str, float]) -> dict[str, float]:
    """Returns the values of a log line that follow from the data and the weights."""
    return {name: log[name] for name in log if name.startswith("train/") and "per_second" not in name}


def climb_straight_and_killed(directory: Path, world_size: int, *shared: Any) -> list[dict[str, Any]]:
    """Returns what each rank of a run found that was never killed; one that was killed and resumed is equal to it."""
    straight: list[dict[str, Any]] = run_ranks(climb, world_size, str(directory / "straight"), *shared)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(climb, world_size, str(directory / "run"), *shared, KillAll())
    resumed = run_ranks(climb, world_size, str(directory / "run"), *shared)
    for one, other in zip(straight, resumed, strict=True):
        assert (one["restored"], other["restored"] in (KILLED_BEFORE - 2, KILLED_BEFORE - 1)) == (0, True)
        assert all(torch.equal(tensor, other["weights"][key]) for key, tensor in one["weights"].items())
        assert [figures_of(line) for line in one["log"][-3:]] == [figures_of(line) for line in other["log"][-3:]]
    return straight


@pytest.mark.parametrize(
    ("strategy", "world_size", "adapter"),
    [
        pytest.param("replicated", 1, LORA, marks=pytest.mark.slow),
        pytest.param("replicated", 2, None, marks=pytest.mark.slow),
        pytest.param("replicated", 2, LORA, marks=pytest.mark.slow),
        pytest.param("full", 2, LORA, marks=pytest.mark.slow),
        pytest.param("full", 2, None, marks=pytest.mark.slow),
        pytest.param("replicated", 1, None, marks=pytest.mark.slow),
        pytest.param("checkpointing", 2, {**LORA, "dora": True}, marks=pytest.mark.slow),
        pytest.param("offload", 2, None, marks=pytest.mark.slow),
        pytest.param("zero1", 2, None, marks=pytest.mark.slow),
        pytest.param("tensor", 2, {**LORA, "dora": True}, marks=pytest.mark.slow),
        pytest.param("pipeline", 2, None, marks=pytest.mark.slow),
        pytest.param("pipeline", 2, LORA, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_continues_bit_for_bit(
    tmp_path: Path, pair_corpus: Path, base: Path, strategy: str, world_size: int, adapter: dict[str, Any] | None
) -> None:
    run_dir, shared = tmp_path / "run", (str(base), str(pair_corpus), strategy)
    straight = run_ranks(climb, world_size, str(tmp_path / "straight"), *shared, "sync", adapter, True)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(climb, world_size, str(run_dir), *shared, "process", adapter, True, KillAll())
    resumed = run_ranks(climb, world_size, str(run_dir), *shared, "process", adapter, True)
    for one, other in zip(straight, resumed, strict=True):
        assert (one["restored"], other["restored"] in (KILLED_BEFORE - 2, KILLED_BEFORE - 1)) == (0, True)
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
        assert (one["counters"], one["position"]) == (other["counters"], other["position"])
        assert one["position"] == 8 * STEPS
        assert one["failed"] == other["failed"] == 0
        assert [figures_of(line) for line in one["log"][-3:]] == [figures_of(line) for line in other["log"][-3:]]
    latest = find_latest(run_dir)
    assert latest is not None
    verify(latest, "deep")
    assert len(list((run_dir / "reference").glob("*"))) == (1 if adapter is None else 0)
    last = straight[0]["log"][-1]
    assert last["train/loss"] == pytest.approx(
        last["train/preference_loss"] + OPTIONS["sft_weight"] * last["train/sft_loss"]
    )
    assert last["train/rewards_chosen"] != 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world_size", "adapter"),
    [
        ("replicated", 1, LORA),
        ("replicated", 2, None),
        ("full", 2, LORA),
        # Its forwards before the window leave parameters gathered: gradients of the window before were added.
        pytest.param("full", 2, None, marks=pytest.mark.each),
        ("pipeline", 2, LORA),
    ],
)
def test_a_killed_run_of_single_answers_continues_bit_for_bit(
    tmp_path: Path, answer_corpus: Path, base: Path, strategy: str, world_size: int, adapter: dict[str, Any] | None
) -> None:
    shared = (str(base), str(answer_corpus), strategy, "sync", adapter, True)
    straight = climb_straight_and_killed(tmp_path, world_size, *shared)
    assert straight[0]["log"][-1]["train/rewards_desirable"] != 0.0
    assert len(list((tmp_path / "run/reference").glob("*"))) == (1 if adapter is None else 0)


@pytest.mark.slow
def test_preferences_beside_a_base_of_bytes_start_at_log_two_and_are_learned(tmp_path: Path, pair_corpus: Path) -> None:
    base = make_base(tmp_path / "base", pair_corpus, BASE_FORMATS["nf4"], PAIR_DECODER)
    adapter = {"rank": 3, "alpha": 6.0}
    (found,) = run_ranks(
        climb, 1, str(tmp_path / "run"), str(base), str(pair_corpus), "replicated", "sync", adapter, False
    )
    first, last = found["log"][0], found["log"][-1]
    assert first["train/rewards_chosen"] == 0.0
    assert last["train/rewards_chosen"] != 0.0
    assert found["failed"] == 0


@pytest.mark.slow
@pytest.mark.repeat  # dense models are killed above, and mixtures in `test_mixture_training.py`
@pytest.mark.parametrize(
    ("name", "strategy", "world_size", "adapter"),
    [
        ("softmax", "replicated", 2, None),
        ("shared", "full", 2, None),
        ("shared", "experts_2", 2, None),
        ("linear", "full", 2, {"rank": 3, "alpha": 6.0, "dropout": 0.2}),
        ("linear without experts", "replicated", 1, None),
    ],
)
def test_a_killed_run_of_a_mixture_continues_bit_for_bit(
    tmp_path: Path, pair_corpus: Path, name: str, strategy: str, world_size: int, adapter: dict[str, Any] | None
) -> None:
    base = write_base(tmp_path / "base", pair_corpus, mix(PAIR_DECODER, name))
    shared = (str(base), str(pair_corpus), strategy, "sync", adapter, True)
    straight = climb_straight_and_killed(tmp_path, world_size, *shared)
    assert straight[0]["log"][-1]["train/rewards_chosen"] != 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "adapter", "strategy"),
    [
        ("pair_corpus", {"rank": 3}, "full"),
        *(
            pytest.param("answer_corpus", *case, marks=pytest.mark.each)
            for case in ((None, "full"), ({"rank": 3}, "replicated"))
        ),
        *(("pair_corpus", *case) for case in ((None, "full"), ({"rank": 3}, "replicated"), (None, "replicated"))),
        *(("answer_corpus", *case) for case in (({"rank": 3}, "full"), (None, "replicated"))),
    ],
)
def test_two_ranks_train_as_one(
    tmp_path: Path,
    base: Path,
    strategy: str,
    adapter: dict[str, Any] | None,
    data: str,
    request: pytest.FixtureRequest,
) -> None:
    shared = (str(base), str(request.getfixturevalue(data)), strategy, "sync", adapter, False)
    (one,) = run_ranks(climb, 1, str(tmp_path / "1"), *shared)
    two, _ = run_ranks(climb, 2, str(tmp_path / "2"), *shared)
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], tensor, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    for line, other in zip(one["log"], two["log"], strict=True):
        wanted = {name: value for name, value in figures_of(line).items() if "scale_factor" not in name}
        assert {name: other[name] for name in wanted} == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        assert "validation/reward_accuracy" not in line or 0.0 <= line["validation/reward_accuracy"] <= 1.0
    validated = [line["validation/loss"] for line in one["log"] if "validation/loss" in line]
    assert validated
    of_two = [line["validation/loss"] for line in two["log"] if "validation/loss" in line]
    assert validated == pytest.approx(of_two, rel=1e-5)  # of weights that differ in float32


@pytest.mark.slow
def test_a_damaged_or_lost_reference_is_computed_again_with_the_same_values(
    tmp_path: Path, pair_corpus: Path, base: Path
) -> None:
    shared = (str(base), str(pair_corpus), "replicated", "sync", None, True)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(climb, 1, str(tmp_path / "run"), *shared, KillAll())
    (path,) = (tmp_path / "run" / "reference").glob("*")
    undamaged = path.read_bytes()
    path.write_bytes(undamaged[:-1] + bytes([undamaged[-1] ^ 1]))
    (resumed,) = run_ranks(climb, 1, str(tmp_path / "run"), *shared)
    assert resumed["restored"] == KILLED_BEFORE - 1
    assert path.read_bytes() == undamaged


@pytest.mark.long
def test_compiled_blocks_switch_adapters_off_and_on(tmp_path: Path, pair_corpus: Path, base: Path) -> None:
    runs = []
    for name in ("replicated", "compiled"):
        shared = (str(tmp_path / name), str(base), str(pair_corpus), name, "sync", {"rank": 3}, False)
        runs += run_ranks(climb, 1, *shared, timeout_seconds=600.0)
    eager, compiled = runs
    for line, other in zip(eager["log"], compiled["log"], strict=True):
        for name in ("train/loss", "train/reward_margin", "train/log_probs_rejected"):
            assert other[name] == pytest.approx(line[name], rel=1e-3, abs=1e-3), name
