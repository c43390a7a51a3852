"""Forged files of data for `genesis data prepare`."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import zstandard

from tests.forged.operators import ALIEN, DEPTH, Case, forge_files, rewrite

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
    chat = Path("data/chat.jsonl")
    for name, content in _CHATS.items():
        line = json.dumps(content).encode()
        for place, forge in (
            ("in a row", rewrite(chat, lambda data, x=line: data + x + b"\n")),  # type: ignore[misc]
            ("in all rows", rewrite(chat, lambda data, x=line: x + b"\n")),  # type: ignore[misc]
        ):
            yield Case("data", f"a chat: {name} {place}", forge, build_command(f"../in/{chat}", ", chat: auto"))
    for name, line in _LINES.items():
        forge = rewrite(chat, lambda data, x=line: data + x + b"\n")  # type: ignore[misc]
        yield Case("data", f"a chat's line: {name}", forge, build_command(f"../in/{chat}", ", chat: auto"))
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
    path = "data/a.jsonl.zst"
    for size in (_BOMB_BYTES, 1000):
        data = zstandard.compress(bytes(size))
        yield Case("data", f"zst of {size}", rewrite(Path(path), lambda _, b=data: b), build_command(f"../in/{path}"))  # type: ignore[misc]


def build_command(path: str, options: str = "") -> tuple[str, ...]:
    """Returns the command that prepares one file, whose source has more options in YAML."""
    source = f"[{{name: a, paths: [{path}]{options}}}]"
    prepare = ("data", "prepare", "--name", "corpus", "--out", "../out", "--num_workers", "1")
    return (*prepare, "--tokenizer", "../in/run", "--sources", source)
