"""A recipe with every option in its place: files, options of the command line and defaults, without Lightning or torch.

All commands that read a recipe read it here; `genesis fit` and `genesis validate` also build from it, and therefore use
the real parser. `tests/recipe/test_resolved.py` compares both on every recipe of Genesis.
"""

import copy
import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from genesis.base.errors import UserError
from genesis.recipe.deprecated import (
    check_beside_muon,
    describe_deprecated,
    rename_in_arguments,
    rename_options,
    spread_keys,
)
from genesis.recipe.imports import allows_others
from genesis.recipe.options import CLASS_KEYS, CLASS_PATH, INIT_ARGS, Option, Options, has_class, hint_key, is_declared
from genesis.recipe.run_length import OPTIONS, find_replaced, replace_in_files, shorten
from genesis.recipe.values import explain_text, explain_value, fits, write_plain
from genesis.recipe.yaml import load_yaml
from genesis_callbacks.base.untrusted import read_text

_ALGORITHM: Final = "genesis.optim.Algorithm"
_TEXT: Final = "<class 'str'>"
_TEXTS: Final = frozenset({_TEXT, "<class 'pathlib.Path'>", "NoneType"})
_DECODER: Final = "model.decoder"
_CLASS_LISTS: Final = ("trainer.callbacks", "trainer.logger")

Override = tuple[str, str]
"""An option of the command line, and its value as text."""


@dataclass(frozen=True)
class Choice:
    """A class that a recipe chooses, and its options.

    Args:
        name: The option of the recipe.
        path: The class's import path; a name where the option also takes names.
        options: Its options, with the defaults of a class of ours.
    """

    name: str
    path: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe of `genesis fit` in which each option has a value.

    Args:
        content: All options by section; an option that is required and missing is left out.
        where: The files, for messages.
        given: The options that files and command line give, without defaults.
        notes: Lines about options of files that later files replace.
        optimizers: Each file, with the options of its optimizer as they are written.
    """

    content: Mapping[str, Any]
    where: str
    given: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    optimizers: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    @classmethod
    def read(cls, steps: Sequence[Path | Override], *, later: Sequence[Override] = ()) -> "ResolvedRecipe":
        """Returns the recipe of files and options of the command line, of which later ones replace earlier ones.

        Each file is read once: it may be a pipe. A decoder that is a path is read relative to the file that names it.
        An option for the length of the run, or for its rate, replaces other forms of the same.

        Args:
            steps: Files, and options such as `("data.seq_len", "512")`, in their order; see `list_steps`.
            later: Options that the caller applies later, by `override`; they are only checked beside the files.

        Raises:
            UserError: A file cannot be read, is no mapping, or has an option that is gone.
        """
        files = {step: _read_file(step) for step in steps if isinstance(step, Path)}
        overrides = [step for step in steps if not isinstance(step, Path)]
        for name in dict.fromkeys(old for file in files.values() for old in file.old):
            warnings.warn(describe_deprecated(name), FutureWarning, stacklevel=2)
        optimizers = tuple((str(path), file.optimizer) for path, file in files.items())
        check_beside_muon(optimizers, [*overrides, *later])
        replaced, notes = replace_in_files((str(path), _list_texts(file.content)) for path, file in files.items())
        given: dict[str, Any] = {}
        for step in steps:
            if isinstance(step, Path):
                for key, value in files[step].content.items():
                    _put(given, [key], value, Options.read().options)
            else:
                _assign(given, _rename([step]))
        words = _rename(overrides)
        _assign(given, complete_arguments(words, replaced)[len(words) :])
        where = ", ".join(map(str, files)) or "the command line"
        return cls(_fill(given), where, given, tuple(notes), optimizers)

    @classmethod
    def complete(cls, content: Mapping[str, Any], where: str) -> "ResolvedRecipe":
        """Returns the recipe of a run or of a checkpoint, with the defaults of options that are newer.

        Args:
            content: Its options, as `config.yaml` or a manifest has them.
            where: The file, for messages.
        """
        given: dict[str, Any] = {}
        for key, value in rename_options(content, is_strict=False)[0].items():
            _put(given, [key], value, Options.read().options)
        return cls(_fill(given), where, given)

    def override(self, overrides: Sequence[Override]) -> "ResolvedRecipe":
        """Returns the recipe with other values of some options; an option of a class may leave out `init_args`.

        An option for the length of the run, or for its rate, replaces other forms of the same.

        Raises:
            UserError: A value is not YAML, names a file that cannot be read, or an option is gone.
        """
        given = copy.deepcopy(dict(self.given))
        _assign(given, complete_arguments(_rename(overrides)))
        return replace(self, given=given, content=_fill(given))

    def complete_by(self, found: Mapping[str, Any]) -> "ResolvedRecipe":
        """Returns the recipe with values of some options, by dotted names, that follow from others."""
        content = copy.deepcopy(dict(self.content))
        for name, value in found.items():
            *groups, last = name.split(".")
            target = content
            for group in groups:
                if target.get(group) is None:
                    target[group] = {}
                target = target[group]
            target[last] = value
        return replace(self, content=content)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of an option by its dotted name; `default` if it is null, or missing without a default."""
        value: Any = self.content
        for key in name.split("."):
            if not isinstance(value, Mapping):
                return default
            value = value.get(key)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Returns a whole number of at least `least`; raises UserError for another value."""
        value = self.get(name, default)
        if type(value) is not int or value < least:
            raise UserError(f"{self.where}: {name} is {value!r}: it must be a whole number of at least {least}")
        return value

    def optional_count(self, name: str) -> int | None:
        """Returns a whole number above 0; None if it is missing or -1, which means no limit."""
        value = self.get(name)
        return None if value is None or value == -1 else self.count(name)

    def find_choice(self, name: str) -> Choice | None:
        """Returns the class that an option chooses; None if it is null.

        Raises:
            UserError: The value is neither a class nor its name.
        """
        value = self.get(name)
        if value is None:
            return None
        path = value.get(CLASS_PATH) if isinstance(value, Mapping) else value
        options = value.get(INIT_ARGS) if isinstance(value, Mapping) else None
        if not isinstance(path, str) or not isinstance(options or {}, Mapping):
            raise UserError(f"{self.where}: {name} is {value!r}: it must be a mapping of class_path, init_args")
        return Choice(name, path, options or {})

    def count_devices(self) -> int | None:
        """Returns the number of devices of each node; None for all that a machine has.

        Raises:
            UserError: `trainer.devices` is no number, list or word that Lightning knows.
        """
        given = self.get("trainer.devices")
        words = list(map(str, given)) if isinstance(given, list) else [one.strip() for one in str(given).split(",")]
        named = [word for word in words if word]
        if named in (["auto"], ["-1"], ["None"]):
            return None
        is_list = isinstance(given, list) or len(words) > 1  # of indices
        number = 0 if not all(map(str.isdecimal, named)) else len(named) if is_list else int("".join(named) or 0)
        if number < 1:
            raise UserError(f"trainer.devices is {given!r}: give a number of at least 1, auto, or indices such as 0,1")
        return number

    def check_run(self, *, is_fit: bool) -> None:
        """Refuses options with which a run would fail late, train wrongly, or have no end.

        Raises:
            UserError: The length is 0 or, for a fit, missing; the limit of the gradient's norm is no limit; or the
                interval of the log is negative.
        """
        for name in ("trainer.max_steps", "trainer.max_epochs"):
            if self.get(name) == 0:
                raise UserError(f"{name} is 0, a run that trains nothing: give at least 1, or -1 for no limit")
        limit, every = self.get("trainer.gradient_clip_val"), self.get("trainer.log_every_n_steps")
        # The real parser refuses values of other types.
        if isinstance(limit, int | float) and not limit >= 0:  # nan is not
            raise UserError(f"trainer.gradient_clip_val is {limit:g}: give a norm above 0, or 0 to clip nothing")
        if isinstance(every, int) and every < 0:
            raise UserError(f"trainer.log_every_n_steps is {every}: give a number of steps, or 0 to log nothing")
        of_data = ("data.num_epochs", "data.num_tokens", "data.max_epochs")
        of_schedule = ("schedule.total_updates", "schedule.total_tokens")
        has_end = (
            any(self.get(name) not in (None, -1) for name in ("trainer.max_steps", "trainer.max_epochs"))
            or any(self.get(name) is not None for name in ("trainer.max_time", *of_data))
            or any(self.get(name) for name in ("trainer.fast_dev_run", *of_schedule))
            or self.get("schedule.shape") in ("constant", "own")
        )
        if is_fit and not has_end:
            raise UserError(
                "no option sets the length of the run: give data.num_epochs, data.num_tokens or trainer.max_steps, "
                "such as --data.num_epochs 3"
            )

    def check_classes(self) -> None:
        """Refuses options that the classes of Genesis do not have, and values that are certainly wrong.

        Raises:
            UserError: There is one.
        """
        for name, option in Options.read().options.items():
            if option.base is not None:
                _check(name, option, self.get(name))


def list_steps(arguments: Sequence[str]) -> list[Path | Override]:
    """Returns the files that the words of `genesis fit` name by `--config`, and the options with values among them."""
    steps: list[Path | Override] = []
    words = list(arguments)[: arguments.index("--") if "--" in arguments else None]
    for word, following in itertools.zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if not equals:
            value = following
        if value is None or not name.startswith("-") or (not equals and value.startswith("--")):
            continue
        if name in ("-c", "--config"):
            steps.append(Path(value))
        elif name.startswith("--") and name != "--print_config":
            steps.append((name.removeprefix("--"), value))
    return steps


def list_overrides(arguments: Sequence[str]) -> dict[str, str]:
    """Returns the options with values among the words of `genesis fit`, by their names without `init_args`.

    Example:
        >>> list_overrides(["--data.num_epochs=2", "--config", "recipe.yaml"])
        {'data.num_epochs': '2'}
    """
    return {shorten(step[0]): step[1] for step in list_steps(arguments) if not isinstance(step, Path)}


def complete_arguments(arguments: Sequence[str], in_files: Mapping[str, str] | None = None) -> list[str]:
    """Returns the words of a command line, and behind them the options that it replaces in recipes.

    Args:
        arguments: The words.
        in_files: Options that later files replace in earlier ones, each with the value that means none.

    Example:
        >>> complete_arguments(["--schedule.decay_share=0.3"])[1:]
        ['--schedule.decay_updates=null', '--schedule.decay_tokens=null']
        >>> complete_arguments(["--schedule={decay_share: 0.3}"])[1:]
        ['--schedule.decay_updates=null', '--schedule.decay_tokens=null']
    """
    given: dict[str, str] = {}
    for name, text in (step for step in list_steps(arguments) if not isinstance(step, Path)):
        value = _parse_value(name, text) if text.startswith("{") else text
        found = _list_texts({Options.read().expand(name): value})
        given |= {shorten(option): each for option, each in found.items() if shorten(option) in OPTIONS}
    kept = {name: none for name, none in (in_files or {}).items() if name not in given}
    return [*arguments, *(f"--{name}={none}" for name, none in (kept | find_replaced(given)).items())]


def replace_in_recipes(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns what later recipes replace in earlier ones, and lines about it (`run_length.replace_in_files`).

    Args:
        arguments: Of `genesis fit`, with its `--config` files. A pipe is skipped: only one reader can read it.
    """
    paths = [step for step in list_steps(arguments) if isinstance(step, Path) and step.is_file()]
    files = [(str(path), _list_texts(_read_file(path).content)) for path in (paths if len(paths) > 1 else ())]
    return replace_in_files(files)


class _File(NamedTuple):
    content: dict[str, Any]
    optimizer: Mapping[str, Any]
    """The options of the optimizer as they are written, perhaps by an old spelling."""
    old: Sequence[str]
    """The old names of options that the file has."""


def _read_file(path: Path) -> _File:
    try:
        content = spread_keys(_read_mapping(path))
        model = content.get("model")
        optimizer = model.get("optimizer") if isinstance(model, dict) else None
        content, old = rename_options(content)
    except RecursionError as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    if "model" not in content and "dim" in content:
        content = {"model": {"decoder": content}}
    if isinstance(content.get("model"), dict) and isinstance(content["model"].get("decoder"), str):
        decoder = content["model"]["decoder"]
        beside = path.parent / decoder
        content["model"]["decoder"] = _read_mapping(beside if beside.exists() else Path(decoder))
    return _File(content, optimizer if isinstance(optimizer, dict) else {}, old)


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        content = load_yaml(read_text(path), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"cannot read {path}: {reason}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} has no options: give a recipe of `genesis fit`, or a decoder's fields")
    return content


def _rename(overrides: Sequence[Override]) -> list[str]:
    """Returns options as words of a command line, under their current names."""
    words, old = rename_in_arguments([f"--{name}={text}" for name, text in overrides])
    for name in old:
        warnings.warn(describe_deprecated(name), FutureWarning, stacklevel=3)
    return words


def _assign(given: dict[str, Any], words: Sequence[str]) -> None:
    for word in words:
        name, _, text = word.removeprefix("--").partition("=")
        name = Options.read().expand(name)
        _put(given, name.split("."), _parse_value(name, text), Options.read().options)


def _parse_value(name: str, text: str) -> Any:
    option = Options.read().find(name)
    if option is not None and set(option.types) <= _TEXTS and text not in ("null", "~", ""):
        return text  # a name that looks like a number is a name
    try:
        value = load_yaml(text, f"--{name}")
    except (yaml.YAMLError, RecursionError):
        raise UserError(f"--{name} is {text!r}: it must be a value as YAML writes it") from None
    is_file = isinstance(value, str) and name in Options.read().sections and Path(value).is_file()
    return _read_mapping(Path(value)) if is_file or (isinstance(value, str) and name == _DECODER) else value


def _list_texts(content: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns the single values of a file that are not null, by their dotted names, as a recipe writes them."""
    texts: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            texts |= _list_texts(value, f"{prefix}{key}.")
        elif value is not None and not isinstance(value, list):
            texts[f"{prefix}{key}"] = write_plain(value)
    return texts


def _put(
    target: dict[str, Any], keys: Sequence[str], value: Any, scope: Mapping[str, Option], prefix: str = ""
) -> None:
    """Gives an option of a scope its value: of the recipe, of a section, or of a class.

    Args:
        target: The values of the scope, or of a group of it.
        keys: The option's name, relative to the target.
        value: The value.
        scope: The options by name.
        prefix: The group that the target is.
    """
    known = Options.read()
    key, rest = keys[0].removesuffix("+"), keys[1:]
    name = f"{prefix}.{key}".removeprefix(".")
    option, held = scope.get(name), target.get(key)
    is_choice = option is not None and option.base in known.bases and not option.is_list
    is_section = option is not None and known.is_section(option)
    if is_choice or (not is_section and (_is_class(held) or (not rest and _is_class(value)))):
        for part in reversed(rest):
            value = {part: value}
        target[key] = _choose(held, value, option)
        return
    is_group = is_section or (scope is known.options and name in known.groups)
    if option is not None and is_section:
        scope, name = known.classes[str(option.base)], ""
        value = value.get(INIT_ARGS) or {} if _is_class(value) else value  # the section's own class may be written, too
    if rest or (is_group and isinstance(value, Mapping)):
        below = target[key] = held if isinstance(held, dict) else {}
        pairs = [(rest, value)] if rest else [([str(each)], of_it) for each, of_it in value.items()]
        for path, given in pairs:
            _put(below, path, given, scope, name)
    elif keys[0].endswith("+"):
        entry = {CLASS_PATH: value} if isinstance(value, str) and name in _CLASS_LISTS else value
        target[key] = [*(held or []), *(entry if isinstance(entry, list) else [entry])]
    else:
        target[key] = copy.deepcopy(value)


def _choose(held: Any, given: Any, option: Option | None) -> Any:
    """Returns the class that an option chooses, with its options; a class that is not named is the one before."""
    known = Options.read()
    base = None if option is None else option.base
    if isinstance(given, str):
        if option is not None and _TEXT in option.types:
            return given  # it may be a name of Lightning's, and replaces the class before
        given = {CLASS_PATH: given}
    if not isinstance(given, Mapping) or not isinstance(given.get(INIT_ARGS) or {}, Mapping):
        return given
    before = option.default if held is None and option is not None else held
    before = {CLASS_PATH: before} if isinstance(before, str) else before if isinstance(before, Mapping) else {}
    path = given.get(CLASS_PATH) or before.get(CLASS_PATH)
    path = known.find_class(path, str(base)) if isinstance(path, str) else path
    scope = known.classes.get(path, {}) if isinstance(path, str) else {}
    options = dict(before.get(INIT_ARGS) or {})
    if path != before.get(CLASS_PATH):
        # As the real parser, which takes both classes' common options over; Lion does not learn at AdamW's rate.
        is_shared = base != _ALGORITHM
        options = {key: value for key, value in options.items()
                   if is_shared and key in scope and fits(value, scope[key].types)}  # fmt: skip
    own = {**(given.get(INIT_ARGS) or {}), **{key: value for key, value in given.items() if key not in CLASS_KEYS}}
    for key, value in own.items():
        _put(options, [str(key)], value, scope)
    others = {key: value for key, value in given.items() if key == "dict_kwargs"}
    return {CLASS_PATH: path, INIT_ARGS: options, **others} if path else {INIT_ARGS: options, **others}


def _is_class(value: Any) -> bool:
    return isinstance(value, Mapping) and CLASS_PATH in value


def _fill(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe with a value for each option that has a default."""
    content = copy.deepcopy(dict(given))
    for name, option in Options.read().options.items():
        *groups, last = name.split(".")
        target: Any = content
        for group in groups:
            target = target.setdefault(group, {}) if isinstance(target, dict) else None
        if isinstance(target, dict) and (last in target or option.has_default) and name != "config":
            target[last] = _complete(target.get(last, option.default), option)
    return content


def _complete(value: Any, option: Option) -> Any:
    """Returns an option's value, in which sections and classes of ours have values for all their options."""
    known = Options.read()
    if option.base is None or value is None:
        return copy.deepcopy(value)
    if option.is_list and option.base in known.bases:
        return copy.deepcopy(value)  # the real parser leaves entries that are classes as they are
    if option.is_list:
        return [_complete(each, option._replace(types=())) for each in value] if isinstance(value, list) else value
    is_choice = option.base in known.bases
    if is_choice and isinstance(value, str):
        path = known.find_class(value, option.base)
        value = {CLASS_PATH: path} if path in known.classes else value
    if not isinstance(value, Mapping):
        return value
    path = known.find_class(str(value.get(CLASS_PATH)), option.base) if is_choice else option.base
    scope, options = known.classes.get(path, {}), value.get(INIT_ARGS) or {} if is_choice else value
    if not isinstance(options, Mapping):
        return value
    filled = {
        name: _complete(options.get(name, below.default), below)
        for name, below in scope.items()
        if name in options or below.has_default
    }
    filled = {**options, **filled}
    chosen = {**value, CLASS_PATH: path, INIT_ARGS: filled} if CLASS_PATH in value else value
    return chosen if is_choice else filled


def _check(name: str, option: Option, value: Any) -> None:
    """Refuses what a section or a class of ours does not take."""
    known = Options.read()
    is_choice = option.base in known.bases
    for entry in value if isinstance(value, list) else [value]:
        if is_choice:
            _check_class(name, entry.get(CLASS_PATH) if isinstance(entry, Mapping) else entry, str(option.base))
        if not isinstance(entry, Mapping):
            continue
        options, path = (entry.get(INIT_ARGS) or {}, entry.get(CLASS_PATH)) if is_choice else (entry, option.base)
        if not isinstance(options, Mapping):
            raise UserError(f"{name}.{INIT_ARGS} is {options!r}: it must be a mapping of options")
        # Where a name may stand for a class, as for a strategy, it has no options.
        if is_choice and options and _TEXT in option.types and "." not in str(path):
            raise UserError(
                f"{name}.{next(iter(options))} is an option of a class, and {name} has none: give --{name} CLASS "
                "before it"
            )
        for key, of_it in options.items() if path in known.classes else ():
            _check_option(f"{name}.{key}", str(path), of_it)


def _check_class(name: str, path: Any, base: str) -> None:
    """Refuses a class that Genesis does not have; short names are refused where no class of others can have them."""
    known = Options.read()
    is_short = isinstance(path, str) and path.isidentifier() and base.startswith("genesis.") and not allows_others()
    is_ours = is_short or (isinstance(path, str) and path.startswith("genesis."))
    if is_ours and known.find_class(path, base) not in known.bases[base] and not has_class(path.rpartition(".")[2]):
        raise UserError(f"{name} is {path}: give one of {', '.join(known.bases[base])}")


def _check_option(name: str, path: str, value: Any) -> None:
    scope, key = Options.read().classes[path], name.rpartition(".")[2]
    option = scope.get(key)
    if option is None:
        if not is_declared(key, path):
            raise UserError(f"unknown key {name}{hint_key(key, list(scope))}")
    elif not fits(value, option.types):
        is_word = isinstance(value, str)
        raise UserError((explain_text if is_word else explain_value)(name, write_plain(value), option.types))
    elif option.base is not None:
        _check(name, option, value)
