"""The demo's text is there on every machine, and the same each time."""

import json
from pathlib import Path

import pytest

from genesis.operations.demo.text import gather_text


def read_tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_text_is_sources_and_topics_and_is_counted(tmp_path: Path) -> None:
    num_documents, num_bytes = gather_text(tmp_path / "text")
    files = read_tree(tmp_path / "text")
    topics = [json.loads(line) for line in files.pop("topics.jsonl").decode().splitlines()]
    assert {"stdlib/json/decoder.py", "stdlib/asyncio/tasks.py"} <= files.keys()
    assert "with" in {topic["id"] for topic in topics}
    assert num_documents == len(files) + len(topics)
    assert num_bytes == sum(map(len, files.values())) + sum(len(topic["text"].encode()) for topic in topics)
    assert num_bytes > 5_000_000


def test_tests_and_other_peoples_packages_are_left_out(tmp_path: Path) -> None:
    gather_text(tmp_path / "text")
    folders = {part for name in read_tree(tmp_path / "text") for part in Path(name).parts}
    assert not {"test", "tests", "site-packages", "__pycache__"} & folders


def test_every_source_is_text(tmp_path: Path) -> None:
    gather_text(tmp_path / "text")
    for path in (tmp_path / "text").rglob("*.py"):
        assert path.read_text(encoding="utf-8")


def test_gathering_again_makes_it_anew(tmp_path: Path) -> None:
    first = gather_text(tmp_path / "text")
    before = read_tree(tmp_path / "text")
    (tmp_path / "text" / "stdlib" / "stale.py").write_text("left over")
    assert gather_text(tmp_path / "text") == first
    assert read_tree(tmp_path / "text") == before
