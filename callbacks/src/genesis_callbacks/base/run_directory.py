"""The paths in a run's directory that the callbacks write. Imports no torch.

    RUN/checkpoints/                    `checkpoints`: one `step-XXXXXXXX` for each commit, and beside them
        .lock                           held by the run that trains
        best.json                       marks the best checkpoints
        .trash/                         what is being deleted
        step-XXXXXXXX.staging-*/        a save in flight
        quarantined-step-XXXXXXXX/      a checkpoint that does not verify
        superseded-N/                   checkpoints that the run does not descend from
    RUN/bases/HASH/                     `base`: the base of checkpoints, which `genesis mirror restore` has put there
    RUN/events/rank-N.jsonl             `event_file`: what happened, by rank (`genesis_callbacks.base.events`)
               commands.jsonl           what commands beside the training did
               supervisor.jsonl         what the supervisor of the run did
    RUN/heartbeats/rank-N.json          `heartbeat_file`: where each rank stands, rewritten at most once a second
                   rank-N.pulse         `pulse_file`: its time shows that the process of the rank runs
    RUN/memory/                         `memory`: snapshots of memory from when it ran out
    RUN/traces/                         `traces`: profiler traces of chosen steps
    RUN/hangs/                          `hangs`: the stacks of all ranks from when a run hung
    RUN/.ranks/                         one file for each rank that lives, while there are several

Names in `checkpoints/` are constants, because the engine also works on a directory of checkpoints that lies in no run.
Each checkpoint has a `manifest.json` and, from its commit on, a marker `COMMITTED` with the manifest's hash.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from .errors import UserError

__all__ = [
    "BEST_NAME",
    "COMMITTED_NAME",
    "LOCK_NAME",
    "EventWriter",
    "MANIFEST_NAME",
    "PLACES_VARIABLE",
    "TRASH_NAME",
    "RunDirectory",
    "base_name",
    "checkpoint_name",
    "is_checkpoint_name",
    "is_staging_name",
    "read_run_dir",
    "step_of",
]

EventWriter = int | Literal["supervisor"] | None
"""Who writes events: a rank, the supervisor of the run, or a command beside the training (None)."""

CHECKPOINTS_NAME: Final = "checkpoints"
LOCK_NAME: Final = ".lock"
BEST_NAME: Final = "best.json"
TRASH_NAME: Final = ".trash"
MANIFEST_NAME: Final = "manifest.json"
COMMITTED_NAME: Final = "COMMITTED"
PLACES_VARIABLE: Final = "GENESIS_BASE_CHECKPOINTS"
"""Environment variable with additional paths of base checkpoints, separated as in PATH."""

_BASE_NAME_LENGTH: Final = 16
_CHECKPOINT_NAME: Final = re.compile(r"step-(\d{8,})")
_STAGING_NAME: Final = re.compile(r"step-\d{8,}\.staging-\w+")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
"""As a URL begins; a `Path` made of a URL has one slash of the two."""


def checkpoint_name(step: int) -> str:
    """Returns the directory name of the checkpoint at `step`."""
    return f"step-{step:08d}"


def base_name(manifest_hash: str) -> str:
    """Returns the name of a base where it is not a checkpoint of its run: the beginning of its manifest's hash."""
    return manifest_hash.partition(":")[2][:_BASE_NAME_LENGTH]


def is_checkpoint_name(name: str) -> bool:
    """Returns whether `name` is the name of a committed checkpoint; other entries are foreign or unfinished."""
    return _CHECKPOINT_NAME.fullmatch(name) is not None


def step_of(name: str) -> int:
    """Returns the step in the name of a committed checkpoint."""
    return int(name.removeprefix("step-"))


def is_staging_name(name: str) -> bool:
    """Returns whether `name` is the name of an unfinished save, in progress or abandoned."""
    return _STAGING_NAME.fullmatch(name) is not None


def read_run_dir(given: str | Path) -> Path:
    """Returns the directory that a user gives a run.

    Raises:
        UserError: It is empty, has a null character, or is a URL: a commit is a rename on a file system.

    Example:
        >>> read_run_dir("runs/a").as_posix()
        'runs/a'
    """
    text = os.fspath(given)
    if not text.strip() or "\0" in text:
        raise UserError(f"run_dir is {text!r}: give the run a directory, such as runs/NAME")
    if _SCHEME.match(text):
        raise UserError(
            f"run_dir is {text!r}, a URL: checkpoints are written into a directory; give one on a disk or a mount, and "
            "copy its checkpoints to the store"
        )
    return Path(text)


@dataclass(frozen=True)
class RunDirectory:
    """The paths in one run's directory. It reads no disk: a path need not exist.

    Args:
        path: The run's directory.

    Example:
        >>> RunDirectory(Path("runs/a")).event_file(0).as_posix()
        'runs/a/events/rank-0.jsonl'
    """

    path: Path

    @classmethod
    def holding(cls, path: Path) -> "RunDirectory | None":
        """Returns the run that holds a checkpoint or a directory of checkpoints, by their names; None if there is none.

        Example:
            >>> RunDirectory.holding(Path("/runs/a/checkpoints/step-00000010")).path.as_posix()
            '/runs/a'
            >>> RunDirectory.holding(Path("/backup/step-00000010")) is None
            True
        """
        absolute = path.absolute()
        for directory in (absolute, absolute.parent):
            if directory.name == CHECKPOINTS_NAME:
                return cls(directory.parent)
        return None

    @property
    def checkpoints(self) -> Path:
        """Holds the checkpoints."""
        return self.path / CHECKPOINTS_NAME

    @property
    def bases(self) -> Path:
        """Holds the bases that a restore has put into the run."""
        return self.path / "bases"

    @property
    def ranks(self) -> Path:
        """Holds a file for each rank that lives."""
        return self.path / ".ranks"

    @property
    def events(self) -> Path:
        """Holds the files of events."""
        return self.path / "events"

    @property
    def heartbeats(self) -> Path:
        """Holds a file for each rank, with its last heartbeat."""
        return self.path / "heartbeats"

    @property
    def memory(self) -> Path:
        """Holds snapshots of memory from when it ran out."""
        return self.path / "memory"

    @property
    def traces(self) -> Path:
        """Holds profiler traces."""
        return self.path / "traces"

    @property
    def hangs(self) -> Path:
        """Holds the reports of hangs."""
        return self.path / "hangs"

    def heartbeat_file(self, rank: int) -> Path:
        """Returns where a rank writes its heartbeat."""
        return self.heartbeats / f"rank-{rank}.json"

    def pulse_file(self, rank: int) -> Path:
        """Returns the file whose time shows that the process of a rank runs."""
        return self.heartbeats / f"rank-{rank}.pulse"

    def event_file(self, writer: EventWriter) -> Path:
        """Returns where a rank, the supervisor, or a command beside the training (None) writes its events."""
        if writer is None:
            return self.events / "commands.jsonl"
        return self.events / (f"{writer}.jsonl" if isinstance(writer, str) else f"rank-{writer}.jsonl")
