"""A teacher's classes on disk: for each position of each sequence of a corpus, under one packing and length.

    CACHE/
        made_for.json         `CacheIdentity`: teacher, corpus, sequences, top_k, temperature; written first
        SOURCE/00000.classes  the sequences of one block: ids, log-probabilities, log-probability of the rest, digest
        cache.json            the identity again, and the digest of each block; written last

A block appears complete or not at all. Its digest has a key of its own, which follows from the identity, the source and
the number of the block: a block of another cache, or at another place, never verifies. An interrupted writer leaves
whole blocks behind, and the next one verifies them and goes on. Training reads `cache.json`, compares the identity
field by field, and verifies each block when it first reads it.

All numbers are little-endian. Log-probabilities are float32, and then exactly those that the teacher gave, or float16:
an error of at most 1/2048 of each one's size as stored. Readers then normalise the classes: up to 3.5/2048.
"""

import fcntl
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from blake3 import blake3
from jaxtyping import Int64, Shaped, UInt64
from numpy import ndarray
from torch import Tensor

from genesis.base.errors import UserError
from genesis.base.progress import stage
from genesis.data.window import MicroBatch
from genesis.objectives.distillation_loss import TeacherClasses
from genesis.objectives.teacher import name_classes
from genesis_callbacks.base.files import replace_file, replacing
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.locks import lock_file, open_lock
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES, check_file, open_file, path_below, read_file

CACHE_NAME: Final = "cache.json"
IDENTITY_NAME: Final = "made_for.json"
BLOCK_BYTES: Final = 32 * 2**20
"""About as many bytes has a block: it is read and verified as a whole, and written as a whole."""

LogProbsType = Literal["float32", "float16"]

_VERSION: Final = 1
_DIGEST_BYTES: Final = 32
_MAX_OPEN: Final = 256
_SMALL_VOCABULARY: Final = 1 << 16
_LOWEST: Final = {"float32": float(np.finfo(np.float32).min), "float16": float(np.finfo(np.float16).min)}


@dataclass(frozen=True)
class CacheIdentity:
    """What a cache was made for. Two caches with the same identity hold the same classes, up to a device's rounding.

    Args:
        teacher: The hash of the teacher (`TeacherReference.hash`).
        teacher_dtype: The dtype in which the teacher ran.
        vocab_size: Number of the tokenizer's ids.
        top_k: Number of ids for each position.
        temperature: The temperature of the probabilities.
        log_probs: The type on disk of the log-probabilities.
        sequences: `CorpusData.identify_sequences`.
    """

    teacher: str
    teacher_dtype: str
    vocab_size: int
    top_k: int
    temperature: float
    log_probs: LogProbsType
    sequences: Mapping[str, Any]

    @property
    def num_sequences(self) -> dict[str, int]:
        """The number of sequences of each source, in the order of the corpus."""
        return {name: source["num_sequences"] for name, source in self.sequences["sources"].items()}

    @property
    def layout(self) -> "BlockLayout":
        """How a block lies on disk."""
        ids = "<u2" if self.vocab_size <= _SMALL_VOCABULARY else "<u4"
        log_probs = "<f4" if self.log_probs == "float32" else "<f2"
        return BlockLayout(self.sequences["seq_len"], self.top_k, np.dtype(ids), np.dtype(log_probs))

    def key(self, source: str, block: int) -> bytes:
        """Returns the key of the digest of one block."""
        return blake3(json.dumps([_plain(self), source, block], sort_keys=True).encode()).digest()


class BlockLayout(NamedTuple):
    """The shape of a block on disk: three arrays, one after another, for each of its sequences' positions.

    Args:
        seq_len: Positions of a sequence.
        top_k: Number of ids for each position.
        ids: The type of the ids.
        log_probs: The type of their log-probabilities.
    """

    seq_len: int
    top_k: int
    ids: np.dtype[Any]
    log_probs: np.dtype[Any]

    @property
    def sequence_bytes(self) -> int:
        """The size of one sequence."""
        return self.seq_len * (self.top_k * (self.ids.itemsize + self.log_probs.itemsize) + 4)

    @property
    def num_sequences(self) -> int:
        """The number of sequences of a block that is not the last: a power of two, so that whole batches fill it."""
        return 1 << int(math.log2(max(1, BLOCK_BYTES // self.sequence_bytes)))

    def num_blocks(self, num_sequences: int) -> int:
        """Returns the number of blocks of a source."""
        return -(-num_sequences // self.num_sequences)

    def rows(self, block: int, num_sequences: int) -> range:
        """Returns the sequences of one block of a source with so many sequences."""
        first = block * self.num_sequences
        return range(first, min(first + self.num_sequences, num_sequences))

    def split(self, content: Shaped[ndarray, " bytes"], num_rows: int) -> tuple[ndarray, ndarray, ndarray]:
        """Returns ids and log-probabilities [rows, seq_len, top_k], and rests [rows, seq_len], as views of a block."""
        num_ids = num_rows * self.seq_len * self.top_k
        of_ids, of_log_probs = num_ids * self.ids.itemsize, num_ids * self.log_probs.itemsize
        shape = (num_rows, self.seq_len, self.top_k)
        rests = content[of_ids + of_log_probs : of_ids + of_log_probs + 4 * num_rows * self.seq_len]
        return (
            content[:of_ids].view(self.ids).reshape(shape),
            content[of_ids : of_ids + of_log_probs].view(self.log_probs).reshape(shape),
            rests.view("<f4").reshape(shape[:2]),
        )


# ---- writing


def write_cache(
    directory: Path,
    identity: CacheIdentity,
    read_sequences: Callable[[int, int, int], MicroBatch],
    read_classes: Callable[[MicroBatch], TeacherClasses],
    *,
    batch_size: int,
) -> bool:
    """Writes a cache, or what an interrupted writer has left to write. May be killed at any time.

    Args:
        directory: The cache's directory.
        identity: What the cache is made for.
        read_sequences: `CorpusData.read_sequences`.
        read_classes: `Teacher.read`, with the sequences moved to its device.
        batch_size: Number of sequences of one forward.

    Returns:
        Whether anything was left to write.

    Raises:
        UserError: The directory holds something else, or another process is writing the cache.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file: give a directory for the cache")
    directory.mkdir(parents=True, exist_ok=True)
    total = sum(identity.num_sequences.values())
    with stage("asking the teacher", total, "sequences") as shown, _locked(directory):
        _begin(directory, identity)
        if (directory / CACHE_NAME).exists():
            open_cache(directory)  # refuses a damaged one
            return False
        done = 0
        digests: dict[str, list[str]] = {}
        for number, (source, num_sequences) in enumerate(identity.num_sequences.items()):
            (directory / source).mkdir(exist_ok=True)
            digests[source] = []
            for block in range(identity.layout.num_blocks(num_sequences)):
                path, rows = _block_path(directory, source, block), identity.layout.rows(block, num_sequences)
                found = _read_verified(path, identity, source, block, len(rows)) if path.exists() else None
                digest = None if found is None else found[0]
                if digest is None:
                    runs = []
                    for first in range(0, len(rows), batch_size):
                        run = rows[first : first + batch_size]
                        runs.append(read_classes(read_sequences(number, run.start, len(run))))
                        shown.done = done + first + len(run)
                    digest = _write_block(path, identity, source, block, runs)
                digests[source].append(digest)
                shown.done = done = done + len(rows)
        content = {"version": _VERSION, "made_for": _plain(identity), "blocks": digests}
        replace_file(directory / CACHE_NAME, json.dumps(content).encode())
    return True


def _begin(directory: Path, identity: CacheIdentity) -> None:
    """Writes the identity, or compares that of an earlier writer."""
    path = directory / IDENTITY_NAME
    if not path.exists():
        if any(entry.name != _LOCK_NAME for entry in directory.iterdir()):
            raise UserError(f"{directory} is not empty, and holds no cache of a teacher: give another directory")
        replace_file(path, json.dumps(_plain(identity), indent=1).encode())
        return
    difference = _find_difference(_read_identity(path, _read_json(path)), identity)
    if difference is not None:
        raise UserError(f"{directory} was begun with {difference}; give another directory, or remove this one")


def _write_block(path: Path, identity: CacheIdentity, source: str, block: int, runs: Sequence[TeacherClasses]) -> str:
    layout = identity.layout
    if any(run.log_probs.isnan().any() for run in runs):
        raise UserError(
            f"the teacher gives probabilities that are no numbers (source {source!r}, block {block}): give "
            "another teacher, or --dtype float32"
        )
    ids = torch.cat([run.ids for run in runs]).cpu().numpy().astype(layout.ids)
    # A class without any probability has the lowest number instead of minus infinity, which float16 would also make
    # of anything below its range.
    lowest = _LOWEST[identity.log_probs]
    log_probs = torch.cat([run.log_probs for run in runs]).cpu().clamp_min(lowest).numpy().astype(layout.log_probs)
    log_rest = torch.cat([run.log_rest for run in runs]).cpu().numpy().astype("<f4")
    digest = blake3(key=identity.key(source, block), max_threads=blake3.AUTO)
    with replacing(path) as file:
        for array in (ids, log_probs, log_rest):
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            digest.update(content)
            file.write(content)
        file.write(digest.digest())
    return digest.hexdigest()


_LOCK_NAME: Final = ".lock"


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with open_lock(directory / _LOCK_NAME) as lock:
        try:
            lock_file(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, directory)
        except BlockingIOError:
            raise UserError(f"another process is writing {directory}; wait for its end, or stop it") from None
        yield


# ---- reading


class TeacherCache:
    """A complete cache, as further tensors of the sequences of training (`genesis.data.loader.SequenceColumns`).

    Thread-safe. Each block is verified when it is first read, and each sequence at every read: what the kernel reads
    from the disk again, after it has dropped the pages, may be something else.

    Args:
        path: The cache's directory.
        identity: What the cache was made for.
        digests: The digest of each block of each source.
        hash: The hash of `cache.json`, which has the digests: it identifies the whole content.
    """

    def __init__(self, path: Path, identity: CacheIdentity, digests: Mapping[str, Sequence[str]], hash: str) -> None:
        self.path, self.identity, self.hash = path, identity, hash
        self._digests = digests
        self._sources = tuple(identity.num_sequences.items())
        self._layout = identity.layout
        self._open: OrderedDict[tuple[str, int], tuple[ndarray, ndarray, ndarray]] = OrderedDict()
        self._checks: dict[tuple[str, int], UInt64[ndarray, " rows"]] = {}
        self._lock = Lock()

    def check(self, wanted: CacheIdentity) -> None:
        """Compares what the cache was made for with what a run needs.

        Raises:
            UserError: Something differs; the message has both values.
        """
        difference = _find_difference(self.identity, wanted)
        if difference is not None:
            raise UserError(f"{self.path} was made with {difference}; make another by `genesis data distill`")

    def read(self, source_ids: Int64[ndarray, " N"], sequence_ids: Int64[ndarray, " N"]) -> dict[str, Tensor]:
        """Returns the classes of these sequences, by their names in `MicroBatch.extra`.

        Raises:
            UserError: A block is damaged.
        """
        layout, num_rows = self._layout, len(sequence_ids)
        ids = np.empty((num_rows, layout.seq_len, layout.top_k), np.int32)
        log_probs = np.empty(ids.shape, np.float32)
        log_rest = np.empty(ids.shape[:2], np.float32)
        for row, (source_id, sequence) in enumerate(zip(source_ids.tolist(), sequence_ids.tolist(), strict=True)):
            ids[row], log_probs[row], log_rest[row] = self._read_sequence(
                source_id, *divmod(sequence, layout.num_sequences)
            )
        classes = TeacherClasses(*(torch.from_numpy(array) for array in (ids, log_probs, log_rest)))
        return name_classes(classes if self.identity.log_probs == "float32" else _normalise(classes))

    def _read_sequence(self, source_id: int, block: int, within: int) -> list[ndarray]:
        copies = [array[within].copy() for array in self._block(source_id, block)]
        source, _ = self._sources[source_id]
        if _check_of(copies) != self._checks[source, block][within]:
            path = _block_path(self.path, source, block)
            raise UserError(
                f"{path} has changed since it was first read: remove {self.path} and run `genesis data distill` again"
            )
        return copies

    def _block(self, source_id: int, block: int) -> tuple[ndarray, ndarray, ndarray]:
        source, num_sequences = self._sources[source_id]
        with self._lock:
            found = self._open.get((source, block))
            if found is None:
                found = self._open[source, block] = self._map(
                    source, block, len(self._layout.rows(block, num_sequences))
                )
            self._open.move_to_end((source, block))
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
            return found

    def _map(self, source: str, block: int, num_rows: int) -> tuple[ndarray, ndarray, ndarray]:
        path = _block_path(self.path, source, block)
        if (source, block) not in self._checks:
            found = _read_verified(path, self.identity, source, block, num_rows)
            if found is None or found[0] != self._digests[source][block]:
                raise UserError(f"{path} is damaged: remove {self.path} and run `genesis data distill` again")
            arrays = self._layout.split(np.frombuffer(found[1], np.uint8), num_rows)
            self._checks[source, block] = np.array([_check_of(rows) for rows in zip(*arrays, strict=True)], np.uint64)
        with open_file(path) as file:
            return self._layout.split(np.memmap(file, np.uint8, mode="r"), num_rows)


def open_cache(path: Path) -> TeacherCache:
    """Returns the cache in a directory, after comparing the size of each block.

    Raises:
        UserError: The directory holds no complete cache, or a damaged one.
    """
    cache, begun = path / CACHE_NAME, path / IDENTITY_NAME
    if not cache.is_file():
        state = "is not complete: run the same `genesis data distill` again" if begun.is_file() else "is no cache of a "
        raise UserError(f"{path} {state}" + ("" if begun.is_file() else "teacher: `genesis data distill` makes one"))
    content = _read_json(cache)
    remedy = f"remove {path} and run `genesis data distill` again"
    if content.get("version") != _VERSION:
        raise UserError(f"{cache} is of another version of genesis; {remedy}")
    identity = _read_identity(cache, content.get("made_for"))
    digests, layout = content.get("blocks"), identity.layout
    wanted = {source: layout.num_blocks(count) for source, count in identity.num_sequences.items()}
    is_table = isinstance(digests, dict) and all(isinstance(found, list) for found in digests.values())
    if digests is None or not is_table or {source: len(found) for source, found in digests.items()} != wanted:
        raise UserError(f"{cache} is damaged: it does not list the blocks of its sequences; {remedy}")
    for source, count in identity.num_sequences.items():
        for block in range(wanted[source]):
            fault = _find_size_fault(_block_path(path, source, block), layout, len(layout.rows(block, count)))
            if fault is not None:
                raise UserError(f"{fault}; {remedy}")
    return TeacherCache(path, identity, digests, blake3(read_file(cache, MAX_DOCUMENT_BYTES)).hexdigest())


def _normalise(classes: TeacherClasses) -> TeacherClasses:
    """Returns rounded classes, scaled so that their probabilities add up to 1 again."""
    total = torch.cat((classes.log_probs, classes.log_rest[..., None]), dim=-1).logsumexp(-1)
    return TeacherClasses(classes.ids, classes.log_probs - total[..., None], classes.log_rest - total)


def _read_verified(
    path: Path, identity: CacheIdentity, source: str, block: int, num_rows: int
) -> tuple[str, memoryview] | None:
    """Returns the digest at a block's end and what comes before; None if that has another digest, or another size."""
    if _find_size_fault(path, identity.layout, num_rows) is not None:
        return None
    content = read_file(path, num_rows * identity.layout.sequence_bytes + _DIGEST_BYTES)
    body, stored = memoryview(content)[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    digest = blake3(body, key=identity.key(source, block), max_threads=blake3.AUTO)
    return (digest.hexdigest(), body) if digest.digest() == stored else None


def _check_of(rows: Iterable[ndarray]) -> int:
    """Returns 64 bits of the hash of a sequence, as it lies on disk."""
    digest = blake3()
    for row in rows:
        digest.update(row.reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest(8), "little")


def _find_size_fault(path: Path, layout: BlockLayout, num_rows: int) -> str | None:
    try:
        found = check_file(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    expected = num_rows * layout.sequence_bytes + _DIGEST_BYTES
    return None if found == expected else f"{path} has {found:,} bytes instead of {expected:,}"


def _block_path(directory: Path, source: str, block: int) -> Path:
    return directory / source / f"{block:05d}.classes"


def _plain(identity: CacheIdentity) -> dict[str, Any]:
    return asdict(identity)


def _find_difference(made_for: CacheIdentity, wanted: CacheIdentity) -> str | None:
    """Returns a line about the first difference: what the cache has, and what is wanted."""
    one, other = _flatten(_plain(made_for)), _flatten(_plain(wanted))
    for name in (*one, *other):
        if one.get(name) != other.get(name):
            return f"{name} {_show(one.get(name))}, and not {_show(other.get(name))}"
    if list(made_for.num_sequences) != list(wanted.num_sequences):
        return f"the sources {', '.join(made_for.num_sequences)}, and not {', '.join(wanted.num_sequences)}"
    return None


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat |= _flatten(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {prefix + name: item}
    return flat


def _show(value: Any) -> str:
    return value[:16] if isinstance(value, str) else "none" if value is None else str(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = load_json(read_file(path, MAX_DOCUMENT_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); remove {path.parent}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is no JSON object; remove {path.parent}")
    return content


def _read_identity(path: Path, content: Any) -> CacheIdentity:
    try:
        identity = CacheIdentity(**content)
        counts = [(name, int(count)) for name, count in identity.num_sequences.items()]
        numbers = (identity.vocab_size, *identity.layout[:2], *identity.num_sequences.values())
        is_valid = identity.log_probs in _LOWEST and all(type(number) is int for number in numbers)
        is_valid = is_valid and min(identity.layout[:2]) > 0
        if is_valid and all(count >= 0 and path_below(path.parent, name, path) for name, count in counts):
            return identity
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        pass
    raise UserError(f"{path} is damaged: it does not say what the cache was made for; remove {path.parent}")
