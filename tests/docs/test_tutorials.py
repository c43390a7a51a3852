"""Every tutorial does what it says: its code runs from top to bottom in an empty directory."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from code_blocks import CodeBlock, read_blocks

from tests.commands import REPOSITORY

TUTORIALS = sorted((REPOSITORY / "docs/tutorials").glob("*.md"))
DEADLINE_SECONDS = 300
SHELL = ("bash", "-eu", "-o", "pipefail", "-c")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The reader's: `python` and `genesis` are found, and nothing else of this test is."""
    sources = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "callbacks/src")))
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COVERAGE"))}
    return {**kept, "PATH": path, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}


def run(block: CodeBlock, directory: Path, environment: dict[str, str]) -> str:
    """Runs a block, and returns what it printed, on both streams."""
    command = (sys.executable, "-c") if block.language == "python" else SHELL
    done = subprocess.run(
        [*command, block.code],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, f"line {block.line}:\n{block.code}\n{done.stdout}"
    return done.stdout


@pytest.mark.parametrize("page", TUTORIALS, ids=[page.stem for page in TUTORIALS])
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.early
@pytest.mark.timeout(900)
def test_a_tutorial_runs_from_top_to_bottom_in_an_empty_directory(
    page: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    num_run = 0
    for block in read_blocks(page.read_text(encoding="utf-8")):
        if block.title is not None:
            (tmp_path / block.title).write_text(block.code, encoding="utf-8")
            continue
        printed = run(block, tmp_path, environment)
        num_run += 1
        assert block.prints is None or block.prints in printed, f"line {block.line} printed:\n{printed}"
    assert num_run >= 4


def test_a_block_is_left_out_only_with_a_reason() -> None:
    text = "<!-- skip: it needs two machines -->\n```bash\nfalse\n```\n\n```bash\ntrue\n```\n\n```text\nfalse\n```\n"
    assert [block.code for block in read_blocks(text)] == ["true\n"]


def test_a_block_with_a_title_is_a_file() -> None:
    (block,) = read_blocks('```yaml title="recipe.yaml"\na: 1\n```\n')
    assert (block.title, block.code) == ("recipe.yaml", "a: 1\n")
