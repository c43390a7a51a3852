"""The demo's text, which every Python includes: the standard library's sources and the topics of its documentation."""

import json
import shutil
import sysconfig
from pathlib import Path
from pydoc_data import topics

# Excluded sources: tests and encodings (mostly tables), third-party packages, and the topics, which are added as text.
_LEFT_OUT = {
    "encodings",
    "pydoc_data",
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "lib-dynload",
}


def gather_text(out: Path) -> tuple[int, int]:
    """Copies the standard library's sources and writes the topics as JSON lines; returns (documents, bytes).

    Args:
        out: The directory to replace: `stdlib/*.py`, one document per file, and `topics.jsonl`.
    """
    shutil.rmtree(out, ignore_errors=True)
    root = Path(sysconfig.get_path("stdlib"))
    num_documents = num_bytes = 0
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _LEFT_OUT.intersection(relative.parts) or relative.parts[0].startswith("config-"):
            continue
        text = path.read_bytes()
        if not _is_utf8(text):
            continue
        target = out / "stdlib" / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
        num_documents, num_bytes = num_documents + 1, num_bytes + len(text)
    target = out / "topics.jsonl"
    with target.open("w", encoding="utf-8") as file:
        for name, topic in sorted(topics.topics.items()):
            file.write(json.dumps({"id": name, "text": topic}, ensure_ascii=False) + "\n")
            num_documents, num_bytes = num_documents + 1, num_bytes + len(topic.encode())
    # The copies keep the originals' times, so that a second demo finds the same files and reuses the prepared tokens.
    shutil.copystat(topics.__file__, target)
    return num_documents, num_bytes


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return bool(text)
