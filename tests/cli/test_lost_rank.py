"""Ranks of `genesis fit`, of which one is killed or cannot save in mid-run: what they print."""

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL
from subprocess import Popen
from typing import NamedTuple

import pytest

from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import STDOUT, start_genesis

DEADLINE_SECONDS = 120
POLL_SECONDS = 0.05
SMALL_FILE_BYTES = 4096


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


class Running(NamedTuple):
    """Ranks of a fit that has begun, and where each of them prints."""

    ranks: list[Popen[str]]
    outputs: list[Path]

    def wait(self, expected: int) -> dict[int, str]:
        """Returns what the ranks that nobody killed have printed when they have ended with this status."""
        statuses = {rank: process.wait(DEADLINE_SECONDS) for rank, process in enumerate(self.ranks)}
        words = {rank: self.outputs[rank].read_text() for rank, status in statuses.items() if status != -SIGKILL}
        assert {status for status in statuses.values() if status != -SIGKILL} == {expected}, words
        assert not any("Traceback" in of_one for of_one in words.values()), words
        return words


@contextmanager
def running(num_ranks: int, corpus: Path, directory: Path, save_every: int) -> Iterator[Running]:
    """Starts a fit without an end; every rank has logged a step when it is given."""
    endless = {
        "trainer.devices": num_ranks,
        "trainer.max_steps": 1_000_000,
        "trainer.val_check_interval": 1_000_000,
        "trainer.enable_progress_bar": False,
        "checkpoint.every_n_steps": save_every,
    }
    recipe = write_recipe(directory / "recipe.yaml", build_recipe(corpus, directory / "run"), endless)
    place = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": "0"}
    outputs = [directory / f"rank-{rank}" for rank in range(num_ranks)]
    ranks = []
    for rank, path in enumerate(outputs):
        with path.open("w") as output:
            environment = {**place, "LOCAL_RANK": str(rank)}
            ranks.append(start_genesis("fit", "--config", recipe, env=environment, stdout=output, stderr=STDOUT))
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (directory / "run/metrics.csv").exists():
            assert all(rank.poll() is None for rank in ranks), [path.read_text() for path in outputs]
            assert time.monotonic() < deadline, "training did not begin"
            time.sleep(POLL_SECONDS)
        yield Running(ranks, outputs)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.process
@pytest.mark.parametrize(("num_ranks", "lost"), [pytest.param(4, 0, marks=pytest.mark.slow), (2, 1)])
def test_one_other_rank_names_a_killed_one_in_its_last_line_and_none_prints_a_traceback(
    num_ranks: int, lost: int, tiny_corpus: Path, tmp_path: Path
) -> None:
    with running(num_ranks, tiny_corpus, tmp_path, save_every=1_000_000) as fit:
        fit.ranks[lost].kill()
        words = fit.wait(70)
    reports = [of_one for of_one in words.values() if "error: " in of_one]
    assert len(reports) == 1, words
    *others, last = reports[0].splitlines()
    assert last.startswith("genesis: error: ") or last.startswith("genesis-callbacks: error: "), words
    assert f"rank {lost} (process {fit.ranks[lost].pid}) is gone" in last
    assert len(others) <= 6, words  # the length of the run, the end of its rate, and four lines of the end
    assert all(len(of_one.splitlines()) <= 2 for of_one in words.values() if of_one not in reports), words


@pytest.mark.process
@pytest.mark.slow
def test_a_first_rank_that_is_killed_while_every_step_is_saved_is_named_by_the_other(
    tiny_corpus: Path, tmp_path: Path
) -> None:
    with running(2, tiny_corpus, tmp_path, save_every=1) as fit:
        fit.ranks[0].kill()
        (words,) = fit.wait(70).values()
    assert f"rank 0 (process {fit.ranks[0].pid}) is gone" in words.splitlines()[-1], words


@pytest.mark.process
@pytest.mark.slow
def test_a_save_that_fails_on_one_rank_is_reported_by_the_first_alone(tiny_corpus: Path, tmp_path: Path) -> None:
    with running(2, tiny_corpus, tmp_path, save_every=50) as fit:
        resource.prlimit(fit.ranks[1].pid, resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES, SMALL_FILE_BYTES))
        first, second = fit.wait(1).values()
    assert "rank 1: OSError: [Errno 27] File too large" in first.splitlines()[-1], first
    assert "is gone" not in first + second
    assert "error" not in second
