"""Builds the documentation site: `make docs`, into `build/site`.

The pages in `docs/` are copied to `build/docs`, together with the pages that are written from the code: one for each
command (its own `--help`), one for each notebook, and the reference of the public names. A line
`<!-- insert: KIND PATH -->` in a page is replaced by what the named source file documents
(`docs/site/docstring_tables.py`), so that a table of metrics cannot differ from the code that logs them. Zensical
renders the pages; a warning is an error. At the end every link of the finished site is checked
(`docs/site/check_site.py`). Nothing of this needs a network.
"""

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

# The script runs by its path, so that the modules beside it are found by their names.
from check_site import find_problems
from command_pages import write_command_pages
from docstring_tables import read_all_names, render
from notebook_pages import write_notebook_pages

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "docs"
CONFIG = ROOT / "mkdocs.yml"

EXTRA_PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "callbacks/README.md": "reference/genesis-callbacks.md",
}
"""Pages that lie elsewhere in the repository, by their place in the site."""

API = {
    "api/genesis_callbacks.md": ("genesis_callbacks", "The callbacks", None),
    "api/checkpoint.md": ("genesis_callbacks.checkpoint", "The checkpoint engine", None),
    "api/events.md": ("genesis_callbacks.base.event_reader", "Reading events", ("read_events", "EventFollower")),
    "api/model.md": ("genesis.model.decoder", "The decoder", ("DecoderConfig", "Decoder")),
    "api/parts.md": ("genesis.model.part", "Parts of the decoder", ()),
    "api/train.md": ("genesis.train.module", "The training step", ("GenesisModule",)),
    "api/data.md": ("genesis.train.data_module", "The data module", ("CorpusDataModule",)),
    "api/strategies.md": ("genesis.strategies", "Strategies", None),
    "api/optim.md": ("genesis.optim", "The optimizer", None),
    "api/sources.md": ("genesis.data.sources", "Sources of text", None),
    "api/tokenizer.md": ("genesis.tokenizer.tokenizer", "The tokenizer protocol", ("Tokenizer",)),
}
"""Page: the module, the title, and the names it documents: None for the module's `__all__`, () for the whole module."""

_INSERT = re.compile(r"^<!-- insert: (?P<kind>\w+) (?P<path>\S+) -->$", re.MULTILINE)


def stage(staged: Path) -> None:
    """Copies the pages to `staged` and writes those beside them that follow from docstrings."""
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(SOURCE, staged, ignore=shutil.ignore_patterns("site", "__pycache__"))
    shutil.copytree(SOURCE / "site/assets", staged / "assets")
    shutil.copytree(ROOT / "benchmarks/records", staged / "records")
    write_notebook_pages(ROOT / "notebooks", staged / "notebooks")
    for origin, place in EXTRA_PAGES.items():
        shutil.copy(ROOT / origin, staged / place)
    for page in staged.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(_INSERT.sub(lambda match: render(ROOT, match["kind"], match["path"]), text), encoding="utf-8")
    for place, (module, title, names) in API.items():
        write_api_page(staged / "reference" / place, module, title, names)


def write_api_page(path: Path, module: str, title: str, names: tuple[str, ...] | None) -> None:
    """Writes a page of mkdocstrings' directives; griffe reads the sources and imports nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if names == ():
        body = f"::: {module}\n    options:\n      show_root_heading: false\n"
    else:
        found = read_all_names(ROOT, module) if names is None else {name: f"{module}.{name}" for name in names}
        body = "\n".join(f"::: {target}\n" for target in found.values())
    path.write_text(f"# {title}\n\nImport from `{module}`.\n\n{body}", encoding="utf-8")


def read_version() -> str:
    """Returns the version of the application."""
    found = re.search(
        r'^__version__ = "(.+)"$', (ROOT / "genesis/__init__.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert found is not None
    return found[1]


def write_config(out: Path, command_pages: list[dict[str, str]]) -> Path:
    """Writes `out/mkdocs.yml`: the configuration with the generated pages in its navigation, and returns its path."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config.update(docs_dir="docs", site_dir="site", site_name=f"{config['site_name']} {read_version()}")
    config["plugins"][1]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT), str(ROOT / "callbacks/src")]
    generated = {
        "COMMANDS": command_pages,
        "API": [{title: f"reference/{place}"} for place, (_, title, _) in API.items()],
        **{
            folder.upper(): [f"{folder}/{path.name}" for path in sorted((out / "docs" / folder).glob("*.md"))]
            for folder in ("decisions", "notebooks", "records")
        },
    }
    config["nav"] = _fill(config["nav"], generated)
    path = out / "mkdocs.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def _fill(nav: list[Any], generated: dict[str, list[Any]]) -> list[Any]:
    """Returns the navigation with each placeholder replaced by the pages that it stands for."""
    filled: list[Any] = []
    for item in nav:
        if isinstance(item, str) and item in generated:
            filled += generated[item]
        elif isinstance(item, dict):
            filled.append({title: _fill(t, generated) if isinstance(t, list) else t for title, t in item.items()})
        else:
            filled.append(item)
    return filled


def find_unlisted(config: Path, staged: Path) -> list[str]:
    """Returns the pages that the navigation does not list: nobody would find them."""
    text = config.read_text(encoding="utf-8")
    pages = sorted(str(path.relative_to(staged)) for path in staged.rglob("*.md"))
    return [f"{page} is not in the navigation of mkdocs.yml" for page in pages if page not in text]


def build(out: Path) -> list[str]:
    """Builds the site into `out/site`, and returns every problem of it."""
    staged, site = out / "docs", out / "site"
    stage(staged)
    config = write_config(out, write_command_pages(staged / "reference/commands"))
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(config)]
    built = subprocess.run(command, capture_output=True, text=True)
    problems = find_unlisted(config, staged)
    # A warning that Zensical prints without counting it is an error, too.
    if built.returncode or re.search("warning", built.stdout + built.stderr, re.IGNORECASE):
        return [*problems, f"zensical failed:\n{built.stdout}{built.stderr}"]
    return [*problems, *find_problems(site)]


def main() -> int:
    """Builds the site and returns the exit status: 1 where a page has a problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="directory of the site and its staged pages")
    out = parser.parse_args().out.resolve()
    began = time.monotonic()
    problems = build(out)
    for problem in problems:
        print(f"docs: error: {problem}", file=sys.stderr)
    if not problems:
        print(f"docs: {out / 'site'} is built, {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
