"""Reads tables and blocks out of the docstrings of source files, without importing them; one module renders its own.

A module of this project documents what it logs, or which files it owns, in a block of its docstring: an indented header
of column titles, then one line for each entry, whose text may go on in lines below it.
"""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

_GAP = re.compile(r" {2,}")


def read_docstring(path: Path) -> str:
    """Returns the docstring of a module."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=True)
    if text is None:
        raise ValueError(f"{path} has no docstring")
    return text


def read_table(docstring: str, first_title: str) -> list[list[str]]:
    """Returns the rows of the table whose first column has this title, the titles first.

    Example:
        >>> read_table("logged   meaning\\na/b      of a,\\n         and b", "logged")
        [['logged', 'meaning'], ['a/b', 'of a, and b']]
    """
    lines = docstring.splitlines()
    begin = next((i for i, line in enumerate(lines) if _GAP.split(line.strip())[0] == first_title), None)
    if begin is None:
        raise ValueError(f"no table that begins with {first_title!r}")
    starts = [match.start() for match in re.finditer(r"(?:(?<=^)|(?<=  ))\S", lines[begin])]
    rows: list[list[str]] = []
    for line in lines[begin:]:
        if not line.strip():
            break
        cells = list(_cut(line, starts))
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [f"{above} {below}".strip() for above, below in zip(rows[-1], cells, strict=True)]
    if len(rows) < 2:
        raise ValueError(f"the table that begins with {first_title!r} has no row")
    return rows


def _cut(line: str, starts: list[int]) -> Iterator[str]:
    """Yields the cells of a line. A first cell that is longer than its column ends at the first gap."""
    if len(starts) > 1 and line[starts[1] - 1 : starts[1]].strip():
        first, _, rest = line.strip().partition("  ")
        yield first
        yield rest.strip()
        yield from [""] * (len(starts) - 2)
        return
    for start, end in zip(starts, [*starts[1:], len(line)], strict=True):
        yield line[start:end].strip()


def read_block(docstring: str) -> str:
    """Returns the first indented block of a docstring, without its indentation."""
    lines: list[str] = []
    for line in docstring.splitlines():
        if line.startswith("    ") or (lines and not line.strip()):
            lines.append(line[4:])
        elif lines:
            break
    if not lines:
        raise ValueError("the docstring has no indented block")
    return "\n".join(lines).strip()


def render(root: Path, kind: str, path: str) -> str:
    """Returns the Markdown of what a source file documents.

    Args:
        root: The repository.
        kind: `logged` (the table of metric keys), `events` (the table of kinds), `block` (the first indented block), or
            `symptoms` (the table that the module renders).
        path: The source file, relative to the repository.
    """
    if kind == "symptoms":
        table: str = runpy.run_path(str(root / path))["render_table"]()
        return table
    docstring = read_docstring(root / path)
    if kind == "block":
        return f"```text\n{read_block(docstring)}\n```"
    first_title = {"logged": "logged", "events": "kind"}[kind]
    titles, *rows = read_table(docstring, first_title)
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    lines += ["| " + " | ".join([f"`{row[0]}`", *map(_escape, row[1:])]) + " |" for row in rows]
    return "\n".join(lines)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def read_all_names(root: Path, module: str) -> dict[str, str]:
    """Returns the names in the `__all__` of a module, each with the dotted path of its definition."""
    path = _find_module(root, module)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    is_package = path.name == "__init__.py"
    origins: dict[str, str] = {}
    names: list[str] = []
    late: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            base = _resolve(module, is_package, node.level, node.module)
            origins |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id == "__all__":
                is_late = isinstance(node.value, ast.List) and isinstance(node.value.elts[0], ast.Starred)
                names = list(late) if is_late else ast.literal_eval(node.value)
            elif node.targets[0].id == "_MODULES":  # names that are imported on first use
                late = ast.literal_eval(node.value)
                for name, place in late.items():
                    inner = place.lstrip(".")
                    origins[name] = f"{_resolve(module, is_package, len(place) - len(inner), inner)}.{name}"
    if not names:
        raise ValueError(f"{module} has no __all__")
    return {name: origins.get(name, f"{module}.{name}") for name in names}


def _resolve(module: str, is_package: bool, level: int, name: str) -> str:
    if level == 0:
        return name
    parts = module.split(".")
    kept = parts[: len(parts) - level + (1 if is_package else 0)]
    return ".".join([*kept, name])


def _find_module(root: Path, module: str) -> Path:
    base = root / ("callbacks/src" if module.startswith("genesis_callbacks") else ".") / Path(*module.split("."))
    package = base / "__init__.py"
    return package if package.exists() else base.with_suffix(".py")
