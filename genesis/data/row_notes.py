"""What is lost of a source's rows on their way into a corpus: skipped rows, by reason, and keys without effect."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from genesis.base.errors import UserError, numbered, printable

MAX_REFUSED: Final = 10
"""Rows that an error names, at most."""
_MAX_PLACES: Final = 3
"""Rows that are named for each reason of skipped ones; finding the line of one takes a pass over its file."""
_MAX_REASONS: Final = 10
_VARYING: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"[^\"]*\"|\d+")
"""The parts of a reason that differ between rows with the same fault: values and numbers."""


class SkippedRows(NamedTuple):
    """Rows that were skipped for one reason, in the words of the first; `places` has the first rows' places."""

    reason: str
    num_rows: int
    places: tuple[str, ...]


class RefusedRow(NamedTuple):
    """A row that stops a command; `may_skip` is whether an option skips rows like it."""

    place: str
    reason: str
    may_skip: bool


class BadRowsError(UserError):
    """Rows stop a command; each reason has a line of its own."""

    is_one_line = False


@dataclass(frozen=True)
class RowNotes:
    """Notes of some rows; those of parts of a source are added, in the order of the parts.

    Args:
        skipped: Bad rows, by reason.
        unused_fields: How many records had a field that is not read, by its name.
        unused_keys: How many messages had a key that the template does not use, by its name.
        num_blank: How many documents were dropped because they are empty or only white space.
    """

    skipped: tuple[SkippedRows, ...] = ()
    unused_fields: Mapping[str, int] = field(default_factory=dict)
    unused_keys: Mapping[str, int] = field(default_factory=dict)
    num_blank: int = 0

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """Returns the notes whose fields were written as JSON."""
        skipped = tuple(SkippedRows(reason, count, tuple(places)) for reason, count, places in raw.get("skipped", ()))
        return cls(skipped, raw.get("unused_fields", {}), raw.get("unused_keys", {}), raw.get("num_blank", 0))

    def __add__(self, other: "RowNotes") -> "RowNotes":
        reasons = {_key(rows.reason): rows for rows in self.skipped}
        for rows in other.skipped:
            before = reasons.get(_key(rows.reason), SkippedRows(rows.reason, 0, ()))
            places = (*before.places, *rows.places)[:_MAX_PLACES]
            reasons[_key(rows.reason)] = SkippedRows(before.reason, before.num_rows + rows.num_rows, places)
        return RowNotes(
            tuple(reasons.values()),
            dict(Counter(self.unused_fields) + Counter(other.unused_fields)),
            dict(Counter(self.unused_keys) + Counter(other.unused_keys)),
            self.num_blank + other.num_blank,
        )

    def describe(self, source: str) -> list[str]:
        """Returns the lines to print about a source; an empty list if nothing was lost."""
        by_count = sorted(self.skipped, key=lambda rows: -rows.num_rows)
        lines = [f"source {source}: skipped {_describe_skipped(rows)}" for rows in by_count[:_MAX_REASONS]]
        if by_count[_MAX_REASONS:]:
            rest = sum(rows.num_rows for rows in by_count[_MAX_REASONS:])
            lines.append(
                f"source {source}: skipped {rest:,} for {numbered(len(by_count) - _MAX_REASONS, 'other reasons')}"
            )
        if self.num_blank:
            lines.append(f"source {source}: {describe_blank(self.num_blank)}")
        parts = [
            f"{what} {', '.join(f'{name} ({count:,})' for name, count in sorted(counts.items()))}"
            for what, counts in (("fields of records", self.unused_fields), ("keys of messages", self.unused_keys))
            if counts
        ]
        if parts:
            lines.append(f"source {source}: left out, because nothing uses them: {'; '.join(parts)}")
        return lines


class SkippedCounter:
    """Collects bad rows that are skipped."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, int, list[str]]] = {}

    def add(self, reason: str, place: Callable[[], str]) -> None:
        """Counts a row; its place is looked up if it is among the first of its reason."""
        first, count, places = self._found.get(_key(reason), (reason, 0, []))
        if len(places) < _MAX_PLACES and len(self._found) <= _MAX_REASONS:
            places = [*places, place()]
        self._found[_key(reason)] = first, count + 1, places

    @property
    def rows(self) -> tuple[SkippedRows, ...]:
        """Returns the rows by reason."""
        return tuple(SkippedRows(reason, count, tuple(places)) for reason, count, places in self._found.values())


def explain_refused(source: str, rows: Sequence[RefusedRow], remedy: str) -> str:
    """Returns the message about rows that stop a command: one line, or a line for each reason below a first one.

    Args:
        source: The source's name.
        rows: The rows; those beyond MAX_REFUSED are not listed.
        remedy: The option that skips such rows.
    """
    hint = f" or {remedy}" if any(row.may_skip for row in rows) else ""
    shown = rows[:MAX_REFUSED]
    alike: dict[str, list[RefusedRow]] = {}
    for row in shown:
        alike.setdefault(_key(row.reason), []).append(row)
    lines = [printable(_describe_rows(same[0].reason, [row.place for row in same])) for same in alike.values()]
    if len(lines) == 1:
        return f"{lines[0]};{hint}" if hint else lines[0]
    count = ("at least " if len(rows) >= MAX_REFUSED else "") + numbered(len(shown), "bad rows")
    return "\n  ".join([f"source {source} has {count}; correct them{hint and ','}{hint}:", *lines])


def strip_place(message: str, place: str) -> str:
    """Returns a message about a row without the row's place; one that names a place within the row stays whole."""
    rest = message.removeprefix(place)
    return rest.removeprefix(":").strip() if rest.startswith((": ", " ")) else message


def count_all(names: Iterable[Iterable[str]]) -> dict[str, int]:
    """Returns how often each name occurs."""
    return dict(Counter(name for some in names for name in some))


def describe_blank(num_blank: int) -> str:
    """Returns a phrase about documents without a text."""
    return f"dropped {numbered(num_blank, 'documents')} without a text, or with white space alone"


def _describe_skipped(rows: SkippedRows) -> str:
    places = [*rows.places, *(["..."] if rows.num_rows > len(rows.places) else [])]
    return f"{rows.num_rows:,}: {_describe_rows(rows.reason, places)}"


def _describe_rows(reason: str, places: Sequence[str]) -> str:
    """Returns the reason at the first place, and the other places."""
    first, *others = dict.fromkeys(places)  # several objects of an array may be in one line
    file = first.rpartition(", ")[0]
    more = f" (also {', '.join(place.removeprefix(f'{file}, ') for place in others)})" if others else ""
    return f"{_sentence(first, reason)}{more}"


def _sentence(place: str, reason: str) -> str:
    """Returns a place and a reason as a sentence: a reason that goes on after the place begins with its verb."""
    if reason.startswith(place.rpartition(", ")[0] or place):
        return reason  # with a place of its own
    return f"{place} {reason}" if reason.startswith(("is ", "has ")) else f"{place}: {reason}"


def _key(reason: str) -> str:
    return _VARYING.sub("...", reason)
