"""What a run knows of one of its mirrors: `RUN/mirrors/ID.json`, which the mirror replaces and anybody may read."""

import hashlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from genesis.base.run_directory import RunDirectory
from genesis.operations.mirror.listing import decode_marker
from genesis.operations.supervise.plain import read_record, write_record

_TOKEN: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class MirrorStatus:
    """The last that a mirror reported.

    Attributes:
        url: Path or URL of the mirror, without a password.
        token: Identifies the run's claim on the mirror; empty before the first contact.
        pid: The process that works or worked for the mirror.
        updated_seconds: Unix time of this report.
        markers: The mirrored checkpoints, by the content of their commit markers.
        newest_step: Step of the newest mirrored checkpoint; None before the first.
        newest_created_seconds: Unix time at which the run committed it; 0 before the first.
        copied_bytes: Bytes that this process has copied.
        problem: Why the mirror is behind, in one line; empty if it works.
        problem_since_seconds: Unix time of the first failure in a row; None if the mirror works.
    """

    url: str
    token: str = ""
    pid: int = 0
    updated_seconds: float = 0.0
    markers: tuple[str, ...] = ()
    newest_step: int | None = None
    newest_created_seconds: float = 0.0
    copied_bytes: int = 0
    problem: str = ""
    problem_since_seconds: float | None = None


def status_path(run_dir: Path, url: str) -> Path:
    """Returns where the status of a run's mirror lies."""
    place = url.rstrip("/") if "://" in url else os.path.abspath(url)  # noqa: PTH100 - Path.absolute keeps "a/.."
    return RunDirectory(run_dir).mirrors / f"{hashlib.sha256(place.encode()).hexdigest()[:12]}.json"


def write_mirror_status(path: Path, status: MirrorStatus) -> None:
    """Replaces a status.

    Raises:
        OSError: It cannot be written.
    """
    write_record(path, status)


def read_mirror_status(path: Path) -> MirrorStatus | None:
    """Returns the status in a file; None if there is none, or none that this version writes."""
    status = read_record(MirrorStatus, path)
    if status is None:
        return None
    markers = (decode_marker(marker.encode(errors="replace")) for marker in status.markers)
    return replace(
        status,
        token=status.token if _TOKEN.fullmatch(status.token) else "",
        markers=tuple(marker for marker in markers if marker is not None),
    )


def read_mirror_statuses(run_dir: Path) -> list[MirrorStatus]:
    """Returns the statuses of all mirrors of a run."""
    paths = sorted(RunDirectory(run_dir).mirrors.glob("*.json"))
    statuses = (read_mirror_status(path) for path in paths)
    return [status for status in statuses if status is not None]
