"""A text as it grows: whole characters, no stop text, tokens with their places."""

import random
from itertools import pairwise

import pytest

from genesis.generate.batch import NewToken
from genesis.serve.choice import Choice, token_name
from genesis.tokenizer.open import open_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file):
    return open_tokenizer(tokenizer_file)


def feed(choice, ids, *, is_last=True):
    """Returns what is shown for each of `ids`, until the text has ended."""
    shown = []
    for index, token in enumerate(ids):
        last = is_last and index == len(ids) - 1
        shown.append(choice.feed(NewToken(0, token, -1.0 - index, ((token, -1.0), (5, -2.0)), last)))
        if choice.finish_reason:
            break
    return shown


def text_of(shown):
    return "".join(part.text for part in shown)


def tokens_of(shown):
    return [token for part in shown for token in part.tokens]


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    ids = tokenizer.encode("a\U0001f600b")
    assert len(ids) > 3
    shown = feed(Choice(tokenizer), ids)
    assert text_of(shown) == "a\U0001f600b"
    assert all("\ufffd" not in part.text for part in shown)


def test_a_character_that_never_came_whole_is_marked_at_the_end(tokenizer):
    shown = feed(Choice(tokenizer), tokenizer.encode("\U0001f600")[:2])
    assert [part.text for part in shown] == ["", "\ufffd"]


def test_the_offsets_cut_the_text_into_its_tokens(tokenizer):
    text = "alpha12 \u00e9t\u00e9 \U0001f600\n\n return"
    shown = feed(Choice(tokenizer, offset=7), tokenizer.encode(text))
    tokens = tokens_of(shown)
    bounds = [token.offset - 7 for token in tokens] + [len(text)]
    assert bounds[0] == 0
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    assert "".join(pieces) == text
    for token, piece in zip(tokens, pieces, strict=True):
        assert token.name == piece or token.name.startswith("bytes:")


def test_every_token_has_a_name_of_its_own(tokenizer):
    names = [token_name(tokenizer, token) for token in range(tokenizer.vocab_size)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("stop", [("beta",), ("a1", "zzz"), (" ",), ("\n\nclass", "\n\nclasses"), ("7",), ("\u00e9",)])
def test_a_stop_text_ends_the_text_and_is_never_shown_however_it_is_cut_into_tokens(tokenizer, stop):
    text = "alpha1 beta\n\nclass 47 \u00e9t\u00e9 def 3"
    wanted = text[: min(text.find(other) for other in stop if other in text)]
    chooser = random.Random(0)
    for _ in range(20):
        cuts = sorted(chooser.sample(range(1, len(text)), 6))
        ids = [
            token
            for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
            for token in tokenizer.encode(text[start:end])
        ]
        choice = Choice(tokenizer, stop)
        shown = feed(choice, ids)
        assert text_of(shown) == wanted
        assert choice.finish_reason == "stop"
        assert choice.num_tokens < len(ids)
        tokens = tokens_of(shown)
        assert all(token.offset < max(1, len(wanted)) for token in tokens)
        if not any(token.name.startswith("bytes:") for token in tokens):
            assert "".join(token.name for token in tokens) == wanted


@pytest.mark.parametrize(
    ("stop", "wanted"),
    [
        # Reported as LostRuins/koboldcpp#791, vllm-project/vllm#2123 and thinking-machines-lab/tinker-feedback#90.
        ("</s>", "alpha beta"),
        ("beta</s>", "alpha "),
        ("</s>\nuser", "alpha beta"),
        ("gamma</s>", None),
        ("/s", None),
    ],
)
def test_a_stop_text_that_spells_a_control_symbol_ends_the_text_at_the_symbol(tokenizer, stop, wanted):
    choice = Choice(tokenizer, ("zzz", stop))
    ids = [*tokenizer.encode("alpha beta"), tokenizer.eos_id, *tokenizer.encode(" 12")]
    assert text_of(feed(choice, ids)) == (wanted or "alpha beta 12")
    assert choice.finish_reason == ("length" if wanted is None else "stop")
    assert choice.num_tokens == len(ids) - (0 if wanted is None else len(tokenizer.encode(" 12")))


def test_a_token_that_ends_the_text_is_not_shown_even_if_it_has_text(tokenizer):
    (last,) = set(tokenizer.encode("12")[-1:])
    choice = Choice(tokenizer, stop_ids={last})
    assert text_of(feed(choice, [*tokenizer.encode("alpha"), last])) == "alpha"
    assert choice.finish_reason == "stop"


def test_what_might_become_a_stop_text_is_held_back_and_comes_when_it_does_not(tokenizer):
    choice = Choice(tokenizer, ("alphabet",))
    ids = tokenizer.encode("alpha") + tokenizer.encode("12")
    shown = feed(choice, ids)
    assert shown[0].text == ""
    assert text_of(shown) == "alpha12"
    assert choice.finish_reason == "length"


def test_the_end_token_is_a_token_without_text(tokenizer):
    choice = Choice(tokenizer, stop_ids=tokenizer.stop_ids)
    shown = feed(choice, [*tokenizer.encode("def "), tokenizer.eos_id])
    assert text_of(shown) == "def "
    assert choice.finish_reason == "stop"
    last = tokens_of(shown)[-1]
    assert (last.name, last.offset) == (tokenizer.pieces[tokenizer.eos_id], 4)


def test_a_token_that_the_tokenizer_does_not_have_is_one_without_text(tokenizer):
    shown = feed(Choice(tokenizer), [*tokenizer.encode("def "), tokenizer.vocab_size + 1, *tokenizer.encode("alpha")])
    assert text_of(shown) == "def alpha"
    assert f"<id {tokenizer.vocab_size + 1}>" in [token.name for token in tokens_of(shown)]


def test_an_alternative_without_probability_is_left_out(tokenizer):
    choice = Choice(tokenizer)
    shown = choice.feed(NewToken(0, 300, -0.5, ((300, -0.5), (301, float("-inf"))), True))
    (token,) = shown.tokens
    assert token.top_logprobs == {token.name: -0.5}
