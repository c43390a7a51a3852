"""Refuses a wrong value of an option of `genesis fit` and `genesis validate` before the slow import of Lightning.

The record of options (`genesis.cli.option_names`) has the types of those that take numbers, words of a list, true or
false, or null. Only values that are certainly wrong are refused; the real parser judges all others, with the same
messages.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from genesis.base.errors import UserError
from genesis.cli.type_errors import explain_value
from genesis.data.manifest import MANIFEST_NAME, NotPreparedError

CORPUS: Final = "data.corpus"
RESTORE: Final = "ckpt_path"
_LITERAL: Final = "typing.Literal["
_WORD: Final = re.compile(r"'([^']*)'|([^,\s]+)")


def _is_number(text: str) -> bool:
    try:
        float(text.removeprefix("+").removeprefix("-").removeprefix(".") if "inf" in text or "nan" in text else text)
    except ValueError:
        return re.fullmatch(r"[+-]?0[xob][0-9a-f_]+", text) is not None
    return True


_FITS: Final[dict[str, Callable[[str], bool]]] = {
    "<class 'int'>": _is_number,  # the parser also takes some numbers with a point or an exponent
    "<class 'float'>": _is_number,
    "<class 'bool'>": lambda text: text in ("true", "false", "yes", "no", "on", "off", "y", "n", "1", "0"),
    "NoneType": lambda text: text in ("null", "none", "~", ""),
}


def is_known_type(kind: str) -> bool:
    """Returns whether this module can judge values of a type, as Python writes it."""
    return kind in _FITS or kind.startswith(_LITERAL)


def check_value(where: str, name: str, text: str, types: Sequence[str]) -> None:
    """Refuses a value that none of an option's types can have.

    Args:
        where: The beginning of the message: the file, if the value is in one.
        name: The option.
        text: The value as it is written.
        types: The option's types, as Python writes them.

    Raises:
        UserError: The value is certainly wrong.
    """
    if not any(_fits(text, kind) for kind in types):
        raise UserError(f"{where}{explain_value(name, text, types)}")


def _fits(text: str, kind: str) -> bool:
    if kind.startswith(_LITERAL):
        words = [quoted or bare for quoted, bare in _WORD.findall(kind.removeprefix(_LITERAL).removesuffix("]"))]
        return text in words
    return _FITS[kind](text.strip().lower())


def check_corpus(given: str | None, *, is_restored: bool) -> None:
    """Refuses a corpus that does not exist.

    Args:
        given: The value of `data.corpus`, if it is known.
        is_restored: Whether the run continues from a checkpoint, whose run knows where its corpus lies.

    Raises:
        NotPreparedError: There is no corpus.
    """
    if given is None or not given.strip() or is_restored:
        return
    corpus = Path(given)
    if not (corpus / MANIFEST_NAME).exists():
        raise NotPreparedError(corpus)
