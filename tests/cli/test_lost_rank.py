"""Ranks of `genesis fit`, of which one is killed in mid-run: what the others print."""

import os
import socket
import time
from pathlib import Path

import pytest

from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import STDOUT, start_genesis

DEADLINE_SECONDS = 120
POLL_SECONDS = 0.05


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


@pytest.mark.process
@pytest.mark.parametrize(("num_ranks", "lost"), [pytest.param(4, 0, marks=pytest.mark.slow), (2, 1)])
def test_one_other_rank_names_a_killed_one_in_its_last_line_and_none_prints_a_traceback(
    num_ranks: int, lost: int, tiny_corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    endless = {
        "trainer.devices": num_ranks,
        "trainer.max_steps": 1_000_000,
        "trainer.val_check_interval": 1_000_000,
        "trainer.enable_progress_bar": False,
        "checkpoint.every_n_steps": 1_000_000,
    }
    recipe = write_recipe(tmp_path / "recipe.yaml", build_recipe(tiny_corpus, run_dir), endless)
    place = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": "0"}
    outputs = [tmp_path / f"rank-{rank}" for rank in range(num_ranks)]
    ranks = []
    for rank, path in enumerate(outputs):
        with path.open("w") as output:
            environment = {**place, "LOCAL_RANK": str(rank)}
            ranks.append(start_genesis("fit", "--config", recipe, env=environment, stdout=output, stderr=STDOUT))
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (run_dir / "metrics.csv").exists():
            assert all(rank.poll() is None for rank in ranks), [path.read_text() for path in outputs]
            assert time.monotonic() < deadline, "training did not begin"
            time.sleep(POLL_SECONDS)
        ranks[lost].kill()
        statuses = {rank: ranks[rank].wait(DEADLINE_SECONDS) for rank in range(num_ranks) if rank != lost}
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    words = {rank: outputs[rank].read_text() for rank in statuses}
    assert set(statuses.values()) == {70}, words
    assert not any("Traceback" in of_one for of_one in words.values()), words
    reports = [of_one for of_one in words.values() if "error: " in of_one]
    assert len(reports) == 1, words
    *others, last = reports[0].splitlines()
    assert last.startswith("genesis: error: ") or last.startswith("genesis-callbacks: error: "), words
    assert f"rank {lost} (process {ranks[lost].pid}) is gone" in last
    assert len(others) <= 4, words
    assert all(len(of_one.splitlines()) <= 2 for of_one in words.values() if of_one not in reports), words
