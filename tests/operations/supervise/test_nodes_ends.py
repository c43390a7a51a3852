"""How several nodes refuse and end: two supervisors with real ranks, which meet on loopback and share a directory.

Each is a process of its own with its own signals, forked with the imports done, as is its launcher.
"""

import contextlib
import http.server
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from genesis.base.run_directory import RunDirectory
from genesis.operations.rehearse.compare import compare_runs
from genesis.operations.supervise.checkpoints import newest_step
from genesis.operations.supervise.cleanup import choose_port
from genesis.operations.supervise.crashes import read_crashes
from genesis.operations.supervise.skips import Skips
from genesis.operations.supervise.state import SupervisorLock, read_skips
from genesis_callbacks.base.event_reader import read_events
from genesis_callbacks.heartbeats import HeartbeatRecord, read_heartbeats
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import STDOUT, run_genesis, start_genesis

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(600)]

_Found = TypeVar("_Found")
_LIMIT_SECONDS = 150.0
_LONG = 1_000_000
"""More steps than a test waits for."""


class Node:
    """A supervisor, and what it prints."""

    def __init__(self, log: Path, recipe: Path, *options: str) -> None:
        self.log = log
        words = ["supervise", "--last_call_seconds", "1", *options, "--", "fit", "--config", str(recipe)]
        with log.open("ab") as out:
            self.process = start_genesis(*words, stdout=out, stderr=STDOUT)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def error(self) -> str:
        """The line that begins as an error; an assertion fails unless there is exactly one."""
        lines = [line for line in self.text.splitlines() if line.startswith("genesis: error: ")]
        assert len(lines) == 1, self.text
        assert "Traceback" not in self.text
        return lines[0].removeprefix("genesis: error: ")

    def wait(self) -> int:
        return self.process.wait(_LIMIT_SECONDS)


class Pair:
    """Starts supervisors that meet at one port.

    Args:
        directory: Holds recipes, logs and, unless another place is given, the run.
        corpus: The corpus.
    """

    def __init__(self, directory: Path, corpus: Path) -> None:
        self.directory, self.endpoint, self.run_dir = directory, f"127.0.0.1:{choose_port()}", directory / "run"
        self._corpus = corpus
        self.nodes: list[Node] = []

    def write(self, name: str = "recipe", **changes: object) -> Path:
        """Writes a recipe; its steps are endless unless `max_steps` is given."""
        recipe = build_recipe(self._corpus, self.run_dir)
        defaults = {"trainer.max_steps": _LONG, "trainer.val_check_interval": _LONG, "checkpoint.every_n_steps": 200}
        given = {key.replace("__", "."): value for key, value in changes.items()}
        return write_recipe(self.directory / f"{name}.yaml", recipe, {**defaults, **given})

    def start(self, name: str, recipe: Path, *options: str, nodes: str = "2") -> Node:
        """Starts the supervisor of a node."""
        where = [] if "--rdzv" in options else ["--rdzv", self.endpoint]
        log = self.directory / f"{name}-{len(self.nodes)}.log"
        self.nodes.append(Node(log, recipe, "--nodes", nodes, "--node_name", name, *where, *options))
        return self.nodes[-1]

    def end(self) -> None:
        """Ends what is left: the ranks end with their launcher, which ends without a supervisor and ranks."""
        for node in self.nodes:
            node.process.terminate()
        for node in self.nodes:
            with contextlib.suppress(Exception):
                node.process.wait(60.0)
            node.process.kill()
            node.process.wait(60.0)

    def is_hosted(self) -> bool | None:
        """Returns True once a supervisor listens at the endpoint; else None."""
        host, _, port = self.endpoint.partition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0 or None

    def wait_trained(self, more_than: int = 0) -> dict[int, HeartbeatRecord]:
        """Waits until both ranks train beyond a step, and returns their heartbeats."""

        def look() -> dict[int, HeartbeatRecord] | None:
            beats = {rank: beat for rank, beat in read_heartbeats(self.run_dir).items() if beat.world_size == 2}
            is_there = len(beats) == 2 and all(
                beat.step > more_than and beat.phase == "train" and time.time() - beat.time_seconds < 5
                for beat in beats.values()
            )
            return beats if is_there else None

        return wait_for(look)


def wait_for(look: Callable[[], _Found | None]) -> _Found:
    """Waits until a function returns something, and returns it."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < deadline:
        if (found := look()) is not None:
            return found
        time.sleep(0.1)
    raise AssertionError("it did not come")


@pytest.fixture
def pair(tiny_corpus: Path, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, tiny_corpus)
    yield made
    made.end()
    for node in made.nodes:
        print(f"--- {node.log.name}\n{node.text[-4000:]}")


@contextlib.contextmanager
def serving_something_else() -> Iterator[int]:
    """Yields the port of a program that is no supervisor."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_nobody_to_meet_is_refused_in_one_line(pair: Pair) -> None:
    recipe = pair.write()
    with serving_something_else() as port:
        taken = pair.start("a", recipe, "--rdzv", f"127.0.0.1:{port}")
        # An address for documentation, which nobody has.
        silent = pair.start("b", recipe, "--rdzv", "192.0.2.1:29400", "--rdzv_seconds", "2")
        unknown = pair.start("c", recipe, "--rdzv", "nowhere.invalid:29400", "--rdzv_seconds", "2")
        alone = pair.start("d", recipe, "--rdzv_seconds", "2")
        assert [node.wait() for node in (taken, silent, unknown, alone)] == [2, 2, 2, 2]
        assert taken.error == (
            f"--rdzv 127.0.0.1:{port} answers, but is no rendezvous of genesis: give a port that no other program uses"
        )
    for node, endpoint in ((silent, "192.0.2.1:29400"), (unknown, "nowhere.invalid:29400")):
        assert re.fullmatch(
            rf"--rdzv {endpoint} did not answer within 2 s \(.+\): give the name of one of the nodes, and start its "
            "supervisor",
            node.error,
        )
        assert f"waiting for {endpoint} to answer, at most 2 s" in node.text
    assert alone.error.startswith(f"fewer than 2 nodes came to {pair.endpoint} within 2 s: start the same command on")
    assert read_crashes(pair.run_dir) == []


def test_nodes_that_do_not_belong_together_are_refused_on_both(pair: Pair, tmp_path: Path) -> None:
    recipe, other = pair.write(), pair.write("other", model__optimizer={"lr": 2e-2})
    for number, (given, size, text) in enumerate(
        [
            (other, "2", r"the recipe \((on b and a|on a and b)\)"),
            (recipe, "2:3", r"--nodes \((2:3 on b, 2 on a|2 on a, 2:3 on b)\)"),
        ]
    ):
        pair.endpoint = f"127.0.0.1:{choose_port()}"
        nodes = [pair.start("a", recipe), pair.start("b", given, nodes=size)]
        assert [node.wait() for node in nodes] == [2, 2], number
        for node in nodes:  # which of the two is node 0 is left to the rendezvous
            whole = f"the nodes differ in {text}: give the same command on each node"
            assert re.fullmatch(whole, node.error), node.error
    pair.endpoint = f"127.0.0.1:{choose_port()}"
    elsewhere = write_recipe(tmp_path / "elsewhere.yaml", build_recipe(pair._corpus, tmp_path / "another"))
    same = write_recipe(tmp_path / "same.yaml", build_recipe(pair._corpus, pair.run_dir))
    nodes = [pair.start("a", same), pair.start("b", elsewhere)]
    assert [node.wait() for node in nodes] == [2, 2]
    for node in nodes:
        assert str(pair.run_dir) in node.error
        assert str(tmp_path / "another") in node.error
        assert "are different directories: give the same --run_dir on each node, on storage that all" in node.error


@pytest.mark.long
def test_a_preempted_node_saves_and_leaves_and_the_other_ends_to_be_requeued(pair: Pair, tmp_path: Path) -> None:
    recipe, mirror = pair.write(), tmp_path / "mirror"
    options = ("--rdzv_seconds", "60", "--metrics_port", "0", "--mirror", str(mirror))
    first = pair.start("a", recipe, *options)
    wait_for(pair.is_hosted)
    second = pair.start("b", recipe, *options)
    pair.wait_trained(10)
    twin = pair.start("b", recipe)
    assert twin.wait() == 2
    assert twin.error == (
        f"{RunDirectory(pair.run_dir).supervisor} already has a supervisor of node b (process {second.process.pid}): "
        "end it first, or give this node another --node_name"
    )
    wait_for(lambda: mirror.exists() or None)
    for node, name in ((first, "a"), (second, "b")):
        figures = read_metrics(node)
        assert f'node="{name}"' in figures
        assert "genesis_ranks" in figures
    assert sorted(count_mirrors(node) for node in (first, second)) == [0, 1]
    second.process.terminate()
    assert second.wait() == 75
    assert newest_step(pair.run_dir) > 0
    assert first.wait() == 75  # it has waited for the other to come back
    assert "the nodes meet again: node b: the supervisor got SIGTERM" in first.text
    assert f"fewer than 2 nodes came to {pair.endpoint} within 60 s: start the same command" in first.text
    found = [event for event in read_events(pair.run_dir) if event.kind == "preempted"]
    assert [event.text for event in found] == ["node b: the supervisor got SIGTERM"]
    assert read_crashes(pair.run_dir) == []


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
def test_ctrl_c_on_one_node_saves_the_run_and_ends_it_on_all(pair: Pair, is_late: bool) -> None:
    recipe = pair.write()
    nodes = [pair.start("a", recipe), pair.start("b", recipe)]
    beats = pair.wait_trained(10)
    if is_late:  # the ranks of node a save and end with those of node b before its supervisor hears why
        nodes[0].process.send_signal(signal.SIGSTOP)
    nodes[1].process.send_signal(signal.SIGINT)
    if is_late:
        wait_for(lambda: not any(Path(f"/proc/{beat.pid}").exists() for beat in beats.values()) or None)
        nodes[0].process.send_signal(signal.SIGCONT)
    assert [node.wait() for node in nodes] == [130, 130]
    for node in nodes:
        assert "node b: the supervisor got SIGINT" in node.text
    assert newest_step(pair.run_dir) >= min(beat.step for beat in beats.values())
    assert read_crashes(pair.run_dir) == []
    for name in "ab":
        SupervisorLock(RunDirectory(pair.run_dir).supervisor / f"node-{name}").release()


def test_a_rank_that_hangs_on_one_node_is_named_and_all_nodes_train_again(pair: Pair) -> None:
    recipe = pair.write(checkpoint__every_n_steps=20)
    nodes = [pair.start("a", recipe), pair.start("b", recipe)]
    beats = pair.wait_trained(25)
    os.kill(beats[1].pid, signal.SIGSTOP)
    crash = wait_for(lambda: next((each for each in read_crashes(pair.run_dir) if each.resumed_from), None))
    assert (crash.end_class, crash.rank) == ("hang", 1)
    after = pair.wait_trained()
    assert not {beat.pid for beat in after.values()} & {beat.pid for beat in beats.values()}
    nodes[0].process.send_signal(signal.SIGINT)
    assert [node.wait() for node in nodes] == [130, 130]
    assert len(read_crashes(pair.run_dir)) == 1


@pytest.mark.parametrize("what", ["supervisor", "machine"])
def test_a_node_whose_supervisor_or_machine_is_killed_comes_back_and_both_train_on(pair: Pair, what: str) -> None:
    recipe = pair.write(checkpoint__every_n_steps=20)
    nodes = {"a": pair.start("a", recipe)}
    wait_for(pair.is_hosted)
    nodes["b"] = pair.start("b", recipe)
    step = 25
    for name in "ba":  # the other one first, then HOST
        beats = pair.wait_trained(step)
        ranks = [beat.pid for beat in beats.values()]
        launchers = {read_parent(pid) for pid in ranks}
        nodes[name].process.kill()
        assert nodes[name].wait() == -signal.SIGKILL
        place = RunDirectory(pair.run_dir).supervisor / f"node-{name}"
        launcher = next(pid for pid in launchers if place in Path(f"/proc/{pid}/fd/1").readlink().parents)
        own = next(pid for pid in ranks if read_parent(pid) == launcher)
        if what == "machine":
            os.kill(launcher, signal.SIGKILL)
            wait_for(lambda own=own, launcher=launcher: read_parent(own) != launcher or None)  # its ranks end with it
        nodes[name] = pair.start(name, recipe)
        beats = wait_for(lambda ranks=ranks: find_others(pair.run_dir, ranks))
        step = max(beat.step for beat in beats.values()) + 5
    pair.wait_trained(step)
    nodes["b"].process.send_signal(signal.SIGINT)
    assert [node.wait() for node in nodes.values()] == [130, 130]
    assert "is lost" in pair.nodes[0].text
    assert "the rendezvous at" in nodes["b"].text
    assert read_crashes(pair.run_dir) == []


def read_parent(pid: int) -> int | None:
    """Returns the parent of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in b"ZX" else int(fields[1])


def find_others(run_dir: Path, ranks: list[int]) -> dict[int, HeartbeatRecord] | None:
    """Returns the heartbeats of two ranks that train and are none of `ranks`; None while there are none."""
    beats = read_heartbeats(run_dir)
    is_new = len(beats) == 2 and not {beat.pid for beat in beats.values()} & set(ranks)
    return beats if is_new and all("first_step" in beat.milestones for beat in beats.values()) else None


@pytest.mark.repeat  # `callbacks/tests/test_hang_watch.py`; the ranks meet in one directory
def test_hang_watch_names_a_stopped_rank_of_another_node(pair: Pair) -> None:
    recipe = pair.write(telemetry__hang_seconds=12.0)
    words = ["fit", "--config", str(recipe), "--trainer.num_nodes", "2"]
    host, _, port = pair.endpoint.partition(":")
    group = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    group |= {"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "two"}
    logs = [pair.directory / f"rank-{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        environment = {**os.environ, **group, "RANK": str(rank), "GROUP_RANK": str(rank)}
        with log.open("wb") as out:
            ranks.append(start_genesis(*words, env=environment, stdout=out, stderr=STDOUT))
    try:
        pair.wait_trained(10)
        ranks[1].send_signal(signal.SIGSTOP)
        assert ranks[0].wait(_LIMIT_SECONDS) == 92
    finally:
        for process in ranks:
            process.kill()
            process.wait(_LIMIT_SECONDS)
        for log in logs:
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")
    found = [event for event in read_events(pair.run_dir) if event.kind == "hang"]
    assert len(found) == 1
    assert found[0].rank == 0
    assert found[0].text.startswith("rank 1 ")
    (verdict,) = (pair.run_dir / "hangs").glob("*/verdict.txt")
    assert verdict.read_text().startswith("rank 1 ")


def test_two_nodes_skip_a_storm_by_one_budget_and_equal_two_ranks_told_to_skip_it(pair: Pair, tmp_path: Path) -> None:
    poison = {"class_path": "tests.operations.supervise.poison.PoisonedData", "init_args": {"first": 80, "stop": 104}}
    given = {"trainer__callbacks": [poison], "counters__max_consecutive_skips": 3, "checkpoint__every_n_steps": 4}
    given |= {"trainer__max_steps": 24, "schedule__total_updates": 24}
    recipe = pair.write(**given)
    nodes = [pair.start(name, recipe, "--may_skip_data", "5") for name in "ab"]
    assert [node.wait() for node in nodes] == [0, 0]
    (crash,) = read_crashes(pair.run_dir)
    assert (crash.end_class, crash.step) == ("non_finite", 13)
    assert crash.action == (
        "roll back by 1 checkpoint and skip 3 windows of data, positions 80 to 103 (3 of --may_skip_data 5 used)"
    )
    assert read_skips(pair.run_dir) == Skips(((80, 104),), 3)
    straight = tmp_path / "straight"
    words = ["--run_dir", str(straight), "--trainer.devices", "2", "--data.skip_positions", "[[80, 104]]"]
    done = run_genesis("fit", "--config", str(recipe), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    comparison = compare_runs(straight, pair.run_dir)
    assert comparison.is_equal, comparison


def read_metrics(node: Node) -> str:
    found = re.search(r"metrics at (http://[\d.:]+/metrics)", node.text)
    assert found is not None
    with urllib.request.urlopen(found[1], timeout=120) as answer:
        content: bytes = answer.read()
    return content.decode()


def count_mirrors(node: Node) -> int:
    """Returns how many processes of a mirror a supervisor has started."""
    children = Path(f"/proc/{node.process.pid}/task/{node.process.pid}/children").read_text().split()
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
    return sum(b"mirror" in line for line in lines)


def test_the_port_of_a_rendezvous_is_free_after_its_run(pair: Pair) -> None:
    node = pair.start("a", pair.write(trainer__max_steps=4), nodes="1")
    assert node.wait() == 0
    with socket.socket() as server:
        host, _, port = pair.endpoint.partition(":")
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, int(port)))
