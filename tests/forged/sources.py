"""Forged files of data for `genesis data prepare`."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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


def build_command(path: str) -> tuple[str, ...]:
    """Returns the command that prepares one file."""
    source = f"[{{name: a, paths: [{path}]}}]"
    prepare = ("data", "prepare", "--name", "corpus", "--out", "../out", "--num_workers", "1")
    return (*prepare, "--tokenizer", "../in/run", "--sources", source)
