"""Corpora of random tokens, and of any size in sparse files, and the time and memory to open one.

Opening covers the work of a run before its first step: reading the manifest, checking every file, computing the order,
and building the first window with its shards hashed. In sparse files 60 billion tokens fit on a small disk. Each
measurement has its own process, because peak memory is counted per process.
"""

import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3

from genesis.base.processes import run_program
from genesis.data.corpus import open_corpus
from genesis.data.loader import Ranks, SequenceFormat, TrainWindows
from genesis.data.manifest import CorpusManifest, ShardRecord, SourceRecord, write_manifest
from genesis.data.order import build_order
from genesis.data.shards import INDEX_ENTRY, EncodedDocuments, ShardWriter, hash_file, little_endian, shard_files
from genesis.tokenizer.train import BOS_ID, EOS_ID

VOCAB_SIZE: Final = 49_152
SEQ_LEN: Final = 2048
GLOBAL_BATCH_SIZE: Final = 32
_SHARDS_PER_DIRECTORY: Final = 10_000
_FIRST_PIECE: Final = 16
_MEAN_DOCUMENT_TOKENS: Final = 800
_NUM_SHARDS: Final = 8
_WEIGHTS: Final = {"web": 7, "code": 3}


@dataclass(frozen=True)
class Opening:
    """The time and memory that one process needed to open a corpus and build windows of it.

    Args:
        num_tokens: Number of tokens in the corpus.
        num_shards: Number of shards in the corpus.
        open_seconds: Time of `open_corpus` alone.
        first_window_seconds: Time from before `open_corpus` until the first window is ready.
        start_bytes: Resident memory before the corpus was opened: Python, torch and numpy.
        first_window_peak_bytes: Peak resident memory until the first window was ready, including `start_bytes`.
        peak_bytes: Peak resident memory after all windows.
        num_windows: Number of windows that were built.
    """

    num_tokens: int
    num_shards: int
    open_seconds: float
    first_window_seconds: float
    start_bytes: int
    first_window_peak_bytes: int
    peak_bytes: int
    num_windows: int


def write_sparse_corpus(path: Path, num_tokens: int, num_shards: int) -> None:
    """Writes a corpus of one source whose shards are sparse files; each shard is one document of zeros.

    Args:
        path: An empty directory, or one that does not exist yet.
        num_tokens: Number of tokens in all shards together; each shard has the same number.
        num_shards: Number of shards.
    """
    path.mkdir(parents=True, exist_ok=True)
    shard_tokens = num_tokens // num_shards
    num_bytes = shard_tokens * little_endian("uint16").itemsize
    index = np.array([shard_tokens], INDEX_ENTRY).tobytes()
    paths = [f"train/web/{number // _SHARDS_PER_DIRECTORY:03d}/{number:06d}.ds" for number in range(num_shards)]
    for directory in sorted({(path / shard).parent for shard in paths}):
        directory.mkdir(parents=True)
    for shard in paths:
        tokens_path, index_path, _ = shard_files(path / shard)
        with tokens_path.open("wb") as file:
            file.truncate(num_bytes)
        index_path.write_bytes(index)
    token_hash, index_hash = hash_file(path / paths[0]), blake3(index).hexdigest()
    shards = [ShardRecord(shard, shard_tokens, 1, 0, num_bytes, token_hash, index_hash) for shard in paths]
    _write_manifest(path, (SourceRecord("web", 1, num_shards, 0, shard_tokens * num_shards, shards),), VOCAB_SIZE)


def write_random_corpus(path: Path, num_tokens: int, vocab_size: int = VOCAB_SIZE) -> Path:
    """Writes a corpus of two sources in several shards, with documents of realistic length, and a flat file of them.

    Returns:
        The path of the flat file of the same tokens, whose type is uint16.
    """
    rng = np.random.default_rng(0)
    path.mkdir(parents=True)
    flat_path = path.with_suffix(".tokens")
    sources = []
    with flat_path.open("wb") as flat:
        for name, weight in _WEIGHTS.items():
            shards = []
            for number in range(_NUM_SHARDS):
                relative = f"train/{name}/{number:05d}.ds"
                (path / relative).parent.mkdir(parents=True, exist_ok=True)
                shard_tokens = num_tokens // (len(_WEIGHTS) * _NUM_SHARDS)
                shards.append(_write_random_shard(path / relative, relative, shard_tokens, rng, vocab_size))
                flat.write((path / relative).read_bytes())
            documents, text_bytes, tokens = (
                sum(getattr(shard, f"num_{key}") for shard in shards) for key in ("documents", "text_bytes", "tokens")
            )
            sources.append(SourceRecord(name, weight, documents, text_bytes, tokens, shards))
    _write_manifest(path, tuple(sources), vocab_size)
    return flat_path


def _write_random_shard(
    path: Path, relative: str, num_tokens: int, rng: np.random.Generator, vocab_size: int
) -> ShardRecord:
    lengths = 2 + rng.geometric(1 / _MEAN_DOCUMENT_TOKENS, max(1, num_tokens // _MEAN_DOCUMENT_TOKENS))
    ends = np.cumsum(lengths)
    tokens = rng.integers(_FIRST_PIECE, vocab_size, ends[-1], dtype=np.int32)
    tokens[ends - lengths] = BOS_ID
    tokens[ends - 1] = EOS_ID
    writer = ShardWriter(path, "uint16", "random", EOS_ID)
    writer.append(EncodedDocuments(tokens, lengths, num_text_bytes=0))
    return writer.finish(relative)


def _write_manifest(path: Path, sources: tuple[SourceRecord, ...], vocab_size: int) -> None:
    manifest = CorpusManifest(
        name=path.name,
        hash_algorithm="blake3",
        tokenizer_hash="",
        vocab_size=vocab_size,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        token_dtype="uint16",
        train=sources,
        validation=(),
    )
    write_manifest(path, manifest)


def measure_opening(path: Path, num_windows: int = 1) -> Opening:
    """Returns the time and memory that a new process needs to open the corpus and to build `num_windows` windows."""
    command = [sys.executable, "-m", __name__, str(path), str(num_windows)]
    done = run_program(command, check=True, stdout=subprocess.PIPE, text=True)
    return Opening(**json.loads(done.stdout))


def open_and_read(path: Path, num_windows: int) -> Opening:
    """Opens the corpus at `path` in this process and builds its first windows."""
    start_bytes = _peak_bytes()
    begin = time.perf_counter()
    corpus = open_corpus(path)
    open_seconds = time.perf_counter() - begin
    (source,) = corpus.train
    windows = TrainWindows(
        build_order({source.name: (source.num_tokens - 1) // SEQ_LEN}, {source.name: 1}, seed=0),
        corpus.train,
        SequenceFormat(SEQ_LEN, EOS_ID, np.ones(VOCAB_SIZE, np.int32), little_endian("uint16")),
        GLOBAL_BATCH_SIZE,
        GLOBAL_BATCH_SIZE,
        Ranks(),
    )
    windows.window(0)
    first_window_seconds = time.perf_counter() - begin
    first_window_peak_bytes = _peak_bytes()
    for number in range(1, num_windows):
        windows.window(number * GLOBAL_BATCH_SIZE)
    return Opening(
        source.num_tokens,
        source.num_shards,
        open_seconds,
        first_window_seconds,
        start_bytes,
        first_window_peak_bytes,
        _peak_bytes(),
        num_windows,
    )


def _peak_bytes() -> int:
    # Not getrusage's ru_maxrss: in a new process it starts at the peak of the process that started it.
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    json.dump(asdict(open_and_read(Path(sys.argv[1]), int(sys.argv[2]))), sys.stdout)
