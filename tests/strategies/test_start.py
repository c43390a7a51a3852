"""Ranks that meet were started together, and a rank whose launcher ends at the start does not wait for the next run."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from genesis.base.errors import RunEndedError
from genesis.base.parent import LAUNCHER_NAME, NONCE_NAME
from genesis.strategies import Replicated, Sharded
from genesis.strategies import start as start_module
from genesis.strategies.start import Start, StartOfRank, find_stray, read_start
from genesis_callbacks.testing import run_ranks
from tests.train.support import build_module, build_trainer, loader

DEADLINE_SECONDS = 60
LAUNCHED = StartOfRank("lightning", 0, "", "n", "r")


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)
    return answer


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


# ---- what is compared


@pytest.mark.parametrize(
    ("starts", "stray"),
    [
        ([LAUNCHED, LAUNCHED], None),
        ([LAUNCHED, replace(LAUNCHED, nonce="m")], 1),
        # Every node has a launcher of its own.
        ([LAUNCHED, LAUNCHED, replace(LAUNCHED, node=1, nonce="m"), replace(LAUNCHED, node=1, nonce="m")], None),
        ([LAUNCHED, LAUNCHED, replace(LAUNCHED, node=1, nonce="m"), replace(LAUNCHED, node=1)], 3),
        ([LAUNCHED, replace(LAUNCHED, launcher="unknown")], 1),
        ([StartOfRank("torchrun", 0, "a", "restart 0", ""), StartOfRank("torchrun", 1, "a", "restart 1", "")], None),
        ([StartOfRank("torchrun", 0, "a", "restart 0", ""), StartOfRank("torchrun", 1, "b", "restart 0", "")], 1),
        ([StartOfRank("torchrun", 0, "a", "restart 1", ""), StartOfRank("torchrun", 0, "a", "restart 0", "")], 1),
    ],
)
def test_a_rank_of_another_start_is_found(starts: list[StartOfRank], stray: int | None) -> None:
    found = find_stray(starts)
    assert (None if found is None else found[0]) == stray


def test_a_start_is_read_from_what_the_launcher_left() -> None:
    elastic = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2", NONCE_NAME: "x"}
    assert read_start(1, {}, elastic) == replace(
        read_start(1, {}, {}), launcher="torchrun", run="job", nonce="restart 2"
    )
    assert read_start(0, {"a": 1}, {NONCE_NAME: "x"}).nonce == "x"
    assert read_start(0, {"a": 1}, {}).recipe_hash != read_start(0, {"a": 2}, {}).recipe_hash


# ---- a launcher that ends before the ranks have met

# Starts `genesis fit` as rank 1, as Lightning's launcher does, and prints its process id.
LAUNCH = f"""
import os, subprocess, sys, time
os.environ.update({LAUNCHER_NAME}=str(os.getpid()), {NONCE_NAME}="n", LOCAL_RANK="1")
rank = subprocess.Popen([sys.executable, "-m", "genesis", "fit", "--help"], stdout=subprocess.DEVNULL)
print(rank.pid, flush=True)
rank.wait()
"""


@pytest.mark.process
def test_a_rank_whose_launcher_is_killed_while_it_imports_ends_at_once() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCH], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    # By now it has Python's start behind it and imports for many seconds yet.
    wait_for(lambda: "libtorch" in Path(f"/proc/{rank}/maps").read_text())
    launcher.kill()
    killed_at = time.monotonic()
    launcher.communicate()
    wait_for(lambda: not is_alive(rank))
    assert time.monotonic() - killed_at < 5


@pytest.mark.process
def test_a_rank_whose_launcher_was_gone_before_it_came_up_says_so_and_ends() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, LAUNCHER_NAME: str(gone.pid), NONCE_NAME: "n", "LOCAL_RANK": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "genesis", "fit", "--config", "genesis-10m"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert ended.returncode == 1
    line = f"rank 0 (process {gone.pid}) ended while rank 1 started: restart the run"
    assert ended.stderr == f"genesis: error: {line}\n"


# ---- ranks on a fixed port: forked from one process that has imported Lightning


def fork(function: Callable[..., Any], *arguments: Any, out: Path, **environment: str) -> int:
    """Runs `function` in a process of its own whose words go to `out`; returns its id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            log = os.open(out, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for name in ("RANK", "WORLD_SIZE", LAUNCHER_NAME, NONCE_NAME):
                os.environ.pop(name, None)
            os.environ.update(environment)
            function(*arguments)
            status = 0
        except RunEndedError as error:
            print(f"genesis: error: {error}", flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


class MarkedStart(Start):
    """Leaves a mark when nothing but the rendezvous comes next."""

    def __init__(self, recipe: dict[str, Any], mark: Path) -> None:
        super().__init__()
        self.recipe, self._mark = recipe, mark

    def begin(self) -> None:
        super().begin()
        self._mark.touch()


def train(strategy: str, recipe: dict[str, Any], mark: Path) -> None:
    """One of two ranks."""
    built = Sharded() if strategy == "sharded" else Replicated()
    built.start = MarkedStart(recipe, mark)
    rank = int(os.environ["LOCAL_RANK"])
    build_trainer(built, 2, 2, []).fit(build_module(), loader(2, rank, 2))


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


def meet(root: Path, strategy: str, nonces: tuple[str, str], recipes: tuple[dict, dict]) -> list[tuple[int, str]]:
    """Starts rank 1 first, as one that was left over would be there first; returns each rank's status and words."""
    dist.destroy_process_group()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": "0"}
    pids = {}
    for rank in (1, 0):
        own = {LAUNCHER_NAME: str(os.getpid()), NONCE_NAME: nonces[rank], "LOCAL_RANK": str(rank), **place}
        pids[rank] = fork(train, strategy, recipes[rank], root / f"meeting-{rank}", out=root / f"rank-{rank}", **own)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1]) for rank in (0, 1)]
    return [(statuses[rank], (root / f"rank-{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.process
@pytest.mark.parametrize(
    ("strategy", "nonces", "recipes", "said"),
    [
        *(
            (strategy, ("new", "old"), ({}, {}), "rank 1 belongs to another start (its start is 'old', that of rank 0")
            for strategy in ("replicated", "sharded")
        ),
        (
            "sharded",
            ("n", "n"),
            ({"model": {"lr": 0.1}, "seed": 1}, {"model": {"lr": 0.2}, "seed": 2}),
            "rank 1 has another recipe than rank 0 (model.lr is 0.2, on rank 0 0.1, and 1 other key)",
        ),
    ],
)
def test_a_stray_rank_on_a_fixed_port_is_refused(
    tmp_path: Path, strategy: str, nonces: tuple[str, str], recipes: tuple[dict, dict], said: str
) -> None:
    (ranks,) = run_ranks(meet, 1, tmp_path, strategy, nonces, recipes)
    for status, words in ranks:
        assert status == 1, words
        assert words.count(f"genesis: error: {said}") == 1, words
        assert "Traceback" not in words


@pytest.mark.process
def test_ranks_of_one_start_meet_and_train(tmp_path: Path) -> None:
    (ranks,) = run_ranks(meet, 1, tmp_path, "replicated", ("n", "n"), ({"a": 1}, {"a": 1}))
    assert [status for status, _ in ranks] == [0, 0], ranks


def lose_launcher(root: Path) -> bool:
    """Kills rank 0 when rank 1, which it has started, waits for it; says whether rank 1 still lives long after."""
    dist.destroy_process_group()
    told, tell = os.pipe()

    def launch() -> None:
        own = {LAUNCHER_NAME: str(os.getpid()), NONCE_NAME: "n", "LOCAL_RANK": "1", "NODE_RANK": "0"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        pid = fork(train, "replicated", {}, root / "meeting", out=root / "rank-1", **own, **place)
        os.write(tell, f"{pid}\n".encode())
        signal.pause()

    launcher = fork(launch, out=root / "rank-0")
    rank = int(os.read(told, 20))
    wait_for((root / "meeting").exists)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    deadline = time.monotonic() + 60
    while is_alive(rank) and time.monotonic() < deadline:
        time.sleep(0.02)
    was_alive = is_alive(rank)
    if was_alive:
        os.kill(rank, signal.SIGKILL)
    return was_alive


@pytest.mark.process
def test_a_rank_whose_launcher_is_killed_before_the_rendezvous_ends(tmp_path: Path) -> None:
    (was_alive,) = run_ranks(lose_launcher, 1, tmp_path)
    assert not was_alive


def watch_a_rank_that_fails(root: Path) -> tuple[int, str, list[int]]:
    """Returns status and words of a launcher whose first rank fails, and the ids of the ranks that it started."""
    told, tell = os.pipe()

    def launch() -> None:
        start_module._FAILED_SECONDS = 0.1
        ranks = [subprocess.Popen(["sh", "-c", "exit 3"]), subprocess.Popen(["sleep", "100"])]
        os.write(tell, " ".join(str(rank.pid) for rank in ranks).encode())
        start_module._watch_ranks(ranks, threading.Event())

    launcher = fork(launch, out=root / "launcher")
    status = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
    return status, (root / "launcher").read_text(), [int(pid) for pid in os.read(told, 40).split()]


@pytest.mark.process
def test_a_rank_that_fails_is_named_and_ends_those_that_still_run(tmp_path: Path) -> None:
    ((status, words, (failed, other)),) = run_ranks(watch_a_rank_that_fails, 1, tmp_path)
    assert status == 70, words
    assert words.startswith(
        f"genesis: error: local rank 1 (process {failed}) ended (exit status 3); the others still ran"
    )
    assert words.count("\n") == 1
    wait_for(lambda: not is_alive(other))
