"""Stages of a command's work reach a display, in this process and from another one."""

import contextlib
import subprocess
import sys

import pytest

from genesis.base.progress import SentStages, Stage, shown_by, stage

SENDER = """
from genesis.base.progress import sent_as_lines, stage
with sent_as_lines():
    with stage("reading", 3, "texts", first=1) as shown:
        for _ in shown.each("ab"):
            pass
    with stage("writing"):
        pass
print("the result")
"""


class Recorder:
    """Keeps the calls that it gets."""

    tick_seconds = 0.001

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.has_ticked = False

    def begin(self, stage: Stage) -> None:
        self.calls.append(("begin", stage.name, stage.done))

    def tick(self, stage: Stage) -> None:
        self.has_ticked = True

    def end(self, stage: Stage) -> None:
        self.calls.append(("end", stage.name, stage.done))


def test_a_stage_without_a_display_counts_and_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("reading", 2, "texts") as shown:
        assert list(shown.each("ab")) == ["a", "b"]
    assert shown.done == 2
    assert capsys.readouterr() == ("", "")


def test_a_display_sees_each_stage_begin_and_end_also_by_an_error() -> None:
    recorder = Recorder()
    with contextlib.suppress(ValueError), shown_by(recorder), stage("outer"), stage("inner", 4, first=2) as inner:
        inner.advance()
        while not recorder.has_ticked:
            pass
        raise ValueError
    assert recorder.calls == [("begin", "outer", 0), ("begin", "inner", 2), ("end", "inner", 3), ("end", "outer", 0)]


@pytest.mark.process
def test_the_stages_of_another_process_are_shown_and_its_other_lines_are_left() -> None:
    sent = subprocess.run([sys.executable, "-c", SENDER], capture_output=True, text=True, check=True)
    recorder = Recorder()
    with shown_by(recorder), SentStages() as stages:
        left = [line for line in sent.stdout.splitlines() if not stages.take(line)]
    assert left == ["the result"]
    assert recorder.calls[0] == ("begin", "reading", 1)
    assert [call[:2] for call in recorder.calls] == [
        ("begin", "reading"),
        ("end", "reading"),
        ("begin", "writing"),
        ("end", "writing"),
    ]


def test_a_process_that_dies_in_a_stage_leaves_no_stage_open() -> None:
    recorder = Recorder()
    line = 'genesis-stage {"name": "reading", "note": "", "total": 3, "unit": "texts", "done": 2, "first": 0}'
    with shown_by(recorder), SentStages() as stages:
        assert stages.take(line)
    assert recorder.calls == [("begin", "reading", 0), ("end", "reading", 2)]
