"""A stream's memory does not grow with its length, and a long document costs a multiple of itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.stream.streams import make_texts, write_files

_PROGRAM = """
import resource, sys
from pathlib import Path
from genesis.data.sources import SourceOptions
from genesis.data.stream.block import Cursor
from genesis.data.stream.open import open_stream
from genesis.data.stream.options import StreamOptions
from genesis.data.stream.worker import BlockMaker, Job, Setup
from genesis.tokenizer.open import open_tokenizer

directory, tokenizer, packing = Path(sys.argv[1]), open_tokenizer(sys.argv[2]), sys.argv[3]
num_rounds = int(sys.argv[4])
sources = tuple(SourceOptions(path.name, (str(path),)) for path in sorted(directory.iterdir()))
options = StreamOptions(sources, block_tokens=4_000, num_workers=0)
stream = open_stream(options, tokenizer, seed=0, seq_len=64, packing=packing)
maker = BlockMaker(Setup(tokenizer.files, stream.recipe, stream.parts))
cursors = dict.fromkeys(stream.parts, Cursor())
for number in range(num_rounds):
    for key, cursor in cursors.items():
        block = maker.make(Job(key, cursor)).block
        assert len(block.rows) or block.next is None
        cursors[key] = block.next or Cursor()
    if number + 1 in (num_rounds // 4, num_rounds):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        print(pages * resource.getpagesize(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def run(directory: Path, tokenizer: Path, packing: str, num_rounds: int) -> list[list[int]]:
    """Returns (resident, peak) bytes after a quarter of the rounds and after all."""
    outcome = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(directory), str(tokenizer), packing, str(num_rounds)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [[int(word) for word in line.split()] for line in outcome.stdout.splitlines()]


@pytest.mark.parametrize("packing", ["chunk", "best_fit"])
@pytest.mark.slow
def test_memory_is_flat_over_many_epochs(tmp_path: Path, tokenizer: Path, packing: str) -> None:
    for suffix in (".jsonl", ".jsonl.zst", ".parquet"):
        write_files(tmp_path / "sources" / suffix.strip(".").replace(".", "-"), make_texts(400, seed=1), suffix)
    (early, _), (late, _) = run(tmp_path / "sources", tokenizer, packing, 40)
    assert late < early + (6 << 20), f"{late - early} bytes more"


@pytest.mark.slow
def test_a_long_document_takes_a_bounded_multiple_of_its_size(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "short" / "web").mkdir(parents=True)
    (tmp_path / "long" / "web").mkdir(parents=True)
    text = "".join(make_texts(4_000, seed=3, max_words=40)).replace("▁", "_")
    text *= (3 << 20) // len(text.encode())
    (tmp_path / "short" / "web" / "a.jsonl").write_text(json.dumps({"text": text[:1_000]}) + "\n", encoding="utf-8")
    (tmp_path / "long" / "web" / "a.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    _, (_, base) = run(tmp_path / "short", tokenizer, "chunk", 8)
    _, (_, peak) = run(tmp_path / "long", tokenizer, "chunk", 8)
    assert peak - base < 16 * len(text.encode())
