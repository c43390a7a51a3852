"""The findings of a part of the doctor, written to a file after each figure.

So the findings of a part that hangs or crashes are kept up to that point.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from genesis_callbacks.base.files import replace_file


class SkippedError(Exception):
    """A part does not apply to this machine; the message gives the reason."""


@dataclass(frozen=True)
class Task:
    """The input of a part.

    Args:
        kind: Kind of device: `cpu`, `cuda` ...
        size: Name of the model shape in `genesis.operations.doctor.fits.SIZES`.
        directory: An empty directory on the file system of the checkpoints, which is removed after the part.
        rank: Number of this process among those of the part.
        num_ranks: The number of processes of the part.
    """

    kind: str
    size: str
    directory: str
    rank: int = 0
    num_ranks: int = 1

    def to_json(self) -> str:
        """Returns the one line that `task_from_json` reads."""
        return json.dumps(asdict(self))


def task_from_json(text: str) -> Task:
    """Returns the task that `Task.to_json` wrote."""
    return Task(**json.loads(text))


@dataclass
class Findings:
    """The findings of a part so far, in plain types.

    Args:
        figures: Name, value and unit of each measurement.
        checks: Name and result of each check, with a description.
        notes: Conclusions for the user.
        skipped: The reason why the part does not apply; None if it applies.
    """

    figures: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: str | None = None

    @property
    def is_failed(self) -> bool:
        """Whether a check failed."""
        return any(not check["passed"] for check in self.checks)


class Probe:
    """Collects a part's findings.

    Args:
        task: The input of the part.
        path: File of the findings; None writes none.
    """

    def __init__(self, task: Task, path: Path | None = None) -> None:
        self.task = task
        self.findings = Findings()
        self._path = path

    def figure(self, name: str, value: float | int | str, unit: str = "") -> None:
        """Adds a measurement; a number that is not finite becomes a text, which JSON can hold."""
        if isinstance(value, float):
            value = float(f"{value:.5g}") if math.isfinite(value) else str(value)
        self.findings.figures.append({"name": name, "value": value, "unit": unit})
        self._write()

    def check(self, name: str, passed: bool, found: str = "") -> None:
        """Adds the result of a check, with a description."""
        self.findings.checks.append({"name": name, "passed": bool(passed), "found": found})
        self._write()

    def note(self, text: str) -> None:
        """Adds a conclusion for the user."""
        self.findings.notes.append(text)
        self._write()

    def skip(self, reason: str) -> None:
        """Records that the part does not apply."""
        self.findings.skipped = reason
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            replace_file(self._path, json.dumps(asdict(self.findings)).encode())


def read_findings(path: Path) -> Findings:
    """Returns the findings that a part wrote; empty findings if it wrote none."""
    if not path.exists():
        return Findings()
    return Findings(**json.loads(path.read_text(encoding="utf-8")))


PartFunction = Callable[[Probe], None]
