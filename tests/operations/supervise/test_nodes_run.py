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

from genesis.base.processes import Mark, find_kind, find_processes
from genesis.base.run_directory import RunDirectory
from genesis.operations.rehearse.compare import compare_runs
from genesis.operations.supervise.crashes import read_crashes
from genesis.operations.supervise.launcher_client import MARK_NAME
from genesis.operations.supervise.state import SupervisorLock, read_state
from genesis_callbacks.base.event_reader import read_events
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
        self.place, self.log, self.run_dir = RunDirectory(run_dir).supervisor / f"node-{name}", log, run_dir
        words = ["--nodes", nodes, "--rdzv", _ENDPOINT, "--node_name", name, "--last_call_seconds", "2"]
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

    def kill_supervisor(self) -> None:
        """Kills the supervisor alone, which `ip` has become; its ranks train on."""
        self.process.kill()
        self.process.wait()
        assert [process for process in find_processes(self.mark) if find_kind(process) == "rank"]

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


def read_pids(run_dir: Path) -> set[int]:
    return {beat.pid for beat in read_heartbeats(run_dir).values()}


def wait_others(run_dir: Path, before: set[int]) -> None:
    """Waits until two ranks train that are none of those before."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while read_pids(run_dir) & before:
        assert time.monotonic() < deadline, "the ranks stay"
        time.sleep(0.1)
    wait_step(run_dir, 2, 1)


def wait_text(log: Path, text: str, times: int) -> None:
    """Waits until a log has a text so many times."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while log.read_text(errors="replace").count(text) < times:
        assert time.monotonic() < deadline, f"{log} has no further {text!r}"
        time.sleep(0.1)


def wait_no_ranks(node: Node) -> None:
    """Waits until a node has no ranks."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while read_pids(node.run_dir) & {process.pid for process in find_processes(node.mark)}:
        assert time.monotonic() < deadline, "its ranks stay"
        time.sleep(0.1)


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


def assert_same_losses(run_dir: Path, straight: Path) -> None:
    # Also the rows of the steps that were saved right before a kill.
    assert read_losses(run_dir) == read_losses(straight)


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


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("per_node", "axes"),
    [(1, {}), (2, {"tensor_parallel": 2}), (2, {"tensor_parallel": 2, "pipeline_parallel": 2})],
    ids=["dp_across", "tp_inside_dp_across", "tp_inside_pp_across"],
)
def test_two_nodes_train_the_weights_of_one_also_after_one_was_killed_whole_and_brought_back(
    tiny_corpus: Path,
    tmp_path: Path,
    namespaces: tuple[str, str],
    start: Callable[..., Node],
    per_node: int,
    axes: dict[str, int],
) -> None:
    strategy = {"class_path": "genesis.strategies.Sharded", "init_args": axes} if axes else "replicated"
    changes = {"trainer.devices": per_node, "trainer.strategy": strategy, "model.decoder.num_layers": 2}
    recipe, run_dir = write(tmp_path, tiny_corpus, 300, **changes), tmp_path / "run"
    fit(recipe, tmp_path / "straight", 2 * per_node)
    first, second = start(0, "2", recipe, run_dir), start(1, "2", recipe, run_dir)
    wait_step(run_dir, 2 * per_node, 60)
    second.kill()
    again = start(1, "2", recipe, run_dir)
    assert (first.wait(), again.wait()) == (0, 0)
    assert compare_runs(tmp_path / "straight", run_dir).is_equal
    assert_same_losses(run_dir, tmp_path / "straight")
    assert "is lost" in first.log.read_text()
    assert "crosses nodes" not in first.log.read_text()
    assert read_crashes(run_dir) == []
    assert_nothing_left(namespaces, first, again)


@pytest.mark.timeout(1800)
def test_two_nodes_train_the_weights_of_two_ranks_after_every_loss_of_a_supervisor_host_and_rank(
    tiny_corpus: Path, tmp_path: Path, namespaces: tuple[str, str], start: Callable[..., Node]
) -> None:
    # The ranks of a supervisor that was killed train on until it is noticed.
    recipe, run_dir = write(tmp_path, tiny_corpus, 3000), tmp_path / "run"
    fit(recipe, tmp_path / "straight", 2)
    nodes = [start(index, "2", recipe, run_dir) for index in range(2)]
    wait_step(run_dir, 2, 60)
    for index in (1, 0):  # the supervisor alone, the second time the one that hosts the rendezvous
        before_pids = read_pids(run_dir)
        nodes[index].kill_supervisor()
        nodes[index] = start(index, "2", recipe, run_dir)
        wait_others(run_dir, before_pids)
    lost = f"the rendezvous at {_ENDPOINT} is lost"
    before = nodes[1].log.read_text(errors="replace").count(lost)
    assert before
    before_pids = read_pids(run_dir)
    nodes[0].kill()  # the machine at which they meet
    wait_text(nodes[1].log, lost, before + 1)
    wait_no_ranks(nodes[1])
    nodes[0] = start(0, "2", recipe, run_dir)
    wait_others(run_dir, before_pids)
    os.kill(read_heartbeats(run_dir)[1].pid, signal.SIGSTOP)
    assert [node.wait() for node in nodes] == [0, 0]
    assert compare_runs(tmp_path / "straight", run_dir).is_equal
    assert_same_losses(run_dir, tmp_path / "straight")
    (crash,) = read_crashes(run_dir)
    assert (crash.end_class, crash.rank) == ("hang", 1)
    assert_nothing_left(namespaces, *nodes)


@pytest.mark.timeout(1200)
def test_hang_watch_names_a_stopped_rank_of_another_node(
    tiny_corpus: Path, tmp_path: Path, namespaces: tuple[str, str]
) -> None:
    recipe, run_dir = write(tmp_path, tiny_corpus, 1_000_000, **{"telemetry.hang_seconds": 15.0}), tmp_path / "run"
    group = {"MASTER_ADDR": _ADDRESSES[0], "MASTER_PORT": "29401", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    group |= {"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "two", "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank, device in enumerate(("gena", "genb")):
        variables = {"RANK": str(rank), "GROUP_RANK": str(rank), "GLOO_SOCKET_IFNAME": device}
        command = ["fit", "--config", str(recipe), "--trainer.num_nodes", "2"]
        # A host name of its own, as another machine has.
        host = ["unshare", "--uts", "sh", "-c", f'hostname node-{rank}; exec "$@"', "sh"]
        ranks.append(
            subprocess.Popen(
                ["ip", "netns", "exec", namespaces[rank], *host, sys.executable, "-m", "genesis", *command],
                env={**os.environ, **group, **variables},
                stderr=subprocess.PIPE,
            )
        )
    try:
        wait_step(run_dir, 2, 20)
        ranks[1].send_signal(signal.SIGSTOP)
        assert ranks[0].wait(_LIMIT_SECONDS) == 92
    finally:
        for process in ranks:
            process.kill()
        errors = [process.communicate()[1].decode() for process in ranks]
    assert "hang: rank 1 is missing: it has written no report" in errors[0]
    (event,) = [event for event in read_events(run_dir) if event.kind == "hang"]
    assert event.rank == 0
    assert event.text.startswith("rank 1 is missing: ")
    (report,) = (run_dir / "hangs").glob("*/rank-0.json")
    assert '"node-0"' in report.read_text()


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
