"""What a run knows of one of its mirrors: `RUN/mirrors/ID.json`, which the mirror replaces and anybody may read."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import printable
from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise.mirror_manifest import decode_marker, read_local_marker
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.run_directory import COMMITTED_NAME, is_checkpoint_name
from genesis_callbacks.base.untrusted import read_file

_MAX_BYTES: Final = 1 << 20
_MAX_TEXT: Final = 1000
_TOKEN: Final = re.compile(r"[0-9a-f]{32}")
_PASSWORD: Final = re.compile(r"(?<=://)[^/@\s]+@")


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


def without_password(url: str) -> str:
    """Returns a URL without user and password.

    Example:
        >>> without_password("ftp://me@host/dir"), without_password("/disk/a@b")
        ('ftp://host/dir', '/disk/a@b')
    """
    return _PASSWORD.sub("", url)


def status_path(run_dir: Path, url: str) -> Path:
    """Returns where the status of a run's mirror lies."""
    place = url.rstrip("/") if "://" in url else os.path.abspath(url)  # noqa: PTH100 - Path.absolute keeps "a/.."
    return RunDirectory(run_dir).mirrors / f"{hashlib.sha256(place.encode()).hexdigest()[:12]}.json"


def write_mirror_status(path: Path, status: MirrorStatus) -> None:
    """Replaces a status.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(asdict(status), indent=1).encode() + b"\n")


def read_mirror_status(path: Path) -> MirrorStatus | None:
    """Returns the status in a file; None if there is none, or none that this version writes."""
    try:
        content = load_json(read_file(path, _MAX_BYTES))
        return _decode(content) if isinstance(content, dict) else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError):  # anything may lie there
        return None


def read_mirror_statuses(run_dir: Path) -> list[MirrorStatus]:
    """Returns the statuses of all mirrors of a run."""
    paths = sorted(RunDirectory(run_dir).mirrors.glob("*.json"))
    statuses = (read_mirror_status(path) for path in paths)
    return [status for status in statuses if status is not None]


def _decode(content: Mapping[str, Any]) -> MirrorStatus:
    step, since, token = content["newest_step"], content["problem_since_seconds"], str(content["token"])
    markers = [decode_marker(str(marker).encode()) for marker in content["markers"]]
    return MirrorStatus(
        url=printable(str(content["url"])[:_MAX_TEXT]),
        token=token if _TOKEN.fullmatch(token) else "",
        pid=int(content["pid"]),
        updated_seconds=float(content["updated_seconds"]),
        markers=tuple(marker for marker in markers if marker is not None),
        newest_step=None if step is None else int(step),
        newest_created_seconds=float(content["newest_created_seconds"]),
        copied_bytes=int(content["copied_bytes"]),
        problem=printable(str(content["problem"])[:_MAX_TEXT]),
        problem_since_seconds=None if since is None else float(since),
    )


def measure_lag(run_dir: Path, status: MirrorStatus, now_seconds: float) -> float:
    """Returns the seconds since the run committed the first checkpoint that the mirror lacks; 0 if it lacks none.

    The lag is measured from the run's directory, so that it grows even if the mirror's process is gone. Older
    checkpoints that the mirror's retention leaves out do not count.
    """
    directory = RunDirectory(run_dir).checkpoints
    try:
        names = [name for name in os.listdir(directory) if is_checkpoint_name(name)]  # noqa: PTH208 - names alone
    except OSError:
        return 0.0
    missing = []
    for name in names:
        try:
            committed_seconds = (directory / name / COMMITTED_NAME).stat().st_mtime
            is_newer = committed_seconds > status.newest_created_seconds
            if is_newer and read_local_marker(directory / name) not in (None, *status.markers):
                missing.append(committed_seconds)
        except OSError:  # removed in between
            continue
    return max(0.0, now_seconds - min(missing)) if missing else 0.0
