"""Reads checkpoints' bytes in a thread beside training, for `CheckpointVerification`."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from ._checkpoint_watch import Fingerprint, take_fingerprint
from .checkpoint.contents import Contents, find_non_finite

_NUM_NAMED = 3


class FiniteReader:
    """Searches checkpoints for values that are not finite, in a thread, one checkpoint after the other."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-verification")
        self._jobs: list[tuple[Contents, Fingerprint | None, Future[list[str]]]] = []

    def begin(self, contents: Contents, fingerprint: Fingerprint | None, buffers: frozenset[str]) -> None:
        """Starts to read; `buffers` may be infinite, and `fingerprint` is that of the files as they are now."""
        self._jobs.append((contents, fingerprint, self._pool.submit(self._read, contents, buffers)))

    def _read(self, contents: Contents, buffers: frozenset[str]) -> list[str]:
        try:
            found = find_non_finite(contents, may_be_infinite=buffers, should_stop=self._stop.is_set)
        except (ValueError, OSError, OverflowError) as error:  # offsets in a checkpoint may be anything
            return [f"cannot be read: {error}"]
        if not found:
            return []
        some = ", ".join(f"{name} ({count:,} elements)" for name, count in list(found.items())[:_NUM_NAMED])
        return [f"{len(found):,} tensors hold values that are not finite, such as {some}"]

    def take_done(self, *, wait: bool) -> Iterator[tuple[Contents, list[str]]]:
        """Yields each checkpoint that was read, with its problems; one that changed or was removed is left out."""
        done = [job for job in self._jobs if wait or job[2].done()]
        self._jobs = [job for job in self._jobs if job not in done]
        for contents, fingerprint, future in done:
            problems = future.result()
            # Retention may have removed files under the reader: a problem in them says nothing about what was saved.
            if take_fingerprint(contents.path) == fingerprint:
                yield contents, problems

    def close(self) -> None:
        """Ends the thread after the block that it reads."""
        self._stop.set()  # before `shutdown`, which waits for the job that runs
        self._pool.shutdown(wait=True, cancel_futures=True)
