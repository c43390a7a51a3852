"""Writes one rank's part of a save and, on rank 0, commits the save: the same code in every mode.

`write_part` and `commit_save` do the work. In a thread or a writer process, `perform` calls them, and ranks meet in the
staging directory alone: each rank leaves a receipt or a note of its failure there, and rank 0 waits for all of them.
`perform` uses no process group, because the death of one member breaks a group for all the others, and a writer may
outlive its trainer.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..base.checkpoint_errors import CheckpointError, SaveFailedError
from ..base.errors import describe_error
from ..base.events import EventLog
from ..base.files import sync_directory
from ..base.hashing import HashAlgorithm, hash_bytes
from ..base.local_shards import TensorShard
from ..base.locks import PrivateDescriptor, lock_file
from ..base.manifest import (
    Ancestor,
    ChunkRecord,
    FileRecord,
    Manifest,
    TensorRecord,
    dtype_from_name,
    dtype_name,
    read_manifest,
)
from ..base.safe_read import MAX_DOCUMENT_BYTES, parse_json, read_file
from .assemble import assemble, collect_records, retain
from .collect import SWAPPED_PREFIX
from .commit import discard
from .digest import digest_chunk
from .durable_file import write_file
from .plan import merge_digests
from .retain import Retention
from .scope import BoundScope
from .stage import Placed, Staged
from .write import Receipt, write_shard

OutcomeKind = Literal["written", "committed", "failed", "torn", "changed"]
_NOTE_ALGORITHM: HashAlgorithm = "blake3"
_POLL_SECONDS = 0.005
_GATHER_GRACE_SECONDS = 2.0
# Long enough for writers whose trainers died together to finish; a restart waits for them.
_ORPHAN_SECONDS = 10.0


@dataclass(frozen=True)
class Outcome:
    """The end of a rank's part of a save; rank 0's outcome is the outcome of the save.

    Attributes:
        kind: `written` (other ranks) and `committed` (rank 0) are good; `torn`: training changed what was being
            staged; `changed`: the rank holds other tensors than were planned.
        text: The reason, if the outcome is not good.
        manifest_hash: Hash of the manifest of a committed save.
        warning: A problem that occurred after the commit.
        write_seconds: From the beginning of the job to its end.
    """

    kind: OutcomeKind
    text: str = ""
    manifest_hash: str = ""
    warning: str | None = None
    write_seconds: float = 0.0


class TornSnapshotError(SaveFailedError):
    """Training changed a tensor while it was staged."""


class ChangedPartsError(SaveFailedError):
    """A rank holds other tensors than the save was planned for."""


_KIND_BY_ERROR: dict[type[SaveFailedError], OutcomeKind] = {TornSnapshotError: "torn", ChangedPartsError: "changed"}


def failed_outcome(error: BaseException) -> Outcome:
    """Returns the outcome of a save that ended by this error."""
    kinds = [kind for error_type, kind in _KIND_BY_ERROR.items() if isinstance(error, error_type)]
    kind: OutcomeKind = kinds[0] if kinds else "failed"
    return Outcome(kind, str(error) if isinstance(error, CheckpointError | SaveFailedError) else describe_error(error))


def error_from(kind: str, text: str) -> SaveFailedError:
    """Returns the error for an outcome of this kind: the inverse of `failed_outcome`."""
    error_type = next((error for error, other in _KIND_BY_ERROR.items() if other == kind), SaveFailedError)
    return error_type(text)


@dataclass(frozen=True)
class CommitOrder:
    """The data with which rank 0 makes a checkpoint of the files that all ranks wrote.

    Attributes:
        header: Header of the manifest.
        shards_by_writer: The shared parts that each rank has to write.
        retention: Which checkpoints stay after the commit.
        num_updates: Optimizer steps that changed parameters since the previous checkpoint.
        moved: Names of the parameters that the last update changed, by its gradients and learning rates.
        events: The log that gets the event of the commit; None for no event.
        scope: Which tensors the checkpoint holds; None for all.
    """

    header: Manifest
    shards_by_writer: tuple[tuple[TensorShard, ...], ...]
    retention: Retention
    num_updates: int
    moved: frozenset[str]
    events: EventLog | None = None
    scope: BoundScope | None = None


@dataclass(frozen=True)
class WriteJob:
    """One rank's part of a save.

    Attributes:
        staging: The staging directory, which rank 0 has made.
        rank: This rank.
        placed: The parts that this rank writes, and their places in the shared buffer.
        digests: Of all parts that this rank holds, taken from the live tensors.
        section: This rank's other state, already plain JSON.
        hash_algorithm: Hash algorithm for every file.
        time_limit_seconds: Time limit of the whole job.
        commit: Rank 0's order; None on other ranks.
    """

    staging: Path
    rank: int
    placed: tuple[Placed, ...]
    digests: Mapping[TensorShard, int]
    section: Any
    hash_algorithm: HashAlgorithm
    time_limit_seconds: float
    commit: CommitOrder | None


@dataclass(frozen=True)
class RankReceipt:
    """The content of a rank's receipt: the files that it wrote, the live digests of its parts, and its other state."""

    receipt: Receipt
    digests: dict[TensorShard, int]
    section: Any


# ---- notes in the staging directory


def _receipt_path(staging: Path, rank: int) -> Path:
    return staging / f"receipt-{rank}.json"


def _failure_path(staging: Path, rank: int) -> Path:
    return staging / f"failed-{rank}.json"


def _write_note(path: Path, content: Any) -> None:
    data = json.dumps(content, allow_nan=False).encode()
    write_file(path, hash_bytes(data, _NOTE_ALGORITHM).encode() + b"\n" + data, algorithm=_NOTE_ALGORITHM)


def _read_note(path: Path) -> Any:
    """Returns the content of a note, or None while the note is missing or incomplete.

    Raises:
        CheckpointError: The note is too large, nested too deeply, or not a regular file, which no rank writes.
    """
    if not path.exists():
        return None
    # A note has its final name while it is still being written: a reader may see any prefix of it, and the hash in the
    # first line shows whether the rest is there.
    expected, _, data = read_file(path, MAX_DOCUMENT_BYTES).partition(b"\n")
    return parse_json(data, path.name) if hash_bytes(data, _NOTE_ALGORITHM).encode() == expected else None


def leave_failure(staging: Path, rank: int, outcome: Outcome) -> None:
    """Leaves a note for rank 0 that this rank's part failed; without the note, rank 0 fails at its time limit."""
    with contextlib.suppress(OSError):
        _write_note(_failure_path(staging, rank), {"kind": outcome.kind, "text": outcome.text})


def _encode_receipt(receipt: Receipt, digests: Mapping[TensorShard, int], section: Any) -> Any:
    parts = [
        [part.name, part.kind, part.shape, dtype_name(part.dtype), part.offsets, part.sizes, f"{digest:016x}"]
        for part, digest in digests.items()
    ]
    chunks = [[name, dataclasses.asdict(chunk)] for name, chunk in receipt.chunks]
    files = [dataclasses.asdict(record) for record in receipt.files]
    return {"files": files, "chunks": chunks, "parts": parts, "section": section}


def _decode_receipt(content: Any) -> RankReceipt:
    chunks = tuple(
        (name, ChunkRecord(**{**chunk, "offsets": tuple(chunk["offsets"]), "sizes": tuple(chunk["sizes"])}))
        for name, chunk in content["chunks"]
    )
    digests = {
        TensorShard(name, kind, tuple(shape), dtype_from_name(dtype), tuple(offsets), tuple(sizes)): int(digest, 16)
        for name, kind, shape, dtype, offsets, sizes, digest in content["parts"]
    }
    files = tuple(FileRecord(**record) for record in content["files"])
    return RankReceipt(Receipt(files, chunks), digests, content["section"])


@contextlib.contextmanager
def hold_staging(staging: Path) -> Iterator[int]:
    """Holds a shared lock on the staging directory, so that a restart can wait for the processes that write into it.

    Yields the descriptor that has the lock: a process that is sent a copy of it has the lock, too.

    In mode "thread" the trainer itself holds the lock; its forked data workers do not.
    """
    descriptor = PrivateDescriptor(staging, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Shared: the writers of all ranks hold it together. Without waiting: if the lock is refused, a restart has just
        # taken it exclusively, and will discard the directory.
        lock_file(descriptor.number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield descriptor.number
    finally:
        descriptor.close()


# ---- one rank's part


def perform(job: WriteJob, staged: Staged, is_orphan: Callable[[], bool]) -> Outcome:
    """Writes one rank's part and, on rank 0, commits the save. It raises nothing and does not communicate.

    Args:
        job: The rank's job.
        staged: Holds the staged data until this function returns.
        is_orphan: Returns whether the trainer is gone; then the wait for other ranks is short.
    """
    begin_seconds = time.monotonic()
    try:
        if not job.staging.is_dir():
            raise SaveFailedError(f"{job.staging.name} is gone: rank 0 abandoned the save")
        with hold_staging(job.staging):
            outcome = _write_and_meet(job, staged, is_orphan)
    except Exception as error:
        outcome = failed_outcome(error)
        if is_orphan():  # otherwise the trainer reports the failure and cleans up (`OneSave.run`)
            if job.commit is None:
                leave_failure(job.staging, job.rank, outcome)
            elif job.staging.is_dir():
                with contextlib.suppress(OSError):
                    discard(job.staging)
    return dataclasses.replace(outcome, write_seconds=time.monotonic() - begin_seconds)


def _write_and_meet(job: WriteJob, staged: Staged, is_orphan: Callable[[], bool]) -> Outcome:
    receipt = write_part(job, staged)
    if job.commit is None:
        content = _encode_receipt(receipt.receipt, receipt.digests, receipt.section)
        _write_note(_receipt_path(job.staging, job.rank), content)
        sync_directory(job.staging)  # fsync of a file stores its bytes; its name needs fsync of the directory
        return Outcome("written")
    receipts = _gather(job, receipt, job.commit.header.world_size, is_orphan)
    # Receipts do not belong to the checkpoint. A kill in this loop costs nothing: without the rename below, a restart
    # discards the whole directory.
    for rank in range(1, len(receipts)):
        os.unlink(_receipt_path(job.staging, rank))  # noqa: PTH108 - the syscall by its name: fault tests wrap it
    # An orphan leaves retention to the next run, which may already read the older checkpoints.
    return commit_save(job.staging, job.commit, receipts, may_retain=lambda: not is_orphan())


def write_part(job: WriteJob, staged: Staged) -> RankReceipt:
    """Writes this rank's shard.

    Raises:
        TornSnapshotError: The staged data differ from the live tensors.
        OSError: The disk is full, or cannot be written.
    """
    receipt = Receipt((), ())
    if job.placed:
        receipt = write_shard(job.staging, job.rank, _read_staged(job, staged), algorithm=job.hash_algorithm)
    return RankReceipt(receipt, dict(job.digests), job.section)


def _read_staged(job: WriteJob, staged: Staged) -> Iterator[tuple[TensorShard, Tensor]]:
    """Yields each part with its staged data, after comparing them with the digest of the live tensor.

    Raises:
        TornSnapshotError: The staged data differ from the live tensor.
    """
    # The first digest is of the live tensor, this second one of its copy. They differ if training wrote into the tensor
    # between the two, or if memory damaged the copy since. Each part is digested just before its write, because the
    # write then finds it in the processor's cache.
    for placed in job.placed:
        part, data = placed.part, staged.view(placed)
        if digest_chunk(data, part.shape, part.offsets) != job.digests[part]:
            raise TornSnapshotError(f"{part.name}: staged and live digests differ: it changed while being copied")
        yield part, data


# ---- rank 0's


def commit_save(
    staging: Path, order: CommitOrder, receipts: Sequence[RankReceipt], *, may_retain: Callable[[], bool]
) -> Outcome:
    """Compares the files of all ranks with the plan and with the previous checkpoint, and commits the save.

    Args:
        staging: Holds the files of all ranks.
        order: The planned content.
        receipts: Of all ranks, in rank order.
        may_retain: Called after the commit; returns whether older checkpoints may be removed.

    Raises:
        SaveFailedError: The files differ from the plan, the snapshot is stale, an optimizer was emptied, or a tensor
            that the save leaves to the base differs from the base, or the base is gone.
        OSError: The disk is full, or cannot be written.
    """
    # Every check that can refuse the save comes before `assemble`, whose rename makes the checkpoint visible. After the
    # rename, a problem becomes a warning, because the checkpoint exists.
    for rank, receipt in enumerate(receipts):
        _check_receipt(staging, rank, order.shards_by_writer[rank], receipt)
    digests = merge_digests([receipt.digests for receipt in receipts])
    parts = {part.name: part for receipt in receipts for part in receipt.digests}
    in_base: Mapping[str, TensorRecord] = {}
    if order.scope is not None:
        order.scope.check_untouched(digests, [receipt.section for receipt in receipts])
        order.scope.check_there()
        in_base = order.scope.tensors
    held = {name: digest for name, digest in digests.items() if name not in in_base}
    written = collect_records(
        [part for name, part in parts.items() if name in held], [receipt.receipt for receipt in receipts], held
    )
    tensors = {**written, **in_base}
    _check_against_previous(staging.parent, order, tensors, parts)
    final, _, manifest_hash = assemble(
        staging,
        order.header,
        tensors,
        [receipt.receipt for receipt in receipts],
        [receipt.section for receipt in receipts],
    )
    # The process that commits also writes the event: if the trainer is killed now, the run's history is complete.
    log_problem = None
    if order.events is not None:
        counters = order.header.counters
        log_problem = order.events.append("saved", step=order.header.step, clocks=counters, checkpoint=final)
    problem = retain(final, order.retention)[1] if may_retain() else None
    return Outcome("committed", manifest_hash=manifest_hash, warning=problem or log_problem)


def _gather(job: WriteJob, own: RankReceipt, world_size: int, is_orphan: Callable[[], bool]) -> list[RankReceipt]:
    """Returns all receipts in rank order, or raises the error in the first failure note; the wait is limited."""
    receipts = {job.rank: own}
    deadline_seconds = time.monotonic() + job.time_limit_seconds + _GATHER_GRACE_SECONDS
    has_lost_trainer = False
    while len(receipts) < world_size:
        for rank in range(world_size):
            failure = _read_note(_failure_path(job.staging, rank))
            if failure is not None:
                raise error_from(failure["kind"], f"rank {rank}: {failure['text']}")
            content = _read_note(_receipt_path(job.staging, rank)) if rank not in receipts else None
            if content is not None:
                receipts[rank] = _decode_receipt(content)
        if not has_lost_trainer and is_orphan():
            has_lost_trainer = True
            deadline_seconds = min(deadline_seconds, time.monotonic() + _ORPHAN_SECONDS)
        if len(receipts) < world_size and time.monotonic() > deadline_seconds:
            missing = ", ".join(str(rank) for rank in range(world_size) if rank not in receipts)
            raise SaveFailedError(f"rank {missing}: no receipt within {job.time_limit_seconds:g} s")
        time.sleep(_POLL_SECONDS)  # inotify would not see what other nodes write to a network file system
    return [receipts[rank] for rank in range(world_size)]


def _check_receipt(staging: Path, rank: int, planned: Sequence[TensorShard], receipt: RankReceipt) -> None:
    """Compares the chunks and files that a rank wrote with those that the plan gave it."""
    due = [*planned, *(part for part in receipt.digests if part.kind == "state")]
    expected = {(part.name, part.offsets, part.sizes) for part in due}
    written = {(name, chunk.offsets, chunk.sizes) for name, chunk in receipt.receipt.chunks}
    if written != expected:
        raise SaveFailedError(
            f"rank {rank}: wrote {len(written)} chunks, but {len(expected)} were planned, such as "
            f"{min(written ^ expected)[0]}"
        )
    # Not equal but at least: `torch.save` adds a header to each chunk.
    num_bytes = sum(record.num_bytes for record in receipt.receipt.files)
    if num_bytes < sum(part.num_bytes for part in due):
        raise SaveFailedError(f"rank {rank}: wrote {num_bytes} bytes, fewer than its tensors have")
    for record in receipt.receipt.files:
        # The size as this node sees it: a rank with another mount would have written to another directory.
        found_bytes = (staging / record.name).stat().st_size
        if found_bytes != record.num_bytes:
            raise SaveFailedError(f"rank {rank}: {record.name} has {found_bytes} of {record.num_bytes} bytes")


def _check_against_previous(
    directory: Path, order: CommitOrder, tensors: Mapping[str, TensorRecord], parts: Mapping[str, TensorShard]
) -> None:
    previous = order.header.previous
    if previous is None or order.num_updates == 0:
        return
    try:
        before = read_manifest(previous.locate(directory)).tensors
    except CheckpointError:
        return  # damage or removal of an older checkpoint must not fail this save
    if order.header.has_optimizer:
        _check_not_emptied(previous, before, tensors)
    if order.moved:
        _check_moved(previous, before, order, tensors, parts)


def _check_not_emptied(
    previous: Ancestor, before: Mapping[str, TensorRecord], tensors: Mapping[str, TensorRecord]
) -> None:
    """Refuses an optimizer that lost its state since the previous checkpoint, although updates happened.

    Raises:
        SaveFailedError: An optimizer was emptied; the message names it.
    """
    had, has = (
        {name.split(".", 2)[1] for name in names if name.startswith("optimizer.")} for names in (before, tensors)
    )
    for index in sorted(had - has):
        raise SaveFailedError(
            f"optimizer {index} has been emptied: {previous.name} has its state, but this save would have none"
        )


def _check_moved(
    previous: Ancestor,
    before: Mapping[str, TensorRecord],
    order: CommitOrder,
    tensors: Mapping[str, TensorRecord],
    parts: Mapping[str, TensorShard],
) -> None:
    """Refuses a stale snapshot: a snapshot that equals the previous checkpoint, although updates happened.

    A parameter is judged together with its optimizer state, because an update smaller than half a unit in the last
    place leaves the parameter unchanged.

    Raises:
        SaveFailedError: Tensors did not change; the message names them.
    """
    is_same = {name: name in before and before[name].digest == record.digest for name, record in tensors.items()}
    moving = [
        name
        for name, part in parts.items()
        if part.kind in ("parameter", "optimizer") and not name.startswith(SWAPPED_PREFIX)  # an average moves by itself
    ]
    if moving and all(is_same[name] for name in moving):
        raise SaveFailedError(
            f"a stale snapshot: no parameter and no optimizer state has changed since {previous.name}, although "
            f"{order.num_updates} updates happened"
        )
    states: dict[str, list[str]] = defaultdict(list)
    for name in tensors:
        if name.startswith("optimizer."):
            _, _, rest = name.split(".", 2)
            states["model." + rest.rpartition(".")[0]].append(name)
    for name in sorted(order.moved & tensors.keys()):
        # Without a step counter (plain SGD) nothing but the parameter would show the update, and rounding may hide it.
        has_step = any(state.endswith(".step") for state in states[name])
        if has_step and is_same[name] and all(is_same[state] for state in states[name]):
            raise SaveFailedError(
                f"a stale snapshot: {name} and its optimizer state have not changed since {previous.name}, although "
                "the last update moved them"
            )
