"""Pages of the notebooks, as they are committed: their text, their code, and the outputs of their last run."""

import base64
import itertools
import json
import re
from pathlib import Path
from typing import Any

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def write_notebook_pages(notebooks: Path, out: Path) -> list[str]:
    """Writes a page, and its pictures, for each notebook; returns the pages' names."""
    out.mkdir(parents=True, exist_ok=True)
    names = []
    for path in sorted(notebooks.glob("*.ipynb")):
        content = json.loads(path.read_text(encoding="utf-8"))
        parts = [part for number, cell in enumerate(content["cells"]) for part in _render(cell, number, path.stem, out)]
        title, *rest = parts
        note = f"*The notebook `notebooks/{path.name}`, with the outputs of a run on two CPU cores.*"
        (out / f"{path.stem}.md").write_text("\n\n".join([title, note, *rest]) + "\n", encoding="utf-8")
        names.append(f"{path.stem}.md")
    return names


def _render(cell: dict[str, Any], number: int, stem: str, out: Path) -> list[str]:
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] == "markdown":
        # A title stands alone, so that the note can follow it.
        return source.split("\n\n", 1) if number == 0 else [source]
    parts = [_fence(source, "python")] if source else []
    outputs = enumerate(cell.get("outputs", ()))
    for is_picture, group in itertools.groupby(outputs, lambda pair: "image/png" in pair[1].get("data", {})):
        if is_picture:
            for place, output in group:
                picture = out / f"{stem}-{number}-{place}.png"
                picture.write_bytes(base64.b64decode("".join(output["data"]["image/png"])))
                parts.append(f"![Output of the cell above]({picture.name})")
        else:
            texts = ["".join(one.get("text") or one.get("data", {}).get("text/plain", "")) for _, one in group]
            parts.append(_fence(_COLOURS.sub("", "".join(texts)).rstrip(), "text"))
    return parts


def _fence(text: str, language: str) -> str:
    mark = "````" if "```" in text else "```"
    return f"{mark}{language}\n{text}\n{mark}"
