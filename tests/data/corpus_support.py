"""Text, a tokenizer and sources to prepare corpora from in tests."""

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from genesis.base.progress import Stage
from genesis.data.prepare import PrepareOptions
from genesis.data.sources import SourceOptions
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer

WORDS = ("alpha ", "beta\n", "gamma", "  delta ", "1984 ", "é", "▁", "\t", "\r\n", "omega ", "👩‍👩‍👧 ", "self.value = ")


def make_texts(num_texts: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [f"{seed}/{number} " + "".join(draw.choices(WORDS, k=draw.randrange(60))) for number in range(num_texts)]


def make_tokenizer(directory: Path, vocab_size: int = 320) -> Path:
    return train_tokenizer(make_texts(200, seed=0), TokenizerOptions(vocab_size), directory)


def make_options(directory: Path, **changes: object) -> PrepareOptions:
    """Returns options for three sources (plain jsonl, one compressed file, parquet); writes their files if need be."""
    web, book, table = directory / "web.jsonl", directory / "book.jsonl.zst", directory / "table.parquet"
    if not web.exists():
        make_tokenizer(directory)
        write_jsonl(web, make_texts(120, seed=1))
        write_jsonl(book, make_texts(60, seed=2))
        pq.write_table(pa.table({"text": make_texts(60, seed=3)}), table, row_group_size=20)
    options: dict[str, object] = {
        "name": "corpus",
        "out": directory,
        "tokenizer": directory,
        "sources": (
            SourceOptions("web", (str(web),), weight=2),
            SourceOptions("book", (str(book),)),
            SourceOptions("table", (str(table),)),
        ),
        "validation_fraction": 0.1,
        "shard_tokens": 2_000,
        "num_workers": 2,
        **changes,
    }
    return PrepareOptions(**options)  # type: ignore[arg-type] # any field may be changed


def write_jsonl(path: Path, texts: list[str]) -> None:
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(zstandard.compress(data) if path.suffix == ".zst" else data)


def read_shard(path: Path, dtype: str) -> list[list[int]]:
    """Returns the tokens of each document of a shard."""
    ends = np.fromfile(f"{path}.index", "<u8").astype(np.int64)
    return [document.tolist() for document in np.split(np.fromfile(path, dtype), ends[:-1])]


def watch_stage(monkeypatch: pytest.MonkeyPatch, module: str, see: Callable[[Stage], object]) -> None:
    """Calls `see` with a module's stage whenever more of its units are done."""

    class Watched(Stage):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "done" and hasattr(self, "begin_seconds"):
                see(self)

    @contextmanager
    def begin(name: str, total: int | None = None, unit: str = "", *, first: int = 0) -> Iterator[Stage]:
        yield Watched(name, total, unit, first, first)

    monkeypatch.setattr(f"{module}.stage", begin)


def read_tree(corpus: Path) -> dict[str, bytes]:
    """Returns every file of a corpus by its path, all but the lock."""
    files = (path for path in corpus.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(corpus)): path.read_bytes() for path in sorted(files)}


def without_stages(err: str) -> list[str]:
    """Returns the lines that a command wrote but for those of stages, which take long enough on a busy machine."""
    stage = re.compile(r"^[^:]+: (?:.* \(\d+%\), .*|.* in [\d.]+ s)$")
    return [line for line in err.splitlines() if not stage.match(line)]
