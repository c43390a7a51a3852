"""`genesis recipes` and `genesis recipes copy`."""

from itertools import groupby
from typing import Final

from genesis.base.arguments import Parser
from genesis.recipe.shipped import copy_recipe, list_names, read_summary

_DESCRIPTION: Final = """Lists the recipes that come with Genesis. --config takes their names: genesis fit --config
genesis-10m. Paths in a recipe, such as those of corpora and runs, are relative to the working directory."""
_COPY: Final = """Copies recipes, with the files that they name, into configs/ of the working directory, to change them
there. --config takes a copy before the recipe of the same name that comes with Genesis."""
_TITLES: Final = {
    "": "genesis fit: models from scratch",
    "finetune": "genesis fit: fine-tuning; the comment at the top of each recipe has the commands before it",
    "loggers": "genesis fit, as a second --config: loggers",
    "strategies": "genesis fit, as a second --config: ways to use several devices",
    "tokenizers": "genesis tokenizer train",
    "corpora": "genesis data prepare",
    "clean": "genesis data clean",
    "model": "genesis model describe: shapes, which recipes of fit name",
}


def main(argv: list[str]) -> int:
    """Runs `genesis recipes` and returns its exit status."""
    Parser("genesis recipes", description=_DESCRIPTION).parse_args(argv)
    folders = groupby(sorted(list_names(), key=_sort_key), key=lambda name: name.rpartition("/")[0])
    for folder, names in folders:
        print(f"{_TITLES.get(folder, folder)}")
        listed = list(names)
        width = max(map(len, listed))
        for name in listed:
            print(f"  {name:<{width}}  {read_summary(name)}".rstrip())
        print()
    print("`genesis recipes copy NAME` copies a recipe into configs/, to change it there.")
    return 0


def copy_main(argv: list[str]) -> int:
    """Runs `genesis recipes copy` and returns its exit status."""
    parser = Parser("genesis recipes copy", description=_COPY)
    parser.add_argument("names", nargs="+", metavar="NAME", help="a recipe, or a folder of them, such as corpora")
    for name in parser.parse_args(argv).names:
        for path in copy_recipe(name):
            print(path)
    return 0


def _sort_key(name: str) -> tuple[int, str]:
    folder = name.rpartition("/")[0]
    order = list(_TITLES)
    return (order.index(folder) if folder in order else len(order), name)
