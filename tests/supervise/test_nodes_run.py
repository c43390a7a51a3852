"""Several nodes: a supervisor in each of two network namespaces, which share a directory, and real ranks."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from genesis.processes import Mark, find_processes
from genesis.rehearse.compare import compare_runs
from genesis.run_directory import RunDirectory
from genesis.supervise.crashes import read_crashes
from genesis.supervise.launcher_client import MARK_NAME
from genesis.supervise.state import SupervisorLock, read_state
from genesis_callbacks.heartbeats import read_heartbeats
from tests.cli.tiny import build_recipe, write_recipe

pytestmark = [pytest.mark.long, pytest.mark.process]

_ADDRESSES = ("10.213.77.1", "10.213.77.2")
_ENDPOINT = f"{_ADDRESSES[0]}:29400"
_LIMIT_SECONDS = 600.0


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Yields two network namespaces with a cable between them."""
    names = (f"genesis-a-{os.getpid()}", f"genesis-b-{os.getpid()}")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces: no program ip")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "gena", "netns", names[0], "type", "veth", "peer", "name", "genb", "netns", names[1])
        for name, device, address in zip(names, ("gena", "genb"), _ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            for each in (device, "lo"):
                _ip("-n", name, "link", "set", each, "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


class Node:
    """A supervisor in a namespace."""

    def __init__(self, namespace: str, name: str, nodes: str, recipe: Path, run_dir: Path, log: Path) -> None:
        self.place, self.log, self._run_dir = RunDirectory(run_dir).supervisor / f"node-{name}", log, run_dir
        words = ["--nodes", nodes, "--rdzv", _ENDPOINT, "--node-name", name, "--last-call-seconds", "2"]
        command = [sys.executable, "-m", "genesis", "supervise", *words, "--", "fit", "--config", str(recipe)]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, *command],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @property
    def mark(self) -> Mark:
        state = read_state(self.place)
        assert state is not None
        return Mark(MARK_NAME, state.run_id)

    def kill(self) -> None:
        """Takes the whole node away: its supervisor, its launcher and its ranks."""
        mark = self.mark
        self.process.kill()
        self.process.wait()
        while left := find_processes(mark):
            for process in left:
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.05)

    def wait(self) -> int:
        return self.process.wait(_LIMIT_SECONDS)


@pytest.fixture
def start(namespaces: tuple[str, str], tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Returns a function that starts the supervisor of a node; those that are left are ended."""
    nodes: list[Node] = []

    def start_node(index: int, size: str, recipe: Path, run_dir: Path) -> Node:
        log = tmp_path / f"node-{'ab'[index]}.log"
        nodes.append(Node(namespaces[index], "ab"[index], size, recipe, run_dir, log))
        return nodes[-1]

    yield start_node
    for node in nodes:
        if node.process.poll() is None:
            node.kill()
    for log in sorted(tmp_path.glob("node-*.log")):
        sys.stdout.write(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}\n")


def wait_step(run_dir: Path, world_size: int, step: int) -> int:
    """Waits until ranks of a world of this size are beyond a step, and returns the step that they have reached."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < deadline:
        beats = [beat for beat in read_heartbeats(run_dir).values() if beat.world_size == world_size]
        fresh = [beat.step for beat in beats if time.time() - beat.time_seconds < 5 and beat.phase == "train"]
        if len(fresh) == world_size and min(fresh) > step:
            return max(fresh)
        time.sleep(0.1)
    raise AssertionError(f"no {world_size} ranks beyond step {step}")


def fit(recipe: Path, run_dir: Path, devices: int) -> None:
    words = ["--run_dir", str(run_dir), "--trainer.devices", str(devices)]
    subprocess.run(
        [sys.executable, "-m", "genesis", "fit", "--config", str(recipe), *words],
        check=True,
        timeout=_LIMIT_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def read_losses(run_dir: Path) -> dict[int, tuple[float, str]]:
    """Returns loss and count of tokens by step, those of the last attempt that trained it."""
    lines = [line.split(",") for line in RunDirectory(run_dir).metrics.read_text().splitlines()]
    step, loss, tokens = (lines[0].index(name) for name in ("step", "train/loss", "counters/tokens_seen"))
    return {int(line[step]): (float(line[loss]), line[tokens]) for line in lines[1:] if line[loss]}


def assert_nothing_left(namespaces: tuple[str, str], *nodes: Node) -> None:
    """Every process of a node and every port that it takes is in its namespace."""
    for name in namespaces:
        assert subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True).stdout == b""
    for node in nodes:
        assert find_processes(node.mark) == []
        SupervisorLock(node.place).release()


def write(tmp_path: Path, corpus: Path, max_steps: int, **changes: object) -> Path:
    recipe = build_recipe(corpus, tmp_path / "run")
    given = {"trainer.max_steps": max_steps, "trainer.val_check_interval": 100_000, "checkpoint.every_n_steps": 50}
    return write_recipe(tmp_path / "recipe.yaml", recipe, {**given, **changes})


@pytest.mark.timeout(1200)
def test_two_nodes_train_the_weights_of_two_ranks_also_after_one_was_killed_whole_and_brought_back(
    tiny_corpus: Path, tmp_path: Path, namespaces: tuple[str, str], start: Callable[..., Node]
) -> None:
    recipe, run_dir = write(tmp_path, tiny_corpus, 600), tmp_path / "run"
    fit(recipe, tmp_path / "straight", 2)
    first, second = start(0, "2", recipe, run_dir), start(1, "2", recipe, run_dir)
    wait_step(run_dir, 2, 60)
    second.kill()
    again = start(1, "2", recipe, run_dir)
    assert (first.wait(), again.wait()) == (0, 0)
    assert compare_runs(tmp_path / "straight", run_dir).is_equal
    assert read_losses(run_dir) == read_losses(tmp_path / "straight")
    assert "is lost" in first.log.read_text()
    assert read_crashes(run_dir) == []
    assert_nothing_left(namespaces, first, again)


@pytest.mark.timeout(1200)
def test_a_run_goes_on_with_one_node_and_later_with_two(
    tiny_corpus: Path, tmp_path: Path, namespaces: tuple[str, str], start: Callable[..., Node]
) -> None:
    recipe, run_dir = write(tmp_path, tiny_corpus, 600, **{"data.global_batch_size": 32}), tmp_path / "run"
    first = start(0, "1:2", recipe, run_dir)
    wait_step(run_dir, 1, 10)
    second = start(1, "1:2", recipe, run_dir)
    wait_step(run_dir, 2, 10)
    assert (first.wait(), second.wait()) == (0, 0)
    fit(recipe, tmp_path / "straight", 1)
    losses, straight = read_losses(run_dir), read_losses(tmp_path / "straight")
    assert {step: tokens for step, (_, tokens) in losses.items()} == {
        step: tokens for step, (_, tokens) in straight.items()
    }
    # Sums of gradients are added in another order.
    assert [losses[step][0] for step in sorted(losses)] == pytest.approx(
        [straight[step][0] for step in sorted(straight)], rel=0.02
    )
    assert read_crashes(run_dir) == []
    assert_nothing_left(namespaces, first, second)
