"""The history of a run in its mirror: events, log and recipes, up to the newest mirrored checkpoint.

    PLACE/history/00000007/     a copy: manifest.json lists its files with sizes and hashes; COMMITTED has its hash
        metrics.csv             rows up to the checkpoint's step
        events.rank-0.jsonl     RUN/events/rank-0.jsonl
        config.yaml             the recipes of all starts

These files grow while they are read. Each copy is therefore what a file held at one moment, up to its last whole line.
A copy gets a number of its own and is visible once it is read back and verified; then the copies before it are removed.
The names in a manifest are checked before they become paths, because a mirror may come from anywhere.
"""

import contextlib
import csv
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from genesis.data.store import StoreError
from genesis.run_directory import RunDirectory
from genesis.supervise.mirror_manifest import CheckpointListing, DamagedCheckpointError, ListedFile, decode_marker
from genesis.supervise.mirror_place import Place
from genesis.supervise.mirror_source import Pace
from genesis.supervise.plain import count, text
from genesis_callbacks.files import create_file, sync_directory
from genesis_callbacks.run_directory import COMMITTED_NAME, MANIFEST_NAME
from genesis_callbacks.run_directory import RunDirectory as CallbacksDirectory

HISTORY: Final = "history"
_NUMBER: Final = re.compile(r"\d{8}")
_METRICS: Final = "metrics.csv"
_EVENTS: Final = re.compile(r"(?:rank-\d{1,7}|commands|supervisor)\.jsonl")
_RECIPE: Final = re.compile(r"config(?:\.resume-\d{1,7})?\.yaml")
_EVENTS_PREFIX: Final = "events."
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_READ_BYTES: Final = 1 << 20
_MAX_FILES: Final = 1 << 14
_ATTEMPTS: Final = 3


@dataclass(frozen=True)
class History:
    """A copy of a run's history.

    Args:
        folder: Its folder in the place.
        checkpoint: The marker of the checkpoint with which it was made.
        step: That checkpoint's step.
        files: Its files.
    """

    folder: str
    checkpoint: str
    step: int
    files: tuple[ListedFile, ...]


def find_local_path(run_dir: Path, name: str) -> Path | None:
    """Returns where a file of a copy lies in a run; None for a name that no copy has."""
    run = RunDirectory(run_dir)
    if name == _METRICS:
        return run.metrics
    if _RECIPE.fullmatch(name):
        return run_dir / name
    event_name = name.removeprefix(_EVENTS_PREFIX)
    if event_name != name and _EVENTS.fullmatch(event_name):
        return CallbacksDirectory(run_dir).events / event_name
    return None


def list_local(run_dir: Path) -> list[str]:
    """Returns the names that the files of a run's history have in a copy."""
    names = [name for name in _list_names(run_dir) if name == _METRICS or _RECIPE.fullmatch(name)]
    events = _list_names(CallbacksDirectory(run_dir).events)
    names += [f"{_EVENTS_PREFIX}{name}" for name in events if _EVENTS.fullmatch(name)]
    return sorted(names)[:_MAX_FILES]


def _list_names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


class HeldHistory:
    """The files of a run's history as they are at one moment, held open.

    Args:
        run_dir: The run's directory.
        step: The last step whose rows of the log count.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        self._descriptors: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        for name in list_local(run_dir):
            path = find_local_path(run_dir, name)
            assert path is not None, "the name comes from the list"
            with contextlib.suppress(FileNotFoundError):
                self._hold(name, path, step)

    def _hold(self, name: str, path: Path, step: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return
        self._descriptors[name] = descriptor
        self.sizes[name] = find_row_end(descriptor, step) if name == _METRICS else find_line_end(descriptor)

    def __enter__(self) -> "HeldHistory":
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read_blocks(self, name: str, block_bytes: int, pace: Pace) -> Iterator[bytes]:
        """Yields the content of a file at that moment; a later part of the file is left out."""
        offset, size = 0, self.sizes[name]
        while offset < size and (block := os.pread(self._descriptors[name], min(block_bytes, size - offset), offset)):
            pace.spend(len(block))
            offset += len(block)
            yield block


def find_line_end(descriptor: int) -> int:
    """Returns the end of the last whole line of an open file."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _READ_BYTES)
        place = os.pread(descriptor, end - start, start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0


def find_row_end(descriptor: int, step: int) -> int:
    """Returns the end of the last row of an open log whose step is at most `step`; rows come in their order.

    A file whose first column is not the step is no log of ours, and is taken whole.
    """
    size = find_line_end(descriptor)
    end = 0
    # A second descriptor of the same file: closing it leaves the first one open.
    with open(os.dup(descriptor), "rb") as file:  # noqa: PTH123  # a descriptor has no path
        file.seek(0)
        for number, line in enumerate(file):
            if end + len(line) > size:
                break
            first = next(csv.reader([line.decode(errors="replace")]), [""])[0]
            if number == 0 and first != "step":
                return size
            if number and (not first.isdecimal() or int(first) > step):
                break
            end += len(line)
    return end


class HistoryMirror:
    """Keeps the newest copy of a run's history in a place.

    Args:
        run_dir: The run's directory.
        place: The second place.
        pace: Limits what is written and read back.
        check_owner: Raises if the place is another run's now.
    """

    def __init__(self, run_dir: Path, place: Place, pace: Pace, check_owner: Callable[[], None]) -> None:
        self._run_dir, self._place, self._pace, self._check_owner = run_dir, place, pace, check_owner
        self._known: History | None = None
        self._has_asked = False

    def update(self, listing: CheckpointListing, *, is_last: bool) -> None:
        """Copies the history up to a checkpoint, unless the place has this copy.

        Args:
            listing: The newest checkpoint, which the place has.
            is_last: Whether events that came after the copy of the checkpoint are copied, too.

        Raises:
            MirrorTakenError: The place belongs to another run.
            StoreError: The store does not respond, or changes data.
            UserError: The store refuses a request.
            OSError: A disk is full, or cannot be read or written.
        """
        if not self._has_asked:
            self._known, self._has_asked = find_history(self._place), True
        known = self._known
        is_current = known is not None and known.checkpoint == listing.marker
        if is_current and not is_last:
            return
        with HeldHistory(self._run_dir, listing.step) as held:
            sizes = {} if known is None else {file.name: file.num_bytes for file in known.files}
            if held.sizes and not (is_current and sizes == held.sizes):
                self._known = self._copy(held, listing)

    def _copy(self, held: HeldHistory, listing: CheckpointListing) -> History:
        found = [each for each in self._place.list_folders(HISTORY) if _NUMBER.fullmatch(each.name)]
        for each in found:
            if not each.is_committed:
                self._place.remove(f"{HISTORY}/{each.name}", is_committed=False)
        own = [each for each in found if each.is_committed]
        folder = f"{HISTORY}/{max((int(each.name) for each in own), default=0) + 1:08d}"
        files = tuple(self._copy_file(held, folder, name) for name in held.sizes)
        content = {"schema_version": 1, "checkpoint": listing.marker, "step": listing.step}
        manifest = json.dumps({**content, "files": [asdict(file) for file in files]}).encode()
        path = self._place.file_path(folder, MANIFEST_NAME, is_committed=False)
        self._place.write(path, lambda block_bytes: iter([manifest]), len(manifest))
        self._check_owner()
        self._place.commit(folder, b"blake3:" + blake3(manifest).hexdigest().encode())
        for each in own:
            self._place.remove(f"{HISTORY}/{each.name}", is_committed=True)
        return History(folder, listing.marker, listing.step, files)

    def _copy_file(self, held: HeldHistory, folder: str, name: str) -> ListedFile:
        """Writes a file and reads it back."""
        path = self._place.file_path(folder, name, is_committed=False)
        hasher = blake3()
        for block in held.read_blocks(name, _READ_BYTES, Pace(None)):
            hasher.update(block)
        file = ListedFile(name, held.sizes[name], hasher.hexdigest())
        for _ in range(_ATTEMPTS):
            self._place.write(path, lambda block_bytes: held.read_blocks(name, block_bytes, self._pace), file.num_bytes)
            if _has_hash(self._place, path, file, self._pace):
                return file
        raise StoreError(
            f"{self._place.url}/{folder}/{name} has other bytes than were written, {_ATTEMPTS} times: the place, or "
            "the way to it, changes data"
        )


def find_history(place: Place, report: Callable[[str], None] | None = None) -> History | None:
    """Returns the newest copy whose manifest is whole; None if there is none.

    Args:
        place: The mirror.
        report: Prints a line about each damaged copy that is passed over.

    Raises:
        StoreError: The store does not respond.
    """
    folders = [each for each in place.list_folders(HISTORY) if _NUMBER.fullmatch(each.name) and each.is_committed]
    for each in sorted(folders, key=lambda folder: folder.name, reverse=True):
        try:
            return _read_history(place, f"{HISTORY}/{each.name}")
        except DamagedCheckpointError as error:
            if report is not None:
                report(f"a copy of the history is left out: {error}")
    return None


def _read_history(place: Place, folder: str) -> History:
    where = f"{place.url}/{folder}"
    marker = decode_marker(place.read(place.file_path(folder, COMMITTED_NAME, is_committed=True)))
    manifest = place.read(place.file_path(folder, MANIFEST_NAME, is_committed=True))
    if manifest is None or marker != f"blake3:{blake3(manifest).hexdigest()}":
        raise DamagedCheckpointError(f"{where} has no manifest with the hash of its marker")
    try:
        content = json.loads(manifest)
        files = tuple(_decode_file(each) for each in content["files"])
        return History(folder, text(content["checkpoint"]), count(content["step"]), files)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where} has a manifest that cannot be read: {error}") from error


def _decode_file(content: Mapping[str, object]) -> ListedFile:
    name, num_bytes, digest = text(content["name"]), count(content["num_bytes"]), text(content["hash"])
    if find_local_path(Path(), name) is None or num_bytes < 0 or not _HASH.fullmatch(digest):
        raise ValueError(f"{name!r} is no file of a history")
    return ListedFile(name, num_bytes, digest)


def verify_history(place: Place, pace: Pace) -> Iterator[tuple[str, str | None]]:
    """Reads every copy, and yields its folder with what is wrong with the copy, or None.

    Raises:
        StoreError: The store does not respond.
    """
    for each in place.list_folders(HISTORY):
        if each.is_committed and _NUMBER.fullmatch(each.name):
            folder = f"{HISTORY}/{each.name}"
            try:
                yield folder, _find_problem(place, _read_history(place, folder), pace)
            except DamagedCheckpointError as error:
                yield folder, str(error)


def _find_problem(place: Place, history: History, pace: Pace) -> str | None:
    for file in history.files:
        if not _has_hash(place, place.file_path(history.folder, file.name, is_committed=True), file, pace):
            return f"{file.name} does not have the size and the hash that were saved"
    return None


def _has_hash(place: Place, path: str, file: ListedFile, pace: Pace) -> bool:
    hasher, num_bytes = blake3(), 0
    with contextlib.suppress(FileNotFoundError):
        for block in place.read_blocks(path, file.num_bytes):
            pace.spend(len(block))
            hasher.update(block)
            num_bytes += len(block)
        return num_bytes == file.num_bytes and hasher.hexdigest() == file.hash
    return False


def restore_history(place: Place, run_dir: Path, step: int, pace: Pace, report: Callable[[str], None]) -> None:
    """Copies the history of a mirror into a run; a file that the run has, and a damaged one, are left out.

    Args:
        place: The mirror.
        run_dir: The run's directory.
        step: The step from which the run continues; later rows of the log are left out.
        pace: Limits the download.
        report: Prints a line.

    Raises:
        StoreError: The store does not respond.
        OSError: A disk is full, or cannot be written.
    """
    history = find_history(place, report)
    if history is None:
        return
    restored: list[Path] = []
    for file in history.files:
        target = find_local_path(run_dir, file.name)
        assert target is not None, "the name was checked"
        if os.path.lexists(target):
            report(f"{target} exists, and is not replaced by the one in the mirror")
        elif _restore_file(place, history, file, target, step, pace):
            restored.append(target)
        else:
            report(f"{place.url}/{history.folder}/{file.name} is damaged, and is left out")
    if restored:
        num_bytes = sum(path.stat().st_size for path in restored)
        up_to = min(step, history.step)
        report(f"the history up to step {up_to} is restored: {len(restored)} files, {num_bytes:,} bytes")


def _restore_file(place: Place, history: History, file: ListedFile, target: Path, step: int, pace: Pace) -> bool:
    """Returns whether a file is whole and now in its place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".restoring")
    partial.unlink(missing_ok=True)
    hasher = blake3()
    try:
        with create_file(partial) as out, contextlib.suppress(FileNotFoundError):
            for block in place.read_blocks(
                place.file_path(history.folder, file.name, is_committed=True), file.num_bytes
            ):
                pace.spend(len(block))
                hasher.update(block)
                out.write(block)
        if hasher.hexdigest() != file.hash:
            return False
        if file.name == _METRICS:
            with partial.open("r+b") as log:
                log.truncate(find_row_end(log.fileno(), step))
        partial.rename(target)
        sync_directory(target.parent)
        return True
    finally:
        partial.unlink(missing_ok=True)
