"""The files of a run's history: which there are, and what they hold at one moment while the run continues.

    a name in a copy                  the file
    metrics.csv                       RUN/metrics.csv
    events.rank-0.jsonl               RUN/events/rank-0.jsonl
    config.yaml                       RUN/config.yaml
    chat.template.jinja               RUN/chat/template.jinja
    skips.json                        RUN/supervisor/skips.json
    crashes.0003-hang.rank-0.log      RUN/crashes/0003-hang/rank-0.log

Names that a copy lists are checked before they become paths, because a mirror may come from anywhere.
"""

import contextlib
import csv
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from genesis.base.run_directory import CHAT_TEMPLATE_NAME, RunDirectory
from genesis.operations.supervise.crashes import RECORD_NAME
from genesis.operations.supervise.state import SKIPS_NAME
from genesis_callbacks.base.run_directory import RunDirectory as CallbacksDirectory
from genesis_callbacks.base.untrusted import RefusedFileError, open_descriptor, read_file

METRICS: Final = "metrics.csv"
SKIPS: Final = SKIPS_NAME
TEMPLATE: Final = CHAT_TEMPLATE_NAME.replace("/", ".")
_EVENTS: Final = re.compile(r"(?:rank-\d{1,7}|commands|supervisor)\.jsonl")
_EVENTS_PREFIX: Final = "events."
_RECIPE: Final = re.compile(r"config(?:\.resume-\d{1,7})?\.yaml")
_CRASH: Final = re.compile(r"\d{4,9}-[a-z_]{1,40}")
_CRASH_FILE: Final = re.compile(rf"{re.escape(RECORD_NAME)}|rank-\d{{1,7}}\.(?:log|stacks)")
_CRASH_PREFIX: Final = "crashes."
_READ_BYTES: Final = 1 << 20
_MAX_FILES: Final = 1 << 14
_MAX_WHOLE_BYTES: Final = 1 << 22
_MAX_CRASH_BYTES: Final = 64 << 20
"""They are in memory during a copy."""


def find_local_path(run_dir: Path, name: str) -> Path | None:
    """Returns where a file of a copy lies in a run; None for a name that no copy has."""
    run = RunDirectory(run_dir)
    whole = {METRICS: run.metrics, TEMPLATE: run.chat_template, SKIPS: run.supervisor / SKIPS_NAME}
    if name in whole:
        return whole[name]
    if _RECIPE.fullmatch(name):
        return run_dir / name
    event_name = name.removeprefix(_EVENTS_PREFIX)
    if event_name != name and _EVENTS.fullmatch(event_name):
        return CallbacksDirectory(run_dir).events / event_name
    folder, _, file_name = name.removeprefix(_CRASH_PREFIX).partition(".")
    if name.startswith(_CRASH_PREFIX) and _CRASH.fullmatch(folder) and _CRASH_FILE.fullmatch(file_name):
        return run.crashes / folder / file_name
    return None


def is_recipe(name: str) -> bool:
    """Returns whether a file of a copy is a recipe of the run."""
    return _RECIPE.fullmatch(name) is not None


def list_local(run_dir: Path) -> list[str]:
    """Returns the names that the files of a run's history have in a copy, what matters most first.

    Of the crashes the records come before the outputs, and the newest first.
    """
    run = RunDirectory(run_dir)
    names = [name for name in _list_names(run_dir) if name == METRICS or _RECIPE.fullmatch(name)]
    names += [TEMPLATE] if run.chat_template.is_file() else []
    names += [name for name in _list_names(run.supervisor) if name == SKIPS]
    events = _list_names(CallbacksDirectory(run_dir).events)
    names += [f"{_EVENTS_PREFIX}{name}" for name in events if _EVENTS.fullmatch(name)]
    folders = [folder for folder in _list_names(run.crashes) if _CRASH.fullmatch(folder)]
    folders.sort(key=lambda folder: int(folder.partition("-")[0]), reverse=True)
    names += [f"{_CRASH_PREFIX}{folder}.{RECORD_NAME}" for folder in folders]
    for folder in folders:
        outputs = [name for name in _list_names(run.crashes / folder) if _CRASH_FILE.fullmatch(name)]
        names += [f"{_CRASH_PREFIX}{folder}.{name}" for name in outputs if name != RECORD_NAME]
        if len(names) >= _MAX_FILES:
            break
    return names[:_MAX_FILES]


def _list_names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_whole(path: Path) -> bytes | None:
    """Returns a small file that its writers only replace; None if it is gone, or none that they write.

    Raises:
        OSError: It cannot be read.
    """
    try:
        return read_file(path, _MAX_WHOLE_BYTES)
    except (FileNotFoundError, NotADirectoryError, RefusedFileError):
        return None


class HeldHistory:
    """The files of a run's history as they are at one moment.

    Files that grow are held open, and count up to their last whole line. Crash records and what the run skips are only
    replaced, and are read at once: their number is not that of open files.

    Args:
        run_dir: The run's directory.
        step: The last step whose rows of the log count.

    Attributes:
        files: By the name in a copy.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        self._descriptors: list[int] = []
        self.files: dict[str, HeldFile] = {}
        num_left = _MAX_CRASH_BYTES
        for name in list_local(run_dir):
            path = find_local_path(run_dir, name)
            assert path is not None, "the name comes from the list"
            if name in (SKIPS, TEMPLATE) or name.startswith(_CRASH_PREFIX):
                data = read_whole(path)
                if data is not None and len(data) <= num_left:
                    num_left -= len(data)
                    self.files[name] = HeldFile(data, len(data))
                continue
            with contextlib.suppress(FileNotFoundError):
                self._hold(name, path, step)

    def _hold(self, name: str, path: Path, step: int) -> None:
        try:
            descriptor = open_descriptor(path)
        except RefusedFileError:
            return
        self._descriptors.append(descriptor)
        size = find_row_end(descriptor, step) if name == METRICS else find_line_end(descriptor)
        self.files[name] = HeldFile(descriptor, size)

    def __enter__(self) -> "HeldHistory":
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


class HeldFile:
    """The content of a file at one moment.

    Args:
        source: An open descriptor, or the content.
        num_bytes: The size at that moment; a later part of the file is left out.
    """

    def __init__(self, source: int | bytes, num_bytes: int) -> None:
        self._source, self.num_bytes = source, num_bytes

    def read_blocks(self, first: int, num_bytes: int, block_bytes: int = _READ_BYTES) -> Iterator[bytes]:
        """Yields a part of the content; less if the file was cut meanwhile."""
        offset, stop = first, min(first + num_bytes, self.num_bytes)
        while offset < stop and (block := self._read(min(block_bytes, stop - offset), offset)):
            offset += len(block)
            yield block

    def _read(self, num_bytes: int, offset: int) -> bytes:
        if isinstance(self._source, bytes):
            return self._source[offset : offset + num_bytes]
        return os.pread(self._source, num_bytes, offset)


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
