"""Measures raw text: a stream of it, from its start to its last window, its preparation, and the memory of a stream."""

import json
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import count, cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, cast

import sentencepiece
import zstandard

from benchmarks.harness import compare_pairs, take_rounds
from genesis.base.processes import PipedWorker, serve_pipe
from genesis.data.loader import Ranks, SequenceFormat
from genesis.data.order import build_order
from genesis.data.prepare import PrepareOptions, prepare_corpus
from genesis.data.sources import SourceOptions, sample_texts
from genesis.data.stream.open import open_stream
from genesis.data.stream.options import StreamOptions
from genesis.data.stream.windows import StreamWindows
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer

SEQ_LEN: Final = 2048
GLOBAL_BATCH_SIZE: Final = 8
_NUM_FILES: Final = 32
_NUM_SAMPLES: Final = 10
_SOURCE: Final = "library"


@dataclass(frozen=True)
class TextTask:
    """The text to stream, and the settings of the stream.

    Args:
        directory: Directory for the text and the tokenizer.
        text_bytes: Size of the text.
        vocab_size: Number of ids of the tokenizer.
        num_workers: Number of streaming processes, and of SentencePiece's threads.
    """

    directory: Path
    text_bytes: int
    vocab_size: int
    num_workers: int


def measure_streaming(task: TextTask, num_pairs: int) -> dict[str, Any]:
    """Returns, in plain types, the speeds of streaming a text once, of preparing it, and of encoding it from memory.

    The time of `data prepare` covers all its work: starting the workers, reading, tokenizing, hashing, writing and
    syncing shards and manifest.
    """
    texts = read_texts(task.text_bytes)
    model = train_tokenizer(texts, TokenizerOptions(task.vocab_size), task.directory)
    paths = write_shards(task.directory / "text", texts)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    def encode() -> int:
        ids = processor.encode(texts, num_threads=task.num_workers)
        return sum(map(len, ids)) + 2 * len(ids)

    def prepare() -> int:
        sources = (SourceOptions(_SOURCE, paths),)
        name = f"run-{next(runs)}"
        done = prepare_corpus(PrepareOptions(name, model, sources, out=task.directory, num_workers=task.num_workers))
        return sum(source.num_tokens for source in done.train)

    runs = count()

    def time_tokens(work: Callable[[], int]) -> float:
        begin_seconds = time.perf_counter()
        return work() / (time.perf_counter() - begin_seconds)

    def stream() -> int:
        return sum(stream_tokens(paths, model, task.num_workers, max_epochs=1))

    work = {"genesis": stream, "prepare": prepare, "encode": encode}
    rates = take_rounds(work, num_pairs, time_tokens, float, "tokens/s")
    return {
        "text": "Python's standard library",
        "text_bytes": sum(len(text.encode()) for text in texts),
        "documents": len(texts),
        "workers": task.num_workers,
        "seq_len": SEQ_LEN,
        "tokens_per_second": {name: sorted(of_one)[len(of_one) // 2] for name, of_one in rates.items()},
        "speed_over_encode": asdict(compare_pairs(rates["genesis"], rates["encode"])),
        "speed_of_prepare_over_encode": asdict(compare_pairs(rates["prepare"], rates["encode"])),
        "tokens_per_second_by_round": {name: [round(rate) for rate in of_one] for name, of_one in rates.items()},
    }


def read_texts(num_bytes: int) -> list[str]:
    """Returns the source files of Python's standard library, repeated until they have `num_bytes`."""
    library = SourceOptions(_SOURCE, (sysconfig.get_path("stdlib"),), suffixes=(".py",), on_undecodable="replace")
    texts: list[str] = []
    for text in cycle(list(sample_texts([library], num_bytes))):
        texts.append(text)
        num_bytes -= len(text.encode())
        if num_bytes <= 0:
            break
    return texts


def measure_memory(task: TextTask, num_tokens: int) -> dict[str, Any]:
    """Returns the memory of a streaming process and its workers after each tenth of `num_tokens`.

    The process streams the files that `measure_streaming` wrote, epoch after epoch.
    """
    paths = tuple(map(str, sorted((task.directory / "text").iterdir())))
    model = task.directory
    worker = PipedWorker(__name__)
    try:
        worker.connection.send((paths, model, num_tokens, task.num_workers))
        samples = [worker.connection.recv() for _ in range(_NUM_SAMPLES)]
    finally:
        worker.end()
    return {"tokens": num_tokens, "resident_bytes": samples}


def write_shards(directory: Path, texts: list[str]) -> tuple[str, ...]:
    """Writes the texts as compressed jsonl, in files with equal numbers of documents, and returns the paths."""
    directory.mkdir()
    paths = []
    for number in range(min(_NUM_FILES, len(texts))):
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts[number::_NUM_FILES])
        path = directory / f"{number:03d}.jsonl.zst"
        path.write_bytes(zstandard.compress(lines.encode()))
        paths.append(str(path))
    return tuple(paths)


def stream_tokens(paths: tuple[str, ...], model: Path, num_workers: int, max_epochs: int | None) -> Iterator[int]:
    """Yields the number of tokens of each window, from the first window to the end of the stream."""
    tokenizer = open_tokenizer(model)
    options = StreamOptions((SourceOptions(_SOURCE, paths),), num_workers=num_workers)
    limits = {} if max_epochs is None else {_SOURCE: max_epochs}
    stream = open_stream(options, tokenizer, seed=0, seq_len=SEQ_LEN, packing="chunk", max_epochs=limits)
    windows = StreamWindows(
        stream,
        build_order({_SOURCE: 1 << 40}, {_SOURCE: 1}, seed=0),
        SequenceFormat.of(tokenizer, SEQ_LEN),
        GLOBAL_BATCH_SIZE,
        GLOBAL_BATCH_SIZE,
        Ranks(),
    )
    try:
        num_empty = 0
        position = 0
        while num_empty * GLOBAL_BATCH_SIZE < stream.num_lanes:
            window = windows.window(position)
            position = window.data_position
            windows.release(position)
            num_empty = 0 if window.num_valid_tokens else num_empty + 1
            yield window.num_valid_tokens
    finally:
        windows.close()


def main(descriptor: int) -> None:
    """Runs the stream that the connection `descriptor` requests, and sends the memory that the stream uses."""
    serve_pipe(descriptor, _watch_memory)


def _watch_memory(connection: "Connection[object, object]") -> None:
    paths, model, num_tokens, num_workers = cast("tuple[tuple[str, ...], Path, int, int]", connection.recv())
    num_read, num_sampled = 0, 0
    for tokens in stream_tokens(paths, model, num_workers, max_epochs=None):
        num_read += tokens
        while num_sampled < _NUM_SAMPLES and num_read >= num_tokens * (num_sampled + 1) // _NUM_SAMPLES:
            connection.send(_resident_bytes())
            num_sampled += 1
        if num_sampled == _NUM_SAMPLES:
            return


def _resident_bytes() -> int:
    """Returns the resident memory of this process and its children; shared pages are counted for each process."""
    own = os.getpid()
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page_bytes for pid in (str(own), *children))
