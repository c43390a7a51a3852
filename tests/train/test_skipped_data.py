"""Skipped data, by corpora and streams: what is passed, what is counted, and what a resume without the option skips."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genesis.base.errors import UserError
from genesis.data.loader import Ranks
from genesis.data.prompts import PromptOptions
from genesis.data.sources import SourceOptions
from genesis.data.training_data import TrainingData
from genesis.data.window import IGNORE_INDEX, AccumulationWindow
from genesis.train.data_module import CorpusDataModule
from tests.data.pair_corpora import write_pair_corpus
from tests.train import test_data_module as corpora
from tests.train import test_stream_data_module as streams
from tests.train.test_data_module import PACKINGS, corpus
from tests.train.test_stream_data_module import directory, tokenizer

__all__ = ["corpus", "directory", "tokenizer"]

NUM_WINDOWS = 8


def read(training: TrainingData, until: int, ranks: Ranks | None = None) -> list[AccumulationWindow]:
    """Trains on windows up to a number of them."""
    training.open(ranks or Ranks())
    windows, size = [], training.options.global_batch_size
    while training.cursor.position < until * size:
        windows.append(training.window(training.cursor.position))
        training.advance(windows[-1], has_tokens=windows[-1].num_valid_tokens > 0)
    return windows


def tensors(window: AccumulationWindow) -> list[list[Any]]:
    return [[micro_batch.input_ids.tolist(), micro_batch.labels.tolist()] for micro_batch in window.micro_batches]


def usage(training: TrainingData) -> dict[str, dict[str, float]]:
    return training.sum_usage(lambda values: values)


def check_skips(build: Any, skipped: int) -> None:
    """Compares data that skip one window with the same data that do not."""
    size = build().training.options.global_batch_size
    plain, told = build().training, build(skip_positions=[[skipped * size + 1, (skipped + 1) * size]]).training
    expected, found = read(plain, NUM_WINDOWS), read(told, NUM_WINDOWS)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one.data_position == other.data_position
        if number != skipped:
            assert not other.is_skipped
            assert tensors(one) == tensors(other)
            continue
        assert other.is_skipped
        assert (other.num_valid_tokens, other.num_bytes) == (0, 0)
        assert [len(each.input_ids) for each in other.micro_batches] == [1] * len(one.micro_batches)
        assert all((micro_batch.labels == IGNORE_INDEX).all() for micro_batch in other.micro_batches)
    for name, figures in usage(plain).items():
        assert figures["epochs"] == usage(told)[name]["epochs"], "the data are passed"
    lost = sum(figures["tokens"] for figures in usage(plain).values()) - sum(
        figures["tokens"] for figures in usage(told).values()
    )
    assert lost > 0
    # A run that is killed anywhere and continues without the option.
    for until in (0, skipped, skipped + 1, NUM_WINDOWS - 1):
        killed = build(skip_positions=[[skipped * size, skipped * size + 1]]).training
        read(killed, until)
        resumed = build()
        resumed.load_state_dict(resumed.combine_rank_states([killed.state()]))
        for one, other in zip(found[until:], read(resumed.training, NUM_WINDOWS), strict=True):
            assert (one.data_position, one.is_skipped, tensors(one)) == (
                other.data_position,
                other.is_skipped,
                tensors(other),
            )
        assert usage(resumed.training) == usage(told)
        assert resumed.state_dict() == told.state()


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_corpus_skips_windows_and_a_resume_at_any_step_skips_them_without_the_option(
    corpus: Path, packing: str
) -> None:
    check_skips(lambda **changes: corpora.data_module(corpus, packing=packing, **changes), skipped=3)


@pytest.mark.slow
def test_a_stream_skips_windows_and_a_resume_at_any_step_skips_them_without_the_option(
    directory: Path, tokenizer: Path
) -> None:
    check_skips(lambda **changes: streams.data_module(directory, tokenizer, **changes), skipped=3)


def test_ranks_skip_the_same_windows_and_count_no_token_of_them(corpus: Path) -> None:
    for rank in range(2):
        training = corpora.data_module(corpus, skip_positions=[[4, 8]]).training
        windows = read(training, 3, Ranks(rank, 2))
        assert [(window.is_skipped, len(window.micro_batches)) for window in windows] == [
            (False, 2),
            (True, 2),
            (False, 2),
        ]


def test_a_skipped_window_of_a_cache_has_the_columns_that_the_objective_reads(corpus: Path) -> None:
    class Numbers:
        def read(self, source_ids: Any, sequence_ids: Any) -> dict[str, torch.Tensor]:
            return {"numbers": torch.from_numpy(sequence_ids)}

    training: Any = corpora.data_module(corpus, skip_positions=[[4, 8]], micro_batch_size=2).training
    training.columns = Numbers()
    skipped = read(training, 2)[1]
    assert [micro_batch.extra["numbers"].shape for micro_batch in skipped.micro_batches] == [(1,), (1,)]


def test_a_resume_reports_positions_that_are_trained_already(corpus: Path) -> None:
    trained = corpora.data_module(corpus).training
    read(trained, 3)
    late = corpora.data_module(corpus, skip_positions=[[4, 8], [16, 20]]).training
    note = late.load_state(trained.state())
    assert note == (
        "data.skip_positions has positions before the checkpoint's, 12 (4 to 7): what was trained there is not skipped"
    )
    assert late.cursor.order.skipped == ((16, 20),)


def test_pairs_and_prompts_refuse_to_be_skipped_in_one_line(tmp_path: Path) -> None:
    pairs = CorpusDataModule(
        str(write_pair_corpus(tmp_path)), seq_len=64, micro_batch_size=1, global_batch_size=2, skip_positions=[[0, 2]]
    )
    with pytest.raises(UserError, match=r"^data\.skip_positions cannot skip pairs of answers: leave it out"):
        pairs.training.open(Ranks())
    prompts = PromptOptions((SourceOptions("questions", ("questions.jsonl",)),), "tokenizer", "reward.py:reward")
    with pytest.raises(UserError, match=r"^data\.skip_positions cannot skip prompts: leave it out"):
        CorpusDataModule(prompts=prompts, seq_len=64, micro_batch_size=1, global_batch_size=2, skip_positions=[[0, 2]])
