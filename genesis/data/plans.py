"""The plan of a packing, computed once: the pieces of documents in each sequence of a corpus.

    CORPUS/packing/best_fit-2048/
        plan.json          hashes of the inputs, and for each source of the training set the figures
        SOURCE.starts      int64, start of each piece in the source
        SOURCE.lengths     int32, number of tokens of each piece
        SOURCE.ends        int64, number of pieces up to the end of each sequence
        SOURCE.tokens      int32, number of tokens of each sequence

All arrays are little-endian. A plan's directory is renamed into place when it is complete and on disk. Training maps
the arrays into memory.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import reduce
from operator import add
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal

import numpy as np
from blake3 import blake3
from jaxtyping import Int64, Integer
from numpy import ndarray

from genesis.base.errors import UserError
from genesis.base.progress import stage
from genesis.data.corpus import Corpus, TokenSource, VerifyHashes
from genesis.data.manifest import SourceRecord
from genesis.data.packing import (
    CUT_EVENLY,
    LostDocuments,
    PackedSequences,
    Packing,
    PackingFigures,
    count_lost,
    count_train_sequences,
    measure_packing,
    pack_documents,
)
from genesis.data.shards import hash_index, index_path, remedy
from genesis_callbacks.base.files import create_file, sync_directory
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.locks import lock_file, open_lock
from genesis_callbacks.base.untrusted import open_file, read_file

PLANS_DIRECTORY: Final = "packing"
BLOCK_DOCUMENTS: Final = 1 << 21
"""Documents that are packed at a time, so that memory does not grow with the corpus."""

PlannedPacking = Literal["best_fit", "pad"]

_PLAN_NAME: Final = "plan.json"
_PLAN_VERSION: Final = 1
_HASHED_BYTES: Final = 1 << 24
_DTYPES: Final = {"starts": "<i8", "lengths": "<i4", "ends": "<i8", "tokens": "<i4"}


@dataclass(frozen=True)
class PlanRecord:
    """The entry of one source in a plan.

    Args:
        made_from: A hash of the hashes of the source's shards.
        num_pieces: Number of pieces in all sequences.
        num_tokens: Number of tokens in all sequences, without padding.
        figures: The effect of the packing on the source.
        hashes: The hash of each file, by its name.
    """

    made_from: str
    num_pieces: int
    num_tokens: int
    figures: PackingFigures
    hashes: dict[str, str]

    @property
    def hash(self) -> str:
        """Returns a hash of the source's whole plan."""
        return blake3("".join(self.hashes[name] for name in _DTYPES).encode()).hexdigest()

    def file_bytes(self, name: str) -> int:
        """Returns the size of one of the source's files."""
        count = self.num_pieces if name in ("starts", "lengths") else self.figures.num_sequences
        return count * np.dtype(_DTYPES[name]).itemsize


@dataclass(frozen=True)
class Plan:
    """The content of `plan.json`; `sources` are the sources of the training set by name."""

    packing: PlannedPacking
    seq_len: int
    sources: dict[str, PlanRecord]


class SourcePlan:
    """The sequences of one source. Its files are mapped, and compared with their hashes, at the first read.

    Thread-safe.
    """

    def __init__(self, directory: Path, name: str, record: PlanRecord, verify_hashes: VerifyHashes) -> None:
        self.num_sequences = record.figures.num_sequences
        self.tokens_per_sequence = Fraction(record.num_tokens, max(1, self.num_sequences))
        self.hash = record.hash
        self.figures = record.figures
        self._directory, self._name, self._record = directory, name, record
        self._verify_hashes = verify_hashes
        self._maps: dict[str, Integer[ndarray, " entries"]] = {}
        self._lock = Lock()

    def pieces(self, sequence: int) -> tuple[Int64[ndarray, " pieces"], Integer[ndarray, " pieces"]]:
        """Returns start and length of each piece of a sequence.

        Raises:
            UserError: The plan is damaged.
        """
        maps = self._mapped()
        first, last = int(maps["ends"][sequence - 1]) if sequence else 0, int(maps["ends"][sequence])
        return maps["starts"][first:last], maps["lengths"][first:last]

    def num_tokens(self, sequences: Int64[ndarray, " count"]) -> int:
        """Returns the number of tokens in these sequences, without padding.

        Raises:
            UserError: The plan is damaged.
        """
        return int(self._mapped()["tokens"][sequences].sum(dtype=np.int64))

    def _mapped(self) -> dict[str, Integer[ndarray, " entries"]]:
        with self._lock:
            if not self._maps:
                self._maps = {name: self._map(name) for name in _DTYPES}
            return self._maps

    def _map(self, name: str) -> Integer[ndarray, " entries"]:
        path = _file(self._directory, self._name, name)
        fault = _find_fault(path, self._record, name, with_hash=self._verify_hashes == "first_touch")
        if fault is not None:
            raise UserError(f"{fault}; remove {self._directory} and run `genesis data plan` again")
        with open_file(path) as file:
            is_empty = not os.fstat(file.fileno()).st_size
            return np.empty(0, _DTYPES[name]) if is_empty else np.memmap(file, _DTYPES[name], mode="r")


def write_plan(corpus: Corpus, packing: PlannedPacking, seq_len: int, *, waits: bool = False) -> Plan:
    """Writes the plan of a corpus, unless a plan for its shards exists, and returns the plan.

    Args:
        corpus: The corpus.
        packing: How documents are packed.
        seq_len: Tokens of a sequence.
        waits: Whether to wait for another process that is writing a plan; otherwise that is an error.

    Raises:
        UserError: An index of documents is damaged, or the disk refuses the files.
    """
    if seq_len < 1:
        raise UserError(f"seq_len is {seq_len}; it must be at least 1")
    if corpus.manifest.is_paired:
        raise UserError(f"{corpus.path} has pairs of answers, which training reads without a plan: leave the plan out")
    directory = _plan_directory(corpus.path, packing, seq_len)
    try:
        with _locked(directory.parent, waits=waits):
            if directory.exists():
                if (found := _read_plan(directory)) is not None and plan_fits(found, corpus):
                    return found
                shutil.rmtree(directory)
            return _write_plan(corpus, packing, seq_len, directory)
    except OSError as error:
        raise UserError(f"{directory} cannot be written ({error.strerror}); check the disk and the directory") from None


def require_plan(corpus: Corpus, packing: PlannedPacking, seq_len: int) -> None:
    """Makes the plan of a corpus if there is none for its shards. Several processes may call it at once: one makes it.

    Raises:
        UserError: An index of documents is damaged, or the disk refuses the files.
    """
    found = _read_plan(_plan_directory(corpus.path, packing, seq_len))
    if found is not None and plan_fits(found, corpus):
        return
    if not os.access(corpus.path, os.W_OK):
        raise UserError(
            f"{corpus.path} has no plan for {packing} at seq_len {seq_len}, and cannot be written: run `genesis data "
            f"plan` where it can, or give --data.packing {CUT_EVENLY}, which cuts documents"
        )
    write_plan(corpus, packing, seq_len, waits=True)


def open_plan(
    corpus: Corpus, packing: PlannedPacking, seq_len: int, verify_hashes: VerifyHashes
) -> tuple[SourcePlan, ...]:
    """Returns the plan of each source of the training set, in the corpus's order.

    Raises:
        UserError: The corpus has no such plan, or the plan was made for other shards.
    """
    directory = _plan_directory(corpus.path, packing, seq_len)
    command = f"run `genesis data plan {corpus.path} --packing {packing} --seq_len {seq_len}`"
    plan = _read_plan(directory)
    if plan is None:
        raise UserError(f"{corpus.path} has no plan for {packing} at seq_len {seq_len}; {command}")
    misfit = _find_misfit(plan, corpus)
    if misfit is not None:
        raise UserError(f"{directory} was made for {misfit}; {command}")
    return tuple(
        SourcePlan(directory, source.name, plan.sources[source.name], verify_hashes) for source in corpus.train
    )


def list_plans(corpus: Path) -> list[Plan]:
    """Returns the plans of a corpus, ordered by name."""
    plans = (_read_plan(path) for path in sorted((corpus / PLANS_DIRECTORY).glob("[!.]*-*")) if path.is_dir())
    return [plan for plan in plans if plan is not None]


def plan_fits(plan: Plan, corpus: Corpus) -> bool:
    """Returns whether a plan was made for this corpus's shards."""
    return _find_misfit(plan, corpus) is None


def find_plan_fault(corpus: Corpus, plan: Plan) -> str | None:
    """Returns a line about how a plan's files differ from the plan, or the plan from the corpus; None if they fit."""
    directory = _plan_directory(corpus.path, plan.packing, plan.seq_len)
    misfit = _find_misfit(plan, corpus)
    if misfit is not None:
        return f"{directory} was made for {misfit}"
    faults = (
        _find_fault(_file(directory, source, name), record, name, with_hash=True)
        for source, record in plan.sources.items()
        for name in _DTYPES
    )
    return next((fault for fault in faults if fault is not None), None)


def measure_source(source: TokenSource, seq_len: int, packing: Packing) -> PackingFigures:
    """Returns the effect that a packing would have on a source."""
    if packing == "chunk":
        num_chunks = count_train_sequences(source.num_tokens, seq_len)
        blocks = (
            measure_packing(*block, seq_len, packing, num_chunks, _label_counter(source, *block))
            for block in _blocks(source.document_ends())
        )
        total = reduce(add, blocks, PackingFigures())
        return PackingFigures(**{**asdict(total), "num_sequences": num_chunks})
    return reduce(add, (figures for _, figures in _pack(source, seq_len, packing)), PackingFigures())


def count_lost_documents(source: TokenSource, seq_len: int, packing: Packing) -> LostDocuments:
    """Returns what a packing does to the documents of a source. It reads the labels of the whole source."""
    num_chunks = count_train_sequences(source.num_tokens, seq_len)
    blocks = (
        count_lost(*block, seq_len, packing, num_chunks, _label_counter(source, *block))
        for block in _blocks(source.document_ends())
    )
    return reduce(add, blocks, LostDocuments())


def hash_shards(record: SourceRecord) -> str:
    """Returns a hash of what the manifest lists of a source's shards: their tokens, document ends and labels."""
    names = ["num_tokens", "num_documents", "hash", "index_hash"]
    # Without the column the hash must equal that of earlier versions, which had no such column.
    if "labels_hash" in record.table.columns:
        names.append("labels_hash")
    columns = [list(record.table.column(name)) for name in names]
    return blake3(json.dumps(columns).encode()).hexdigest()


# Making a plan


def _write_plan(corpus: Corpus, packing: PlannedPacking, seq_len: int, directory: Path) -> Plan:
    staging = directory.with_name(f".staging-{secrets.token_hex(8)}")
    staging.mkdir()
    try:
        sources = {
            source.name: _write_source(staging, corpus, source, record, packing, seq_len)
            for source, record in zip(corpus.train, corpus.manifest.train, strict=True)
        }
        plan = Plan(packing, seq_len, sources)
        with create_file(staging / _PLAN_NAME) as file:
            file.write(json.dumps({"plan_version": _PLAN_VERSION, **asdict(plan)}, indent=1).encode())
        sync_directory(staging)
        staging.rename(directory)
        sync_directory(directory.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return plan


def _write_source(
    staging: Path, corpus: Corpus, source: TokenSource, record: SourceRecord, packing: PlannedPacking, seq_len: int
) -> PlanRecord:
    _check_index(corpus, record)
    paths = {name: _file(staging, source.name, name) for name in _DTYPES}
    figures, num_pieces, num_tokens = PackingFigures(), 0, 0
    with contextlib.ExitStack() as opened:
        files = {name: opened.enter_context(create_file(path)) for name, path in paths.items()}
        shown = opened.enter_context(stage(f"packing {source.name}", record.num_documents, "documents"))
        for packed, of_block in _pack(source, seq_len, packing):
            firsts = packed.sequence_ends - np.diff(packed.sequence_ends, prepend=0)
            arrays = {
                "starts": packed.starts,
                "lengths": packed.lengths,
                "ends": packed.sequence_ends + num_pieces,
                "tokens": np.add.reduceat(packed.lengths, firsts) if len(packed) else packed.lengths,
            }
            for name, array in arrays.items():
                files[name].write(array.astype(_DTYPES[name]).tobytes())
            figures, num_pieces = figures + of_block, num_pieces + len(packed.starts)
            num_tokens += int(packed.lengths.sum())
            shown.advance(of_block.num_documents)
    hashes = {name: _hash_file(path) for name, path in paths.items()}
    return PlanRecord(hash_shards(record), num_pieces, num_tokens, figures, hashes)


def _pack(
    source: TokenSource, seq_len: int, packing: PlannedPacking
) -> Iterator[tuple[PackedSequences, PackingFigures]]:
    """Yields the packed documents of a source, block by block."""
    for starts, ends in _blocks(source.document_ends()):
        packed = pack_documents(ends - starts[0], seq_len, packing)
        moved = PackedSequences(packed.starts + starts[0], packed.lengths, packed.sequence_ends)
        count_labels = _label_counter(source, starts, ends)
        yield moved, measure_packing(starts, ends, seq_len, packing, len(packed), count_labels)


def _label_counter(
    source: TokenSource, starts: Int64[ndarray, " documents"], ends: Int64[ndarray, " documents"]
) -> Callable[[Int64[ndarray, " places"]], Int64[ndarray, " places"]]:
    """Returns the function that counts labels before positions in a block of documents, for `measure_packing`."""
    if not source.has_label_column:
        return lambda places: places
    first = starts[:1]

    def count(places: Int64[ndarray, " places"]) -> Int64[ndarray, " places"]:
        return source.count_labels(np.concatenate((first, np.minimum(places, ends[-1]))))[1:]

    return count


def _blocks(
    document_ends: Iterable[Int64[ndarray, " documents"]],
) -> Iterator[tuple[Int64[ndarray, " documents"], Int64[ndarray, " documents"]]]:
    """Yields the starts and ends of `BLOCK_DOCUMENTS` documents at a time, across the borders of shards."""
    waiting: list[Int64[ndarray, " documents"]] = []
    num_waiting, start = 0, 0
    for ends in document_ends:
        waiting.append(ends)
        num_waiting += len(ends)
        while num_waiting >= BLOCK_DOCUMENTS:
            joined = np.concatenate(waiting)
            block, rest = joined[:BLOCK_DOCUMENTS], joined[BLOCK_DOCUMENTS:]
            yield np.concatenate(([start], block[:-1])), block
            waiting, num_waiting, start = [rest], len(rest), int(block[-1])
    if num_waiting:
        block = np.concatenate(waiting)
        yield np.concatenate(([start], block[:-1])), block


def _check_index(corpus: Corpus, record: SourceRecord) -> None:
    for shard in record.shards:
        found = hash_index(corpus.path, shard)
        if found != shard.index_hash:
            raise UserError(
                f"{index_path(corpus.path, shard)} has hash {found[:16]}, the manifest lists {shard.index_hash[:16]}; "
                f"{remedy(shard.path)}"
            )


@contextmanager
def _locked(plans: Path, *, waits: bool) -> Iterator[None]:
    plans.mkdir(exist_ok=True)
    with open_lock(plans / ".lock") as lock:
        try:
            lock_file(lock.fileno(), fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB, plans)
        except BlockingIOError:
            raise UserError(f"another process is writing a plan in {plans}; wait for its end, or stop it") from None
        for left_over in plans.glob(".staging-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        yield


# Reading a plan


def _plan_directory(corpus: Path, packing: PlannedPacking, seq_len: int) -> Path:
    return corpus / PLANS_DIRECTORY / f"{packing}-{seq_len}"


def _file(directory: Path, source: str, name: str) -> Path:
    return directory / f"{source}.{name}"


def _read_plan(directory: Path) -> Plan | None:
    """Returns the plan in a directory, None if there is no such directory."""
    path = directory / _PLAN_NAME
    if not directory.exists():
        return None
    try:
        raw: dict[str, Any] = load_json(read_file(path))
        is_known = raw.pop("plan_version") == _PLAN_VERSION
        for name, record in raw["sources"].items() if is_known else ():
            raw["sources"][name] = PlanRecord(**{**record, "figures": PackingFigures(**record["figures"])})
        if is_known:
            return Plan(**raw)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); remove {directory} and run `genesis data plan` again") from None
    raise UserError(f"{path} is of another version of genesis; remove {directory} and run `genesis data plan` again")


def _find_misfit(plan: Plan, corpus: Corpus) -> str | None:
    """Returns the data that a plan was made for, if they are not this corpus's training set, else None."""
    names = [record.name for record in corpus.manifest.train]
    if list(plan.sources) != names:
        return f"the sources {', '.join(plan.sources)}, the corpus has {', '.join(names)}"
    other = next((r.name for r in corpus.manifest.train if plan.sources[r.name].made_from != hash_shards(r)), None)
    return None if other is None else f"other shards of the source {other!r}"


def _find_fault(path: Path, record: PlanRecord, name: str, *, with_hash: bool) -> str | None:
    if not path.exists():
        return f"{path} is missing"
    found_bytes, expected_bytes = path.stat().st_size, record.file_bytes(name)
    if found_bytes != expected_bytes:
        return f"{path} has {found_bytes:,} bytes, but its plan lists {expected_bytes:,}"
    found = _hash_file(path) if with_hash else record.hashes[name]
    return (
        None
        if found == record.hashes[name]
        else f"{path} has hash {found[:16]}, but its plan lists {record.hashes[name][:16]}"
    )


def _hash_file(path: Path) -> str:
    """Returns the BLAKE3 hex digest of a file. It reads without a map, whose pages would count as process memory."""
    digest = blake3(max_threads=blake3.AUTO)
    with open_file(path) as file:
        while part := file.read(_HASHED_BYTES):
            digest.update(part)
    return digest.hexdigest()
