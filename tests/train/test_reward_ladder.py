"""Reward models under strategies: equal on one rank and two, killed and resumed bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from genesis.base.errors import UserError
from genesis.data.sources import SourceOptions
from genesis.model.adapter import AdapterConfig
from genesis.objectives import RewardModel
from genesis.optim import AdamW
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks.testing import run_ranks
from tests.data.pair_corpora import RECORDS, SEQ_LEN, write_pair_corpus
from tests.data.test_conversations import write_lines
from tests.train.test_ladder import KILLED_BEFORE, KillAll
from tests.train.test_preference_ladder import PAIR_DECODER, figures_of, fit_from_base, write_base

SCORER = replace(PAIR_DECODER, num_scores=1)


@pytest.fixture(scope="module")
def rated_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of pairs with margins, as TRL's column has them."""
    directory = tmp_path_factory.mktemp("rated")
    rated = [{**record, "margin": float(number % 4)} for number, record in enumerate(RECORDS)]
    write_lines(directory / "rated.jsonl", rated)
    source = SourceOptions("pairs", (str(directory / "rated.jsonl"),), chat="pairs", value_field="margin")
    return write_pair_corpus(directory, sources=(source,))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory, rated_corpus: Path) -> Path:
    return write_base(tmp_path_factory.mktemp("scorer") / "run", rated_corpus, SCORER)


def climb(
    directory: str,
    base: str,
    corpus: str,
    strategy: str,
    adapter: dict[str, Any] | None,
    has_dropout: bool,
    *callbacks: Any,
) -> dict[str, Any]:
    """Trains a reward model from the latest checkpoint in `directory`, or from the base."""
    config = None if adapter is None else AdapterConfig(**adapter)
    decoder = replace(SCORER, dropout=SCORER.dropout if has_dropout else 0.0)  # ranks draw other masks than one
    objective = RewardModel(center_rewards_coefficient=0.05, margin_scale=0.2)
    module = GenesisModule(decoder, AdamW(lr=3e-3), adapter=config, objective=objective)
    data = CorpusDataModule(corpus, seq_len=SEQ_LEN, micro_batch_size=2, global_batch_size=8)
    return fit_from_base(directory, base, strategy, "sync", module, data, *callbacks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world_size", "adapter"),
    [
        ("replicated", 2, None),
        # One row of the output weight for two ranks: one of them holds nothing of it.
        pytest.param("full", 2, None, marks=pytest.mark.each),
        ("pipeline", 2, None),
        ("replicated", 1, {"rank": 3, "alpha": 6.0, "also_train": ("head",)}),
    ],
)
def test_a_killed_run_continues_bit_for_bit(
    tmp_path: Path, rated_corpus: Path, scorer: Path, strategy: str, world_size: int, adapter: dict[str, Any] | None
) -> None:
    shared = (str(scorer), str(rated_corpus), strategy, adapter, True)
    straight = run_ranks(climb, world_size, str(tmp_path / "straight"), *shared)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(climb, world_size, str(tmp_path / "run"), *shared, KillAll())
    resumed = run_ranks(climb, world_size, str(tmp_path / "run"), *shared)
    for one, other in zip(straight, resumed, strict=True):
        assert (one["restored"], other["restored"] in (KILLED_BEFORE - 2, KILLED_BEFORE - 1)) == (0, True)
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
        assert (one["counters"], one["position"]) == (other["counters"], other["position"])
        assert [figures_of(line) for line in one["log"][-3:]] == [figures_of(line) for line in other["log"][-3:]]
    last = straight[0]["log"][-1]
    assert 0.0 <= last["train/reward_accuracy"] <= 1.0
    assert last["train/reward_margin"] == pytest.approx(
        last["train/rewards_chosen"] - last["train/rewards_rejected"], abs=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full", "replicated", "pipeline"])
def test_two_ranks_train_as_one(tmp_path: Path, rated_corpus: Path, scorer: Path, strategy: str) -> None:
    shared = (str(scorer), str(rated_corpus))
    (one,) = run_ranks(climb, 1, str(tmp_path / "1"), *shared, "replicated", None, False)
    two, *_ = run_ranks(climb, 2, str(tmp_path / "2"), *shared, strategy, None, False)
    for name, tensor in two["weights"].items():  # those of this rank's stage
        torch.testing.assert_close(tensor, one["weights"][name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    for line, other in zip(one["log"], two["log"], strict=True):
        wanted = {name: value for name, value in figures_of(line).items() if "scale_factor" not in name}
        assert {name: other[name] for name in wanted} == pytest.approx(wanted, rel=1e-3, abs=1e-4)
    validated = [line["validation/loss"] for line in one["log"] if "validation/loss" in line]
    assert validated
    assert validated == pytest.approx(
        [line["validation/loss"] for line in two["log"] if "validation/loss" in line], rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor", "context"])
def test_axes_that_divide_rows_or_the_score_are_refused_in_one_line(
    tmp_path: Path, rated_corpus: Path, scorer: Path, strategy: str
) -> None:
    kind = f"does not train under {strategy} parallelism"
    with pytest.raises(AssertionError, match=kind):
        run_ranks(climb, 2, str(tmp_path / "run"), str(scorer), str(rated_corpus), strategy, None, False)


def test_margins_that_are_no_whole_numbers_are_refused_with_their_row(tmp_path: Path) -> None:
    write_lines(tmp_path / "rated.jsonl", [{**record, "margin": 0.5} for record in RECORDS])
    source = SourceOptions("pairs", (str(tmp_path / "rated.jsonl"),), chat="pairs", value_field="margin")
    wanted = r"line 1: margin, the value_field, is 0\.5: it must be .* give a margin in hundredths, and train with marg"
    with pytest.raises(UserError, match=wanted):
        write_pair_corpus(tmp_path, sources=(source,))
