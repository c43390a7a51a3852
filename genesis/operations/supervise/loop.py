"""The loop: launch from the newest checkpoint, watch, classify the end, decide, clean up; until the run is complete."""

import os
import signal
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from genesis.base.errors import RunEndedError
from genesis.base.processes import Mark
from genesis.base.progress import numbered
from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise.attempt import Attempt, Limits, Sight, read_from
from genesis.operations.supervise.checkpoints import list_steps, newest_step
from genesis.operations.supervise.classify import Diagnosis, Evidence, classify
from genesis.operations.supervise.cleanup import Scene, choose_port, wait_until_free
from genesis.operations.supervise.crashes import CrashRecord, read_crashes
from genesis.operations.supervise.decide import Action, PastEnd, Policy, decide
from genesis.operations.supervise.ends import ENDS, EXIT_COMPLETE, EXIT_REQUEUE
from genesis.operations.supervise.goodput import Goodput, GoodputMeter, describe_goodput, format_seconds
from genesis.operations.supervise.launch_protocol import Job
from genesis.operations.supervise.launcher_client import MARK_NAME, LauncherClient, LauncherLostError
from genesis.operations.supervise.node_options import NodeOptions
from genesis.operations.supervise.observers import Launch, Observer, Observers
from genesis.operations.supervise.plan import Plan, RecipeFacts, build_jobs, build_probe, read_facts, save_stalls
from genesis.operations.supervise.records import Records, SafeWriter
from genesis.operations.supervise.skips import Blame, Skips, choose_newest, find_blame
from genesis.operations.supervise.space import wait_for_space
from genesis.operations.supervise.state import (
    NODE_PREFIX,
    LoopState,
    SupervisorLock,
    read_skips,
    read_state,
    write_skips,
    write_state,
)
from genesis.operations.supervise.status import State, SupervisorStatus, read_status, write_status
from genesis.operations.supervise.stops import StopRequests
from genesis_callbacks.base.event_reader import EventFollower
from genesis_callbacks.base.events import EventLog
from genesis_callbacks.base.untrusted import read_text

_STATUS_SECONDS: Final = 1.0
_LAUNCHER_TRIES: Final = 2
_KILLED_TRIES: Final = 5
_HELD_SECONDS: Final = 180.0


@dataclass(frozen=True)
class SuperviseOptions:
    """The options of a supervisor.

    Args:
        fit: Arguments of `genesis fit`, without the run's directory and the checkpoint.
        run_dir: The run's directory.
        policy: What the user consents to.
        limits: How long the ranks may take.
        port: The port at which the ranks meet; None for a free one in each attempt.
        wait_seconds: How long to wait for disk space.
        preempt_file: A file whose existence announces that the machine is about to be taken; None for none.
        preempt_url: A URL that does so by answering with status 200; None for none.
        cost_per_hour: What an hour of the machine costs, for the records; None if it is not known.
        nodes: How this node meets the others; None for a run on one node.
    """

    fit: tuple[str, ...]
    run_dir: Path
    policy: Policy = field(default_factory=Policy)
    limits: Limits = field(default_factory=Limits)
    port: int | None = None
    wait_seconds: float = 3600.0
    preempt_file: Path | None = None
    preempt_url: str | None = None
    cost_per_hour: float | None = None
    nodes: NodeOptions | None = None

    @property
    def directory(self) -> Path:
        """Where this supervisor keeps what only this node may use: its lock, its launcher and its state."""
        shared = RunDirectory(self.run_dir).supervisor
        return shared if self.nodes is None else shared / f"{NODE_PREFIX}{self.nodes.name}"


class Supervisor:
    """Keeps one run alive.

    Args:
        options: The options.
        report: Prints a line.
        echo: Prints what rank 0 has printed.
        observers: What else follows the run.
    """

    def __init__(
        self,
        options: SuperviseOptions,
        report: Callable[[str], None],
        echo: Callable[[bytes], None],
        observers: Sequence[Observer] = (),
    ) -> None:
        self._options, self._report, self._echo = options, report, echo
        self._observers = Observers(observers, report)
        self._writer = SafeWriter(report)
        self._run = RunDirectory(options.run_dir)
        self._run.check_own()
        self._place = options.directory
        self._waits_for_lock = True
        self._lock = SupervisorLock(self._place)
        self._state = read_state(self._place) or LoopState(uuid.uuid4().hex, began_seconds=time.time())
        self._skips = read_skips(options.run_dir)
        self._mark = Mark(MARK_NAME, self._state.run_id)
        self._client = LauncherClient(self._place, self._mark)
        self._events = EventLog(options.run_dir, "supervisor")
        before = read_status(options.run_dir)
        goodput = Goodput() if before is None else before.goodput
        if before is not None:  # the time since then belonged to nobody
            goodput = replace(goodput, down=goodput.down + max(0.0, time.time() - before.updated_seconds))
        self._meter = GoodputMeter(goodput, time.monotonic())
        crashes = read_crashes(options.run_dir)
        if self._state.is_over:  # an end that somebody has seen: what follows is a new try
            self._state.first_crash = len(crashes) + 1
        self._was_over, self._state.is_over = self._state.is_over, False
        self._records = Records(options.run_dir, crashes, self._writer)
        self._restarts: Counter[str] = Counter({} if before is None else before.restarts)
        self._plan = Plan()
        self._facts: RecipeFacts | None = None
        self._status_state: State = "launching"
        self._reason = ""
        self._told_seconds = 0.0
        self._port: int | None = None
        self._followed: EventFollower | None = None
        self._echoed_bytes = 0
        self._unrecovered: CrashRecord | None = None
        self._crash_seconds = 0.0
        self._repeated_until = self._state.best_step
        """The largest step that attempts before the one at hand had reached."""
        self._verified_step: int | None = newest_step(options.run_dir) or None

    def run(self) -> int:
        """Supervises until the run is complete, must not be restarted, or is left to its queue; returns the status.

        Raises:
            RunEndedError: Something that the last attempt held did not become free, or no rank can be started.
        """
        stops = StopRequests(self._options.preempt_file, self._options.preempt_url)
        with stops.watching():
            try:
                return self._supervise(stops)
            finally:
                self._client.leave()
                self._lock.release()

    # ---- the loop

    def _supervise(self, stops: StopRequests) -> int:
        is_adopted = self._adopt()
        if not is_adopted:
            self._facts = self._resolve()
        while True:
            if not is_adopted and not self._launch(stops):
                return self._finish("requeued", f"{stops.find()} before the launch", EXIT_REQUEUE)
            attempt = self._build_attempt(stops, is_adopted=is_adopted)
            is_adopted = False
            evidence = attempt.run()
            self._meter.enter("down", attempt.end_seconds)
            self._count_saves(attempt.sight)
            diagnosis = classify(evidence)
            if diagnosis.end_class is None:
                self._recover(attempt.sight)
                return self._finish("completed", "", EXIT_COMPLETE)
            action = self._conclude(attempt, evidence, diagnosis)
            if action.kind == "requeue":
                return self._finish("requeued", diagnosis.reason, self._choose_requeue_status(stops))
            if action.kind == "stop":
                remedy = ENDS[diagnosis.end_class].remedy
                return self._finish("stopped", f"{action.text}; {remedy}", action.exit_status or 1)
            self._prepare_restart(action, stops)

    def _adopt(self) -> bool:
        """Returns whether ranks that an earlier supervisor has started still run, or ended while nobody looked."""
        if not self._client.connect():
            return False
        state = self._client.state
        assert state is not None
        if state.attempt == 0 or state.attempt != self._state.attempt or self._was_over:
            return False
        self._facts = read_facts(self._place)
        if self._facts is None:
            return False
        num_running = sum(child.status is None for child in state.children)
        self._report(f"found attempt {state.attempt}: {num_running} of {len(state.children)} ranks run, watched again")
        return True

    def _launch(self, stops: StopRequests) -> bool:
        """Launches the next attempt as soon as nothing of the last is held; returns False if a stop was requested."""
        self._free()
        if stops.find() is not None:
            return False
        options, facts, state = self._options, self._facts, self._state
        assert facts is not None
        state.attempt += 1
        self._repeated_until = state.best_step
        self._observers.call(lambda each: each.before_launch(options.run_dir, state.attempt))
        self._take_restored()
        state.saved_step = newest_step(options.run_dir)
        self._save_state()
        self._port = options.port or choose_port(() if self._port is None else (self._port,))
        jobs = build_jobs(
            *(options.fit, options.run_dir, facts, self._plan, state.attempt, self._port, self._mark),
            skips=self._skips.positions,
        )
        self._tell("launching" if self._unrecovered is None else "recovering", self._reason)
        self._meter.enter("start", time.monotonic())
        self._followed = EventFollower(options.run_dir, is_from_now=True)
        self._fork(state.attempt, jobs)
        return True

    def _take_restored(self) -> None:
        """Takes over what an observer has restored of a run whose machine was lost: crashes, and the skipped data."""
        crashes = read_crashes(self._options.run_dir) if not self._records.last_number else []
        if crashes:  # of the machine before: what follows is a new try
            self._records = Records(self._options.run_dir, crashes, self._writer)
            self._state.first_crash = self._records.last_number + 1
        self._skips = choose_newest([self._skips, read_skips(self._options.run_dir)])

    def _fork(self, attempt: int, jobs: Sequence[Job]) -> None:
        """Forks jobs from the launcher, and from a new one where it has just ended.

        Raises:
            RunEndedError: The new one has ended, too, or several were killed one after the other.
        """
        num_tries, limit = 0, _KILLED_TRIES
        while num_tries < limit:
            num_tries += 1
            try:
                self._ensure_launcher()
                self._client.fork(attempt, jobs)
                return
            except LauncherLostError:
                limit = _KILLED_TRIES if self._client.was_killed() else _LAUNCHER_TRIES
                self._client.close()
        log = self._place / "launcher.log"
        raise RunEndedError(f"the launcher of ranks ends before it has launched any (see {log})")

    def _build_attempt(self, stops: StopRequests, *, is_adopted: bool) -> Attempt:
        facts, number = self._facts, self._state.attempt
        assert facts is not None
        outputs = {rank: attempt_folder(self._run, number) / f"rank-{rank}.log" for rank in range(facts.num_ranks)}
        self._echoed_bytes = outputs[0].stat().st_size if is_adopted and outputs[0].exists() else 0
        attempt = Attempt(
            *(self._options.run_dir, self._client, outputs, self._options.limits, stops.find),
            lambda sight: self._look(sight, outputs[0]),
            events=None if is_adopted else self._followed,
        )
        launch = Launch(self._options.run_dir, number, attempt.pids, is_adopted)
        who = ", ".join(f"rank {rank} is process {pid}" for rank, pid in attempt.pids.items())
        self._report(f"attempt {number}: {who}; {self._plan.describe(self._state.saved_step)}")
        self._events.append("launched", text=f"attempt {number}: {who}")
        self._observers.call(lambda each: each.on_launch(launch))
        return attempt

    def _look(self, sight: Sight, output: Path) -> None:
        """Follows what is seen of an attempt: time by part, the first new step, output and snapshot."""
        if sight.started_seconds is not None:
            self._meter.enter("restore", sight.started_seconds)
        trained_from = sight.milestone("train")
        step = sight.step
        if trained_from is not None:
            reached = max(step or 0, sight.restored_step or 0)
            self._meter.enter("trained" if reached >= self._repeated_until else "repeated", trained_from)
        if step is not None:
            if step > self._state.best_step:
                self._recover(sight)
                self._state.best_step = step
            if self._status_state != "training" and self._unrecovered is None:
                self._tell("training", "")
        news = read_from(output, self._echoed_bytes)
        self._echoed_bytes += len(news)
        if news:
            self._echo(news)
        if time.monotonic() - self._told_seconds >= _STATUS_SECONDS:
            self._verified_step = newest_step(self._options.run_dir) or None
            self._tell(self._status_state, self._reason)

    def _recover(self, sight: Sight) -> None:
        """Completes the record of the last crash when the run has got beyond it, or to its end."""
        record, self._unrecovered = self._unrecovered, None
        if record is None:
            return
        seconds, resumed = time.monotonic() - self._crash_seconds, sight.restored_step or 0
        rate, repeated_steps = self._options.cost_per_hour, max(0, self._state.best_step - resumed)
        record = replace(
            record,
            resumed_from=resumed,
            repeated_steps=repeated_steps,
            lost_seconds=seconds,
            cost=None if rate is None else seconds / 3600 * rate,
        )
        self._records.replace_last(record)
        text = f"crash {record.number} ({record.end_class}): training again after {format_seconds(seconds)}"
        self._report(f"{text}, from step {resumed}, {numbered(repeated_steps, 'steps')} repeated")
        self._events.append("recovered", step=sight.step, text=text)
        self._observers.call(lambda each: each.on_recovered(record))

    def _conclude(self, attempt: Attempt, evidence: Evidence, diagnosis: Diagnosis) -> Action:
        """Records an end and decides what follows."""
        assert diagnosis.end_class is not None
        sight = attempt.sight
        blame = self._find_blame(evidence, diagnosis)
        past = PastEnd(diagnosis.end_class, sight.step, newest_step(self._options.run_dir), blame)
        history = [*self._records.history(self._state.first_crash), past]
        action = decide(history, self._options.policy, self._skips)
        if diagnosis.end_class == "preempted":  # the run did what it was asked to: no crash
            self._report(f"attempt {self._state.attempt} was preempted: {diagnosis.reason}; {action.text}")
            self._events.append("preempted", step=sight.step, text=diagnosis.reason)
            return action
        self._crash_seconds, self._reason = attempt.end_seconds, diagnosis.reason
        record = self._records.add(attempt, diagnosis, past, action, attempt_folder(self._run, self._state.attempt))
        self._report(f"attempt {self._state.attempt} ended: {diagnosis.end_class}: {diagnosis.reason}")
        self._report(f"  {action.text}")
        self._events.append("crashed", step=sight.step, text=f"{diagnosis.end_class}: {diagnosis.reason}")
        self._observers.call(lambda each: each.on_end(record))
        if action.kind == "restart":
            self._unrecovered = record
            self._restarts[diagnosis.end_class] += 1
            self._tell("recovering", diagnosis.reason)
        return action

    def _find_blame(self, evidence: Evidence, diagnosis: Diagnosis) -> Blame | None:
        """Returns the data in which an attempt failed, by what the rank that failed first wrote at that moment."""
        end = next((end for end in evidence.ranks if end.rank == diagnosis.rank), None)
        if end is None or self._facts is None or diagnosis.end_class is None:
            return None
        size = self._facts.global_batch_size
        return find_blame(diagnosis.end_class, end.failed_step, end.failed_clocks, size)

    def _prepare_restart(self, action: Action, stops: StopRequests) -> None:
        self._plan = Plan.follow(self._plan, action, list_steps(self._options.run_dir))
        if action.skips and self._facts is not None:  # saved before the launch, so that none is skipped uncounted
            self._change_skips(self._skips.add(action.skips, self._facts.global_batch_size))
        if action.delay_seconds:
            self._report(f"  waiting {format_seconds(action.delay_seconds)}: no progress between the last ends")
            self._meter.enter("waiting", time.monotonic())
            stops.wait(action.delay_seconds)
        if action.waits_for_space:
            self._meter.enter("waiting", time.monotonic())
            self._tell("waiting", "disk space")
            wait_for_space(self._options.run_dir, self._options.wait_seconds, stops, self._report)
        if self._plan.is_fresh:
            self._free()
            self._call("genesis.operations.supervise.fresh:main", [str(self._options.run_dir)])
            self._state.best_step = 0
            if action.is_fresh:  # the positions are of a run that is over; the count stays
                self._change_skips(replace(self._skips, positions=()))

    def _change_skips(self, skips: Skips) -> None:
        self._skips = skips
        self._writer.write(lambda: write_skips(self._options.run_dir, skips))

    def _free(self) -> None:
        pids = [] if self._client.state is None else [child.pid for child in self._client.state.children]
        self._client.end_children()  # those of a supervisor that was killed, if they are not watched again
        spared = {os.getpid(), *([] if self._client.pid is None else [self._client.pid])}
        scene = Scene(
            *(self._options.run_dir, self._mark, spared, pids, self._options.port), has_lock=self._waits_for_lock
        )
        self._meter.enter("waiting", time.monotonic())
        left = wait_until_free(scene, _HELD_SECONDS, self._report)
        self._meter.enter("start", time.monotonic())
        foreign = [each for each in left if not each.text.startswith("port ")]  # a taken port is an end of its own
        if foreign:
            text = ", ".join(each.text for each in foreign)
            raise RunEndedError(f"the run cannot be launched, because {text} is not free after {_HELD_SECONDS:g} s")

    # ---- jobs that are no training

    def _resolve(self) -> RecipeFacts:
        """Returns what the recipe says, which a child of the launcher resolves as `genesis fit` does."""
        self._free()
        out = self._place / "recipe.json"
        out.unlink(missing_ok=True)
        self._call("genesis.cli.supervise_recipe:main", [str(out), *self._options.fit])
        facts = read_facts(self._place)
        if facts is None:
            raise RunEndedError(f"the recipe was not resolved (see {self._place / 'job.log'})")
        facts.check(
            self._options.run_dir,
            has_nodes=self._options.nodes is not None,
            may_skip_data=self._options.policy.may_skip_data,
        )
        if facts.note:
            self._report(facts.note)
        return facts

    def _call(self, target: str, arguments: Sequence[str]) -> None:
        """Runs a function in a child of the launcher, and again if the child or the launcher was killed.

        Raises:
            RunEndedError: It failed; the exit status is the child's.
        """
        status: int | None = None
        for _ in range(_KILLED_TRIES):
            job = build_probe(target, arguments, self._place, self._mark)
            self._fork(0, [job])
            status = self._wait_for_job()
            if status is not None and status >= 0:
                break
        if status:
            lines = read_text(job.output, errors="replace").splitlines()
            killed = f"{target} was ended by signal {-status}" if status < 0 else f"{target} ended with status {status}"
            error = RunEndedError((lines or [killed])[-1].removeprefix("genesis: error: "))
            error.exit_status = status if status > 0 else 1
            raise error
        if status is None:
            raise RunEndedError(f"the launcher of ranks has ended (see {self._place / 'launcher.log'})")

    def _wait_for_job(self) -> int | None:
        """Returns the status of the launcher's only child when it has ended; None if the launcher ends before."""
        try:
            while self._client.state is not None and any(child.status is None for child in self._client.state.children):
                self._client.poll(1.0)
        except LauncherLostError:
            return None
        assert self._client.state is not None
        return self._client.state.children[0].status

    def _ensure_launcher(self) -> None:
        try:
            while self._client.poll(0.0):
                pass
        except LauncherLostError:
            self._client.start()

    # ---- accounts

    def _count_saves(self, sight: Sight) -> None:
        stalls = save_stalls(self._run.metrics, sight.restored_step or 0)
        self._meter.move(stalls, "trained", "saves")

    def _choose_requeue_status(self, stops: StopRequests) -> int:
        return 128 + signal.SIGINT if stops.is_interrupted else EXIT_REQUEUE

    def _finish(self, state: State, reason: str, status: int) -> int:
        self._state.is_over = True
        self._save_state()
        self._verified_step = newest_step(self._options.run_dir) or None
        self._tell(state, reason)
        self._client.leave()
        final = self._snapshot()
        self._events.append("completed" if state == "completed" else "stopped", step=final.step, text=reason)
        self._report(f"{state}: step {final.step}, crashes {final.num_crashes}" + (f"; {reason}" if reason else ""))
        for line in [] if state == "completed" else self._records.describe_tried(self._state.first_crash):
            self._report(line)
        self._report(describe_goodput(final.goodput))
        self._observers.call(lambda each: each.on_complete(final))
        return status

    def _tell(self, state: State, reason: str) -> None:
        self._status_state, self._reason, self._told_seconds = state, reason, time.monotonic()
        status = self._snapshot()
        if self._writer.write(lambda: write_status(self._options.run_dir, status)):
            self._records.write_lost()
        self._observers.call(lambda each: each.on_status(status))

    def _save_state(self) -> None:
        self._writer.write(lambda: write_state(self._place, self._state))

    def _snapshot(self) -> SupervisorStatus:
        return SupervisorStatus(
            state=self._status_state,
            pid=os.getpid(),
            host=socket.gethostname(),
            began_seconds=self._state.began_seconds,
            updated_seconds=time.time(),
            attempt=self._state.attempt,
            num_ranks=0 if self._facts is None else self._facts.num_ranks,
            ends=self._records.count_ends(),
            restarts=dict(self._restarts),
            step=self._state.best_step,
            verified_step=self._verified_step,
            goodput=self._meter.read(time.monotonic()),
            reason=self._reason,
        )


def attempt_folder(run: RunDirectory, attempt: int) -> Path:
    """Returns where the output and the stacks of an attempt's ranks lie."""
    return run.supervisor / f"attempt-{attempt:04d}"
