"""Counts log lines that repeat, so that nobody can fill the log."""

import logging
import time
from typing import Final

_REPEAT_SECONDS: Final = 60.0
_MAX_DIFFERENT: Final = 8
_COMPARED_CHARS: Final = 500


class RepeatFilter(logging.Filter):
    """Lets the first of equal log lines pass, and counts those of the next minute; the next line has their number.

    Lines are equal if they have the same text and exception. Of one statement and one kind of exception, eight
    different lines pass in a minute, because clients can cause lines that all differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int, object], tuple[float, set[str], int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a record is logged."""
        kind, error, _ = record.exc_info or (None, None, None)
        key = (record.pathname, record.lineno, kind)
        text = f"{record.getMessage()} {error}"[:_COMPARED_CHARS]
        since_seconds, texts, num_left_out = self._seen.get(key, (-_REPEAT_SECONDS, set(), 0))
        now = time.monotonic()
        if now - since_seconds < _REPEAT_SECONDS:
            if text not in texts and len(texts) < _MAX_DIFFERENT:
                texts.add(text)
                return True
            self._seen[key] = since_seconds, texts, num_left_out + 1
            return False
        self._seen[key] = now, {text}, 0
        if num_left_out:
            record.msg, record.args = f"{record.getMessage()} ({num_left_out:,} more since the last such line)", ()
        return True
