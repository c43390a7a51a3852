"""Tokenizers of a `tokenizer.json`: the ids of transformers, and the bytes of each id."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from genesis.base.errors import UserError
from genesis.export.texts import SCRIPTS
from genesis.export.tokenizer import compare_tokenizers
from genesis.tokenizer.files import write_files
from genesis.tokenizer.limited import TextSearch
from genesis.tokenizer.open import build_tokenizer, has_hash, has_same_ids, has_tokenizer, hash_contents, open_tokenizer
from genesis.tokenizer.tokenizer import StreamingDecoder, Tokenizer, encode_prompt, frame_document

TEXTS = [*SCRIPTS.values(), "def f(x):\n\treturn x + 12  # two\n" * 5, "it's  we'll\r\n\r\n"]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HARD = [
    "",
    " ",
    "  a",
    "\n\n \t",
    "<|im_start|>user<|im_end|>",
    "a<|endoftext|>b",
    "<tool_call>{}</tool_call>",
    "   <tool_call>  ",
    "\u2581",
    "\ufeff",
    "\0",
    "e\u0301 \u0958",
    "\U0001f469\u200d\U0001f467",
    "\ud7ff\ue000\U0010ffff",
]


def train(**parts: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    return tokenizer


TRUNCATION = {"max_length": 9, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": {"content": "<|endoftext|>", "__type": "AddedToken"},
    "chat_template": TEMPLATE,
    "clean_up_tokenization_spaces": True,
}


def save(directory: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, Any] | None = None, **others: Any) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(CONFIG if config is None else config))
    for name, content in others.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def smollm(directory: Path) -> Path:
    return save(directory, train(), generation_config={"eos_token_id": [2, 0]})


def qwen(directory: Path) -> Path:
    # transformers builds tokenizers of Qwen2 by its own code, with this expression, whatever the file has.
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return save(directory, train(normalizer=normalizers.NFC(), pre_tokenizer=split))


def llama3(directory: Path) -> Path:
    tokenizer = train()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", 0)]
    )
    return save(directory, tokenizer, CONFIG | {"bos_token": "<|endoftext|>"})


def llama2(directory: Path) -> Path:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefghiklmnoprstu"]
    pairs = [("\u2581", "a"), ("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "\u2581"), ("i", "n"), ("e", "r")]
    vocabulary = {piece: token for token, piece in enumerate([*pieces, *("".join(pair) for pair in pairs)])}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    return save(directory, tokenizer, config)


KINDS: dict[str, Callable[[Path], Path]] = {"smollm": smollm, "qwen": qwen, "llama3": llama3, "llama2": llama2}


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def ours(directory: Path) -> Tokenizer:
    return open_tokenizer(directory)


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory, split_special_tokens=True)


def test_ids_are_those_of_transformers_for_every_text_of_the_proof(ours: Tokenizer, theirs: Any) -> None:
    counts = compare_tokenizers(
        ours,
        lambda text: theirs.encode(text, add_special_tokens=False),
        lambda ids: theirs.decode(ids, clean_up_tokenization_spaces=False),
        left_out=ours.altered_characters,
    )
    assert counts["characters"] > 2000


@pytest.mark.parametrize("text", HARD)
def test_hard_texts_have_the_ids_of_transformers_and_no_control(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert not any(ours.is_control(token) for token in ids)
    assert encode_prompt(ours, text)[-len(ids) or len(encode_prompt(ours, text)) :] == tuple(ids)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_the_bytes_of_ids_are_those_of_the_text(ours: Tokenizer, text: str) -> None:
    ids = ours.encode(text)
    content = ours.decode_bytes(ids)
    assert ours.token_num_bytes[ids].sum() == len(content)
    if ours.is_lossless and not ours.altered_characters:
        assert content == text.encode()
    assert ours.decode(ids) == ours.spell(ids, has_controls=False)
    decoder = StreamingDecoder(ours)
    assert "".join(decoder.feed(token) for token in ids) + decoder.flush() == content.decode()


def test_a_batch_gives_the_ids_of_each_text_on_any_number_of_threads(ours: Tokenizer) -> None:
    wanted = [ours.encode(text) for text in (*TEXTS, *HARD)]
    for num_threads in (1, 2):
        batch = ours.encode_batch([*TEXTS, *HARD], num_threads)
        assert [ids.tolist() for ids in batch] == wanted
        assert all(ids.dtype == np.int32 for ids in batch)


def test_it_is_built_again_of_its_files_with_its_identity(ours: Tokenizer, directory: Path, tmp_path: Path) -> None:
    again = build_tokenizer(ours.files)
    write_files(ours.files, tmp_path)
    assert again.hash == ours.hash
    assert has_tokenizer(directory, ours.hash)
    assert has_tokenizer(tmp_path, ours.hash)
    assert again.encode(TEXTS[0]) == ours.encode(TEXTS[0])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert open_tokenizer(tmp_path).hash == ours.hash
    (tmp_path / "chat_template.jinja").write_text("another")
    assert open_tokenizer(tmp_path).hash != ours.hash
    assert open_tokenizer(tmp_path).chat_template == "another"


def test_special_ids_are_those_of_transformers(ours: Tokenizer, theirs: Any) -> None:
    assert (ours.eos_id, ours.pad_id) == (theirs.eos_token_id, theirs.pad_token_id)
    framed = theirs.encode("a")
    assert tuple(framed) == encode_prompt(ours, "a")
    assert len(theirs) == ours.vocab_size
    special = {token for token, added in theirs.added_tokens_decoder.items() if added.special}
    assert {token for token in range(ours.vocab_size) if ours.is_control(token)} == special >= {*theirs.all_special_ids}
    assert not any(ours.token_num_bytes[token] for token in special)


def test_text_stops_where_the_generation_config_says_and_at_eos(tmp_path: Path) -> None:
    assert open_tokenizer(smollm(tmp_path)).stop_ids == {0, 2}
    (tmp_path / "generation_config.json").unlink()
    assert open_tokenizer(tmp_path).stop_ids == {2}


def test_a_document_begins_with_bos_where_the_tokenizer_puts_it(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(llama3(tmp_path))
    assert frame_document(tokenizer, np.array([9], np.int32)).tolist() == [0, 9, 2]
    config = json.loads((tmp_path / "tokenizer_config.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    assert open_tokenizer(tmp_path).bos_id == 0  # transformers does not read that key beside a tokenizer.json
    assert AutoTokenizer.from_pretrained(tmp_path)("a").input_ids == list(encode_prompt(open_tokenizer(tmp_path), "a"))


def test_a_conversation_has_the_ids_of_transformers(tmp_path: Path) -> None:
    tokenizer, theirs = open_tokenizer(smollm(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "\u00e9t\u00e9 <tool_call>"}, {"role": "assistant", "content": "12"}]
    assert tokenizer.chat_template == theirs.chat_template
    text = theirs.apply_chat_template(messages, tokenize=False)
    wanted = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert tokenizer.encode_with_controls(text) == wanted
    assert tokenizer.encode(text) != wanted
    assert wanted.count(2) == 2


def test_tokens_that_only_the_configuration_names_are_added_as_transformers_does(tmp_path: Path) -> None:
    listed = {"602": {"content": "<extra>", "special": False, "lstrip": True, "normalized": False, "rstrip": False}}
    save(
        tmp_path,
        train(),
        CONFIG | {"pad_token": "[PAD]", "extra_special_tokens": ["[X]"], "added_tokens_decoder": listed},
    )
    ours, theirs = open_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=True)
    assert ours.vocab_size == len(theirs) == 605
    assert ours.pad_id == theirs.pad_token_id
    for text in ("a <extra> b [PAD][X]", "<extra>"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.pieces[-3:] == ("<extra>", "[PAD]", "[X]")
    assert [ours.is_control(token) for token in (602, 603, 604)] == [False, True, True]


def test_files_for_transformers_have_the_spellings_that_its_version_4_knows(tmp_path: Path) -> None:
    save(tmp_path, train(), CONFIG | {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["[X]"]})
    ours = open_tokenizer(tmp_path)
    files = dict(ours.huggingface_files(256) or {})
    written = json.loads(files["tokenizer_config.json"])
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["[X]"]
    assert "extra_special_tokens" not in written
    again = build_tokenizer(files)
    assert again.hash == ours.hash
    assert again.pieces == ours.pieces
    assert again.huggingface_files(256) == files


def test_special_tokens_of_the_older_file_count_where_transformers_reads_it(tmp_path: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    save(tmp_path, train(), config, special_tokens_map={"eos_token": "<|endoftext|>", "pad_token": "<|im_start|>"})
    ours, theirs = open_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.eos_id, ours.pad_id) == (theirs.eos_token_id, theirs.pad_token_id) == (0, 1)


def drop_byte(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    token = vocabulary.pop("\u0104")
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "\u0104" not in "".join(pair)]
    vocabulary["nothing else"] = token


def test_a_byte_without_a_token_is_left_out_as_transformers_does(tmp_path: Path) -> None:
    smollm(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_bytes())
    drop_byte(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ours, theirs = open_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert not ours.is_lossless
    assert ours.encode("a\4b") == theirs.encode("a\4b") == ours.encode("ab")
    content["model"]["unk_token"] = "<|endoftext|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"the text '\\x04' is encoded to a special token"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "decoder is"),
        (lambda content: content["model"].update(dropout=0.1), "its dropout is 0.1"),
        (lambda content: content.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}), "WordLevel"),
        (lambda content: content.update(model={"type": "BPE"}), "cannot be read"),
    ],
)
def test_what_is_not_exact_is_refused_by_what_differs(change: Any, message: str, tmp_path: Path) -> None:
    smollm(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_bytes())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as error:
        open_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json is not JSON"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({}, True),
        ({"chat_template": "{{ messages }}", "model_max_length": 8192, "pad_token": "<|im_start|>"}, True),
        ({"eos_token": "<|endoftext|>"}, False),
        ({"additional_special_tokens": ["<think>"]}, False),
    ],
)
def test_tokenizers_of_one_family_have_the_same_ids_if_only_text_differs(
    changes: dict[str, Any], is_same: bool, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    smollm(first)
    content = json.loads((first / "tokenizer.json").read_text())
    content["truncation"] = TRUNCATION
    content["model"]["merges"] = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
    ]
    (second / "tokenizer.json").write_text(json.dumps(content, indent=1))
    (second / "tokenizer_config.json").write_text(json.dumps(CONFIG | changes))
    one, other = open_tokenizer(first), open_tokenizer(second)
    assert (one.hash == other.hash) is (not changes), "another spelling of the same content"
    assert has_same_ids(one, other) is is_same


def reorder(directory: Path) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items())), indent=3).replace("\n", "\r\n"))


def add_line_break(directory: Path) -> None:
    (directory / "tokenizer.json").write_text((directory / "tokenizer.json").read_text() + "\n")


def change(name: str, **values: Any) -> Callable[[Path], None]:
    def change_file(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change_file


@pytest.mark.parametrize(
    ("edit", "is_same"),
    [
        (reorder, True),
        (add_line_break, True),
        (change("tokenizer_config.json", model_max_length=9, transformers_version="5.0"), True),
        (change("tokenizer.json", truncation=TRUNCATION), True),
        (change("tokenizer_config.json", chat_template=TEMPLATE + "\n"), True),
        (change("tokenizer_config.json", chat_template=TEMPLATE + " "), False),
        (change("tokenizer_config.json", eos_token="<|endoftext|>"), False),
        (change("tokenizer_config.json", pad_token="<|im_start|>"), False),
        (change("tokenizer.json", normalizer={"type": "NFC"}), False),
    ],
)
def test_a_tokenizer_is_what_it_does_and_not_how_its_files_are_written(
    edit: Callable[[Path], None], is_same: bool, tmp_path: Path
) -> None:
    directory = smollm(tmp_path)
    before = open_tokenizer(directory)
    bytes_before = hash_contents(before)
    edit(directory)
    after = open_tokenizer(directory)
    assert (after.hash == before.hash) is is_same
    assert has_tokenizer(directory, before.hash) is is_same
    # What corpora and checkpoints of earlier versions recorded means exactly these bytes.
    assert has_hash(before, bytes_before)
    assert not has_hash(after, bytes_before)
    assert not has_tokenizer(directory, bytes_before)
    assert has_tokenizer(directory, hash_contents(after))


def swap_ids(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]


def swap_merges(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def normalise(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "NFC"}


def read_a_control_as_text(content: dict[str, Any]) -> None:
    content["added_tokens"][0]["special"] = False


@pytest.mark.parametrize("change", [swap_ids, swap_merges, normalise, read_a_control_as_text])
def test_tokenizers_that_differ_in_an_id_do_not_have_the_same_ids(change: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    save(first, train(), {})
    content = json.loads((first / "tokenizer.json").read_text())
    change(content)
    (second / "tokenizer.json").write_text(json.dumps(content))
    (second / "tokenizer_config.json").write_text("{}")
    assert not has_same_ids(open_tokenizer(first), open_tokenizer(second))


@pytest.mark.parametrize("single", ["$A $A", "$A:0 $A:1"])
def test_each_token_of_a_text_that_is_written_twice_has_its_place(tmp_path: Path, single: str) -> None:
    tokenizer = train()
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[])
    ids, offsets = open_tokenizer(save(tmp_path, tokenizer, CONFIG)).encode_with_offsets("the end")
    assert offsets.shape == (len(ids), 2)
    once = len(ids) // 2
    assert offsets[:once].tolist() == offsets[once:].tolist()
    assert offsets[0, 0] == 0
    assert offsets[-1, 1] == len("the end")


PIECES = [
    *"abAB 12\n\r\t.,'!\u00e9\u00b2\u4f60\u2028\u3000\u0301\u200d",
    *SPECIAL,
    "<tool_call>",
    "  ",
    "\n\n",
    "'s",
    "'LL",
    " The",
]


def test_a_long_text_has_the_ids_and_the_places_of_the_whole(
    ours: Tokenizer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser = random.Random(0)
    texts = [*TEXTS, *("".join(chooser.choices(PIECES, k=1 + number % 60)) for number in range(200))]
    whole = [(ours.encode(text), *ours.encode_with_offsets(text)) for text in texts]
    monkeypatch.setattr("genesis.tokenizer.limited._PART_CHARS", 2)
    sizes: list[int] = []
    call = TextSearch._call
    monkeypatch.setattr(
        TextSearch, "_call", lambda search, act, size, *words: sizes.append(size) or call(search, act, size, *words)
    )
    for text, (ids, *places) in zip(texts, whole, strict=True):
        assert ours.encode(text) == ids
        assert all(map(np.array_equal, ours.encode_with_offsets(text), places))
    assert (len(sizes) > 3 * len(texts)) == (not directory.name.startswith("llama2"))
