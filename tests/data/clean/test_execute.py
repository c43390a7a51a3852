import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from genesis.base.errors import UserError
from genesis.base.progress import Stage
from genesis.data.clean.execute import LocalOptions, Phase, check_complete, run_locally


class Refusal(PipelineStep):  # type: ignore[misc]
    """Notes each task that it runs in a file, and refuses the tasks from `first_bad` on."""

    name = "refusal"
    type = "test"

    def __init__(self, folder: Path, first_bad: int) -> None:
        super().__init__()
        self._folder = folder
        self._first_bad = first_bad

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> Iterator[object]:
        with (self._folder / f"{rank}.runs").open("a") as file:
            file.write("x")
        if rank >= self._first_bad:
            raise UserError(f"line {rank} is bad; fix it")
        yield from ()


def count_runs(folder: Path) -> list[int]:
    return [len(path.read_text()) for path in sorted(folder.glob("*.runs"))]


def test_a_task_that_refuses_ends_the_run_and_finished_ones_are_not_run_again(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def begin(phase: Phase, num_done: int) -> Iterator[Stage]:
        shown = Stage(phase.name, phase.num_tasks, done=num_done)
        try:
            yield shown
        finally:
            told.append((num_done, shown.done))

    def run(first_bad: int) -> None:
        phases = [Phase("read", (Refusal(tmp_path, first_bad),), 4)]
        run_locally(phases, tmp_path / "lock", tmp_path / "logs", LocalOptions(workers=1), begin)

    with pytest.raises(UserError, match="line 2 is bad"):
        run(first_bad=2)
    assert (told, count_runs(tmp_path)) == ([(0, 2)], [1, 1, 1])
    run(first_bad=4)
    assert (told, count_runs(tmp_path)) == ([(0, 2), (2, 4)], [1, 1, 2, 1])
    run(first_bad=4)
    assert count_runs(tmp_path) == [1, 1, 2, 1]


def test_tasks_that_failed_elsewhere_are_told_with_their_error_and_log(tmp_path: Path) -> None:
    executor = LocalPipelineExecutor([Refusal(tmp_path, 1)], tasks=3, logging_dir=str(tmp_path / "read"))
    for rank in (0, 1):
        with contextlib.suppress(UserError):
            executor._run_for_rank(rank)
    with pytest.raises(UserError) as caught:
        check_complete(executor, tmp_path / "read")
    line = str(caught.value)
    assert line.startswith("2 of 3 tasks of read failed: ")
    assert "UserError: line 1 is bad; fix it" in line
    assert str(tmp_path / "read" / "logs" / "task_00001.log") in line
    assert "\n" not in line
