"""Control symbols that are only text, in every kind of tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from genesis.tokenizer.literal import LiteralControls
from genesis.tokenizer.open import open_tokenizer
from tests.data.corpus_support import make_tokenizer
from tests.tokenizer.test_huggingface import KINDS, llama2


def metaspace(directory: Path) -> Path:
    """A tokenizer that writes a space before the first piece of a text, and before no other piece."""
    path = llama2(directory) / "tokenizer.json"
    built = tokenizers.Tokenizer.from_file(str(path))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    content = json.loads(built.to_str())
    content["normalizer"] = None
    path.write_text(json.dumps(content))
    return directory


ALL: dict[str, Callable[[Path], Path]] = {
    **KINDS,
    "metaspace": metaspace,
    "sentencepiece": lambda directory: make_tokenizer(directory / "tokenizer"),
}


@pytest.mark.parametrize("kind", ALL)
def test_the_symbols_of_a_text_split_it_as_before_where_others_are_only_text(tmp_path: Path, kind: str) -> None:
    tokenizer = open_tokenizer(ALL[kind](tmp_path))
    symbols = [piece for token, piece in enumerate(tokenizer.pieces) if tokenizer.is_control(token)]
    first, second = symbols[-2:]
    sound = f"{first}the  ten{second} {first} in there{second}the{second}"
    ids, offsets = (found.tolist() for found in tokenizer.encode_with_offsets(sound))
    for text in (second, f" a {second} in{first}{symbols[0]}"):
        given = sound + tokenizer.literal.hide(text)
        mixed, places = (found.tolist() for found in tokenizer.encode_with_offsets(given))
        assert tokenizer.encode_with_controls(given) == mixed
        assert (mixed[: len(ids)], places[: len(ids)]) == (ids, offsets)
        assert not any(map(tokenizer.is_control, mixed[len(ids) :]))
        assert tokenizer.decode_bytes(mixed[len(ids) :]).decode().strip() == text.strip()
        assert places[-1][1] == len(given)


def test_only_what_spells_a_symbol_is_hidden_and_all_of_it_is_found_again() -> None:
    literal = LiteralControls(["<s>", "<|end|>", "[INST]", "<|end|"])
    value = {"content": "a <|end|> b <|end| [INST]<s> <<s>s>", "n": [1, None, "<b> [x]"]}
    hidden = literal.hide(value)
    assert literal.hide(hidden) == hidden
    assert not any(spelling in hidden["content"] for spelling in ("<s>", "<|end|", "[INST]"))
    assert hidden["n"] == value["n"]
    assert len(hidden["content"]) == len(value["content"])
    assert literal.reveal(hidden["content"]) == value["content"]
    assert literal.swap(literal.swap("<s>" + hidden["content"])) == "<s>" + hidden["content"]
    private = "\ufdd0 \ufdd1|x \U000f0001"
    assert (literal.hide(private), literal.reveal(private)) == (private, private)
