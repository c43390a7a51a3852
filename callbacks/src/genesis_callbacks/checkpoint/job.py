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

import numpy as np
from torch import Tensor

from genesis_callbacks.base.errors import numbered

from ..base.checkpoint_errors import CheckpointError, SaveFailedError
from ..base.chunk_table import ChunkTable
from ..base.errors import describe_error
from ..base.events import EventLog
from ..base.files import sync_directory
from ..base.hashing import HashAlgorithm, hash_bytes
from ..base.local_shards import TensorShard
from ..base.locks import PrivateDescriptor, lock_file
from ..base.manifest import (
    Ancestor,
    FileRecord,
    Manifest,
    TensorRecord,
    dtype_from_name,
    dtype_name,
    read_manifest,
)
from ..base.safe_read import MAX_DOCUMENT_BYTES, parse_json, read_file
from .assemble import assemble, describe_tensor, retain
from .collect import SWAPPED_PREFIX
from .commit import discard
from .digest import digest_chunk
from .durable_file import write_file
from .garbage import without_collections
from .plan import Digests, Numbers, SavePlan, merge_digests
from .retain import Retention
from .scope import BoundScope
from .stage import Placed, Staged
from .write import SHARD_NAME, write_shard

OutcomeKind = Literal["written", "committed", "failed", "torn", "changed"]
_NOTE_ALGORITHM: HashAlgorithm = "blake3"
_RECEIPT = "receipt-"
_FAILURE = "failed-"
_NUM_PLACES = len(("byte_offset", "num_bytes", "data_offset"))
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
        plan: The shared parts that each rank holds and has to write.
        retention: Which checkpoints stay after the commit.
        num_updates: Optimizer steps that changed parameters since the previous checkpoint.
        moved: Names of the parameters that the last update changed, by its gradients and learning rates.
        events: The log that gets the event of the commit; None for no event.
        scope: Which tensors the checkpoint holds; None for all.
    """

    header: Manifest
    plan: SavePlan
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
        digests: Of all parts that this rank holds, taken from the live tensors: first the shared parts, in the order in
            which this rank reported them for the plan.
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
    """What a rank wrote, and the live digests of its parts, as numbers in an order that rank 0 knows from the plan.

    Attributes:
        file: The shard; None if the rank wrote no tensor.
        states: The tensors of the rank's own state, which it alone holds and writes.
        digests: Of the parts in the rank's report, in its order, then of `states`.
        places: The place in the file of each part that the plan gave to the rank, in the plan's order, then of
            `states`: `[part, 3]`, the numbers of `ChunkRecord`.
        section: The rank's other state.
    """

    file: FileRecord | None
    states: tuple[TensorShard, ...]
    digests: Digests
    places: Numbers
    section: Any


# ---- notes in the staging directory


def _receipt_path(staging: Path, rank: int) -> Path:
    return staging / f"{_RECEIPT}{rank}"


def _failure_path(staging: Path, rank: int) -> Path:
    return staging / f"{_FAILURE}{rank}"


def _write_note(path: Path, content: Any, numbers: bytes = b"") -> None:
    data = json.dumps(content, allow_nan=False).encode() + b"\n" + numbers
    write_file(path, hash_bytes(data, _NOTE_ALGORITHM).encode() + b"\n" + data, algorithm=_NOTE_ALGORITHM)


def _read_note(path: Path) -> tuple[Any, bytes] | None:
    """Returns the content of a note and the numbers behind it, or None while the note is missing or incomplete.

    Raises:
        CheckpointError: The note is too large, nested too deeply, or not a regular file, which no rank writes.
    """
    if not path.exists():
        return None
    # A note has its final name while it is still being written: a reader may see any prefix of it, and the hash in the
    # first line shows whether the rest is there.
    expected, _, data = read_file(path, MAX_DOCUMENT_BYTES).partition(b"\n")
    if hash_bytes(data, _NOTE_ALGORITHM).encode() != expected:
        return None
    text, _, numbers = data.partition(b"\n")
    return parse_json(text, path.name), numbers


def leave_failure(staging: Path, rank: int, outcome: Outcome) -> None:
    """Leaves a note for rank 0 that this rank's part failed; without the note, rank 0 fails at its time limit."""
    with contextlib.suppress(OSError):
        _write_note(_failure_path(staging, rank), {"kind": outcome.kind, "text": outcome.text})


def _leave_receipt(staging: Path, rank: int, receipt: RankReceipt) -> None:
    states = [[part.name, part.shape, dtype_name(part.dtype), part.offsets, part.sizes] for part in receipt.states]
    content = {
        "file": receipt.file and dataclasses.asdict(receipt.file),
        "states": states,
        "num_digests": len(receipt.digests),
        "section": receipt.section,
    }
    numbers = receipt.digests.astype("<u8").tobytes() + receipt.places.astype("<i8").tobytes()
    _write_note(_receipt_path(staging, rank), content, numbers)


def _decode_receipt(content: Any, numbers: bytes) -> RankReceipt:
    states = tuple(
        TensorShard(name, "state", tuple(shape), dtype_from_name(dtype), tuple(offsets), tuple(sizes))
        for name, shape, dtype, offsets, sizes in content["states"]
    )
    num_digests = content["num_digests"]
    places = np.frombuffer(numbers, "<i8", offset=8 * num_digests).reshape(-1, _NUM_PLACES)
    file = content["file"] and FileRecord(**content["file"])
    return RankReceipt(file, states, np.frombuffer(numbers, "<u8", num_digests), places, content["section"])


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
        _leave_receipt(job.staging, job.rank, receipt)
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
    file, places = None, np.empty((0, _NUM_PLACES), dtype=np.int64)
    if job.placed:
        file, places = write_shard(job.staging, job.rank, _read_staged(job, staged), algorithm=job.hash_algorithm)
    states = tuple(part for part in job.digests if part.kind == "state")
    return RankReceipt(file, states, np.array(list(job.digests.values()), dtype=np.uint64), places, job.section)


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


@without_collections()
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
    plan = order.plan
    for rank, receipt in enumerate(receipts):
        _check_receipt(staging, rank, plan, receipt)
    shared = merge_digests(
        plan, [receipt.digests[: len(held)] for held, receipt in zip(plan.held, receipts, strict=True)]
    )
    in_base: Mapping[str, TensorRecord] = {}
    if order.scope is not None:
        order.scope.check_untouched(shared, [receipt.section for receipt in receipts])
        order.scope.check_there()
        in_base = order.scope.tensors
    tensors = {**_collect_records(plan, shared, in_base, receipts), **in_base}
    _check_against_previous(staging.parent, order, tensors)
    final, _, manifest_hash = assemble(
        staging,
        order.header,
        tensors,
        [receipt.file for receipt in receipts if receipt.file is not None],
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
        # One listing, and not a question for each rank's note: there may be a thousand ranks.
        names = frozenset(os.listdir(job.staging))  # noqa: PTH208 - no objects for thousands of names
        for rank in range(world_size):
            failure = _read_note(_failure_path(job.staging, rank)) if f"{_FAILURE}{rank}" in names else None
            if failure is not None:
                raise error_from(failure[0]["kind"], f"rank {rank}: {failure[0]['text']}")
            is_new = rank not in receipts and f"{_RECEIPT}{rank}" in names
            note = _read_note(_receipt_path(job.staging, rank)) if is_new else None
            if note is not None:
                receipts[rank] = _decode_receipt(*note)
        if not has_lost_trainer and is_orphan():
            has_lost_trainer = True
            deadline_seconds = min(deadline_seconds, time.monotonic() + _ORPHAN_SECONDS)
        if len(receipts) < world_size and time.monotonic() > deadline_seconds:
            missing = ", ".join(str(rank) for rank in range(world_size) if rank not in receipts)
            raise SaveFailedError(f"rank {missing}: no receipt within {job.time_limit_seconds:g} s")
        time.sleep(_POLL_SECONDS)  # inotify would not see what other nodes write to a network file system
    return [receipts[rank] for rank in range(world_size)]


def _check_receipt(staging: Path, rank: int, plan: SavePlan, receipt: RankReceipt) -> None:
    """Compares what a rank wrote with what the plan gave it: each part once, whole, within its file, and apart."""
    num_states = len(receipt.states)
    num_planned, num_held = len(plan.written[rank]) + num_states, len(plan.held[rank]) + num_states
    if (len(receipt.places), len(receipt.digests)) != (num_planned, num_held):
        raise SaveFailedError(
            f"rank {rank}: wrote {numbered(len(receipt.places), 'chunks')} and has digests of "
            f"{numbered(len(receipt.digests), 'tensors')}, but {num_planned} and {num_held} were planned"
        )
    record = receipt.file
    num_bytes = 0 if record is None else record.num_bytes
    due = np.concatenate([plan.count_bytes(plan.blocks_of(rank)), [part.num_bytes for part in receipt.states]])
    starts, data = receipt.places[:, 0], receipt.places[:, 2]
    ends = starts + receipt.places[:, 1]
    is_apart = (starts >= np.concatenate([[0], ends[:-1]])).all() and (ends <= num_bytes).all()
    if not (is_apart and (data >= starts).all() and (data + due <= ends).all()):
        raise SaveFailedError(f"rank {rank}: the chunks that it reports are not its tensors one after the other")
    if record is not None:
        if record.name != SHARD_NAME.format(rank=rank):
            raise SaveFailedError(f"rank {rank}: wrote {record.name}, which is not its shard")
        # The size as this node sees it: a rank with another mount would have written to another directory.
        found_bytes = (staging / record.name).stat().st_size
        if found_bytes != record.num_bytes:
            raise SaveFailedError(f"rank {rank}: {record.name} has {found_bytes} of {record.num_bytes} bytes")


def _collect_records(
    plan: SavePlan, shared: Mapping[str, int], in_base: Mapping[str, TensorRecord], receipts: Sequence[RankReceipt]
) -> dict[str, TensorRecord]:
    """Returns the records of the tensors that the ranks wrote: the shared ones, and those of each rank's own state.

    Raises:
        SaveFailedError: Two ranks have a tensor of the same name in their own states.
    """
    files = tuple(SHARD_NAME.format(rank=rank) for rank in range(len(receipts)))
    records: dict[str, TensorRecord] = {}
    shared_names = {part.name for part in plan.tensors if part.name not in in_base}
    for rank, receipt in enumerate(receipts):
        num_states = len(receipt.states)
        own = zip(receipt.states, receipt.digests[-num_states:].tolist(), receipt.places[-num_states:], strict=False)
        for part, digest, place in own:
            if part.name in records or part.name in shared_names:
                raise SaveFailedError(f"rank {rank}: another rank has a tensor of the name {part.name}, too")
            row = np.concatenate([[rank], place, part.offsets, part.sizes]).astype(np.int64)
            records[part.name] = describe_tensor(part, digest, ChunkTable(files, row[None]))
    written = [plan.blocks_of(rank) for rank in range(len(receipts))]
    blocks, num_blocks = np.concatenate(written), [len(of_rank) for of_rank in written]
    places = np.concatenate([it.places[:number] for it, number in zip(receipts, num_blocks, strict=True)])
    ranks = np.repeat(np.arange(len(receipts)), num_blocks)
    # By tensor, and of each tensor by rank.
    order = np.argsort(plan.tensor_of[blocks], kind="stable")
    ends = np.cumsum(np.bincount(plan.tensor_of[blocks], minlength=len(plan.tensors)))
    for part, of_tensor in zip(plan.tensors, np.split(order, ends)[:-1], strict=True):
        if part.name in shared_names:
            num_dims = len(part.shape)
            ranges = plan.ranges[blocks[of_tensor], :, :num_dims].reshape(len(of_tensor), 2 * num_dims)
            rows = np.concatenate([ranks[of_tensor, None], places[of_tensor], ranges], axis=1)
            records[part.name] = describe_tensor(part, shared[part.name], ChunkTable(files, rows))
    return records


def _check_against_previous(directory: Path, order: CommitOrder, tensors: Mapping[str, TensorRecord]) -> None:
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
        _check_moved(previous, before, order, tensors)


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
) -> None:
    """Refuses a stale snapshot: a snapshot that equals the previous checkpoint, although updates happened.

    A parameter is judged together with its optimizer state, because an update smaller than half a unit in the last
    place leaves the parameter unchanged.

    Raises:
        SaveFailedError: Tensors did not change; the message names them.
    """
    is_same = {name: name in before and before[name].digest == record.digest for name, record in tensors.items()}
    moving = [
        part.name
        for part in order.plan.tensors
        # an average moves by itself
        if part.kind in ("parameter", "optimizer") and not part.name.startswith(SWAPPED_PREFIX)
    ]
    if moving and all(is_same[name] for name in moving):
        raise SaveFailedError(
            f"a stale snapshot: no parameter and no optimizer state has changed since {previous.name}, although "
            f"{numbered(order.num_updates, 'updates')} happened"
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
