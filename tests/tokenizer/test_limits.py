"""What a tokenizer's files claim is refused before anything has that size."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split

from genesis.base.errors import UserError
from genesis.export.tokenizer import compare_fast_tokenizer
from genesis.tokenizer.limits import LINEAR, can_cut, check_charsmap
from genesis.tokenizer.open import open_tokenizer
from tests.tokenizer.test_huggingface import qwen

Change = Callable[[dict[str, Any]], object]
MAX_BYTES = 100 << 20
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def doubles(times: int, *, is_nested: bool = False) -> dict[str, Any]:
    step: dict[str, Any] = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    if is_nested:
        step = {"type": "Sequence", "normalizers": [step, step]}
    return {"type": "Sequence", "normalizers": [step] * times}


def added(token: int) -> dict[str, Any]:
    return {"id": token, "content": "<zz>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}


def templates(number: int) -> dict[str, Any]:
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0] * number, "tokens": ["<|endoftext|>"] * number}}
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}


FORGED: dict[str, tuple[str, Change, str]] = {
    "id of 20 million": ("tokenizer", lambda c: c["model"]["vocab"].update(zz=20_000_000), "'zz' has the id 20000000"),
    "largest id": ("tokenizer", lambda c: c["model"]["vocab"].update(zz=2**32 - 1), "id 4294967295: with 606 tokens"),
    "id of 60 digits": ("tokenizer", lambda c: c["model"]["vocab"].update(zz=10**60), "a number of many digits"),
    "negative id": ("tokenizer", lambda c: c["model"]["vocab"].update(zz=-1), "has the id -1"),
    "id of an added token": (
        "tokenizer",
        lambda c: c["added_tokens"].append(added(9**8)),
        "'<zz>' has the id 43046721",
    ),
    "id in the configuration": (
        *("tokenizer_config", lambda c: c.update(added_tokens_decoder={"20000000": {"content": "<zz>"}})),
        "'<zz>' has the id 20000000",
    ),
    "a million added tokens": (
        *("tokenizer_config", lambda c: c.update(extra_special_tokens=[""] * 1_000_000)),
        "1,000,005 added tokens",
    ),
    "a piece of 2 MB": (
        "tokenizer",
        lambda c: c["model"]["vocab"].update({"z" * 2_000_000: 9}),
        "2,000,000 characters",
    ),
    "30 doublings": ("tokenizer", lambda c: c.update(normalizer=doubles(30)), "1,073,741,824 times longer"),
    "nested doublings": ("tokenizer", lambda c: c.update(normalizer=doubles(20, is_nested=True)), "times longer"),
    "doublings by an expression": (
        "tokenizer",
        lambda c: c.update(
            normalizer={
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "ab"}] * 30,
            }
        ),
        "times longer",
    ),
    "a long replacement": (
        *("tokenizer", lambda c: c.update(normalizer={"type": "Prepend", "prepend": "b" * 2_000_000})),
        "a text of 2,000,000 characters",
    ),
    "bytes of bytes": (
        *("tokenizer", lambda c: c.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 30})),
        "its pre_tokenizer makes a text",
    ),
    "a thousand steps": (
        *("tokenizer", lambda c: c.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1_000})),
        "1,000 steps",
    ),
    "doublings while decoding": (
        *("tokenizer", lambda c: c.update(decoder={"type": "Sequence", "decoders": doubles(30)["normalizers"]})),
        "its decoder makes a text",
    ),
    "a long frame": ("tokenizer", lambda c: c.update(post_processor=templates(100_000)), "adds 100,000 ids to a text"),
    "many stops": ("generation_config", lambda c: c.update(eos_token_id=[*range(500_000)]), "lists 500,000 ids"),
}


def write_split(directory: Path, expression: str) -> None:
    """Writes a tokenizer that splits texts by an expression."""
    qwen(directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}
    (directory / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", FORGED)
def test_a_claim_beyond_any_tokenizer_is_one_line_before_it_takes_memory(tmp_path: Path, name: str) -> None:
    file, change, words = FORGED[name]
    qwen(tmp_path)
    path = tmp_path / f"{file}.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    change(content)
    path.write_text(json.dumps(content))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as refused:
        open_tokenizer(tmp_path)
    assert words in str(refused.value)
    assert len(str(refused.value).removeprefix(str(path))) < 400
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_BYTES


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (r"\s*\s*x|\s", r"a search of its expressions \([^\n]*\) in [0-9,]+ characters takes more than 0.25 s of "),
        ("(1|11)+b", r"its library fails on a text|[^\n]* characters takes more than 0.25 s of processor time"),
    ],
)
def test_an_expression_without_end_is_refused_where_a_tokenizer_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expression: str, words: str
) -> None:
    write_split(tmp_path, expression)
    monkeypatch.setattr("genesis.base.limited_workers._ENCODING_SECONDS", 0.25)
    with pytest.raises(UserError, match=rf"(?:{words})[^\n]*[:;] use another tokenizer$"):
        open_tokenizer(tmp_path)


def test_a_text_without_end_costs_the_limit_and_leaves_the_tokenizer_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_split(tmp_path, r"(?:yz|y|z|zy)+q|\s?\S")
    tokenizer = open_tokenizer(tmp_path)
    before = tokenizer.encode("ab")
    monkeypatch.setattr("genesis.base.limited_workers._ENCODING_SECONDS", 0.25)
    with pytest.raises(UserError, match=r"takes more than 0.25 s of processor time|its library fails on a text"):
        tokenizer.encode("yz" * 40)
    assert tokenizer.encode("ab") == before


@pytest.mark.parametrize("expression", LINEAR)
def test_known_expressions_find_an_end_in_texts_that_are_hard_for_others(expression: str) -> None:
    units = (" ", "\n", " \n", "a", "A", "aA", "\u3042", "A\u0301", "1", "'l", "!", "!\n", "\u3000")
    ends = ("x", "!", " ", "\n")
    tokenizer = Tokenizer(BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = Split(Regex(expression), "isolated")
    tokenizer.encode_batch_fast([unit * 4000 + end for unit in units for end in ends])


def test_gaps_and_ordinary_steps_are_read(tmp_path: Path) -> None:
    qwen(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["zz"] = 40_000
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, *doubles(3)["normalizers"]]}
    path.write_text(json.dumps(content))
    assert open_tokenizer(tmp_path).vocab_size == 40_001


def test_the_fast_form_beside_another_tokenizer_is_checked_as_well(tmp_path: Path) -> None:
    qwen(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text()) | {"normalizer": doubles(30)}
    with pytest.raises(UserError, match="times longer"):
        compare_fast_tokenizer(tokenizer, json.dumps(content).encode())


def test_a_sentencepiece_model_whose_characters_grow_is_refused() -> None:
    trie = (1024).to_bytes(4, "little") + bytes(1024)
    check_charsmap(trie + b"ffi\0" + b"\xef\xb7\xba" * 11 + b"\0")
    check_charsmap(b"")
    with pytest.raises(UserError, match="makes 1,000,000 bytes of a character"):
        check_charsmap(trie + b"a" * 1_000_000 + b"\0")
    with pytest.raises(UserError, match="claims 4,294,967,295 bytes and has 4"):  # which the library would allocate
        check_charsmap(b"\xff" * 8)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
OF_GPT2 = BYTES | {"use_regex": True}
WORDS = {"type": "Split", "pattern": {"Regex": LINEAR[3]}, "behavior": "Isolated"}
ONE, TEXT = {"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}


@pytest.mark.parametrize("steps", [[OF_GPT2], [WORDS, BYTES], [{"type": "Digits"}, OF_GPT2]])
@pytest.mark.parametrize(
    "content",
    [
        {},
        {"normalizer": {"type": "NFC"}},
        {"post_processor": {"type": "TemplateProcessing", "single": [ONE, TEXT]}},
        {"post_processor": BYTES | {"trim_offsets": True}},
    ],
)
def test_texts_are_cut_where_known_words_end(steps: list[dict[str, Any]], content: dict[str, Any]) -> None:
    whole = {"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, **content}
    assert can_cut(whole, ["<|im_end|>", "<s>"])


@pytest.mark.parametrize(
    ("steps", "content", "added"),
    [
        ([], {}, ""),
        ([BYTES], {}, ""),  # the merges see the whole text
        ([{"type": "Digits"}, BYTES], {}, ""),
        ([OF_GPT2 | {"add_prefix_space": True}], {}, ""),
        ([{"type": "ByteLevel"}], {}, ""),  # the library's default adds a space
        ([WORDS], {}, ""),
        ([WORDS, WORDS, BYTES], {}, ""),
        ([WORDS | {"behavior": "Contiguous"}, BYTES], {}, ""),
        ([WORDS | {"behavior": "Removed"}, BYTES], {}, ""),
        *(([WORDS | {"pattern": {"Regex": one}}, BYTES], {}, "") for one in (LINEAR[0], LINEAR[1], "a+")),
        ([WORDS | {"pattern": {"String": LINEAR[3]}}, BYTES], {}, ""),
        ([WORDS, BYTES], {"model": {"type": "Unigram"}}, ""),
        ([WORDS, BYTES], {"normalizer": {"type": "Lowercase"}}, ""),
        ([WORDS, BYTES], {"post_processor": {"type": "TemplateProcessing", "single": [TEXT, TEXT]}}, ""),
        ([WORDS, BYTES], {"post_processor": {"type": "ByteLevel", "add_prefix_space": True}}, ""),
        ([WORDS, BYTES], {"post_processor": {"type": "RobertaProcessing"}}, ""),
        ([WORDS, BYTES], {}, "New York"),
        ([WORDS, BYTES], {}, "stop"),  # with `rstrip` it takes the space behind it
        ([WORDS, BYTES], {}, " foo."),  # with `single_word` it is not found behind a letter
    ],
)
def test_no_text_is_cut_where_something_may_look_across(
    steps: list[dict[str, Any]], content: dict[str, Any], added: str
) -> None:
    whole = {"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, **content}
    assert not can_cut(whole, [added] if added else [])
