"""DPO with compiled blocks and in mixed precision: the numbers of the plain run."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from genesis.export.importing import save_weights
from genesis.model.decoder import Decoder
from genesis.objectives.preference import DPO
from genesis.optim import AdamW
from genesis.tokenizer.open import open_tokenizer
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, SkipAwareLR, TokenCounters
from genesis_callbacks.testing import run_ranks
from tests.data.pair_corpora import SEQ_LEN, write_pair_corpus
from tests.train.support import build_strategy, build_trainer, whole
from tests.train.test_preference_ladder import PAIR_DECODER, KeepLog, figures_of

STEPS = 3
DECODER = replace(PAIR_DECODER, dropout=0.0)


@pytest.fixture(scope="module")
def pair_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair_corpus(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, pair_corpus: Path) -> Path:
    decoder = Decoder(DECODER)
    decoder.init_weights(0)
    directory = tmp_path_factory.mktemp("base") / "run"
    directory.mkdir()
    return save_weights(decoder.state_dict(), DECODER, open_tokenizer(pair_corpus), directory / "checkpoints")


def train(
    directory: str,
    base: str,
    corpus: str,
    strategy: str = "replicated",
    precision: Any = "32-true",
) -> dict[str, Any]:
    """Trains a few steps from the base and returns weights, log lines and the shapes of the micro-batches."""
    objective = DPO(beta=0.5, reference=base)
    optimizer = AdamW(lr=3e-3)
    module = GenesisModule(DECODER, optimizer, objective=objective)
    module.is_restored = True
    data = CorpusDataModule(corpus, seq_len=SEQ_LEN, micro_batch_size=2, global_batch_size=4)
    keep = KeepLog()
    checkpoint = AsyncProcessCheckpoint(run_dir=directory, every_n_steps=100, mode="sync", restore="weights")
    callbacks = [TokenCounters(), SkipAwareLR(total_updates=STEPS), keep, checkpoint]
    world_size, options = int(os.environ["WORLD_SIZE"]), {"gradient_clip_val": 1.0, "precision": precision}
    trainer = build_trainer(build_strategy(strategy), world_size, STEPS, callbacks, **options)
    trainer.fit(module, data, ckpt_path=Path(base))
    return {
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
        "log": [figures_of(line) for line in keep.steps],
        "pads": data.pads_pairs,
    }


def assert_same(one: dict[str, Any], other: dict[str, Any], *, rel: float) -> None:
    for line, again in zip(one["log"], other["log"], strict=True):
        names = ("train/loss", "train/reward_margin", "train/log_probs_chosen", "train/grad_norm")
        assert [again[name] for name in names] == pytest.approx([line[name] for name in names], rel=rel, abs=rel)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicated", "full"])
def test_mixed_precision_stays_near_float32(tmp_path: Path, pair_corpus: Path, base: Path, strategy: str) -> None:
    shared = (str(base), str(pair_corpus))
    (exact,) = run_ranks(train, 1, str(tmp_path / "exact"), *shared)
    mixed = run_ranks(train, 2, str(tmp_path / "mixed"), *shared, strategy, "bf16-mixed")
    assert_same(exact, mixed[0], rel=3e-2)
    assert mixed[0]["log"][0]["train/loss"] == pytest.approx(0.6931, abs=2e-3)  # policy and reference are one model


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["compiled", "compiled_shards"])
def test_compiled_blocks_get_rows_of_one_length_and_give_the_same_numbers(
    tmp_path: Path, pair_corpus: Path, base: Path, strategy: str
) -> None:
    shared = (str(base), str(pair_corpus))
    (eager,) = run_ranks(train, 1, str(tmp_path / "eager"), *shared)
    (compiled,) = run_ranks(train, 1, str(tmp_path / "compiled"), *shared, strategy)
    assert (eager["pads"], compiled["pads"]) == (False, True)
    assert_same(eager, compiled, rel=1e-3)
