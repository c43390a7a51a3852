"""Single answers with values: each beside the answer to the next other prompt of its source."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genesis.base.errors import UserError
from genesis.data.corpus_data import CorpusData
from genesis.data.loader import VALUES, Ranks
from genesis.data.pair_windows import PAIRS, build_pair_window, read_mismatched
from genesis.data.pairs import PairSet
from genesis.data.training_data import TrainingOptions
from genesis.data.window import IGNORE_INDEX
from tests.data.pair_corpora import SEQ_LEN, write_answer_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answer_corpus(tmp_path_factory.mktemp("answers"))


def open_data(corpus: Path, ranks: Ranks | None = None, **options: Any) -> CorpusData:
    given = TrainingOptions(seq_len=SEQ_LEN, micro_batch_size=2, global_batch_size=8, **options)
    data = CorpusData(corpus, given, verify_hashes="first_touch", tokenizer_hash=None)
    data.has_answers = True
    data.open(ranks or Ranks())
    return data


def answers_of(data: CorpusData) -> PairSet:
    assert data.pairs is not None
    return data.pairs


def test_each_answer_has_its_value_and_a_prompt_with_the_answer_to_the_next_other_prompt(corpus: Path) -> None:
    answers = answers_of(open_data(corpus))
    read = [answers.read(number) for number in range(answers.first_of_validation)]
    prompts = [one.chosen.tokens[: one.chosen.has_label.argmax()].tolist() for one in read]
    ends = [one.chosen.tokens[one.chosen.has_label.argmax() :].tolist() for one in read]
    assert {one.value for one in read} == {0, 1}
    for number, one in enumerate(read):
        following = [(number + distance) % len(read) for distance in range(1, len(read))]
        other = next(place for place in following if prompts[place] != prompts[number])
        assert one.rejected.tokens.tolist() == prompts[number] + ends[other]
        assert int(one.rejected.has_label.argmax()) == len(prompts[number])
    # Two answers to each prompt follow one another: half of the next ones are to the same prompt.
    assert any(prompts[number] == prompts[number + 1] for number in range(len(read) - 1))


def test_windows_are_the_same_for_any_number_of_ranks(corpus: Path) -> None:
    data = open_data(corpus)
    whole = data.window(0)
    assert whole.num_units == {PAIRS: 8}
    shares = [open_data(corpus, Ranks(rank, 2)).window(0) for rank in (0, 1)]
    for one, other in zip(whole.micro_batches, [m for share in shares for m in share.micro_batches], strict=True):
        assert one.tensors.keys() == other.tensors.keys()
        assert all(np.array_equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    assert sum(int((one.labels != IGNORE_INDEX).sum()) for one in whole.micro_batches) == whole.num_valid_tokens


def test_a_mismatched_answer_is_cut_where_a_sequence_ends(corpus: Path) -> None:
    data = open_data(corpus)
    answer = answers_of(data).read(0)
    num_kept = len(answer.rejected.tokens) - 2
    wanted = answer.rejected.tokens[:num_kept][answer.rejected.has_label[:num_kept]].tolist()
    short = replace(data.sequence_format, seq_len=num_kept)
    for is_padded in (False, True):
        window = build_pair_window([answer], short, 1, 1, is_padded=is_padded, is_valued=True)
        (micro_batch,) = window.micro_batches
        assert micro_batch.extra[VALUES].tolist() == [answer.value]
        mismatched = read_mismatched(micro_batch)
        found = mismatched.labels[mismatched.labels != IGNORE_INDEX].tolist()
        assert found == wanted


def test_a_source_with_one_prompt_and_a_packing_are_refused(corpus: Path) -> None:
    data = open_data(corpus)
    (source,) = answers_of(data).train
    source.num_sequences = 2  # two answers to one prompt
    first = next(n for n in range(20) if _prompt(source, n) == _prompt(source, n + 1))
    source._ends = source._ends[first:]
    with pytest.raises(UserError, match="source 'answers' has answers to one prompt alone"):
        source.read(0)
    with pytest.raises(UserError, match=r"data.packing is pad, and .* has single answers, which none joins"):
        open_data(corpus, packing="pad")


def _prompt(source: Any, number: int) -> list[int]:
    answer, _ = source._read_document(number)
    return answer.tokens[: answer.has_label.argmax()].tolist()
