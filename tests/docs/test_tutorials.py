"""Every tutorial does what it says: its code runs from top to bottom in an empty directory."""

import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from code_blocks import CodeBlock, read_blocks

from tests.commands import PIPE, REPOSITORY, STDOUT, run_module
from tests.forked_shell import ForkedShell

TUTORIALS = sorted((REPOSITORY / "docs/tutorials").glob("*.md"))
DEADLINE_SECONDS = 300
SHELL = ("bash", "-eu", "-o", "pipefail", "-c")


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The reader's: `python` and `genesis` are found, and nothing else of this test is."""
    sources = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "callbacks/src")))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COVERAGE"))}
    with tempfile.TemporaryDirectory() as directory, ForkedShell(Path(directory), "genesis", "python"):
        path = os.pathsep.join([directory, sysconfig.get_path("scripts"), os.environ["PATH"]])
        yield {**kept, "PATH": path, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}


def run(block: CodeBlock, directory: Path, environment: dict[str, str]) -> str:
    """Runs a block, and returns what it printed, on both streams."""
    options: dict[str, Any] = {"cwd": directory, "env": environment, "stdout": PIPE, "stderr": STDOUT}
    if block.language == "python":
        with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as script:
            script.write(block.code)
            script.flush()
            done = run_module(script.name, timeout=DEADLINE_SECONDS, **options)
    else:
        done = subprocess.run([*SHELL, block.code], text=True, timeout=DEADLINE_SECONDS, check=False, **options)
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


@pytest.mark.process
def test_the_command_of_these_tests_has_the_arguments_and_the_status_of_a_real_one(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    def say(code: str) -> tuple[int, str, str]:
        done = subprocess.run([*SHELL, code], cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    status, out, err = say("genesis --version")
    assert (status, err) == (0, "")
    assert out.startswith("genesis ")
    status, out, err = say("genesis checkpoint list 'no run' 2>&1 >/dev/null | cat; exit ${PIPESTATUS[0]}")
    assert (status, err) == (2, "")
    assert "no run" in out


@pytest.mark.process
@pytest.mark.parametrize(("sent", "status"), [("KILL", 137), ("TERM", 143)])
def test_a_signal_to_the_command_of_these_tests_ends_what_it_runs(tmp_path: Path, sent: str, status: int) -> None:
    # `tokenize` of the standard library reads a pipe until it is closed. The pipe breaks when its reader has ended.
    code = f"mkfifo pipe; tokenize pipe & exec 3>pipe; kill -{sent} $!; wait $! || echo $?"
    broken = "; trap '' PIPE; while echo >&3; do sleep 0.1; done 2>&1"
    with tempfile.TemporaryDirectory() as directory, ForkedShell(Path(directory), "tokenize"):
        environment = {**os.environ, "PATH": os.pathsep.join([directory, os.environ["PATH"]])}
        done = subprocess.run(
            [*SHELL, code + broken], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60.0
        )
    assert done.stdout.splitlines()[0] == str(status), (done.stdout, done.stderr)


def test_a_block_is_left_out_only_with_a_reason() -> None:
    text = "<!-- skip: it needs two machines -->\n```bash\nfalse\n```\n\n```bash\ntrue\n```\n\n```text\nfalse\n```\n"
    assert [block.code for block in read_blocks(text)] == ["true\n"]


def test_a_block_with_a_title_is_a_file() -> None:
    (block,) = read_blocks('```yaml title="recipe.yaml"\na: 1\n```\n')
    assert (block.title, block.code) == ("recipe.yaml", "a: 1\n")
