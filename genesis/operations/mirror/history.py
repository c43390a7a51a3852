"""The history of a run in its mirror: events, log, recipes, crash records and what is skipped.

    PLACE/history/00000007/     a copy: manifest.json lists all files of the history; COMMITTED has its hash
        metrics.csv             a piece of this file: rows up to the checkpoint's step, from where the last piece ends
        events.rank-0.jsonl     the same of RUN/events/rank-0.jsonl

The files grow while they are read. A copy is what they held at one moment. Each file of it consists of the pieces that
earlier copies have written, as far as the file still begins with them, and one in the copy's own folder. A log that a
resume has cut back shares the pieces before the cut. Folders are merged as their sizes demand, so that there are few of
them and each byte is written a few times, however long the run lasts. A copy is visible once it is read back and
verified; then the folders that it does not use are removed.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from genesis.base.errors import numbered
from genesis.operations.mirror.history_files import (
    METRICS,
    SKIPS,
    HeldFile,
    HeldHistory,
    find_local_path,
    find_row_end,
    is_recipe,
    read_whole,
)
from genesis.operations.mirror.listing import CheckpointListing, decode_marker
from genesis.operations.mirror.places import Place
from genesis.operations.mirror.transfer import Pace, read_hash, write_verified
from genesis.operations.supervise.plain import decode
from genesis.recipe.imports import explain_others, list_others
from genesis.recipe.yaml import find_imports
from genesis_callbacks.base.files import create_file, sync_directory
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.run_directory import COMMITTED_NAME, MANIFEST_NAME
from genesis_callbacks.checkpoint import CorruptCheckpointError

HISTORY: Final = "history"
_NUMBER: Final = re.compile(r"\d{8}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_APART: Final = ".unread"


@dataclass(frozen=True)
class Piece:
    """A part of a file, as the file of the same name in the folder of a copy.

    Args:
        folder: The copy's number.
        num_bytes: Its size.
        hash: Its hash.
    """

    folder: str
    num_bytes: int
    hash: str


@dataclass(frozen=True)
class HistoryFile:
    """A file of a copy.

    Args:
        name: Its name in copies.
        num_bytes: Its size.
        hash: Its hash.
        pieces: Its pieces in order.
    """

    name: str
    num_bytes: int
    hash: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class History:
    """A copy of a run's history.

    Args:
        folder: Its number, which names its folder.
        checkpoint: The marker of the checkpoint with which it was made.
        step: That checkpoint's step.
        files: Its files.
    """

    folder: str
    checkpoint: str
    step: int
    files: tuple[HistoryFile, ...]


def plan_merge(folders: Sequence[tuple[int, int]], num_new_bytes: int) -> int:
    """Returns the first of the folders whose pieces are all written again, into the new one. Pure.

    These are a folder that is more than half unused and all after it, and then folders that are no larger than all
    that follows: the sizes that stay at least double from the newest to the oldest.

    Args:
        folders: How many bytes of each are used, and how many there are, the oldest first.
        num_new_bytes: What is written anyway.

    Returns:
        The index of that folder; the number of folders if all stay.

    Example:
        >>> plan_merge([(900, 900), (200, 200), (90, 90)], 100)
        2
    """
    # A folder goes only as a whole. Without this rule, logs that resumes cut back would leave the place full of bytes
    # that no copy uses.
    first = next((number for number, (used, there) in enumerate(folders) if 2 * used < there), len(folders))
    size = num_new_bytes + sum(used for used, _ in folders[first:])
    # As sizes double from folder to folder, a byte is written again only when its folder doubles. One folder for each
    # copy would need a request for each, and one for all would be written again at each copy.
    while first and folders[first - 1][0] <= size:
        first -= 1
        size += folders[first][0]
    return first


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
        self._whole: set[tuple[str, str]] = set()
        """Pieces that this process has read back, by folder and name."""

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
        if is_current and not is_last and not self._has_new_skips():
            return
        with HeldHistory(self._run_dir, listing.step) as held:
            if held.files:
                self._copy(held, listing, is_current=is_current)

    def _has_new_skips(self) -> bool:
        """Returns whether the run skips more data than the copy knows: the budget does not wait for a checkpoint."""
        path = find_local_path(self._run_dir, SKIPS)
        assert path is not None
        data = read_whole(path)
        known = {} if self._known is None else {file.name: file.hash for file in self._known.files}
        return data is not None and known.get(SKIPS) != blake3(data).hexdigest()

    def _copy(self, held: HeldHistory, listing: CheckpointListing, *, is_current: bool) -> None:
        there = self._list_folders()
        begun = {name: self._find_begun(name, file, there) for name, file in held.files.items()}
        known = {} if self._known is None else {file.name: file.pieces for file in self._known.files}
        num_new = sum(file.num_bytes - _count(begun[name]) for name, file in held.files.items())
        if is_current and begun == known and not num_new:
            return
        used: dict[str, int] = {}
        for piece in (piece for pieces in begun.values() for piece in pieces):
            used[piece.folder] = used.get(piece.folder, 0) + piece.num_bytes
        folders = sorted(used)
        staying = set(folders[: plan_merge([(used[each], sum(there[each].values())) for each in folders], num_new)])
        # Above all that are there, also those of copies that are damaged: the newest number is the copy that counts.
        folder = f"{max(map(int, there), default=0) + 1:08d}"
        files = []
        for name, file in held.files.items():
            pieces = tuple(piece for piece in begun[name] if piece.folder in staying)
            files.append(self._copy_file(name, file, folder, pieces))
        self._commit(History(folder, listing.marker, listing.step, tuple(files)))
        # Only after the commit: until then, the copy before needs them.
        for each in there.keys() - staying:
            self._place.remove(f"{HISTORY}/{each}", is_committed=True)
        self._whole = {key for key in self._whole if key[0] in {*staying, folder}}

    def _list_folders(self) -> dict[str, dict[str, int]]:
        """Returns the sizes of the pieces by folder and name, after removing what an interrupted copy has left."""
        found = {}
        for each in self._place.list_folders(HISTORY):
            if _NUMBER.fullmatch(each.name) and each.is_committed:
                own = (MANIFEST_NAME, COMMITTED_NAME)
                found[each.name] = {name: size for name, size in each.files.items() if name not in own}
            elif _NUMBER.fullmatch(each.name):
                self._place.remove(f"{HISTORY}/{each.name}", is_committed=False)
        return found

    def _find_begun(self, name: str, file: HeldFile, there: Mapping[str, Mapping[str, int]]) -> tuple[Piece, ...]:
        """Returns the pieces in the place with which a file begins."""
        known = () if self._known is None else self._known.files
        pieces = next((each.pieces for each in known if each.name == name), ())
        begun: list[Piece] = []
        offset = 0
        for piece in pieces:
            # The bytes decide, and not the length: a resume cuts the log back and writes other rows in their place.
            # What follows the first piece that differs cannot be shared, as its offset is another.
            is_there = there.get(piece.folder, {}).get(name) == piece.num_bytes
            if not is_there or _hash_part(file, offset, piece.num_bytes) != piece.hash or not self._reads(name, piece):
                break
            begun.append(piece)
            offset += piece.num_bytes
        return tuple(begun)

    def _reads(self, name: str, piece: Piece) -> bool:
        """Returns whether a piece has its hash in the place; one that another process has written is read once."""
        key = (piece.folder, name)
        if key not in self._whole and _has_hash(self._place, _path(self._place, name, piece), piece, self._pace):
            self._whole.add(key)
        return key in self._whole

    def _copy_file(self, name: str, file: HeldFile, folder: str, begun: tuple[Piece, ...]) -> HistoryFile:
        """Writes what a file has beyond its first pieces, and reads this back."""
        first = _count(begun)
        num_bytes = file.num_bytes - first
        digest = _hash_part(file, 0, file.num_bytes)
        if not num_bytes:
            return HistoryFile(name, file.num_bytes, digest, begun)
        piece = Piece(folder, num_bytes, _hash_part(file, first, num_bytes))
        write_verified(
            *(self._place, f"{HISTORY}/{folder}", name),
            blocks=lambda block_bytes: file.read_blocks(first, num_bytes, block_bytes),
            num_bytes=num_bytes,
            digest=piece.hash,
            build_hasher=blake3,
            pace=self._pace,
        )
        self._whole.add((folder, name))
        return HistoryFile(name, file.num_bytes, digest, (*begun, piece))

    def _commit(self, history: History) -> None:
        content = {"schema_version": 2, "checkpoint": history.checkpoint, "step": history.step}
        manifest = json.dumps({**content, "files": [asdict(file) for file in history.files]}).encode()
        folder = f"{HISTORY}/{history.folder}"
        digest = blake3(manifest).hexdigest()
        write_verified(
            self._place, folder, MANIFEST_NAME, lambda _: iter([manifest]), len(manifest), digest, blake3, self._pace
        )
        self._check_owner()
        self._place.commit(folder, f"blake3:{digest}".encode())
        self._known = history


def _count(pieces: Sequence[Piece]) -> int:
    return sum(piece.num_bytes for piece in pieces)


def _path(place: Place, name: str, piece: Piece) -> str:
    return place.file_path(f"{HISTORY}/{piece.folder}", name, is_committed=True)


def _hash_part(file: HeldFile, first: int, num_bytes: int) -> str:
    hasher = blake3()
    for block in file.read_blocks(first, num_bytes):
        hasher.update(block)
    return hasher.hexdigest()


def find_history(place: Place, report: Callable[[str], None] | None = None) -> History | None:
    """Returns the newest copy whose manifest is whole; None if there is none.

    Args:
        place: The mirror.
        report: Prints a line about each damaged copy that is passed over.

    Raises:
        StoreError: The store does not respond.
    """
    for folder in _list_copies(place):
        try:
            return _read_history(place, folder)
        except CorruptCheckpointError as error:
            if report is not None:
                report(f"a copy of the history is left out: {error}")
    return None


def _list_copies(place: Place) -> list[str]:
    """Returns the numbers of the copies, the newest first."""
    folders = [each.name for each in place.list_folders(HISTORY) if _NUMBER.fullmatch(each.name) and each.is_committed]
    return sorted(folders, reverse=True)


def _read_history(place: Place, folder: str) -> History:
    where = f"{HISTORY}/{folder}"
    marker = decode_marker(place.read(place.file_path(where, COMMITTED_NAME, is_committed=True)))
    manifest = place.read(place.file_path(where, MANIFEST_NAME, is_committed=True))
    if manifest is None or marker != f"blake3:{blake3(manifest).hexdigest()}":
        raise CorruptCheckpointError(f"{place.url}/{where} has no manifest with the hash of its marker")
    try:
        content = load_json(manifest)
        for file in content["files"]:
            # Copies of earlier versions have each file whole.
            file.setdefault("pieces", [{"folder": folder, "num_bytes": file["num_bytes"], "hash": file["hash"]}])
        history = decode(History, {**content, "folder": folder})
        for each in history.files:
            _check_file(each)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{place.url}/{where} has a manifest that cannot be read: {error}") from error
    return history


def _check_file(file: HistoryFile) -> None:
    is_piece = all(
        _NUMBER.fullmatch(each.folder) and each.num_bytes >= 0 and _HASH.fullmatch(each.hash) for each in file.pieces
    )
    if find_local_path(Path(), file.name) is None or not is_piece or _count(file.pieces) != file.num_bytes:
        raise ValueError(f"{file.name!r} is no file of a history")


def verify_history(place: Place, pace: Pace) -> Iterator[tuple[str, str | None]]:
    """Reads the newest copy, and yields its folder with what is wrong, or None; before it, newer ones that are damaged.

    Raises:
        StoreError: The store does not respond.
    """
    for folder in _list_copies(place):
        try:
            yield f"{HISTORY}/{folder}", _find_problem(place, _read_history(place, folder), pace)
            return
        except CorruptCheckpointError as error:
            yield f"{HISTORY}/{folder}", str(error)


def _find_problem(place: Place, history: History, pace: Pace) -> str | None:
    for file in history.files:
        if not all(_has_hash(place, _path(place, file.name, piece), piece, pace) for piece in file.pieces):
            return f"{file.name} does not have the size and the hash that were saved"
    return None


def _has_hash(place: Place, path: str, piece: Piece, pace: Pace) -> bool:
    return read_hash(place, path, piece.num_bytes, blake3(), pace) == piece.hash


def restore_history(place: Place, run_dir: Path, step: int, pace: Pace, report: Callable[[str], None]) -> None:
    """Copies the history of a mirror into a run; a file that the run has, and a damaged one, are left out.

    A recipe that names code of other packages gets a name under which no command takes it for a recipe.

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
        elif _restore_file(place, file, target, step, pace):
            restored.append(_set_apart(target, report) if is_recipe(file.name) else target)
        else:
            report(f"{place.url}/{HISTORY}: {file.name} is damaged, and is left out")
    if restored:
        num_bytes = sum(path.stat().st_size for path in restored)
        up_to = min(step, history.step)
        report(f"the history up to step {up_to} is restored: {numbered(len(restored), 'files')}, {num_bytes:,} bytes")


def _set_apart(recipe: Path, report: Callable[[str], None]) -> Path:
    """Returns where a restored recipe lies, after renaming one that names code which is not allowed."""
    data = read_whole(recipe)
    others = [] if data is None else list_others(find_imports(data.decode(errors="replace")))
    if data is not None and not others:
        return recipe
    apart = recipe.with_name(recipe.name + _APART)
    recipe.rename(apart)
    why = f"names {explain_others(others)}" if others else "is too large for a recipe"
    report(f"{recipe.name} {why}; it is restored as {apart}: read it before you rename it")
    return apart


def _restore_file(place: Place, file: HistoryFile, target: Path, step: int, pace: Pace) -> bool:
    """Returns whether a file is whole and now in its place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".restoring")
    partial.unlink(missing_ok=True)
    hasher = blake3()
    try:
        with create_file(partial) as out:
            for piece in file.pieces:
                read_hash(place, _path(place, file.name, piece), piece.num_bytes, hasher, pace, out)
        if hasher.hexdigest() != file.hash:
            return False
        if file.name == METRICS:
            with partial.open("r+b") as log:
                log.truncate(find_row_end(log.fileno(), step))
        partial.rename(target)
        sync_directory(target.parent)
        return True
    finally:
        partial.unlink(missing_ok=True)
