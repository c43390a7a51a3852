"""Keeps copies of a run's checkpoints in a second place while the run trains: `genesis mirror`.

The mirror takes no lock of the run and writes only `RUN/mirrors`. It runs in a process of its own: neither a store
that hangs nor a slow disk can delay the training. A checkpoint becomes visible in the mirror after all of its files
have been read back and have the hashes of its manifest.
"""

import contextlib
import fcntl
import json
import os
import random
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from genesis.base.errors import RunEndedError, UserError
from genesis.base.run_directory import RunDirectory
from genesis.data.store import StoreError, plan_wait_seconds
from genesis.operations.mirror.contents import BASES, CHECKPOINTS, MirrorContents, read_contents
from genesis.operations.mirror.history import HistoryMirror
from genesis.operations.mirror.listing import CheckpointListing, read_local_listing, read_local_marker
from genesis.operations.mirror.places import Place
from genesis.operations.mirror.plan import (
    MirrorRetention,
    bases_of,
    find_superseded,
    order,
    plan_copies,
    plan_mirror_removals,
)
from genesis.operations.mirror.status import (
    MirrorStatus,
    read_mirror_status,
    status_path,
    write_mirror_status,
)
from genesis.operations.mirror.transfer import AbandonedError, HeldCheckpoint, Pace, read_hash, write_verified
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.locks import lock_file
from genesis_callbacks.base.manifest import BaseReference, FileRecord
from genesis_callbacks.base.run_directory import BEST_NAME, MANIFEST_NAME, base_name, is_checkpoint_name
from genesis_callbacks.base.untrusted import RefusedFileError, read_file
from genesis_callbacks.checkpoint import CorruptCheckpointError
from genesis_callbacks.checkpoint.tensor_places import find_base

OWNER_NAME: Final = "mirror.json"
"""The file in a mirror that names its owner."""
_MAX_MARKS_BYTES: Final = 64 << 10


class MirrorTakenError(RunEndedError):
    """The place is the mirror of another run, or of another copy of this run."""


@dataclass(frozen=True)
class MirrorOptions:
    """How a mirror works.

    Args:
        retention: Which checkpoints it keeps.
        bytes_per_second: Limit of all that is written and read back; None for none.
        poll_seconds: Time between two looks for new checkpoints.
        report_seconds: Time between two reports in the run's directory while nothing changes.
    """

    retention: MirrorRetention = field(default_factory=MirrorRetention)
    bytes_per_second: float | None = None
    poll_seconds: float = 2.0
    report_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise UserError(f"the bandwidth is {self.bytes_per_second}: give a number of bytes above 0")


class Mirror:
    """The mirror of one run in one place. One process at a time works for it.

    Args:
        run_dir: The run's directory; it need not exist yet.
        place: The second place.
        options: How the mirror works.
        report: Prints a line.

    Raises:
        UserError: Another process works for this mirror, or the place lies in the run itself.
    """

    def __init__(self, run_dir: Path, place: Place, options: MirrorOptions, report: Callable[[str], None]) -> None:
        _check_is_second(run_dir, place)
        RunDirectory(run_dir).check_own()
        self._run_dir, self._place, self._options, self._report = run_dir, place, options, report
        self._directory = RunDirectory(run_dir).checkpoints
        self._pace = Pace(options.bytes_per_second)
        self._path = status_path(run_dir, place.address)
        self._lock = _lock(self._path.with_suffix(".lock"))
        before = read_mirror_status(self._path)
        self._status = MirrorStatus(place.url, "" if before is None else before.token, os.getpid(), time.time())
        self._contents: MirrorContents | None = None
        self._has_claimed, self._has_asked = False, False
        self._known: dict[str, CheckpointListing] = {}
        self._damaged: dict[str, str] = {}
        self._marks = b""
        self._history = HistoryMirror(run_dir, place, self._pace, self._check_owner)
        self._whole: set[tuple[str, str, str]] = set()

    def close(self) -> None:
        """Lets another process work for this mirror."""
        os.close(self._lock)

    def __enter__(self) -> "Mirror":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the loop

    def run(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Copies checkpoints as they appear, and repeats what fails.

        Args:
            is_wanted: Asked between two looks for checkpoints; the call returns when the answer is no.

        Raises:
            MirrorTakenError: The place belongs to another run.
            UserError: The place refused the first request.
        """
        num_failures = 0
        while is_wanted():
            try:
                self.sync()
            except (UserError, OSError) as error:
                if not self._has_claimed and not isinstance(error, StoreError | OSError):
                    raise
                num_failures += 1
                self._contents = None  # the place may have changed meanwhile
                self._fail(error)
                time.sleep(max(self._options.poll_seconds, plan_wait_seconds(num_failures, random.random())))
            else:
                num_failures = 0
                time.sleep(self._options.poll_seconds)

    def sync(self, *, is_last: bool = False) -> list[str]:
        """Brings the mirror up to date once.

        Args:
            is_last: Whether events since the newest checkpoint are copied, too, because the run has ended.

        Returns:
            What is wrong with checkpoints of the run that could not be mirrored.

        Raises:
            MirrorTakenError: The place belongs to another run.
            StoreError: The store does not respond.
            UserError: The store refuses a request, or a base is missing.
            OSError: A disk is full, or cannot be read or written.
        """
        run = self._read_run()
        if not run and not self._has_claimed:
            # Nothing is claimed for an empty run: it may be about to continue from this very mirror.
            if not self._has_asked:
                self._read_owner()  # a place that refuses is reported now, and not after hours of training
                self._has_asked = True
            return list(self._damaged.values())
        contents = self._look(run)
        while (copy := self._next_copy(run, contents)) is not None:
            self._copy_checkpoint(copy, contents)
            run = self._read_run()
        self._remove(run, contents)
        self._discard_leftovers(contents)
        self._copy_marks(contents)
        newest = max(run, key=order, default=None)
        if newest is not None and contents.find(newest.marker) is not None:
            self._history.update(newest, is_last=is_last)
        self._succeed()
        return list(self._damaged.values())

    def _next_copy(self, run: list[CheckpointListing], contents: MirrorContents) -> CheckpointListing | None:
        whole = [listing for listing in run if listing.marker not in self._damaged]
        copies = plan_copies(whole, list(contents.checkpoints.values()), self._options.retention, self._read_marked())
        return copies[0] if copies else None

    # ---- the run

    def _read_run(self) -> list[CheckpointListing]:
        """Returns the committed checkpoints of the run, in order; damaged ones are reported once."""
        try:
            paths = sorted(path for path in self._directory.iterdir() if is_checkpoint_name(path.name))
        except FileNotFoundError:
            return []
        found: dict[str, CheckpointListing] = {}
        for path in paths:
            marker = read_local_marker(path)
            if marker is None or marker in self._damaged:
                continue
            try:
                listing = self._known.get(marker) or read_local_listing(path)
            except CorruptCheckpointError as error:
                self._damage(marker, error)
                continue
            if listing is not None and listing.name == path.name:
                found[marker] = listing
        self._known = found
        return sorted(found.values(), key=order)

    def _damage(self, marker: str, error: CorruptCheckpointError) -> None:
        self._damaged[marker] = str(error)
        self._report(f"not mirrored: {error}")

    def _read_marked(self) -> set[str]:
        try:
            content = load_json(self._read_marks() or b"{}")
            entries = [content, *content.get("others", [])] if content else []
            return {str(entry["name"]) for entry in entries}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return set()  # the commands that use the marks report that they are damaged

    def _read_marks(self) -> bytes | None:
        with contextlib.suppress(FileNotFoundError, RefusedFileError):
            return read_file(self._directory / BEST_NAME, _MAX_MARKS_BYTES)
        return None

    # ---- the place

    def _look(self, run: list[CheckpointListing]) -> MirrorContents:
        """Returns what the place holds; as only this process changes it, it is listed again only after failures."""
        if self._contents is None:
            contents = read_contents(self._place)
            self._claim(run, contents)
            self._place.clean()
            copies = plan_copies(run, list(contents.checkpoints.values()), self._options.retention, self._read_marked())
            wanted = {f"{CHECKPOINTS}/{listing.name}" for listing in copies}
            wanted |= {f"{BASES}/{base_name(marker)}" for marker in bases_of(copies)}
            self._discard_leftovers(contents, wanted)
            self._contents = contents
        return self._contents

    def _discard_leftovers(self, contents: MirrorContents, wanted: Collection[str] = ()) -> None:
        for folder in [folder for folder in contents.leftovers if folder not in wanted]:
            self._place.remove(folder, is_committed=False)
            del contents.leftovers[folder]

    def _claim(self, run: list[CheckpointListing], contents: MirrorContents) -> None:
        """Makes this run the owner of the place; two runs, or two copies of a run, would remove each other's copies."""
        owner = self._read_owner()
        if owner is not None and owner == self._status.token:
            self._has_claimed = True
            return
        if owner is not None and self._status.token:
            raise MirrorTakenError(
                f"{self._status.url} is mirrored by another copy of this run now, and this one has stopped; give this "
                f"run another mirror, or remove {self._path} to take the mirror back"
            )
        if owner is None and (contents.checkpoints or contents.bases or contents.damaged or contents.leftovers):
            # A run, or somebody's copy of one: the retention of a mirror would remove checkpoints there.
            raise MirrorTakenError(
                f"{self._status.url} holds checkpoints and is not a mirror, because it has no {OWNER_NAME}; give an "
                "empty place"
            )
        mirrored = {listing.marker for listing in contents.checkpoints.values()}
        related = {listing.marker for listing in run} | {listing.previous_hash for listing in run}
        if mirrored and not mirrored & related:
            raise MirrorTakenError(
                f"{self._status.url} holds checkpoints that {self._run_dir} does not descend from; give this run "
                f"another mirror, or continue the mirrored run: genesis mirror restore {self._status.url} RUN"
            )
        token = secrets.token_hex(16)
        content = {"schema_version": 1, "owner": token, "since_seconds": time.time()}
        self._place.replace(OWNER_NAME, json.dumps(content).encode() + b"\n")
        self._status = replace(self._status, token=token)
        write_mirror_status(self._path, self._status)
        self._has_claimed = True

    def _read_owner(self) -> str | None:
        data = self._place.read(OWNER_NAME)
        if data is None:
            return None
        try:
            return str(load_json(data)["owner"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(
                f"{self._status.url}/{OWNER_NAME} is not a file of a mirror ({error}); give this run another mirror"
            ) from error

    def _check_owner(self) -> None:
        owner = self._read_owner()
        if owner == self._status.token:
            return
        self._contents = None
        if owner is None:
            raise StoreError(f"{self._status.url} has lost {OWNER_NAME}, which this mirror has written there")
        raise MirrorTakenError(f"{self._status.url} is mirrored by another copy of this run now: this one stops")

    # ---- copies

    def _copy_checkpoint(self, listing: CheckpointListing, contents: MirrorContents) -> None:
        path = self._directory / listing.name
        folder = f"{CHECKPOINTS}/{listing.name}"
        begin_seconds = time.monotonic()
        try:
            if listing.base is not None:
                self._copy_base(path, listing.base, contents)
            if folder in contents.checkpoints or folder in contents.damaged:
                # The run went back and saved the same step again, or the copy is damaged.
                self._place.remove(folder, is_committed=True)
                contents.checkpoints.pop(folder, None)
                contents.damaged.pop(folder, None)
            self._copy(path, listing, folder, contents)
        except AbandonedError:
            self._report(f"step {listing.step} was removed by the run before its copy was made; newer ones follow")
            return
        except CorruptCheckpointError as error:
            if read_local_marker(path) == listing.marker:
                self._damage(listing.marker, error)
            return
        contents.checkpoints[folder] = listing
        seconds = time.monotonic() - begin_seconds
        self._report(f"step {listing.step}: {listing.num_bytes:,} bytes in {seconds:.1f} s, read back and verified")
        self._succeed()

    def _copy_base(self, path: Path, base: BaseReference, contents: MirrorContents) -> None:
        if contents.find(base.manifest_hash) is not None:
            return
        folder = f"{BASES}/{base_name(base.manifest_hash)}"
        place, _ = find_base(path, base)
        try:
            listing = read_local_listing(place)
            if listing is None:
                raise AbandonedError("it was removed")
            self._copy(place, listing, folder, contents)
        except (AbandonedError, CorruptCheckpointError) as error:
            raise UserError(f"the base {place} of {path} cannot be mirrored: {error}; restore it") from error
        contents.bases[folder] = listing
        self._report(f"base {place}: {listing.num_bytes:,} bytes, read back and verified")

    def _copy(self, path: Path, listing: CheckpointListing, folder: str, contents: MirrorContents) -> None:
        leftover = contents.leftovers.get(folder)
        sizes = {} if leftover is None else leftover.files
        with HeldCheckpoint(path, listing) as held:
            try:
                for file in listing.files:
                    self._copy_file(held, listing, folder, file, sizes.get(file.name))
            except (AbandonedError, CorruptCheckpointError):
                contents.leftovers.pop(folder, None)
                self._place.remove(folder, is_committed=False)
                raise
        write_verified(
            *(self._place, folder, MANIFEST_NAME, lambda block_bytes: _cut(listing.manifest, block_bytes)),
            *(len(listing.manifest), listing.marker.partition(":")[2], listing.build_hasher, self._pace),
        )
        self._check_owner()
        self._place.commit(folder, listing.marker.encode())
        contents.leftovers.pop(folder, None)
        self._whole = {key for key in self._whole if key[0] != listing.marker}

    def _copy_file(
        self, held: HeldCheckpoint, listing: CheckpointListing, folder: str, file: FileRecord, size_there: int | None
    ) -> None:
        """Writes a file and reads it back; a file that an interrupted copy has left is only read."""
        key = (listing.marker, folder, file.name)
        path = self._place.file_path(folder, file.name, is_committed=False)
        is_there = size_there == file.num_bytes
        if key in self._whole and is_there:
            return
        build = listing.build_hasher
        if not (is_there and read_hash(self._place, path, file.num_bytes, build(), self._pace) == file.hash):
            write_verified(
                *(self._place, folder, file.name, lambda block_bytes: held.read_blocks(file, block_bytes)),
                *(file.num_bytes, file.hash, build, self._pace),
            )
            self._status = replace(self._status, copied_bytes=self._status.copied_bytes + file.num_bytes)
        self._whole.add(key)

    def _remove(self, run: list[CheckpointListing], contents: MirrorContents) -> None:
        mirrored = list(contents.checkpoints.values())
        removals = plan_mirror_removals(run, mirrored, self._options.retention, self._read_marked())
        superseded = find_superseded(run, mirrored)
        for listing in removals:
            self._check_owner()
            folder = f"{CHECKPOINTS}/{listing.name}"
            self._place.remove(folder, is_committed=True)
            del contents.checkpoints[folder]
            why = "the run went back before it" if listing.marker in superseded else "by the mirror's retention"
            self._report(f"step {listing.step} is removed, {why}")

    def _copy_marks(self, contents: MirrorContents) -> None:
        """Copies the marks of the best checkpoints after these; readers ignore marks of missing checkpoints."""
        marks = self._read_marks()
        if marks is not None and marks != self._marks and contents.checkpoints:
            self._place.replace(f"{CHECKPOINTS}/{BEST_NAME}", marks)
            self._marks = marks

    # ---- the status

    def _succeed(self) -> None:
        contents = self._contents
        listings = [] if contents is None else sorted(contents.checkpoints.values(), key=order)
        status = replace(
            self._status,
            updated_seconds=time.time(),
            markers=tuple(listing.marker for listing in listings),
            newest_step=listings[-1].step if listings else None,
            newest_created_seconds=listings[-1].created_seconds if listings else 0.0,
            problem=next(iter(self._damaged.values()), ""),
            problem_since_seconds=None if not self._damaged else self._status.problem_since_seconds or time.time(),
        )
        is_new = replace(status, updated_seconds=0.0) != replace(self._status, updated_seconds=0.0)
        if self._status.problem and not status.problem:
            self._report("the mirror works again")
        if is_new or status.updated_seconds - self._status.updated_seconds > self._options.report_seconds:
            self._write(status)

    def _fail(self, error: Exception) -> None:
        problem = str(error)
        if isinstance(error, OSError) and error.errno is None:  # a store's, whose text is the path alone
            problem = f"{type(error).__name__}: {problem}"
        if problem != self._status.problem:
            self._report(f"{problem}; the mirror tries again, and training is unaffected")
        since = self._status.problem_since_seconds or time.time()
        self._write(replace(self._status, updated_seconds=time.time(), problem=problem, problem_since_seconds=since))

    def _write(self, status: MirrorStatus) -> None:
        self._status = status
        try:
            write_mirror_status(self._path, status)
        except OSError as error:  # the run's disk is full: the mirror matters more now than its report
            self._report(f"{self._path} cannot be written: {error.strerror}")


def _lock(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
    try:
        lock_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"another process mirrors this run to the same place ({path} is locked): stop it first"
        ) from None
    return descriptor


def _cut(data: bytes, block_bytes: int) -> Iterator[bytes]:
    return (data[start : start + block_bytes] for start in range(0, len(data), block_bytes))


def _check_is_second(run_dir: Path, place: Place) -> None:
    """Refuses a place in the run's own directory, where the mirror's retention would remove the run's checkpoints."""
    own = run_dir.resolve()
    if "://" not in place.url and own in (found := Path(place.url).resolve(), *found.parents):
        raise UserError(f"the mirror {place.url} lies in the run {run_dir} itself: give a directory on another disk")
