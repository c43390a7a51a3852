"""Writes a page for each command from its own `--help`, so that the reference is what the program prints."""

import contextlib
import io
import itertools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from genesis.cli.table import COMMANDS, Command

_COLUMNS = 100
_MAX_USAGE_LINES = 20
_OPTION = re.compile(r"^  (?P<name>\S.*?)(?:  +(?P<text>\S.*))?$")
_ROLE = re.compile(r":\w+:`~?([^`<]*?)(?: <[^`]*>)?`")


@dataclass
class Section:
    """A group of options as `--help` prints it."""

    title: str
    about: list[str] = field(default_factory=list)
    options: list[tuple[str, list[str]]] = field(default_factory=list)


def read_help(command: Command) -> str:
    """Returns what `genesis COMMAND --help` prints; a terminal's width is fixed, so that pages do not depend on it."""
    os.environ["COLUMNS"] = str(_COLUMNS)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        command.load()(["--help"])
    if not printed.getvalue().startswith("usage: "):
        raise RuntimeError(f"`genesis {command.name} --help` printed no usage: {printed.getvalue()[:200]!r}")
    # jsonargparse marks a place of a name with a character that no font has.
    return "".join(c for c in printed.getvalue() if c.isprintable() or c == "\n")


def parse_help(text: str) -> tuple[str, list[str], list[Section]]:
    """Returns the usage, the paragraphs of the description and the groups of options of a help page."""
    usage, _, rest = text.partition("\n\n")
    about: list[str] = [""]
    sections: list[Section] = []
    for line in rest.splitlines():
        option = _OPTION.match(line)
        if line and not line[0].isspace() and line.endswith(":"):
            sections.append(Section(line.removesuffix(":")))
        elif not sections:
            about = [*about, ""] if not line.strip() else [*about[:-1], f"{about[-1]} {line.strip()}".strip()]
        elif option is not None and (option["name"].startswith("-") or not sections[-1].about or option["text"]):
            sections[-1].options.append((option["name"], [option["text"]] if option["text"] else []))
        elif sections[-1].options and line.startswith("      "):
            sections[-1].options[-1][1].append(line.strip())
        elif line.strip():
            sections[-1].about.append(line.strip())
    return usage, [paragraph for paragraph in about if paragraph], sections


def escape(text: str) -> str:
    """Returns a help text as Markdown: what stands in backticks stays code, everything else is literal."""
    plain = _ROLE.sub(r"`\1`", text).replace("``", "`")
    parts = re.split(r"(`[^`]*`)", plain)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_\[\]<>|#{}])", r"\\\1", part) for part in parts)


def render_page(command: Command, text: str) -> str:
    """Returns the Markdown page of a command."""
    usage, about, sections = parse_help(text)
    lines = [f"# genesis {command.name}", "", f"{command.summary[0].upper()}{command.summary[1:]}.", ""]
    if command.extra is not None and not command.target_of:
        lines += [f"Needs optional packages: `pip install 'genesis-lm[{command.extra}]'`.", ""]
    for paragraph in about:
        lines += [escape(paragraph), ""]
    lines += ["## Usage", "", *_render_usage(usage), ""]
    for section in sections:
        prefix = _common_prefix([name for name, _ in section.options])
        title = f"`{prefix}`" if prefix else f"{section.title[0].upper()}{escape(section.title[1:])}"
        about_section = [f"{section.title}."] if prefix else []
        lines += [f"## {title}", "", escape(" ".join([*about_section, *section.about])), ""]
        for name, words in section.options:
            lines += [f"`{name}`", f":   {escape(' '.join(words)) or 'No description.'}", ""]
    return "\n".join(lines)


def _render_usage(usage: str) -> list[str]:
    """Returns the usage as a block of code, folded away where it is longer than a screen."""
    lines = ["```text", *usage.splitlines(), "```"]
    if len(lines) <= _MAX_USAGE_LINES:
        return lines
    return ['??? note "All options in short"', "", *(f"    {line}" for line in lines)]


def _common_prefix(names: list[str]) -> str:
    """Returns the dotted group that all of these options belong to, as `data` of `--data.seq_len`; empty for none.

    Example:
        >>> _common_prefix(["--model.decoder CONFIG", "--model.decoder.dim DIM"])
        'model.decoder'
    """
    keys = [re.split(r"[ ,]", name.removeprefix("--"))[0].split(".") for name in names if name.startswith("--")]
    if len(keys) < 2 or len(keys) != len(names):
        return ""
    common = itertools.takewhile(lambda components: len(set(components)) == 1, zip(*keys, strict=False))
    return ".".join(components[0] for components in common)


def page_name(command: Command) -> str:
    """Returns the file name of a command's page."""
    return f"{command.name.replace(' ', '-')}.md"


def write_command_pages(directory: Path) -> list[dict[str, str]]:
    """Writes all pages and the table of them, and returns their entries of the navigation."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = ["| command | does |", "|---|---|"]
    entries = [{"All commands": "reference/commands/index.md"}]
    for command in COMMANDS:
        name = page_name(command)
        (directory / name).write_text(render_page(command, read_help(command)), encoding="utf-8")
        rows.append(f"| [`genesis {command.name}`]({name}) | {command.summary} |")
        entries.append({command.name: f"reference/commands/{name}"})
    about = (
        "Each page is what the command prints for `--help`. The [exit statuses](../exit-statuses.md) are the same for "
        "all commands. `source <(genesis completion bash)` completes commands and options in a shell.\n"
    )
    (directory / "index.md").write_text("\n".join(["# Commands", "", about, *rows, ""]), encoding="utf-8")
    return entries
