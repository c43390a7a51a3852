"""Which code a recipe may name: classes of the packages that every run uses, and what the user allows.

A recipe chooses classes by their import paths, and the import of a module runs it with the user's rights. Paths into
other packages are refused before anything is imported. The user allows them by `--allow-imports NAME[,NAME]` or by
the variable GENESIS_ALLOW_IMPORTS; a name allows all below it. A recipe cannot allow itself: neither is an option of
one. What the user writes on the command line is the user's own word, as the command itself is, and needs no more.

`genesis.cli.import_gate` asks here before jsonargparse imports anything. `find_imports` lists what a file names, so
that all of it is refused at once.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, Final

from genesis.base.errors import UserError

OPTION: Final = "--allow_imports"
VARIABLE: Final = "GENESIS_ALLOW_IMPORTS"
PACKAGES: Final = frozenset({"genesis", "genesis_callbacks", "lightning", "pytorch_lightning", "torch", "torchmetrics"})
"""The packages whose classes a recipe may name."""

_OWN_WORD: Final = re.compile(r"(?<![\w./-])[^\W\d]\w*(?:\.[^\W\d]\w*)+(?![\w./-])")
_THE_RECIPE: Final = "the recipe"
_REFUSAL: Final = re.compile(rf"{_THE_RECIPE} names code (?:(?!{_THE_RECIPE} ).)*?`{VARIABLE}=[^`]*`")
_MOST_LISTED: Final = 10


def read_allowed() -> frozenset[str]:
    """Returns the names that the environment allows.

    Raises:
        UserError: The variable has something else than names.
    """
    return _read_names(os.environ.get(VARIABLE, ""), VARIABLE)


def _read_names(text: str, where: str) -> frozenset[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise UserError(f"{where} is {text!r}: give names of packages or classes, such as my_package")
    return frozenset(names)


def split_allowed(words: Sequence[str]) -> tuple[list[str], frozenset[str]]:
    """Returns a command line without its `--allow_imports`, and what it allows.

    Args:
        words: The words, with underscores in the names of options. Those after a lone `--` stay.

    Raises:
        UserError: The option has no names.

    Example:
        >>> rest, names = split_allowed(["--allow_imports", "mine", "--trainer.callbacks", "ours.Watch"])
        >>> rest, sorted(names)
        (['--trainer.callbacks', 'ours.Watch'], ['mine', 'ours.Watch'])
    """
    kept: list[str] = []
    names: set[str] = set()
    end = words.index("--") if "--" in words else len(words)
    waiting = iter(words[:end])
    for word in waiting:
        option, equals, value = word.partition("=")
        if option != OPTION:
            kept.append(word)
            continue
        found = _read_names(value if equals else next(waiting, ""), OPTION)
        if not found:
            raise UserError(f"{OPTION} has no names: give packages or classes, such as {OPTION} my_package")
        names |= found
    kept += words[end:]
    for word in kept:
        option, equals, value = word.partition("=")
        given = value if equals and option.startswith("--") else word
        if not os.path.lexists(given):  # the name of a recipe or a directory is another's choice
            names.update(_OWN_WORD.findall(given))
    return kept, frozenset(names)


@contextlib.contextmanager
def allowing(names: Iterable[str]) -> Iterator[None]:
    """Allows names within the block, here and in the processes that it starts."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ",".join(sorted({*names, *read_allowed()}))
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def is_allowed(path: str) -> bool:
    """Returns whether the user allows an import path, or a name above it."""
    parts, allowed = path.split("."), read_allowed()
    return any(".".join(parts[:end]) in allowed for end in range(1, len(parts) + 1))


def allows_others() -> bool:
    """Returns whether the user allows code of other packages than those of every run."""
    return any(name.partition(".")[0] not in PACKAGES for name in read_allowed())


def import_allowed(path: str) -> None:
    """Imports the module of a class that a file names, if the user allows the class; otherwise does nothing.

    Raises:
        UserError: The module does not exist, or fails.
    """
    module = path.rpartition(".")[0]
    if module in sys.modules or not is_allowed(path):
        return
    try:
        import_module(module)
    except Exception as error:  # any code of the user's may fail
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} is allowed, but {module} cannot be imported: {reason}{find_remedy(error)}") from error


def find_class(path: str) -> Any:
    """Returns the class at an import path, whose module is imported if the user allows it; None if there is none."""
    import_allowed(path)
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def find_remedy(error: Exception) -> str:
    """Returns what helps against the error of an import: words for the end of a message, or none."""
    is_missing = isinstance(error, ModuleNotFoundError)
    return "; install it, or set PYTHONPATH to the directory that has it" if is_missing else ""


def list_others(paths: Iterable[str]) -> list[str]:
    """Returns the import paths that are neither of the packages of every run nor allowed, each once.

    Texts that Python could not import, such as those without a dot, are left out.
    """
    return [
        path
        for path in dict.fromkeys(paths)
        if "." in path
        and all(part.isidentifier() for part in path.split("."))
        and path.partition(".")[0] not in PACKAGES
        and not is_allowed(path)
    ]


def check_imports(paths: Iterable[str], where: str = _THE_RECIPE) -> None:
    """Refuses import paths that are neither of the packages of every run nor allowed.

    Args:
        paths: The import paths.
        where: The file that names them, if it is known.

    Raises:
        UserError: There are such paths; the message lists them, and what allows them.
    """
    others = list_others(paths)
    if others:
        raise UserError(f"{where} names {explain_others(others)}")


def explain_others(others: Sequence[str]) -> str:
    """Returns the words for import paths into other packages, with what allows them; of many, for the first ones."""
    shown = others[:_MOST_LISTED]
    more = f" and {len(others) - _MOST_LISTED} more" if len(others) > _MOST_LISTED else ""
    return _explain(f"code of other packages: {', '.join(shown)}{more}", [path.partition(".")[0] for path in shown])


def refuse(kind: str, path: str) -> UserError:
    """Returns the error about a single import path that a recipe names.

    Args:
        kind: What code it is.
        path: The path.
    """
    return UserError(f"{_THE_RECIPE} names {_explain(f'{kind}: {path}', [path])}")


def _explain(what: str, needed: Iterable[str]) -> str:
    names = ",".join(dict.fromkeys(needed))
    return (
        f"{what}; it would run with your rights: read it, then add `--allow-imports {names}` or set "
        f"`{VARIABLE}={names}`"
    )


def find_refusal(line: str) -> str | None:
    """Returns the message of `refuse` in a parser's line, which has it once for each type of an option; or None."""
    found = _REFUSAL.search(line)
    return None if found is None else found[0]
