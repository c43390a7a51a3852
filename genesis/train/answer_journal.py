"""Answers of a server on the disk, before they are trained: a run that is killed asks for none of them again.

    RUN/served/answers/ROLLOUT.rank-N.jsonl    an answer on each line: key, ids of its tokens, their log-probabilities

The key is a hash of the request and of the weights that were asked, so that a file never gives the answer to another
request, or of other weights. Lines are appended as answers come. What a killed process or machine has left in the midst
of a line is cut off.
"""

import json
import os
import threading
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genesis_callbacks.base.files import sync_directory
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import open_file

_MAX_LINE_BYTES: Final = 1 << 28
_NAME: Final = "{rollout:010d}.rank-{rank}.jsonl"


class Completion(NamedTuple):
    """New tokens, with the one that ended them, and what a server gives for their log-probabilities."""

    ids: NDArray[np.int32]
    log_probs: NDArray[np.float32] | None = None


class AnswerJournal:
    """The answers of a rank on the disk. Thread-safe.

    Args:
        directory: The directory of all ranks.
        rank: The rank.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._rank = directory, rank
        self._files: dict[int, BinaryIO] = {}
        self._unsynced: set[int] = set()
        self._lock = threading.Lock()

    def read(self, rollout: int) -> dict[str, Completion]:
        """Returns the answers that all ranks have got for a rollout, by their keys."""
        found: dict[str, Completion] = {}
        for path in sorted(self._directory.glob(_NAME.format(rollout=rollout, rank="*"))):
            with open_file(path) as file:
                while line := file.readline(_MAX_LINE_BYTES):
                    entry = _parse(line)
                    if entry is not None:
                        found[entry[0]] = entry[1]
        return found

    def append(self, rollout: int, key: str, answer: Completion) -> None:
        """Adds an answer; it is on the disk for certain behind `sync`."""
        assert answer.log_probs is not None, "of a server"
        line = {"key": key, "ids": answer.ids.tolist(), "log_probs": answer.log_probs.tolist()}
        with self._lock:
            if rollout not in self._files:
                self._files[rollout] = self._open(rollout)
            self._files[rollout].write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            self._unsynced.add(rollout)

    def sync(self) -> None:
        """Waits until all answers are on the disk."""
        with self._lock:
            for rollout in self._unsynced:
                self._files[rollout].flush()
                os.fsync(self._files[rollout].fileno())
            self._unsynced.clear()

    def close(self, before: int | None = None) -> None:
        """Closes the files of the rollouts before one, or of all."""
        with self._lock:
            for rollout in [one for one in self._files if before is None or one < before]:
                self._files.pop(rollout).close()
                self._unsynced.discard(rollout)

    def remove(self, before: int) -> None:
        """Removes the files of all ranks for the rollouts before one."""
        for path in self._directory.glob("*.rank-*.jsonl"):
            number = path.name.partition(".")[0]
            if number.isdecimal() and int(number) < before:
                path.unlink(missing_ok=True)

    def _open(self, rollout: int) -> BinaryIO:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / _NAME.format(rollout=rollout, rank=self._rank)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        file = os.fdopen(descriptor, "r+b")
        file.truncate(_find_end(file))
        file.seek(0, os.SEEK_END)
        sync_directory(self._directory)
        return file


def _find_end(file: BinaryIO) -> int:
    """Returns the number of bytes of whole lines."""
    end = 0
    while line := file.readline(_MAX_LINE_BYTES):
        if not line.endswith(b"\n"):
            break
        end += len(line)
    return end


def _parse(line: bytes) -> tuple[str, Completion] | None:
    """Returns key and answer of a line; None for one that is no whole answer, which is asked for again."""
    try:
        content = load_json(line)
        key, ids, log_probs = (content[name] for name in ("key", "ids", "log_probs"))
        answer = Completion(np.array(ids, np.int32), np.array(log_probs, np.float32))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    is_whole = isinstance(key, str) and answer.ids.ndim == 1 and len(ids) == len(log_probs)
    return (key, answer) if line.endswith(b"\n") and is_whole and len(answer.ids) else None
