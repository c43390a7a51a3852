import pickle
from itertools import pairwise

import pytest

from genesis.data.clean.words import Words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't stop... (it is 3.5 m!)", ["Don't", "stop", "it", "is", "3.5", "m"]),
        ("l\u2019été\tx_1 -- = f(y)\n", ["l\u2019été", "x_1", "--", "=", "f(y"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("abc这是。def, ไทย", ["abc", "这", "是", "def", *"ไทย"]),
        ("  \n", []),
    ],
)
def test_a_text_of_any_script_is_cut_into_words(text: str, words: list[str]) -> None:
    assert Words().word_tokenize(text) == words


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ('It is 3.5 m. "Really?" he said.', ["It is 3.5 m.", '"Really?"', "he said."]),
        ("这是中文。那也是。", ["这是中文。", "那也是。"]),
        ("a heading\nand a line", ["a heading", "and a line"]),
        (" \n", []),
    ],
)
def test_a_text_of_any_script_is_cut_into_sentences(text: str, sentences: list[str]) -> None:
    assert Words().sent_tokenize(text) == sentences


def test_spans_hold_all_of_the_text_that_is_no_space() -> None:
    text = "One. Two!\n\nThree 这是。four"
    spans = Words().span_tokenize(text)
    assert "".join(text[start:end] for start, end in spans).split() == text.split()
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_filters_that_came_to_a_worker_share_what_was_cut() -> None:
    # datatrove remembers the words of the last texts by text and tokenizer.
    copy = pickle.loads(pickle.dumps(Words()))
    assert copy == Words()
    assert hash(copy) == hash(Words())
    assert copy != "en"
