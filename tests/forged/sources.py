"""Forged files of data for `genesis data prepare`."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import zstandard

from tests.forged.operators import ALIEN, DEPTH, Case, Forge, forge_files, rewrite
from tests.forged.sound import GOOD_NAME, PAIRS_NAME

PAIRS, GOOD = Path("data", PAIRS_NAME), Path("data", GOOD_NAME)

_NAMES: Final = ("jsonl", "json", "txt", "csv", "parquet", "arrow", "jsonl.gz", "jsonl.zst")
_LINES: Final[dict[str, bytes]] = {
    "key twice": b'{"text": "a", "text": "b"}',
    "deep": b'{"text": ' + b"[" * DEPTH + b"]" * DEPTH + b"}",
    "digits": b'{"text": ' + b"9" * 50_000 + b"}",
    "no text": b'{"text": 5}',
    "surrogate": b'{"text": "\\ud800"}',
    "alien field": json.dumps({ALIEN: ALIEN}).encode(),
    "long field": json.dumps({"k" * 100_000: 1}).encode(),
    "NaN": b'{"text": NaN}',
    "alien text": json.dumps({"text": ALIEN}).encode(),
    "no JSON": f"{ALIEN}".encode(),
}
_USER: Final = {"role": "user", "content": "a"}
_ANSWER: Final = {"role": "assistant", "content": "b"}
_CHATS: Final[dict[str, Any]] = {
    "no turns": {"messages": []},
    "turns that are a text": {"messages": "ab"},
    "a turn that is a list": {"messages": [["user", "a"], _ANSWER]},
    "an alien role": {"messages": [{"role": ALIEN, "content": ALIEN}, _ANSWER]},
    "a role of no text": {"messages": [{"role": 5, "content": "a"}, _ANSWER]},
    "a content of nothing": {"messages": [_USER, {"role": "assistant", "content": None}]},
    "a deep content": {"messages": [{"role": "user", "content": json.loads("[" * 400 + "]" * 400)}, _ANSWER]},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}, _ANSWER]},
    "calls of no JSON": {"messages": [_USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
    "calls that are a number": {"messages": [_USER, {"role": "assistant", "content": "b", "tool_calls": 5}]},
    "tools that are a text": {"messages": [_USER, _ANSWER], "tools": "f"},
    "an answer alone": {"messages": [_ANSWER]},
    "no answer": {"messages": [_USER]},
    "answers alone": {"messages": [_ANSWER] * 50},
    "three thousand turns": {"messages": [_USER, _ANSWER] * 1500},
    "a long answer": {"messages": [_USER, {"role": "assistant", "content": "b " * (1 << 14)}]},
    "a long word": {"messages": [_USER, {"role": "assistant", "content": "b" * (1 << 16)}]},
    "a control symbol": {"messages": [{"role": "user", "content": "</s><s><|im_end|>"}, _ANSWER]},
    "other names": {"conversations": [{"from": ALIEN, "value": 5}, {"from": "gpt", "value": "b"}]},
    "two forms": {"messages": [_USER, _ANSWER], "conversations": [{"from": "human", "value": "a"}]},
    "a pair": {"prompt": "a", "chosen": "b", "rejected": "b"},
    "half a pair": {"prompt": [_USER], "chosen": [_ANSWER]},
    "variables": {"messages": [_USER, _ANSWER], "chat_template_kwargs": {"messages": ALIEN, "range": 1}},
    "labels": {"messages": [_USER, {**_ANSWER, "train": ALIEN, "weight": -1}]},
}
_FORMS: Final = {
    "a content": '{"messages": [{"role": "user", "content": DEEP}, {"role": "assistant", "content": "b"}]}',
    "variables": '{"chat_template_kwargs": {"a": DEEP}, TURNS}',
    "tools": '{"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": DEEP}}}], TURNS}',
    "another field": '{"other": DEEP, TURNS}',
}
_DEEP: Final = {
    f"{name} of {levels} levels": form.replace("DEEP", "[" * levels + "]" * levels)
    .replace("TURNS", json.dumps({"messages": [_USER, _ANSWER]})[1:-1])
    .encode()
    for levels in (100, 300, 450, 700, 950)
    for name, form in _FORMS.items()
}
_PAIRS: Final[dict[str, Any]] = {
    "a pair of numbers": {"prompt": 5, "chosen": 6, "rejected": 7},
    "a pair of lists of lists": {"chosen": [[_USER]], "rejected": [[_ANSWER]]},
    "a pair of long prompts": {"prompt": "b " * (1 << 14), "chosen": "a", "rejected": "c"},
    "a pair without a question": {"chosen": [_ANSWER], "rejected": [_ANSWER]},
    "a pair of two questions": {"chosen": [_USER, _ANSWER], "rejected": [{**_USER, "content": "b"}, _ANSWER]},
    "a pair of an alien": {"prompt": [{"role": ALIEN, "content": ALIEN}], "chosen": ALIEN, "rejected": [ALIEN]},
    "a pair that is no text": {"prompt": "a", "chosen": {"a": {}}, "rejected": None},
}
_GOOD: Final = (None, 2, -1, 10**400, 1.0, "true", ALIEN, [], {"a": 1}, 255, 256)
_BOMB_BYTES: Final = 64 << 20


def iterate_cases(seed: int, mark: Path) -> Iterator[Case]:
    """Yields the cases."""
    for kind in _NAMES:
        path = f"data/a.{kind}"
        for name, forge in forge_files([path], seed):
            yield Case("data", name, forge, build_command(f"../in/{path}"))
    jsonl = Path("data/a.jsonl")
    for name, line in _LINES.items():
        yield Case(
            "data",
            f"a line: {name}",
            rewrite(jsonl, lambda data, x=line: data + x + b"\n"),
            build_command(f"../in/{jsonl}"),
        )  # type: ignore[misc]
    yield from _iterate_chats()
    short = rewrite(Path("data/a.txt"), lambda data: b"a\n" * 200_000)
    yield Case("data", "lines of one letter", short, build_command("../in/data/a.txt"))
    for bomb in (gzip.compress(bytes(_BOMB_BYTES)), zlib.compress(bytes(1000))):
        path = "data/a.jsonl.gz"
        yield Case(
            "data", f"gz of {len(bomb)}", rewrite(Path(path), lambda _, b=bomb: b), build_command(f"../in/{path}")
        )  # type: ignore[misc]
    line = b'{"text": "' + b"a " * 500 + b'"}\n'
    lines = rewrite(Path("data/a.jsonl.zst"), lambda _: zstandard.compress(line * (_BOMB_BYTES // len(line))))
    yield Case("data", "zst of lines", lines, build_command("../in/data/a.jsonl.zst"))
    long = rewrite(jsonl, lambda data: data + b'{"text": "' + b"a" * (_BOMB_BYTES // 2) + b'"}\n')
    yield Case("data", "a line of half a bomb", long, build_command(f"../in/{jsonl}"))
    yield from _iterate_adopted(seed)
    path = "data/a.jsonl.zst"
    for size in (_BOMB_BYTES, 1000):
        data = zstandard.compress(bytes(size))
        yield Case("data", f"zst of {size}", rewrite(Path(path), lambda _, b=data: b), build_command(f"../in/{path}"))  # type: ignore[misc]


def _iterate_chats() -> Iterator[Case]:
    """Yields conversations, pairs of answers, and answers with values."""
    chat = Path("data/chat.jsonl")
    for name, content in _CHATS.items():
        line = json.dumps(content).encode()
        for place, forge in (
            ("in a row", rewrite(chat, lambda data, x=line: data + x + b"\n")),  # type: ignore[misc]
            ("in all rows", rewrite(chat, lambda data, x=line: x + b"\n")),  # type: ignore[misc]
        ):
            yield Case("data", f"a chat: {name} {place}", forge, build_command(f"../in/{chat}", ", chat: auto"))
    for name, content in _PAIRS.items():
        line = json.dumps(content).encode()
        command = build_command(f"../in/{PAIRS}", ", chat: pairs")
        yield Case("data", name, rewrite(PAIRS, lambda data, x=line: data + x + b"\n"), command)  # type: ignore[misc]
    for value in _GOOD:
        line = json.dumps({"messages": [_USER, _ANSWER], "good": value}).encode()
        command = build_command(f"../in/{GOOD}", ", chat: auto, value_field: good")
        forge = rewrite(GOOD, lambda data, x=line: data + x + b"\n")  # type: ignore[misc]
        yield Case("data", f"a value: {str(value)[:20]!r}", forge, command)
    for name, line in (_LINES | _DEEP).items():
        forge = rewrite(chat, lambda data, x=line: data + x + b"\n")  # type: ignore[misc]
        yield Case("data", f"a chat's line: {name}", forge, build_command(f"../in/{chat}", ", chat: auto"))


_STATES: Final[dict[str, Any]] = {
    "a path out": {"_data_files": [{"filename": "../a.npy"}, {"filename": "../../../outside/secret"}]},
    "an absolute path": {"_data_files": [{"filename": "/etc/passwd"}]},
    "a number": {"_data_files": [{"filename": 5}]},
    "a device": {"_data_files": [{"filename": "/dev/zero"}]},
    "no list": {"_data_files": 5},
    "a list": [],
    "nothing": {"_data_files": []},
}
_HEADERS: Final = {
    "a large shape": "{'descr': '<u2', 'fortran_order': False, 'shape': (1<<60,)}",
    "a negative shape": "{'descr': '<u2', 'fortran_order': False, 'shape': (-3, -7)}",
    "no shape": "{[]: 1}",
    "an open text": "{'descr': '''",
    "an object": "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    "a deep shape": "(" * 5000,
    "digits": "{'descr': '<u2', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}",
    "an alien": ALIEN,
}
_OFFSETS: Final = {
    "lead out": (0, 2**30, 2**31 - 1),
    "go back": (0, 64, 3),
    "are negative": (-(2**31), 0, 64),
    "begin late": (2**30, 2**30, 2**30),
}


def _iterate_adopted(seed: int) -> Iterator[Case]:
    """Yields token files of other tools."""
    for given, names in {
        "a.npy": ("a.npy",),
        "b.bin": ("b.bin", "b.idx"),
        "c.ds": ("c.ds", "c.ds.index", "c.ds.metadata"),
        "d": ("d/state.json", "d/data.arrow"),
    }.items():
        command = ("data", "adopt", f"../in/adopt/{given}", "--name", "corpus", "--out", "../out")
        command += ("--vocab_size", "300", "--eos_id", "0")
        for name, forge in (*forge_files([f"adopt/{name}" for name in names], seed), *_FORGE_ADOPTED[given]()):
            yield Case("data", name, forge, command)
    path = Path("data/a.arrow")
    for name, offsets in _OFFSETS.items():
        forge = _write_lists(path, offsets, "text")
        yield Case("data", f"texts whose offsets {name}", forge, build_command(f"../in/{path}"))


def _forge_headers() -> Iterator[tuple[str, Forge]]:
    for name, text in _HEADERS.items():
        header = text.encode()
        data = b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header + bytes(64)
        yield f"npy: {name}", rewrite(Path("adopt/a.npy"), lambda _, d=data: d)  # type: ignore[misc]


def _forge_numbers(path: str, places: Sequence[tuple[int, int]]) -> Iterator[tuple[str, Forge]]:
    """Puts numbers of eight bytes at places of a file."""
    for place, value in places:

        def put(data: bytes, place: int = place, value: int = value) -> bytes:
            place %= len(data)
            return data[:place] + (value % 2**64).to_bytes(8, "little") + data[place + 8 :]

        yield f"{path}: {value} at {place}", rewrite(Path(path), put)


def _forge_datasets() -> Iterator[tuple[str, Forge]]:
    for name, content in _STATES.items():
        text = json.dumps(content).encode()
        yield f"state: {name}", rewrite(Path("adopt/d/state.json"), lambda _, t=text: t)  # type: ignore[misc]
    for name, offsets in _OFFSETS.items():
        yield f"lists whose offsets {name}", _write_lists(Path("adopt/d/data.arrow"), offsets)


_FORGE_ADOPTED: Final[dict[str, Callable[[], Iterator[tuple[str, Forge]]]]] = {
    "a.npy": _forge_headers,
    "b.bin": lambda: _forge_numbers(
        "adopt/b.idx", [(18, 2**62), (26, 2**62), (34, -1), (-8, -1), (-16, -(2**62)), (-16, 2**62)]
    ),
    "c.ds": lambda: _forge_numbers("adopt/c.ds.index", [(0, 2**63), (8, 0), (-8, 2**64 - 1)]),
    "d": _forge_datasets,
}


def _write_lists(path: Path, offsets: Sequence[int], column: str = "input_ids") -> Forge:
    """Returns an act that writes two rows of 31 and 33 values, with other offsets."""
    texts, ids = pa.array(["a" * 31, "a" * 33]), pa.array([[1] * 31, [1] * 33], pa.list_(pa.int32()))

    def write(root: Path) -> None:
        table = pa.table({column: texts if column == "text" else ids})
        with pa.OSFile(str(root / path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        data, sound = (root / path).read_bytes(), np.array([0, 31, 64], np.int32).tobytes()
        assert data.count(sound) == 1
        (root / path).write_bytes(data.replace(sound, np.array(offsets, np.int32).tobytes()))

    return write


def build_command(path: str, options: str = "") -> tuple[str, ...]:
    """Returns the command that prepares one file, whose source has more options in YAML."""
    source = f"[{{name: a, paths: [{path}]{options}}}]"
    prepare = ("data", "prepare", "--name", "corpus", "--out", "../out", "--num_workers", "1")
    return (*prepare, "--tokenizer", "../in/run", "--sources", source)
