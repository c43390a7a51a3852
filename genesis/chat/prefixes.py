"""Measures all beginnings of a conversation at once, for templates that write one message after the other.

The labels of a turn need the text of the conversation up to this turn, with and without the prompt for the assistant.
To render each beginning by itself takes a time that grows with the square of the number of turns. Here the whole
conversation is rendered once, by a template that is changed in two ways:

- The messages are a sequence that notes how far the template has looked into it. While it has seen only the first k
  messages, and neither their number nor their end, it has written what it writes for these k messages alone.
- The part of the template behind its last loop, the *tail*, is written before each message, too. So the end of the
  text of the first k messages is known.

What a template does otherwise is not known here, and is rendered for each turn.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from jinja2 import nodes

_NAMES: Final = ("genesis_prefixes_enter", "genesis_prefixes_seen", "genesis_prefixes_tail", "genesis_prefixes_end")
_SEEN, _OPEN, _CLOSE, _END = "\ue010", "\ue011", "\ue012", "\ue013"
_PARTS: Final = re.compile(f"{_SEEN}([^{_END}]*){_END}|{_OPEN}([^{_CLOSE}]*){_CLOSE}([^{_END}]*){_END}")
_MARKS: Final = re.compile(f"[{_SEEN}-{_END}]")
_SAFE: Final = (
    *(nodes.Output, nodes.TemplateData, nodes.If, nodes.Name, nodes.Const, nodes.Compare, nodes.Operand, nodes.And),
    *(nodes.Or, nodes.Not, nodes.Test, nodes.Filter, nodes.Getattr, nodes.Getitem, nodes.CondExpr, nodes.Concat),
)
"""What a tail may consist of: nothing that changes a value which the loop sees."""


class WatchedMessages(Sequence[Any]):
    """Messages that note how far a template has looked.

    It has no other operation of a list, such as `+`: a template that needs one fails, and is rendered for each turn.
    """

    def __init__(self, items: Sequence[Any], seen: "Seen", start: int = 0) -> None:
        self._items, self._seen, self.start = items, seen, start

    def _refuse(self, *_: object) -> Any:
        raise TypeError("the messages have no such operation here")

    __eq__ = __hash__ = __str__ = __repr__ = __format__ = __add__ = _refuse

    def __len__(self) -> int:
        self._seen.look(math.inf)
        return len(self._items)

    def __bool__(self) -> bool:
        self._seen.look(self.start + 1)
        return bool(self._items)

    def __iter__(self) -> Iterator[Any]:
        for index, item in enumerate(self._items):
            self._seen.look(self.start + index + 1)
            yield item
        self._seen.look(math.inf)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and (index.stop, index.step) == (None, None) and (index.start or 0) >= 0:
            start = index.start or 0
            return WatchedMessages(self._items[start:], self._seen, self.start + start)
        self._seen.look(self.start + index + 1 if isinstance(index, int) and index >= 0 else math.inf)
        return self._items[index]


class Seen:
    """How many of the first messages a template has seen, and the functions that the changed template calls."""

    def __init__(self) -> None:
        self._num = self._num_before_tail = 0.0
        self.start: int | None = None

    def look(self, num: float) -> None:
        """Notes that the template knows something of so many messages."""
        self._num = max(self._num, num)

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Returns the functions by their names in the template."""
        return dict(zip(_NAMES, (self._enter, self._write, self._open, self._close), strict=True))

    def _enter(self, messages: Any) -> Any:
        self.start = messages.start if isinstance(messages, WatchedMessages) else None
        return messages

    def _write(self) -> str:
        return f"{_SEEN}{self._num}{_END}"

    def _open(self) -> str:
        self._num_before_tail, self._num = self._num, 0.0
        return _OPEN

    def _close(self) -> str:
        num, self._num = self._num, self._num_before_tail
        return f"{_CLOSE}{num}{_END}"


def change_template(parse: Callable[[], nodes.Template]) -> nodes.Template | None:
    """Returns a parsed template that marks its parts, for `read_beginnings`; None if it may not write in order."""
    changed = parse()
    place = max((place for place, node in enumerate(changed.body) if isinstance(node, nodes.For)), default=None)
    if place is None:
        return None
    loop, tail = changed.body[place], changed.body[place + 1 :]
    assert isinstance(loop, nodes.For)
    if loop.else_ or loop.recursive or loop.test is not None or not isinstance(loop.target, nodes.Name):
        return None
    parts = [part for node in tail for part in (node, *node.find_all(nodes.Node))]
    names = {part.name for part in parts if isinstance(part, nodes.Name)}
    if not all(isinstance(part, _SAFE) for part in parts) or names & {loop.target.name, "loop", *_NAMES}:
        return None
    enter, seen, opening, closing = _NAMES
    iterated = loop.iter
    assert isinstance(iterated, nodes.Expr)
    loop.iter = _call(enter, [iterated])
    loop.body = [_write(opening), nodes.Scope(parse().body[place + 1 :]), _write(closing), *loop.body, _write(seen)]
    changed.body.insert(place, _write(seen))
    changed.set_lineno(1)  # of what was inserted
    return changed


def read_beginnings(marked: str, seen: Seen, text: str) -> dict[int, int]:
    """Returns the lengths of the texts of the first messages, by the number of messages.

    Only those are returned that are certain, and that begin the text of all messages.

    Args:
        marked: What a changed template has written.
        seen: What the template has seen.
        text: What the template itself writes for all messages.
    """
    if seen.start is None or _MARKS.search(text):
        return {}
    found: list[tuple[int, int, str]] = []
    parts: list[str] = []
    length, last = 0, 0
    number, num_seen = seen.start, math.inf
    for match in _PARTS.finditer(marked):
        parts.append(marked[last : match.start()])
        length, last = length + len(parts[-1]), match.end()
        if match[1] is not None:
            num_seen = float(match[1])
            continue
        if max(num_seen, float(match[3])) <= number:
            found.append((number, length, match[2]))
        number, num_seen = number + 1, math.inf  # until the end of the loop's body, which `continue` leaves out
    parts.append(marked[last:])
    joined = "".join(parts)
    pairs = enumerate(zip(joined, text, strict=False))
    num_equal = len(text) if joined.startswith(text) else next((at for at, (one, other) in pairs if one != other), 0)
    return {
        number: start + len(tail)
        for number, start, tail in found
        if start <= num_equal and text.startswith(tail, start)
    }


def _call(function: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.Name(function, "load"), arguments, [], None, None)


def _write(function: str) -> nodes.Output:
    return nodes.Output([_call(function, [])])
