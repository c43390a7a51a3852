"""The recipes that come with Genesis: their names, their files, and copies of them.

They are written in `configs/` of the repository. A wheel carries that folder as `genesis/configs`. Where Genesis runs
from a checkout, the folder beside the package is taken.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

from genesis.base.errors import UserError, naming
from genesis_callbacks.base.untrusted import check_file, read_file

FOLDER: Final = "configs"
"""The folder of recipes: in the checkout, in the package, and of copies in the working directory."""

_PACKAGE: Final = Path(__file__).parents[1]
_CONFIG: Final = re.compile(r"(?:--config|-c)(?:=(?P<value>.*))?", re.DOTALL)
_ADDRESS: Final = re.compile(r"(?!file:)[A-Za-z][\w+.-]*::?//")
_MAX_RECIPE_BYTES: Final = 1 << 19
"""A thousand times a recipe; of more, the parsers of options take minutes."""
_SENTENCE_END: Final = re.compile(r"(?<=\.)\s")
_FILE: Final = re.compile(r"[\w./+-]+\.(?:yaml|jsonl|jinja|py)")


def find_recipes() -> Path:
    """Returns the directory of the recipes that come with Genesis."""
    packaged = _PACKAGE / FOLDER
    return packaged if packaged.is_dir() else _PACKAGE.parent / FOLDER


def list_names() -> list[str]:
    """Returns the names of all recipes: `genesis-10m`, `corpora/genesis-10m`."""
    root = find_recipes()
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))


def read_summary(name: str) -> str:
    """Returns the first sentence of the comment that begins a recipe, after the command that takes the recipe."""
    lines = (find_recipes() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comments = (line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("# "), lines))
    text = " ".join(line for line in comments if not line.startswith("genesis "))
    return _SENTENCE_END.split(text)[0]


def find_recipe(name: str) -> Path | None:
    """Returns the file of a recipe, or None.

    Args:
        name: `genesis-10m`, `genesis-10m.yaml` or `configs/genesis-10m.yaml`. A copy in `configs/` of the working
            directory is taken before the recipe that comes with Genesis.
    """
    inner = name.removeprefix(f"{FOLDER}/").removesuffix(".yaml")
    if not inner or ".." in Path(inner).parts or Path(inner).is_absolute():
        return None
    places = (Path(FOLDER) / f"{inner}.yaml", find_recipes() / f"{inner}.yaml")
    return next((place for place in places if place.is_file()), None)


def resolve_recipes(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a command with a file in the place of each recipe's name that --config gives.

    Raises:
        UserError: --config names neither a file nor a recipe.
    """
    resolved = list(arguments)
    for place, word in enumerate(arguments):
        found = _CONFIG.fullmatch(word)
        if found is None:
            continue
        if found["value"] is not None:
            option = word.partition("=")[0]
            resolved[place] = f"{option}={_resolve(found['value'])}"
        elif place + 1 < len(arguments):
            resolved[place + 1] = _resolve(arguments[place + 1])
    return resolved


def _resolve(value: str) -> str:
    """Returns the file that the value of --config stands for; the value itself where it is no name of a file."""
    if _ADDRESS.match(value):
        raise UserError(f"--config {value!r} is an address: download the recipe, read it, and give the file")
    if not value.strip() or value.startswith("-") or ":" in value or "\n" in value:
        return value
    path = Path(value)
    if path.exists() and not path.is_dir():
        try:
            check_file(path, _MAX_RECIPE_BYTES, may_be_given=True)
        except OSError as error:
            raise UserError(f"--config {value} {error.strerror}: give a file with a recipe") from None
        return value
    # A directory is not taken: the recipe tokenizers/genesis-10m writes a directory of that name.
    recipe = find_recipe(value)
    if recipe is not None:
        return str(recipe)
    if (path / "config.yaml").is_file():
        raise UserError(f"--config {value} is a directory; its recipe is {path / 'config.yaml'}")
    problem = "a directory, not a file" if path.is_dir() else "no such file"
    raise UserError(f"--config {value}: {problem}, and no recipe of Genesis{_hint(value)}")


def _hint(wanted: str) -> str:
    """Returns the end of a message that refuses a name: the recipes whose names are like it."""
    names = list_names()
    last = Path(wanted).name.removesuffix(".yaml")
    near = [name for name in names if name.rpartition("/")[2] == last]
    near = near or difflib.get_close_matches(wanted.removeprefix(f"{FOLDER}/").removesuffix(".yaml"), names, n=1)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{hint} (`genesis recipes` lists them)"


def copy_recipe(name: str) -> list[Path]:
    """Copies a recipe, and the files that it names, into `configs/` of the working directory.

    Args:
        name: The name of a recipe, or of a folder of them.

    Returns:
        The files that are now there, the recipe's first.

    Raises:
        UserError: There is no such recipe, or a file differs from what would be written.
    """
    root = find_recipes()
    inner = name.removeprefix(f"{FOLDER}/").removesuffix(".yaml").strip("/")
    firsts = [each for each in list_names() if each == inner or each.startswith(f"{inner}/")]
    if not firsts:
        raise UserError(f"there is no recipe {name!r}{_hint(name)}")
    waiting, files = [root / f"{first}.yaml" for first in firsts], dict[Path, None]()
    while waiting:
        file = waiting.pop(0)
        if file not in files:
            files[file] = None
            waiting += _list_named_files(file, root)
    copies = {file: Path(FOLDER) / file.relative_to(root) for file in files}
    for file, copy in copies.items():
        if copy.exists() and read_file(copy) != file.read_bytes():
            raise UserError(f"{copy} exists and differs from the recipe of Genesis: rename it, or use it as it is")
    for file, copy in copies.items():
        with naming(copy):
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return list(copies.values())


def _list_named_files(file: Path, root: Path) -> Iterator[Path]:
    """Yields the files among the recipes that a recipe names, relative to itself or to the working directory."""
    for word in _FILE.findall(file.read_text(encoding="utf-8")):
        for place in (file.parent / word, root.parent / word):
            if place.is_file() and place.resolve().is_relative_to(root.resolve()):
                yield root / place.resolve().relative_to(root.resolve())
