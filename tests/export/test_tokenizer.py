"""The fast tokenizer is ours, id by id, or it is refused."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from genesis.base.errors import UserError
from genesis.export.texts import SCRIPTS
from genesis.export.tokenizer import compare_fast_tokenizer, compare_tokenizers
from genesis.tokenizer.fast_form import FAST_NAME
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.sentencepiece import SentencePieceTokenizer
from genesis.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return open_tokenizer(tokenizer_file)


@pytest.mark.slow
def test_every_kind_of_text_is_compared(tokenizer: Tokenizer) -> None:
    counts = compare_fast_tokenizer(tokenizer, tokenizer.huggingface_files(256)[FAST_NAME])
    assert counts["bytes"] == 256
    assert counts["characters"] > 2000
    assert counts["scripts"] == len(SCRIPTS) >= 10
    assert counts["runs"] > 100


@pytest.mark.parametrize("broken", ["bytes", "characters", "runs", pytest.param("spaces", marks=pytest.mark.slow)])
def test_one_text_that_comes_out_otherwise_is_refused_with_its_kind(tokenizer: Tokenizer, broken: str) -> None:
    text = {"bytes": "\x85", "characters": "\n", "runs": "x" + "=" * 7 + "y", "spaces": " \u2581 \u2581\u2581x"}[broken]
    with pytest.raises(UserError, match="no exact fast form") as error:
        compare_tokenizers(tokenizer, lambda given: [0] if given == text else tokenizer.encode(given), tokenizer.decode)
    assert f"({broken})" in str(error.value) or text in "".join(map(chr, range(256)))
    assert "\n" not in str(error.value)


def test_a_text_that_does_not_come_back_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"does not decode .* exactly"):
        compare_tokenizers(tokenizer, tokenizer.encode, lambda ids: tokenizer.decode(ids).strip())


@pytest.mark.slow
def test_merges_in_another_order_are_found(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sentencepiece.SentencePieceProcessor, "get_score", lambda self, token: float(token), raising=True
    )
    fast = tokenizer.huggingface_files(256)[FAST_NAME]
    with pytest.raises(UserError, match="no exact fast form"):
        compare_fast_tokenizer(tokenizer, fast)


def test_a_unigram_model_is_refused() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in SCRIPTS.values() for _ in range(20)]),
        model_writer=model,
        model_type="unigram",
        vocab_size=700,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        pad_id=3,
        minloglevel=3,
    )
    tokenizer = SentencePieceTokenizer(model.getvalue())
    fast = tokenizer.huggingface_files(256)[FAST_NAME]
    with pytest.raises(UserError, match="no exact fast form"):
        compare_fast_tokenizer(tokenizer, fast)


def test_transformers_puts_bos_first_and_reads_control_symbols_as_text(tokenizer: Tokenizer, exported: Path) -> None:
    fast = AutoTokenizer.from_pretrained(exported)
    text = "a</s> <|user|>\u2581"
    assert fast(text).input_ids == [tokenizer.bos_id, *tokenizer.encode(text)]
    assert fast.decode(fast(text).input_ids, skip_special_tokens=True) == text
    assert (fast.bos_token_id, fast.eos_token_id, fast.pad_token_id) == (
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.pad_id,
    )
    assert len(fast) == tokenizer.vocab_size


def test_other_tools_are_told_that_no_space_comes_before_a_text(tokenizer: Tokenizer, exported: Path) -> None:
    assert json.loads((exported / "tokenizer_config.json").read_bytes())["add_prefix_space"] is False
    fast = AutoTokenizer.from_pretrained(exported)
    assert fast("class", add_special_tokens=False).input_ids == tokenizer.encode("class") != tokenizer.encode(" class")
