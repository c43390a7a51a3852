"""Bounds of single operations of a chat template, which nothing interrupts once they run.

A width, a separator or a replacement can make a text of gigabytes of a few characters, nested lists have a text that
doubles with each level, and numbers grow without end. Each check runs before its operation.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import BuiltinMethodType
from typing import Any, Final

import jinja2

MAX_RESULT_CHARS: Final = 64_000_000
"""Characters that one operation may write."""
_MAX_NUMBER: Final = 100_000
"""The largest width, indentation or number of copies."""
_MAX_PARTS: Final = 1_000_000
"""Parts of nested lists and mappings, each counted as often as it is written."""
_MAX_BITS: Final = 4096
_LONG_NUMBER: Final = re.compile(r"\d{6,}")
_TAKE_ANY: Final = frozenset(
    [
        "length",
        "count",
        "first",
        "last",
        "default",
        "d",
        "list",
        "items",
        "reverse",
        "select",
        "reject",
        "selectattr",
        "rejectattr",
        "map",
        "attr",
        "int",
        "abs",
    ]
)
"""Filters that do not write their values."""
_COMPARE: Final = (
    *("==", "eq", "equalto", "!=", "ne", "in"),
    *(">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le"),
)


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template exceeds a limit."""


def check_nesting(value: Any) -> None:
    """Refuses lists and mappings whose text is too long, because they hold each other many times."""
    if not isinstance(value, list | tuple | dict):
        return
    waiting, num_parts, num_chars = [value], 0, 0
    while waiting:
        parts = waiting.pop()
        for part in [*parts, *parts.values()] if isinstance(parts, dict) else parts:
            num_parts += 1
            if isinstance(part, list | tuple | dict):
                waiting.append(part)
            elif isinstance(part, str):
                num_chars += len(part)
            if num_parts > _MAX_PARTS or num_chars > MAX_RESULT_CHARS:
                raise TemplateLimitError(f"it nests lists of more than {_MAX_PARTS:,} parts; simplify it")


def check_method(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Refuses a method of a text or number with an endless result; returns whether the function is such a method."""
    owner = getattr(function, "__self__", None)
    if not isinstance(function, BuiltinMethodType) or not isinstance(owner, str | bytes | int | float):
        return False
    _check_writing(function.__name__, owner, [*args, *kwargs.values()])
    return True


def bound_filter(name: str, function: Callable[..., Any], charge: Callable[[int], None]) -> Callable[..., Any]:
    """Returns a filter that checks what it would write before it runs, and counts what it wrote."""
    if name in _TAKE_ANY:
        return function
    # Some filters get the context or the environment before their value.
    num_before = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, *given = args[num_before:]
        for one in (value, *given, *kwargs.values()):
            check_nesting(one)
        if name == "format":
            check_format(str(value), [*given, *kwargs.values()])
        else:
            _check_writing(name, value, [*given, *kwargs.values()])
        result = function(*args, **kwargs)
        charge(len(result) if isinstance(result, str) else 0)
        return result

    return bounded


def bound_test(name: str, function: Any) -> Any:
    """Returns a test that compares no endlessly nested values."""
    if name not in _COMPARE:
        return function

    @wraps(function)
    def bounded(value: Any, *args: Any) -> Any:
        check_nesting(value)
        return function(value, *args)

    return bounded


def check_format(text: str, given: Sequence[Any]) -> None:
    """Refuses a format with a very large width, which may be among its arguments."""
    has_width = _LONG_NUMBER.search(text) is not None or (
        ("*" in text or "{" in text) and any(_is_large(value) for value in given)
    )
    if has_width:
        raise TemplateLimitError(f"it formats with a width above {_MAX_NUMBER:,}; write a smaller one")
    for value in given:
        check_nesting(value)


def check_product(left: Any, right: Any) -> None:
    """Refuses a product of numbers without a bound."""
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
        raise TemplateLimitError(f"it computes a number of more than {_MAX_BITS:,} bits; write the number")


def check_power(left: Any, right: Any) -> None:
    """Refuses a power that is not one of small numbers."""
    is_number = isinstance(left, int | float) and isinstance(right, int | float)
    if not is_number or (isinstance(left, int) and left.bit_length() * max(1, abs(right)) > _MAX_BITS):
        raise TemplateLimitError("it computes a power with a large exponent; write the number")


def _check_writing(name: str, value: Any, given: Sequence[Any]) -> None:
    """Refuses a filter or method whose arguments make its result much longer than its value."""
    if any(_is_large(one) for one in given):
        raise TemplateLimitError(f"it calls {name} with a number above {_MAX_NUMBER:,}; write a smaller one")
    texts = [one for one in given if isinstance(one, str)]
    number = max((one for one in given if isinstance(one, int)), default=0)
    text = value if isinstance(value, str) else ""
    num_chars = 0
    if name == "replace" and len(texts) > 1:
        num_chars = text.count(texts[0]) * len(texts[1])
    elif name == "join":  # the filter has its separator among the arguments, the method its texts
        separator = text if isinstance(value, str) and not texts else "".join(texts)
        num_chars = len(separator) * max([_count(value), *map(_count, given)])
    elif name in ("indent", "expandtabs", "tojson"):
        num_chars = number * (text.count("\n") + text.count("\t") + 1)
    if num_chars > MAX_RESULT_CHARS:
        raise TemplateLimitError(f"its {name} writes more than {MAX_RESULT_CHARS:,} characters; shorten it")


def _count(value: Any) -> int:
    """Returns the number of parts of a list; that of the longest range for what is not counted before it is used."""
    if isinstance(value, str | int | float | None):
        return 0
    return len(value) if hasattr(value, "__len__") else _MAX_NUMBER


def _is_large(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > _MAX_NUMBER
