"""Checks that all ranks of a process group were started together, and ends ranks that outlive their launcher.

On a fixed port, a rank left over from an earlier start can join the ranks of this start: its checkpoints would
verify although its weights belong to another run. So right after the process group exists, all ranks compare their
launchers and their recipes.

    launcher     the same on all ranks    the same on the ranks of a node
    Lightning    -                        a random number of local rank 0, inherited by the ranks that it starts
    torchrun     the run's id             the count of restarts, which each node's agent keeps for itself
    unknown      -                        -
"""

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from genesis.base.errors import QuietExit, RunEndedError, numbered
from genesis.base.parent import (
    LAUNCHER_NAME,
    NONCE_NAME,
    LauncherKind,
    end_with_parent,
    is_launched,
    launcher_kind,
    outlive_parent,
)
from genesis.base.processes import without_input
from genesis_callbacks.base.hashing import hash_bytes
from genesis_callbacks.checkpoint import Ranks
from genesis_callbacks.checkpoint.drift import compare_mappings

EXIT_STATUS = 70
"""sysexits' EX_SOFTWARE, as for a rank that has lost another one."""

_ANSWER_SECONDS = 300.0
_POLL_SECONDS = 1.0
# The process group and the checkpoint callback's watch detect a lost rank earlier, and name it.
_ORPHAN_SECONDS = 60.0
_FAILED_SECONDS = 30.0


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher of further ranks, with another watch over them; each rank knows its launcher and its start.

    Lightning's own watch kills all ranks some seconds after one has ended, before they have named the lost one or
    finished a save. This launcher gives them time for both, and names the rank that ended.
    """

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Starts the further ranks of this node, calls `function`, and returns what it returns."""
        del kwargs["trainer"]
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            os.environ[LAUNCHER_NAME] = str(os.getpid())
            os.environ[NONCE_NAME] = uuid.uuid4().hex
            with without_input():
                self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        is_over = threading.Event()
        threading.Thread(target=_watch_ranks, args=(self.procs, is_over), name="ranks-watch", daemon=True).start()
        try:
            return function(*args, **kwargs)
        finally:
            is_over.set()


def _watch_ranks(processes: Sequence[subprocess.Popen[bytes]], is_over: threading.Event) -> None:
    """Ends this process and the ranks that it started some time after one of them has failed."""
    while not (failed := [(n, process) for n, process in enumerate(processes, 1) if process.poll()]):
        if is_over.wait(_POLL_SECONDS):
            return
    if is_over.wait(_FAILED_SECONDS):
        return
    number, process = failed[0]
    status = process.returncode
    how = f"exit status {status}" if status > 0 else f"killed by {signal.Signals(-status).name}"
    sys.stderr.write(
        f"genesis: error: local rank {number} (process {process.pid}) ended ({how}); the others still ran "
        f"{_FAILED_SECONDS:g} s later and are ended as well: start the run again\n"
    )
    sys.stderr.flush()
    for other in processes:
        other.kill()
    os._exit(EXIT_STATUS)


@dataclass(frozen=True)
class StartOfRank:
    """A rank's own record of its start.

    Args:
        launcher: The program that started it.
        node: The number of its node.
        run: A name that is the same on all ranks.
        nonce: A value that is the same on the ranks of a node.
        recipe_hash: The hash of the resolved recipe as JSON.
    """

    launcher: LauncherKind
    node: int
    run: str
    nonce: str
    recipe_hash: str


def read_start(node: int, recipe: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> StartOfRank:
    """Returns what this process knows about its own start."""
    recipe_hash = hash_bytes(json.dumps(recipe, sort_keys=True).encode(), "blake3")
    launcher = launcher_kind(environment)
    if launcher == "torchrun":
        run, nonce = environment["TORCHELASTIC_RUN_ID"], environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return StartOfRank(launcher, node, run, f"restart {nonce}", recipe_hash)
    return StartOfRank(launcher, node, "", environment.get(NONCE_NAME, ""), recipe_hash)


def find_stray(starts: Sequence[StartOfRank]) -> tuple[int, str] | None:
    """Returns the first rank that was not started together with those before it, and the difference, or None. Pure.

    Args:
        starts: By rank.
    """
    nonces: dict[int, tuple[int, str]] = {}
    for rank, start in enumerate(starts):
        first, nonce = nonces.setdefault(start.node, (rank, start.nonce))
        for name, own, other, other_rank in (
            ("launcher", start.launcher, starts[0].launcher, 0),
            ("run", start.run, starts[0].run, 0),
            ("start", start.nonce, nonce, first),
        ):
            if own != other:
                return rank, f"its {name} is {own!r}, that of rank {other_rank} is {other!r}"
    return None


def check_same_start(own: StartOfRank, recipe: Mapping[str, Any]) -> list[StartOfRank]:
    """Compares the starts of all ranks, and returns them. Every rank calls it; it communicates over its own group.

    Raises:
        RunEndedError: On rank 0 and the first rank that differs from it: that rank is of another start, or has
            another recipe.
        QuietExit: On the other ranks, so that the reason is printed once.
    """
    try:
        ranks = Ranks(timeout_seconds=_ANSWER_SECONDS)
        # First the small records, then the recipes only if their hashes differ. Every rank sees the same records and
        # takes the same branch, so the second gather matches.
        starts = ranks.gather(own)
        found = find_stray(starts)
        if found is None:
            others = [rank for rank, start in enumerate(starts) if start.recipe_hash != starts[0].recipe_hash]
            if not others:
                return starts
            recipes = ranks.gather(recipe)
    except RuntimeError as error:
        raise RunEndedError(
            f"the ranks connected, but one of them did not answer ({' '.join(str(error).split())}): start the run again"
        ) from error
    if found is not None:
        stray, difference = found
        message = (
            f"rank {stray} belongs to another start ({difference}): end the processes of the earlier start, or give "
            "this run another MASTER_PORT, and start it again"
        )
    else:
        stray = others[0]
        difference = _describe_difference(recipes[0], recipes[stray])
        message = f"rank {stray} has another recipe than rank 0 ({difference}): start all ranks with the same recipe"
    if ranks.rank not in (0, stray):
        raise QuietExit(RunEndedError.exit_status)
    raise RunEndedError(message)


def _describe_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    (key, value, other_value), *more = compare_mappings(first, other)
    rest = f", and {numbered(len(more), 'other keys')}" if more else ""
    return f"{key} is {other_value!r}, on rank 0 {value!r}{rest}"


class Start:
    """The start of this rank, from before it meets the others until its strategy ends.

    Attributes:
        recipe: The resolved recipe, the same on all ranks; set it before the ranks join the process group.
        nodes: The node of each rank, known after `check`.
    """

    def __init__(self) -> None:
        self.recipe: Mapping[str, Any] = {}
        self.nodes: Sequence[int] = ()
        self._stopped: threading.Event | None = None

    def begin(self) -> None:
        """Makes this rank end with its launcher. Called before the ranks join the process group."""
        end_with_parent()

    def check(self, node: int) -> None:
        """Compares this start with those of all ranks, which have just joined the process group. Communicates.

        Raises:
            RunEndedError: See `check_same_start`.
        """
        self.nodes = [node]
        if dist.get_world_size() > 1:
            self.nodes = [start.node for start in check_same_start(read_start(node, self.recipe), self.recipe)]
        if is_launched() and self._stopped is None:
            # Until here a rank ends immediately with its launcher, since it might wait forever in the rendezvous. From
            # here on other ranks notice the loss of rank 0 and name it, and at the run's end rank 0 may end first.
            self._stopped = threading.Event()
            watch = threading.Thread(
                target=_watch_launcher, args=(os.getppid(), self._stopped), name="launcher-watch", daemon=True
            )
            watch.start()
            outlive_parent()

    def end(self) -> None:
        """Lets this rank outlive its launcher. Does not wait for other ranks."""
        if self._stopped is not None:
            self._stopped.set()
            self._stopped = None


def _watch_launcher(launcher: int, stopped: threading.Event) -> None:
    """Ends this process some time after its launcher has ended, unless it is stopped before."""
    # A process whose parent has ended gets another parent, so a changed number is enough; a pid may be reused.
    while os.getppid() == launcher:
        if stopped.wait(_POLL_SECONDS):
            return
    if stopped.wait(_ORPHAN_SECONDS):
        return
    sys.stderr.write(
        f"genesis: error: [rank {os.environ['LOCAL_RANK']} of this node] the process that started it ({launcher}) is "
        f"gone; this rank ends as well {_ORPHAN_SECONDS:g} s later. The last checkpoint is good: start the run again\n"
    )
    sys.stderr.flush()
    os._exit(EXIT_STATUS)
