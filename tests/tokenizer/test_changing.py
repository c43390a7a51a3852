"""Unigram models and WordPiece: the ids of transformers, the bytes that they keep, and what is lost in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from genesis.base.errors import UserError
from genesis.export.gguf_tokenizer import describe_tokenizer
from genesis.export.texts import SCRIPTS
from genesis.export.tokenizer import compare_tokenizers
from genesis.generate.grammar import compile_grammar
from genesis.serve.errors import ApiError
from genesis.serve.prompt import Facts, encode_prompts
from genesis.serve.request import parse_completion
from genesis.tokenizer.addition import TokenAddition
from genesis.tokenizer.files import write_files
from genesis.tokenizer.losses import find_losses, writes
from genesis.tokenizer.open import build_tokenizer, extend_tokenizer, open_tokenizer
from genesis.tokenizer.tokenizer import StreamingDecoder, Tokenizer, encode_prompt, frame_document
from tests.tokenizer.changing import CHANGING, bert, t5, train_sentencepiece
from tests.tokenizer.test_huggingface import HARD, qwen

LOST = {
    "t5": "replaces characters by compatible ones, drops spaces at the ends, joins spaces, makes spaces of line "
    "breaks, drops characters without a token",
    "albert": "lower-cases letters, strips accents, replaces characters by compatible ones, drops spaces at the ends, "
    "joins spaces, makes spaces of line breaks, drops characters without a token",
    "xlnet": "replaces characters by compatible ones, joins spaces, makes spaces of line breaks, drops "
    "characters without a token",
    "unigram of bytes": None,
    "bert": "lower-cases letters, strips accents, drops spaces at the ends, joins spaces, makes spaces of line breaks, "
    "moves spaces beside punctuation, drops characters without a token",
    "cased bert": "drops spaces at the ends, joins spaces, makes spaces of line breaks, moves spaces beside "
    "punctuation, drops characters without a token",
}
LOST["xlm-roberta"] = LOST["sentencepiece unigram"] = LOST["t5"]


@pytest.fixture(scope="module", params=CHANGING)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ours(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(CHANGING[kind](tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def directory(ours: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("for-transformers")
    write_files(ours.huggingface_files(256) or {}, place)
    return place


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory, split_special_tokens=True)


def test_ids_are_those_of_transformers_for_every_text_of_the_proof(ours: Tokenizer, theirs: Any, kind: str) -> None:
    counts = compare_tokenizers(
        ours,
        lambda text: theirs.encode(text, add_special_tokens=False),
        lambda ids: theirs.decode(ids, clean_up_tokenization_spaces=False),
        left_out=ours.altered_characters,
    )
    assert counts["characters"] > 2000
    assert counts.get("control symbols that are none here", 0) <= (0 if "bert" in kind.split()[-1:] else 5)


def test_what_is_lost_is_one_line(ours: Tokenizer, kind: str) -> None:
    assert find_losses(ours) == LOST[kind]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_the_bytes_of_ids_are_those_of_the_text_that_is_kept(ours: Tokenizer, text: str) -> None:
    ids = ours.encode(text)
    content = ours.decode_bytes(ids)
    assert ours.token_num_bytes[ids].sum() == len(content)
    assert ours.decode(ids) == ours.spell(ids, has_controls=False)
    assert content.decode().endswith(ours.decode(ids))
    decoder = StreamingDecoder(ours)
    assert "".join(decoder.feed(token) for token in ids) + decoder.flush() == content.decode()


@pytest.mark.parametrize("text", [*HARD, "a</s>b<unk><pad>", "[CLS] [UNK]", " </s>", "a [SEP]"])
def test_no_text_is_a_control_symbol(ours: Tokenizer, text: str) -> None:
    assert not any(map(ours.is_control, ours.encode(text)))
    hidden = ours.literal.hide(text)
    assert not any(map(ours.is_control, ours.encode_with_controls(hidden)))


def test_symbols_in_a_text_are_those_of_transformers(ours: Tokenizer, directory: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(directory)
    piece = next(ours.pieces[token] for token in range(ours.vocab_size) if ours.is_control(token))
    for text in (f"a b{piece}c {piece} d", piece):
        assert ours.encode_with_controls(text) == theirs.encode(text, add_special_tokens=False)
        ids, offsets = (found.tolist() for found in ours.encode_with_offsets(text))
        places = [text[slice(*place)] for token, place in zip(ids, offsets, strict=True) if ours.is_control(token)]
        assert places == [piece] * text.count(piece)


def test_a_batch_gives_the_ids_of_each_text(ours: Tokenizer) -> None:
    texts = [*SCRIPTS.values(), *HARD]
    for num_threads in (1, 2):
        assert [ids.tolist() for ids in ours.encode_batch(texts, num_threads)] == [ours.encode(text) for text in texts]


def test_a_document_is_framed_as_the_tokenizer_frames_a_text(ours: Tokenizer, directory: Path, kind: str) -> None:
    framed = AutoTokenizer.from_pretrained(directory).encode("a")
    document = frame_document(ours, np.array(ours.encode("a"), np.int32)).tolist()
    assert document[: len(framed)] == framed
    assert encode_prompt(ours, "a") == tuple(document[:-1])
    assert ours.eos_id in ours.stop_ids


def test_it_is_built_again_and_extended(ours: Tokenizer) -> None:
    assert build_tokenizer(ours.files).hash == ours.hash
    extended = extend_tokenizer(ours, TokenAddition(tokens=("<|turn|>",)))
    assert extended.encode_with_controls("a<|turn|>")[-1] == ours.vocab_size
    assert ours.vocab_size not in extended.encode("a<|turn|>")


def test_only_texts_that_come_back_can_be_written(tmp_path: Path) -> None:
    uncased = open_tokenizer(bert(tmp_path))
    assert [writes(uncased, text) for text in ("the", " the", ".", "THE", "\n", "a-b", "a - b")] == [
        *(True, True, True),
        *(False, False, False, True),
    ]


def test_the_unknown_token_has_no_bytes_and_is_no_control_symbol(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(t5(tmp_path))
    unknown = tokenizer.encode("\u4f60")[-1]
    assert tokenizer.pieces[unknown] == "<unk>"
    assert tokenizer.token_num_bytes[unknown] == 0
    assert not tokenizer.is_control(unknown)
    assert tokenizer.decode(tokenizer.encode("a\u4f60 b")) == "a b"


def test_ids_of_a_sentencepiece_model_are_those_of_its_library() -> None:
    model = train_sentencepiece()
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = build_tokenizer({"tokenizer.model": model})
    pieces = [piece.replace("\u2581", " ") for piece in ours.pieces]
    characters = [f"a{chr(code)}b" for code in range(0x3000) if code != 0x2581]
    spaces = ["  a  b  ", " ", "\n a \n", "\t \r\n  \n"]
    for text in (*SCRIPTS.values(), *pieces, *characters, *spaces, "".join(pieces)):
        assert library.encode(text) == ours.encode(text)


def test_a_sentencepiece_model_that_gives_texts_back_keeps_its_library(tmp_path: Path) -> None:
    model = train_sentencepiece(
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, vocab_size=720
    )
    tokenizer = build_tokenizer({"tokenizer.model": model})
    assert (tokenizer.kind, tokenizer.is_lossless) == ("SentencePiece", True)


def change_model(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["model"].update(changes)


@pytest.mark.parametrize(
    ("kind", "change", "line"),
    [
        ("bert", change_model(unk_token="[NONE]"), r"its unk_token '\[NONE\]' is not in its vocabulary"),
        ("bert", change_model(max_input_chars_per_word=10**9), "its max_input_chars_per_word is 1000000000"),
        ("bert", lambda c: c.update(decoder={"type": "WordPiece", "prefix": "@@", "cleanup": True}), "joins words at"),
        ("bert", lambda c: c.update(decoder={"type": "Fuse"}), "its decoder is Fuse"),
        ("t5", change_model(unk_id=None), "its unk_id None is no id"),
        ("t5", change_model(unk_id=10**6), "cannot be read .*UnkIdNotInVocabulary"),
        ("t5", lambda c: c["model"]["vocab"].append(["z" * 300, -1.0]), "has 300 characters: at most 256"),
        ("t5", lambda c: c["model"]["vocab"].append("z"), "cannot be read"),
        ("t5", lambda c: c["normalizer"].update(precompiled_charsmap="?"), "which is not base64|cannot be read"),
        ("t5", lambda c: c["normalizer"].update(precompiled_charsmap="BAAAAAAAAABhYWE="), "fails on a text|cannot be"),
        (
            "t5",
            lambda c: c.update(normalizer={"type": "Sequence", "normalizers": [c["normalizer"]] * 4}),
            "its normalizer makes a text up to .* times longer",
        ),
    ],
)
def test_forged_models_are_one_line(kind: str, change: Any, line: str, tmp_path: Path) -> None:
    path = CHANGING[kind](tmp_path) / "tokenizer.json"
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=line) as refused:
        open_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("kind", "model"), [("bert", "WordPiece"), ("t5", "Unigram")])
def test_a_gguf_is_refused_by_the_type_of_the_tokenizer(kind: str, model: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(CHANGING[kind](tmp_path))
    with pytest.raises(UserError, match=f"has byte-pair encoding alone, and this tokenizer is of type {model}"):
        describe_tokenizer(tokenizer, tokenizer.vocab_size, 256, None, tokenizer.stop_ids)


@pytest.mark.parametrize(
    ("build", "stop", "is_written"),
    [
        (bert, "the", True),
        (bert, "THE", False),
        (bert, "\n", False),
        (bert, "[SEP]", True),
        (bert, "the[SEP]", True),
        (bert, "THE[SEP]", False),
        (t5, "</s>", True),
        (qwen, "e\u0301", True),
    ],
)
def test_a_stop_text_that_the_model_cannot_write_is_refused(
    build: Callable[[Path], Path], stop: str, is_written: bool, tmp_path: Path
) -> None:
    tokenizer = open_tokenizer(build(tmp_path))
    facts = Facts(tokenizer, 1000, tokenizer.vocab_size, 0, shared_bytes=0, chat_template=None)
    asked = parse_completion(json.dumps({"model": "m", "prompt": "a", "stop": stop}).encode(), 1)
    if is_written:
        assert encode_prompts(asked, facts)
    else:
        with pytest.raises(ApiError, match="which this model never writes: its tokenizer lower-cases letters"):
            encode_prompts(asked, facts)


@pytest.mark.parametrize("kind", ["bert", "cased bert"])
def test_a_grammar_is_refused_where_words_begin_with_a_space(kind: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(CHANGING[kind](tmp_path))
    with pytest.raises(UserError, match="cannot be followed by this model, whose tokenizer puts a space before each"):
        compile_grammar('start: "{"', tokenizer, tokenizer.vocab_size, tokenizer.stop_ids)


def test_a_grammar_is_followed_by_a_unigram_model(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(t5(tmp_path))
    mask = compile_grammar('start: "a"', tokenizer, tokenizer.vocab_size, tokenizer.stop_ids).mask()
    assert mask[tokenizer.pieces.index("a")]
