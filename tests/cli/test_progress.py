"""How stages look: lines in a log, bars on a terminal; and how a command ends that is interrupted or not read."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from genesis.base.progress import Stage, shown_by, stage
from genesis.cli.progress import Bars, Lines, describe

TALKER = """
import sys
from genesis.cli.main import main
from genesis.cli.table import Command

def run(arguments):
    {print}
    return 0

Command.load = lambda command, arguments: run
sys.exit(main(["demo"]))
"""
PRINTS = {
    "print": "[print('x' * 1000) for _ in range(1000)]",
    "rich": "from rich.console import Console; [Console().print('x' * 1000) for _ in range(1000)]",
    "flushed at the end": "print('x')",
    "stderr": "[print('x' * 1000, file=sys.stderr) for _ in range(1000)]",
}


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        (Stage("s", 4000, "texts", 1200, begin_seconds=0.0), "1,200 of 4,000 texts (30%), 2 min 20 s left"),
        (Stage("s", 4000, "texts", 1200, 600, begin_seconds=0.0), "1,200 of 4,000 texts (30%), 4 min 40 s left"),
        (Stage("s", 8_000_000, "bytes", 2_000_000, begin_seconds=0.0), "2.0 MB of 8.0 MB (25%), 3 min 00 s left"),
        (Stage("s", 10, "texts", 10, begin_seconds=0.0), "10 of 10 texts (100%)"),
        (Stage("s", 10, "texts", 0, begin_seconds=0.0), "0 of 10 texts (0%), 1 min 00 s"),
        (Stage("s", None, "texts", 3, begin_seconds=0.0), "3 texts, 1 min 00 s"),
        (Stage("s", note="5 tokens/s", begin_seconds=0.0), "5 tokens/s, 1 min 00 s"),
    ],
)
def test_a_stage_is_described_by_what_is_done_and_left(stage: Stage, line: str) -> None:
    assert describe(stage, 60.0) == line


def test_a_log_gets_a_line_after_two_seconds_then_at_intervals_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("genesis.cli.progress.BEGIN_SECONDS", 2.0)  # the fixtures of all tests switch lines off
    lines: list[str] = []
    now = 0.0
    display = Lines(lines.append, lambda: now)
    slow, quick = Stage("reading", 4000, "texts", begin_seconds=0.0), Stage("quick", begin_seconds=31.0)
    display.begin(slow)
    for now, done in ((1.0, 20), (2.5, 50), (10.0, 400), (20.0, 1000), (31.0, 4000)):  # noqa: B007
        slow.done = done
        display.tick(slow)
    display.end(slow)
    display.begin(quick)
    display.tick(quick)
    display.end(quick)
    assert lines == [
        "reading: 50 of 4,000 texts (1%), 3 min 18 s left",
        "reading: 1,000 of 4,000 texts (25%), 1 min 00 s left",
        "reading: 4,000 texts in 31.0 s",
    ]


def test_a_terminal_shows_a_bar_for_each_open_stage_and_erases_them() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with shown_by(Bars(console)), stage("reading"), stage("of which texts", 8, "texts") as shown:
        shown.advance(2)
    text = file.getvalue()
    assert "reading" in text
    assert "of which texts" in text
    assert text.endswith("\x1b[2K")  # the last line is erased


@pytest.mark.process
@pytest.mark.parametrize("how", PRINTS)
def test_a_reader_that_is_gone_ends_a_command_quietly(how: str) -> None:
    program = TALKER.format(print=PRINTS[how])
    talker = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert talker.stdout is not None
    assert talker.stderr is not None
    talker.stdout.close()
    if how == "stderr":
        talker.stderr.close()
    else:
        assert talker.stderr.read() == ""
        talker.stderr.close()
    assert talker.wait(60) == 141


@pytest.mark.process
def test_a_broken_pipe_to_another_process_is_no_closed_output() -> None:
    program = TALKER.format(print="raise BrokenPipeError(32, 'of a worker')")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "BrokenPipeError: [Errno 32] of a worker" in ended.stderr
