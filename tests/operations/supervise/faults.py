"""Random faults on one supervised run, unattended: real processes, real signals, a real full disk.

    python -m tests.operations.supervise.faults CORPUS DIRECTORY --faults 100 --seed 7

It trains the recipe straight once, then supervised with faults, and compares the final checkpoints bit for bit. In the
end no process, port, shared memory or lock of the run may be left.
"""

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from genesis.base.processes import Mark, MarkedProcess, find_kind, find_processes
from genesis.base.run_directory import RunDirectory
from genesis.operations.rehearse.compare import CheckpointComparison, compare_runs
from genesis.operations.supervise.checkpoints import list_steps
from genesis.operations.supervise.cleanup import Scene, find_held, is_port_free
from genesis.operations.supervise.crashes import read_crashes
from genesis.operations.supervise.ends import EXIT_REQUEUE
from genesis.operations.supervise.launcher_client import MARK_NAME
from genesis.operations.supervise.state import read_state
from genesis.operations.supervise.status import SupervisorStatus, read_status
from genesis_callbacks.base.run_directory import checkpoint_name
from genesis_callbacks.heartbeats import read_heartbeats
from tests.cli.tiny import build_recipe, write_recipe

KINDS = ("rank", "ranks", "writer", "supervisor", "stop", "term", "usr1", "port", "disk", "corrupt")
ENDING_KINDS = ("rank", "ranks", "stop", "port", "disk", "corrupt")
"""Faults after which there is a new attempt of the same supervisor."""
NUM_RANKS = 2
EVERY_N_STEPS = 10
LIMIT_SECONDS = 240.0
STEP_LIMIT_SECONDS = 1.0
"""Limit for each step of a whole run, on a machine that others use as well."""
POLL_SECONDS = 0.02


@dataclass
class Outcome:
    """What a run with faults came to."""

    statuses: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    comparison: CheckpointComparison | None = None
    left: list[str] = field(default_factory=list)
    status: SupervisorStatus | None = None
    ends: Counter[str] = field(default_factory=Counter)


class FaultyRun:
    """One supervised run on which faults fall.

    Args:
        corpus: The corpus to train on.
        directory: A directory for both runs; the faulty run lies on a small disk of its own if that can be mounted.
        max_steps: Number of steps.
        seed: Of the faults.
    """

    def __init__(self, corpus: Path, directory: Path, max_steps: int, seed: int) -> None:
        self.directory, self.straight, self.run_dir = directory, directory / "straight", directory / "disk" / "run"
        self.run_dir.parent.mkdir(parents=True)
        # Room for a few checkpoints, and for a log that grows with the steps.
        self.disk_megabytes = 12 + max_steps // 500
        self.limit_seconds = 5 * LIMIT_SECONDS + max_steps * STEP_LIMIT_SECONDS
        self._chooser = random.Random(seed)
        self._recipe = write_recipe(
            directory / "recipe.yaml",
            build_recipe(corpus, self.run_dir),
            {
                "trainer.devices": NUM_RANKS,
                "trainer.max_steps": max_steps,
                "trainer.val_check_interval": 10 * max_steps,
                "schedule.total_updates": max_steps,
                "checkpoint.every_n_steps": EVERY_N_STEPS,
                "checkpoint.mode": "process",
                "checkpoint.lost_rank_seconds": 2.0,
            },
        )
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            self._port: int = server.getsockname()[1]
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._after_attempt = 0
        self.outcome = Outcome()

    # ---- processes

    def train_straight(self) -> None:
        """Trains without faults, as one `genesis supervise`."""
        with (self.directory / "straight.log").open("wb") as log:
            command = [sys.executable, "-m", "genesis", "supervise", "--", "fit", "--config", str(self._recipe)]
            command += ["--run_dir", str(self.straight)]
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True, timeout=self.limit_seconds)

    def start(self) -> None:
        """Starts a supervisor."""
        command = [sys.executable, "-m", "genesis", "supervise", "--hang_seconds", "30", "--grace_seconds", "3"]
        command += ["--port", str(self._port), "--max_ends_without_progress", "20"]
        command += ["--", "fit", "--config", str(self._recipe)]
        with (self.directory / "supervise.log").open("ab") as log:
            self._supervisor = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    @property
    def supervisor(self) -> "subprocess.Popen[bytes]":
        assert self._supervisor is not None
        return self._supervisor

    def mark(self) -> Mark:
        state = read_state(RunDirectory(self.run_dir).supervisor)
        return Mark(MARK_NAME, "" if state is None else state.run_id)

    def read_attempt(self) -> int:
        """Returns the number of the last attempt, which a full disk may hold back."""
        state = read_state(RunDirectory(self.run_dir).supervisor)
        return 0 if state is None else state.attempt

    def find(self, kind: str) -> list[MarkedProcess]:
        """Returns the run's live ranks or writers, without the launcher and without helpers of ranks."""
        found = find_processes(self.mark())
        launchers = {process.pid for process in found if process.group == process.pid and process.parent == 1}
        pids = {beat.pid for beat in read_heartbeats(self.run_dir).values()}
        chosen = [process for process in found if find_kind(process) == kind and process.pid not in launchers]
        return [process for process in chosen if kind == "writer" or process.pid in pids]

    def wait_training(self) -> bool:
        """Waits until both ranks of a new attempt train under a supervisor that takes signals.

        It returns False when the run has ended.
        """
        deadline_seconds = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline_seconds:
            if self.supervisor.poll() is not None:
                return False
            status = read_status(self.run_dir)
            # Ranks outlive a killed supervisor: they train while the next one still imports its modules.
            is_watched = status is not None and status.pid == self.supervisor.pid
            if not is_watched or self.read_attempt() <= self._after_attempt:
                time.sleep(POLL_SECONDS)
                continue
            beats = read_heartbeats(self.run_dir).values()
            alive = {process.pid for process in find_processes(self.mark())}
            ready = [beat for beat in beats if beat.pid in alive and "first_step" in beat.milestones]
            if len(ready) == NUM_RANKS and all(beat.phase == "train" for beat in ready):
                return True
            time.sleep(POLL_SECONDS)
        raise AssertionError(f"the run did not train again within {LIMIT_SECONDS:g} s (see {self.directory})")

    def kill(self, process: MarkedProcess, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)

    # ---- faults

    def strike(self, kind: str) -> None:
        """Lets one fault happen, and starts the supervisor again where the fault has ended it."""
        self._after_attempt = self.read_attempt() if kind in ENDING_KINDS else 0
        getattr(self, f"_strike_{kind}")()
        self.outcome.faults.append(kind)

    def _strike_rank(self) -> None:
        ranks = self.find("rank")
        if ranks:
            self.kill(self._chooser.choice(ranks), signal.SIGKILL)

    def _strike_ranks(self) -> None:
        for process in self.find("rank"):
            self.kill(process, signal.SIGKILL)

    def _strike_writer(self) -> None:
        writers = self.find("writer")
        if writers:
            self.kill(self._chooser.choice(writers), signal.SIGKILL)

    def _strike_stop(self) -> None:
        ranks = self.find("rank")
        if ranks:
            self.kill(self._chooser.choice(ranks), signal.SIGSTOP)

    def _strike_supervisor(self) -> None:
        self.supervisor.kill()
        self.supervisor.wait()
        time.sleep(self._chooser.uniform(0.0, 1.0))
        self.start()

    def _strike_term(self) -> None:
        self._preempt(signal.SIGTERM)

    def _strike_usr1(self) -> None:
        self._preempt(signal.SIGUSR1)

    def _preempt(self, number: int) -> None:
        self.supervisor.send_signal(number)
        status = self.supervisor.wait(LIMIT_SECONDS)
        self.outcome.statuses.append(status)
        if status == EXIT_REQUEUE:
            self.start()

    def _strike_port(self) -> None:
        """Takes the port of the ranks as soon as they are dead, and frees it after a while."""
        self._strike_ranks()
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            deadline_seconds = time.monotonic() + 5
            while time.monotonic() < deadline_seconds:
                try:
                    thief.bind(("", self._port))
                    thief.listen(1)
                    break
                except OSError:
                    time.sleep(POLL_SECONDS)
            time.sleep(self._chooser.uniform(0.5, 2.0))

    def _strike_disk(self) -> None:
        """Fills the disk of the run until an attempt has ended by it, then frees the space."""
        filler = self.run_dir.parent / "filler"
        num_before = len(read_crashes(self.run_dir))
        descriptor = os.open(filler, os.O_CREAT | os.O_WRONLY)
        try:
            with contextlib.suppress(OSError):
                while os.write(descriptor, bytes(1 << 16)):
                    pass
            deadline_seconds = time.monotonic() + 30
            while time.monotonic() < deadline_seconds and len(read_crashes(self.run_dir)) == num_before:
                if self.supervisor.poll() is not None:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            os.close(descriptor)
            filler.unlink()

    def _strike_corrupt(self) -> None:
        """Kills everything that trains or saves, and flips a byte in the newest checkpoint."""
        for process in (*self.find("writer"), *self.find("rank")):
            self.kill(process, signal.SIGKILL)
        steps = list_steps(self.run_dir)
        if len(steps) > 1:
            path = RunDirectory(self.run_dir).checkpoints / checkpoint_name(steps[-1]) / "__0_0.distcp"
            with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0xFF]))

    # ---- the whole

    def run(self, kinds: list[str]) -> Outcome:
        """Runs with the faults in order, to the end of the run."""
        self.start()
        try:
            for kind in kinds:
                if not self.wait_training():
                    break
                time.sleep(self._chooser.uniform(0.1, 1.0))
                if self.supervisor.poll() is not None:
                    break
                self.strike(kind)
            self.outcome.statuses.append(self.supervisor.wait(self.limit_seconds))
        finally:
            if self.supervisor.poll() is None:
                self.supervisor.kill()
        outcome = self.outcome
        outcome.status = read_status(self.run_dir)
        outcome.ends = Counter(crash.end_class for crash in read_crashes(self.run_dir))
        outcome.left = self.find_left()
        if outcome.statuses[-1] == 0:
            outcome.comparison = compare_runs(self.straight, self.run_dir)
        return outcome

    def find_left(self) -> list[str]:
        """Returns what of the run is left: processes, lock, port, shared memory."""
        held = [each.text for each in find_held(Scene(self.run_dir, self.mark(), spared=()))]
        held += [] if is_port_free(self._port) else [f"port {self._port}"]
        held += [str(path) for path in Path("/dev/shm").glob("torch_*") if path.stat().st_uid == os.getuid()]
        return held


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[bool]:
    """Mounts a small disk; yields whether that is possible here."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(path)]
    is_mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


def choose_kinds(num_faults: int, seed: int, *, has_disk: bool) -> list[str]:
    """Returns the kinds of the faults: each as often as the others, in a random order."""
    kinds = [kind for kind in KINDS if has_disk or kind != "disk"]
    chosen = (kinds * (num_faults // len(kinds) + 1))[:num_faults]
    random.Random(seed).shuffle(chosen)
    return chosen


def main() -> None:
    """Runs the long form, and prints what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began_seconds = time.monotonic()
    faulty = FaultyRun(arguments.corpus, arguments.directory, arguments.steps, arguments.seed)
    with small_disk_of(faulty) as has_disk:
        faulty.train_straight()
        outcome = faulty.run(choose_kinds(arguments.faults, arguments.seed, has_disk=has_disk))
    print(f"faults {Counter(outcome.faults)}, ends {outcome.ends}, statuses {outcome.statuses}, left {outcome.left}")
    print(f"equal: {outcome.comparison is not None and outcome.comparison.is_equal}, {outcome.status}")
    print(f"{time.monotonic() - began_seconds:.0f} s")


@contextlib.contextmanager
def small_disk_of(faulty: FaultyRun) -> Iterator[bool]:
    """Mounts a small disk for a faulty run."""
    faulty.run_dir.parent.rmdir()
    with small_disk(faulty.run_dir.parent, faulty.disk_megabytes) as has_disk:
        yield has_disk


if __name__ == "__main__":
    main()
