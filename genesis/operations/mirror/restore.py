"""Continues a run from its mirror: copies the newest checkpoint that verifies back into the run's directory.

A checkpoint is downloaded beside its place, verified by the engine down to every tensor, and renamed. A base that it
names is restored into the run, or into the directory that the user gives, under the hash of its manifest: no path that
a mirror names is ever written. What a mirror holds is refused as a whole or restored: then no file of it is left.
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from genesis.base.errors import UserError, numbered
from genesis.base.run_directory import RunDirectory
from genesis.operations.mirror.contents import BASES, CHECKPOINTS, MirrorContents, read_contents
from genesis.operations.mirror.history import restore_history
from genesis.operations.mirror.listing import CheckpointListing, read_local_marker
from genesis.operations.mirror.places import Place
from genesis.operations.mirror.plan import order
from genesis.operations.mirror.transfer import Pace, read_hash
from genesis.operations.supervise.state import read_fresh_seconds
from genesis_callbacks.base.checkpoint_errors import BaseCheckpointError
from genesis_callbacks.base.files import create_file, replace_file, sync_directory
from genesis_callbacks.base.hashing import hash_file
from genesis_callbacks.base.manifest import BaseReference, FileRecord
from genesis_callbacks.base.run_directory import (
    BEST_NAME,
    COMMITTED_NAME,
    MANIFEST_NAME,
    PLACES_VARIABLE,
    base_name,
)
from genesis_callbacks.base.untrusted import check_file
from genesis_callbacks.checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    list_committed,
    verify,
)
from genesis_callbacks.checkpoint.lineage import DirectoryLock
from genesis_callbacks.checkpoint.tensor_places import find_base

_STAGING: Final = ".staging-restore"
"""A fit discards directories of such names, like every save that was interrupted."""


@dataclass(frozen=True)
class RestoreOutcome:
    """What a restore has done.

    Attributes:
        step: Step of the checkpoint from which the run continues; None if neither run nor mirror has one.
        restored: The steps that were copied into the run, in order.
        passed_over: Why checkpoints of the mirror were left out, by step.
    """

    step: int | None
    restored: tuple[int, ...] = ()
    passed_over: tuple[tuple[int, str], ...] = ()


def restore_run(
    place: Place,
    run_dir: Path,
    *,
    bases: Path | None = None,
    has_all: bool = False,
    bytes_per_second: float | None = None,
    report: Callable[[str], None] = print,
) -> RestoreOutcome:
    """Copies the newest checkpoint of a mirror that verifies into a run, unless the run itself has a newer one.

    The run's directory is locked meanwhile, so that no training takes it. Checkpoints from before the run began again
    from scratch (`--on_drift fresh`) are left out.

    Args:
        place: The mirror.
        run_dir: The run's directory; it need not exist.
        bases: A directory for bases; None for the run's own.
        has_all: Whether older checkpoints of the mirror are restored, too.
        bytes_per_second: Limit of the download; None for none.
        report: Prints a line.

    Raises:
        CorruptCheckpointError: The mirror has checkpoints, and none verifies.
        StoreError: The store does not respond.
        UserError: The mirror is another run's, or a checkpoint of the run is in the way.
        OSError: A disk is full, or cannot be written.
    """
    contents = read_contents(place)
    since = read_fresh_seconds(run_dir)
    valid = [item for item in contents.checkpoints.items() if item[1].created_seconds >= since]
    num_old = len(contents.checkpoints) - len(valid)
    if num_old:
        report(
            f"left out: {numbered(num_old, 'checkpoints')} of {place.url} from before {run_dir} began again from "
            "scratch; restore into another directory to have them"
        )
    mirrored = sorted(valid, key=lambda item: order(item[1]), reverse=True)
    if not mirrored and (num_old or not contents.damaged):
        return RestoreOutcome(_newest_step(RunDirectory(run_dir).checkpoints))
    run = RunDirectory(run_dir)
    new = [path for path in (run.bases, run.checkpoints, run_dir, *run_dir.parents) if not path.exists()]
    lock = DirectoryLock(run.checkpoints)
    try:
        return _Restore(place, run_dir, bases, contents, Pace(bytes_per_second), report).restore(mirrored, has_all)
    except CheckpointError:
        for path in new:
            # What the run's two hold is the restore's own; another one may be in use by others in the meantime.
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path in (run.bases, run.checkpoints) else path.rmdir()
        raise
    finally:
        lock.release()


def _newest_step(directory: Path) -> int | None:
    committed = list_committed(directory)
    return committed[-1][1].step if committed else None


class _Restore:
    def __init__(
        self,
        place: Place,
        run_dir: Path,
        bases: Path | None,
        contents: MirrorContents,
        pace: Pace,
        report: Callable[[str], None],
    ) -> None:
        self._place, self._contents, self._pace, self._report = place, contents, pace, report
        self._run = RunDirectory(run_dir)
        self._directory = self._run.checkpoints
        self._bases = bases
        self._restored_bases: list[Path] = []
        self._passed_over: list[tuple[int, str]] = []

    def restore(self, mirrored: list[tuple[str, CheckpointListing]], has_all: bool) -> RestoreOutcome:
        own = list_committed(self._directory)
        markers: set[str | None] = {read_local_marker(path) for path, _ in own}
        self._check_related(markers, mirrored)
        newest = (own[-1][1].sequence, own[-1][1].step) if own else (-1, -1)
        for folder, problem in self._contents.damaged.items():
            self._report(f"{folder} of the mirror is passed over: {problem}")
        restored: list[int] = []
        for folder, listing in mirrored:
            is_wanted = has_all or (order(listing) > newest and not restored)
            if is_wanted and listing.marker not in markers and self._try(folder, listing):
                restored.append(listing.step)
        if not own and not restored:
            raise CorruptCheckpointError(
                f"none of the {numbered(len(mirrored) + len(self._contents.damaged), 'checkpoints')} in "
                f"{self._place.url} verifies ({self._describe()}); use another copy, or start again in another "
                "directory"
            )
        if restored:
            self._restore_marks()
            restore_history(self._place, self._run.path, max(restored), self._pace, self._report)
        return RestoreOutcome(_newest_step(self._directory), tuple(sorted(restored)), tuple(self._passed_over))

    def _check_related(self, markers: set[str | None], mirrored: list[tuple[str, CheckpointListing]]) -> None:
        listings = [listing for _, listing in mirrored]
        known = {listing.marker for listing in listings} | {listing.previous_hash for listing in listings}
        if markers and listings and not known & markers:
            raise UserError(
                f"{self._place.url} holds no checkpoint that {self._run.path} has had: it is the mirror of another "
                "run; restore into an empty directory"
            )

    def _describe(self) -> str:
        problems = [problem for _, problem in self._passed_over] or list(self._contents.damaged.values())
        return problems[0]

    def _try(self, folder: str, listing: CheckpointListing) -> bool:
        """Restores a checkpoint; one that does not verify is reported, and the one before it is tried next."""
        try:
            self._restore_checkpoint(folder, listing)
        except (CheckpointError, FileNotFoundError) as error:
            self._passed_over.append((listing.step, str(error)))
            self._report(f"step {listing.step} of the mirror is passed over: {error}")
            return False
        self._report(f"step {listing.step} is restored: {listing.num_bytes:,} bytes, verified")
        return True

    def _restore_checkpoint(self, folder: str, listing: CheckpointListing) -> None:
        target = self._directory / listing.name
        if os.path.lexists(target):
            raise UserError(f"{target} exists, and is not the checkpoint of the mirror: move it away, and start again")
        num_before = len(self._restored_bases)
        base = None if listing.base is None else self._restore_base(target, listing.base)
        try:
            self._download(folder, listing, target, places=[] if base is None else [base])
        except CheckpointError:
            while len(self._restored_bases) > num_before:  # no checkpoint needs it
                shutil.rmtree(self._restored_bases.pop())
            raise

    def _restore_base(self, checkpoint: Path, base: BaseReference) -> Path:
        """Returns where the base of a checkpoint lies, after restoring it if it is not there."""
        # Only the hash of its content names the place: a path from the mirror could lead into another run.
        target = (self._bases or self._run.bases) / base_name(base.manifest_hash)
        with contextlib.suppress(BaseCheckpointError):
            return find_base(checkpoint, base, [target])[0]
        folder = self._contents.find(base.manifest_hash)
        if folder is None:
            raise CorruptCheckpointError(f"its base {base.manifest_hash[:23]} is not in {self._place.url}/{BASES}")
        if os.path.lexists(target):
            raise UserError(f"{target} exists, and is not the base of the mirror: move it away, and start again")
        listing = {**self._contents.checkpoints, **self._contents.bases}[folder]
        self._download(folder, listing, target, places=[])
        self._restored_bases.append(target)
        self._report(f"the base is restored to {target}: {listing.num_bytes:,} bytes, verified")
        if self._bases is not None:
            self._report(f"set {PLACES_VARIABLE}={target} for every command that reads this run")
        return target

    def _download(self, folder: str, listing: CheckpointListing, target: Path, places: list[Path]) -> None:
        staging = target.with_name(target.name + _STAGING)
        staging.mkdir(parents=True, exist_ok=True)
        try:
            for file in listing.files:
                self._download_file(folder, listing, file, staging)
            for name, data in ((MANIFEST_NAME, listing.manifest), (COMMITTED_NAME, listing.marker.encode())):
                with create_file(staging / name) as out:
                    out.write(data)
            sync_directory(staging)
            verify(staging, "deep", places=places)
        except CheckpointError:
            shutil.rmtree(staging)
            raise
        staging.rename(target)
        sync_directory(target.parent)

    def _download_file(self, folder: str, listing: CheckpointListing, file: FileRecord, staging: Path) -> None:
        """Downloads a file, unless an interrupted restore has left it whole."""
        path = staging / file.name
        if _has_hash(path, file, listing):
            return
        source = self._place.file_path(folder, file.name, is_committed=True)
        with create_file(path) as out:
            found = read_hash(self._place, source, file.num_bytes, listing.build_hasher(), self._pace, out)
        if found != file.hash:
            raise CorruptCheckpointError(f"{self._place.url}/{source} does not have the hash that was saved")

    def _restore_marks(self) -> None:
        path = self._directory / BEST_NAME
        marks = self._place.read(f"{CHECKPOINTS}/{BEST_NAME}")
        if marks is not None and not path.exists():
            replace_file(path, marks)  # readers ignore the marks of checkpoints that are not there


def _has_hash(path: Path, file: FileRecord, listing: CheckpointListing) -> bool:
    try:
        return check_file(path) == file.num_bytes and hash_file(path, listing.algorithm) == file.hash
    except (OSError, CheckpointError):
        return False
