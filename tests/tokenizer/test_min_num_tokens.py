"""A text has at least so many tokens as its length demands, so that no text that fits is refused."""

import json
import unicodedata

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from genesis.tokenizer.huggingface import HuggingFaceTokenizer
from genesis.tokenizer.open import open_tokenizer
from tests.chat.support import write_tokenizer
from tests.fixtures import SCRIPTS

COMPOSED = "\u1fa7\u0390\uac01\u1e69e\u0301\u212b\u2126\u0344\U0001d15e\U0002f800a\u0323\u0307"
PARTS = ["a", " ", "\n\t ", "<|im_start|>", "</s>", "<tool_call>", "assistant", *COMPOSED, *SCRIPTS.values()]


@pytest.fixture(scope="module")
def opened(tmp_path_factory, tokenizer_file):
    kinds = {kind: write_tokenizer(tmp_path_factory.mktemp(kind), kind=kind) for kind in ("qwen", "llama")}
    return {"sentencepiece": open_tokenizer(tokenizer_file), **{kind: open_tokenizer(kinds[kind]) for kind in kinds}}


@pytest.mark.parametrize("kind", ["sentencepiece", "qwen", "llama"])
@settings(max_examples=25)
@given(parts=st.lists(st.sampled_from(PARTS) | st.text(max_size=8), max_size=12), times=st.integers(1, 50))
def test_no_text_has_fewer_tokens(opened, kind, parts, times):
    text = "".join(parts) * times
    assert len(opened[kind].encode_with_controls(text)) >= opened[kind].min_num_tokens(text)


def test_a_text_that_its_normal_form_shortens_counts_by_that_form(tmp_path):
    directory = write_tokenizer(tmp_path)
    built = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    built.add_tokens([tokenizers.AddedToken("\u1fa7" * 20, special=False, normalized=True)])
    built.save(str(directory / "tokenizer.json"))
    tokenizer, text = open_tokenizer(directory), unicodedata.normalize("NFD", "\u1fa7" * 2000)
    assert len(tokenizer.encode_with_controls(text)) == 100 >= tokenizer.min_num_tokens(text) > 0


def test_a_long_text_is_known_to_have_many_tokens(opened):
    for tokenizer in opened.values():
        assert tokenizer.min_num_tokens("a " * 1_000_000) > 10_000
        assert tokenizer.min_num_tokens("") == 0


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "ab"}, "content": ""}},
        {"takes_spaces": True},
    ],
    ids=["strip", "nfkc", "replace", "takes spaces"],
)
def test_where_a_token_may_stand_for_any_number_of_bytes_no_number_is_known(tmp_path, change):
    directory = write_tokenizer(tmp_path)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    if change.pop("takes_spaces", False):
        content["added_tokens"][0]["lstrip"] = True
    file.write_text(json.dumps({**content, **change}))
    assert HuggingFaceTokenizer({"tokenizer.json": file.read_bytes()}).min_num_tokens("ab " * 1_000_000) == 0
