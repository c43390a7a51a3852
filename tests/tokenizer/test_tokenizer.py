import io
import json

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from genesis.base.errors import UserError
from genesis.export.tokenizer import compare_fast_tokenizer
from genesis.tokenizer.fast_form import CONFIG_NAME, FAST_NAME
from genesis.tokenizer.inspect import find_unused, measure_texts
from genesis.tokenizer.open import build_tokenizer, open_tokenizer
from genesis.tokenizer.tokenizer import StreamingDecoder
from genesis.tokenizer.train import CONTROL_SYMBOLS, MODEL_NAME, TokenizerOptions, train_tokenizer

WORDS = [
    f"{first}{second}" for first in ("alpha", "beta", "gamma", "delta") for second in ("", "tic", "ray", "_7", "ß")
]
TEXT = "".join(f"def {word}(self, {word}):\n\treturn {word} + 12  # ▁ é\r\n\n" for word in WORDS * 20)
VOCAB_SIZE = 340

HARD_TEXTS = [
    "",
    " ",
    "\0",
    "a\0b",
    "\n",
    "\r\n\r\n",
    "  leading and   runs  ",
    "\t\tx",
    "▁",
    "▁▁ a▁b ▁",
    "<s></s><pad><unk>",
    "<|user|>hi<|end|><|reserved_0|>",
    "<0x41>",
    "👩‍👩‍👧‍👦",
    "\ufeffmark",
    "ﬁ ½ e\u0301 \u0958",
    "\ud7ff\ue000\U0010ffff",
    "▅⁇",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_tokenizer(train_tokenizer([TEXT], TokenizerOptions(VOCAB_SIZE), tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_come_back_as_they_were(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back_as_it_was(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not any(tokenizer.is_control(token) for token in ids)
    assert tokenizer.token_num_bytes[ids].sum() == len(text.encode())


def test_every_unicode_character_comes_back_without_a_control_symbol(tokenizer):
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    texts = ["".join(characters[start : start + 4096]) for start in range(0, len(characters), 4096)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_num_bytes[ids].all()


@given(st.lists(st.sampled_from([*HARD_TEXTS, "alpha ", "  betatic", TEXT]), max_size=12))
def test_a_batch_gives_the_ids_of_each_text_alone(tokenizer, texts):
    batch = tokenizer.encode_batch(texts, num_threads=2)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text) for text in texts]


def test_cutting_long_texts_does_not_change_their_ids(tokenizer):
    text = TEXT.replace("▁", "x") * 3
    whole = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.files[MODEL_NAME]).encode(text)
    assert tokenizer.encode(text) == whole
    assert len(text) > 20_000


def test_special_ids_are_fixed_whatever_the_vocabulary(tokenizer, tmp_path):
    other = open_tokenizer(train_tokenizer([TEXT], TokenizerOptions(VOCAB_SIZE + 9), tmp_path).parent)
    for each in (tokenizer, other):
        assert each.pieces[:16] == ("<pad>", "<unk>", "<s>", "</s>", *CONTROL_SYMBOLS)
        assert (each.pad_id, each.bos_id, each.eos_id) == (0, 2, 3)
        assert not each.token_num_bytes[:16].any()
        assert each.token_id("<|user|>") == 5
        assert each.decode([2, 5, *each.encode("hi"), 7, 3]) == "hi"
    assert other.vocab_size == VOCAB_SIZE + 9
    assert other.hash != tokenizer.hash


def test_an_unknown_token_name_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"no token '<\|nobody\|>'"):
        tokenizer.token_id("<|nobody|>")


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_streaming_gives_the_text_and_never_half_a_character(tokenizer, text):
    decoder = StreamingDecoder(tokenizer)
    parts = [decoder.feed(token) for token in tokenizer.encode(text)]
    assert "".join(parts) == text
    assert decoder.flush() == ""


def test_streaming_holds_back_half_a_character_and_flushes_it(tokenizer):
    decoder = StreamingDecoder(tokenizer)
    ids = tokenizer.encode("👩")
    assert [decoder.feed(token) for token in ids[:3]] == ["", "", ""]
    assert decoder.flush() == "�"
    assert decoder.feed(ids[0]) == ""
    assert "".join(decoder.feed(token) for token in ids[1:]) == "👩"


def test_training_twice_gives_the_same_file(tokenizer, tmp_path):
    assert (
        train_tokenizer(iter([TEXT]), TokenizerOptions(VOCAB_SIZE), tmp_path).read_bytes()
        == tokenizer.files[MODEL_NAME]
    )


def test_digits_are_split(tokenizer):
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1212")] == ["1", "2", "1", "2"]


def test_a_vocabulary_too_large_names_the_largest_that_works(tmp_path):
    with pytest.raises(UserError, match=r"vocab_size 49152 is too large for this text: choose (\d+) or less") as caught:
        train_tokenizer([TEXT], TokenizerOptions(), tmp_path)
    largest = int(str(caught.value).split("choose ")[1].split()[0])
    assert open_tokenizer(train_tokenizer([TEXT], TokenizerOptions(largest), tmp_path)).vocab_size == largest


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        ([], VOCAB_SIZE, "have no text to train"),
        (["", "\0"], VOCAB_SIZE, "have no text to train"),
        ([TEXT], 280, "vocab_size 280 is too small for this text's characters: choose more than"),
        ([TEXT], 272, "vocab_size 272 is too small"),
    ],
)
def test_text_and_vocabulary_that_do_not_fit_are_refused(tmp_path, texts, vocab_size, message):
    with pytest.raises(UserError, match=message):
        train_tokenizer(texts, TokenizerOptions(vocab_size), tmp_path)
    assert not (tmp_path / MODEL_NAME).exists()


def test_a_missing_or_foreign_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        open_tokenizer(tmp_path / "nothing")
    (tmp_path / MODEL_NAME).write_bytes(b"no model")
    with pytest.raises(UserError, match="not a SentencePiece model"):
        open_tokenizer(tmp_path)


def test_a_model_that_changes_text_is_refused(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=VOCAB_SIZE,
        model_type="bpe",
        byte_fallback=True,
        pad_id=3,
        minloglevel=3,
    )
    with pytest.raises(UserError, match="decoding does not return the encoded text"):
        open_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def with_prefix():
    """A model as Llama 2 and Mistral ship it: a space before each text, no pad id."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        vocab_size=VOCAB_SIZE,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=3,
    )
    return model.getvalue()


@pytest.mark.parametrize("text", [*HARD_TEXTS, "alpha", " alpha", TEXT[:20_000]])
def test_a_model_that_puts_a_space_before_a_text_gives_its_ids_and_the_text_back(with_prefix, text):
    tokenizer = build_tokenizer({MODEL_NAME: with_prefix})
    theirs = sentencepiece.SentencePieceProcessor(model_proto=with_prefix)
    plain = text.replace("\u2581", "")
    assert tokenizer.encode(plain) == theirs.encode(plain)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    num_bytes = tokenizer.token_num_bytes[tokenizer.encode(text)].sum() if text else 0
    assert num_bytes == len(text.encode()) + (1 if text else 0)
    assert tokenizer.pad_id is None
    assert tokenizer.files[MODEL_NAME] == with_prefix


def test_its_fast_form_is_exact_and_puts_the_space_there_too(with_prefix):
    tokenizer = build_tokenizer({MODEL_NAME: with_prefix})
    files = tokenizer.huggingface_files(256)
    assert compare_fast_tokenizer(tokenizer, files[FAST_NAME])["characters"] > 2000
    assert "pad_token" not in json.loads(files[CONFIG_NAME])


def test_a_tokenizer_json_is_taken_where_it_lies_beside_such_a_model(with_prefix, tokenizer, tmp_path):
    for name, content in build_tokenizer({MODEL_NAME: with_prefix}).huggingface_files(256).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / MODEL_NAME).write_bytes(with_prefix)
    fast = open_tokenizer(tmp_path)
    assert fast.kind == "Hugging Face"
    assert fast.encode("alpha beta") == build_tokenizer({MODEL_NAME: with_prefix}).encode("alpha beta")
    assert fast.decode(fast.encode("alpha")) == "alpha"
    (tmp_path / MODEL_NAME).write_bytes(tokenizer.files[MODEL_NAME])
    assert open_tokenizer(tmp_path).kind == "SentencePiece"


def test_every_control_symbol_that_a_text_spells_is_that_symbol(tokenizer):
    controls = [token for token in range(tokenizer.vocab_size) if tokenizer.is_control(token)]
    assert "<unk>" in {tokenizer.pieces[token] for token in controls}
    text = "".join(f"x{tokenizer.pieces[token]}" for token in controls)
    assert [token for token in tokenizer.encode_with_controls(text) if tokenizer.is_control(token)] == controls
    with pytest.raises(UserError, match="the tokenizer has no token '<none>'"):
        tokenizer.token_id("<none>")


def test_controls_are_read_where_a_template_writes_them(tokenizer):
    ids = tokenizer.encode_with_controls("<|user|>hi<|end|>")
    assert ids == [5, *tokenizer.encode("hi"), 7]


def test_the_report_counts_bytes_tokens_and_unused_pieces(tokenizer):
    texts = ["alpha beta", "▁", "日"]
    report = measure_texts(tokenizer, texts)
    assert (report.num_documents, report.num_bytes, report.num_changed) == (3, 16, 0)
    assert report.num_tokens == sum(len(tokenizer.encode(text)) for text in texts)
    assert report.num_byte_tokens == 6
    assert report.bytes_per_token == 16 / report.num_tokens
    unused = set(find_unused(tokenizer, report.id_counts))
    assert unused == set(range(272, VOCAB_SIZE)) - set(np.flatnonzero(report.id_counts).tolist())
