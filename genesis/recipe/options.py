"""The options of `genesis fit` and `genesis validate`: their names, types and defaults, without Lightning or torch.

Options and defaults are declared once, by the signatures and dataclasses of the classes that take them. `options.json`
beside this file has what the real parser finds there: `make golden` writes the record, and a test compares it. An
option that is newer than the record is found in our sources, and is left to the real parser.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

RECORD: Final = Path(__file__).with_name("options.json")
CLASS_PATH: Final = "class_path"
INIT_ARGS: Final = "init_args"
CLASS_KEYS: Final = frozenset({CLASS_PATH, INIT_ARGS, "dict_kwargs"})

_FEW_NAMES: Final = 20


class Option(NamedTuple):
    """An option.

    Args:
        types: The types of its values, as Python writes them.
        has_default: Whether it may be left out.
        default: What it then is.
        base: The class of its value, or of the entries of a list: a section of options, or the base of the classes
            that a recipe chooses from. None for plain values, and for classes that are not ours.
    """

    types: tuple[str, ...]
    has_default: bool = False
    default: Any = None
    base: str | None = None

    @property
    def is_list(self) -> bool:
        """Whether the value is a list."""
        return any(kind.startswith(("list[", "tuple[")) for kind in self.types)


@dataclass(frozen=True, eq=False)
class Options:
    """The options of one command.

    Args:
        options: Each option that takes a value, by its dotted name: `data.seq_len`.
        groups: Dotted names that only contain options: `data`. All keys below them are listed.
        bases: The classes that a recipe may choose for each base.
        classes: The options of each class, and of each section that a recipe may leave out, by its import path.
    """

    options: Mapping[str, Option]
    groups: frozenset[str]
    bases: Mapping[str, Sequence[str]]
    classes: Mapping[str, Mapping[str, Option]]

    @classmethod
    @cache
    def read(cls, command: str = "fit") -> "Options":
        """Returns the options of a command."""
        record = _read_record()
        names = {name: given for name, given in record["options"].items() if command in given.get("only", command)}
        options = _read_options(names)
        return cls(
            options,
            frozenset(record["groups"]),
            record["bases"],
            {path: _read_options(given) for path, given in record["classes"].items()},
        )

    @cached_property
    def names(self) -> frozenset[str]:
        """The dotted names of all options, with those of sections that a recipe may leave out."""
        return frozenset(name for name, _ in self._walk())

    @cached_property
    def sections(self) -> frozenset[str]:
        """The dotted names below which only options lie: the groups, and sections that a recipe may leave out."""
        return self.groups | {name for name, option in self._walk() if self.is_section(option)}

    def _walk(self) -> Iterator[tuple[str, Option]]:
        for name, option in self.options.items():
            yield name, option
            if self.is_section(option):
                yield from ((f"{name}.{key}", below) for key, below in self.classes[str(option.base)].items())

    def find(self, name: str) -> Option | None:
        """Returns an option by its dotted name; None for a group, and for a name below a chosen class."""
        group, _, last = name.rpartition(".")
        above = self.options.get(group)
        if name in self.options or above is None or not self.is_section(above):
            return self.options.get(name)
        return self.classes[str(above.base)].get(last)

    def is_section(self, option: Option) -> bool:
        """Returns whether an option's value is a section of options, which may be null."""
        return option.base in self.classes and not option.is_list

    def find_class(self, path: str, base: str) -> str:
        """Returns the path under which a class is listed, if it is one of those for `base`; `path` otherwise."""
        named = [each for each in self.bases.get(base, ()) if each.rpartition(".")[2] == path.rpartition(".")[2]]
        return named[0] if named and ("." not in path or path.startswith("genesis.")) else path

    def is_unknown(self, name: str) -> bool:
        """Returns whether `name` is certainly neither an option nor a key below one."""
        parts = name.split(".")
        if name in self.names | self.groups or CLASS_KEYS.intersection(parts):
            return False
        if not all(parts) or any(part.startswith("__") for part in parts):
            return False
        above = {".".join(parts[:end]) for end in range(1, len(parts))}
        return not above & (self.names - self.sections)

    def is_abbreviated(self, name: str) -> bool:
        """Returns whether an option begins with `name`, which argparse would then accept as its abbreviation."""
        return any(option.startswith(name) for option in self.names | self.groups)

    def expand(self, name: str) -> str:
        """Returns the option of which `name` is the only abbreviation; `name` otherwise."""
        found = [option for option in self.names if option.startswith(name)]
        return found[0] if len(found) == 1 and self.is_unknown(name) else name

    def hint(self, name: str) -> str:
        """Returns the end of the message that refuses `name`: the nearest option."""
        group, _, last = name.rpartition(".")
        siblings = {option.rpartition(".")[2]: option for option in self.names if option.rpartition(".")[0] == group}
        namesakes = [option for option in sorted(self.names) if option.rpartition(".")[2] == last]
        near = [siblings[sibling] for sibling in difflib.get_close_matches(last, sorted(siblings), n=1)] or namesakes
        if not near and group not in self.sections:
            near = difflib.get_close_matches(name, sorted(self.names), n=1)
        return f"; did you mean {near[0]!r}?" if near else list_few(siblings)


def hint_key(wanted: str, known: Sequence[str]) -> str:
    """Returns the key nearest to `wanted`; without a near one, the options of a class if there are only a few."""
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else list_few(known)


def list_few(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Returns the end of a message that lists options, if there are only a few."""
    return f"; the options are {', '.join(sorted(names))}" if 0 < len(names) <= _FEW_NAMES else ""


def is_current() -> bool:
    """Returns whether the record was made with the version of Lightning that is installed."""
    return bool(_read_record()["lightning"] == version("lightning"))


def is_declared(name: str, path: str = "") -> bool:
    """Returns whether our sources declare a parameter or a field of this name, which may be newer than the record.

    Args:
        name: The option.
        path: The class that has to declare it; empty for any.
    """
    key, owner = name.rpartition(".")[2], re.escape(path.rpartition(".")[2])
    within = rf"^class {owner}\b(?:(?!^class ).)*" if path else ""
    return _is_in_sources(key, rf"{within}\b{re.escape(key)} *: *\S")


def has_class(name: str) -> bool:
    """Returns whether our sources have a class, or a function in its place, of this name."""
    return _is_in_sources(name, rf"^(?:class|def) {re.escape(name)}\b")


def _is_in_sources(word: str, pattern: str) -> bool:
    """Returns whether one of our files matches a pattern, which begins or ends at a word that the file has to have."""
    found = re.compile(pattern, re.MULTILINE | re.DOTALL)
    texts = (
        file.read_text(encoding="utf-8")
        for package in ("genesis", "genesis_callbacks")
        for folder in _folders(package)
        for file in folder.rglob("*.py")
    )
    return any(word in text and found.search(text) for text in texts)


@cache
def _read_record() -> Any:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def _folders(package: str) -> Iterator[Path]:
    spec = find_spec(package)
    yield from map(Path, (spec and spec.submodule_search_locations) or ())


def _read_options(record: Mapping[str, Any]) -> dict[str, Option]:
    return {
        name: Option(tuple(given["types"].split(" | ")), "default" in given, given.get("default"), given.get("base"))
        for name, given in record.items()
    }
