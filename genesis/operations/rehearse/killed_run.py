"""A run that is killed several times, as planned, and restarted after each kill until the run is complete."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from genesis.base.errors import RunEndedError, numbered
from genesis.operations.rehearse.compare import Losses, compare_losses, compare_runs, find_unlogged, read_losses
from genesis.operations.rehearse.display import Display
from genesis.operations.rehearse.launch import Launcher, Start, read_last_words
from genesis.operations.rehearse.plan import Pace, PlannedKill, Sight, Trigger
from genesis.operations.rehearse.report import KillRecord, Round

POLL_SECONDS = 0.004

# A rank notices within seconds, by its connection, that a peer has ended; its save in flight then has some more time.
_OTHERS_END_SECONDS = 60.0
# A training is stuck if it logs nothing for longer than _STUCK_SECONDS plus this multiple of the straight run's time.
_STUCK_FACTOR = 10.0
_STUCK_SECONDS = 120.0


class KilledRun:
    """Carries out a plan of kills on one run.

    Args:
        run_dir: A new directory for the run.
        triggers: The triggers of the kills, in the order of their steps.
        pace: The pace of the straight run.
        losses: The losses of the straight run.
        launcher: Starts the trainings.
        display: Prints the events.
        kills: The kills of the rehearsal so far; the kills of this run are appended when they happen.
    """

    def __init__(
        self,
        run_dir: Path,
        triggers: Sequence[Trigger],
        pace: Pace,
        losses: Losses,
        launcher: Launcher,
        display: Display,
        kills: list[KillRecord],
    ) -> None:
        self.round = Round(directory=str(run_dir))
        self._run_dir, self._pace, self._losses = run_dir, pace, losses
        self._launcher, self._display, self._kills = launcher, display, kills
        self._triggers = deque(trigger for trigger in triggers if trigger.kill.aim != "start")
        self._start_triggers = deque(trigger for trigger in triggers if trigger.kill.aim == "start")
        # The kill that ended the last training, until the next training has resumed.
        self._unresumed: KillRecord | None = None
        self._reached_step = 0

    def run(self, straight: Path) -> None:
        """Trains to the end of the run and compares the killed run with the straight run.

        Raises:
            RunEndedError: A training ended or hung without a kill, or a final checkpoint is missing or does not verify.
        """
        is_over = False
        while not is_over:
            self.round.num_starts += 1
            is_over = self._train()
        # A kill may come between a step's save and its log row: a training that resumes there never logs that step.
        resumed = {kill.resumed_from for kill in self._kills}
        unlogged = find_unlogged(self._losses, read_losses(self._run_dir))
        self.round.unlogged_steps = [step for step in unlogged if step not in resumed]
        self.round.checkpoints = compare_runs(straight, self._run_dir)

    def _train(self) -> bool:
        """Starts a training, kills it when a kill is due, and returns whether the training completed the run."""
        start = self._launcher.launch(self._run_dir, f"{self._run_dir.name}-start-{self.round.num_starts}")
        struck = self._watch_start(start)
        if not struck:
            struck = self._watch(start)
        ended_seconds = start.training.wait_ended(_OTHERS_END_SECONDS)
        if ended_seconds is None:
            start.training.kill_ranks()
            start.training.wait_ended(_OTHERS_END_SECONDS)
        self._take_stock(start)
        return self._conclude(start, struck, ended_seconds)

    def _watch_start(self, start: Start) -> list[KillRecord]:
        """Watches the start of a training and kills it there if the next planned kill of a restart is due by now."""
        if not self._start_triggers or self._start_triggers[0].kill.step > self._reached_step:
            return []
        trigger = self._start_triggers.popleft()
        while start.training.poll() is None:
            sight = start.look_at_start(trigger.kill.phase)
            self._display.show(f"{self._run_dir.name} run, start {self.round.num_starts}", sight)
            self._check_progress(start, sight)
            if trigger.is_due(sight):
                return [self._strike(start, trigger.kill, sight)]
            time.sleep(POLL_SECONDS)
        return []

    def _watch(self, start: Start) -> list[KillRecord]:
        """Watches the training until it ends or is killed, and returns the kills that happened."""
        struck: list[KillRecord] = []
        while start.training.poll() is None:
            sight = start.view.look()
            self._display.show(f"{self._run_dir.name} run, start {self.round.num_starts}", sight)
            if sight.last_step is not None:
                self._note_resume(start)
            self._check_progress(start, sight)
            if self._triggers and self._triggers[0].is_due(sight):
                struck.append(self._strike(start, self._triggers.popleft().kill, sight))
                if struck[-1].victim != "writer":
                    break
            time.sleep(POLL_SECONDS)
        return struck

    def _check_progress(self, start: Start, sight: Sight) -> None:
        usual_seconds = self._pace.start + self._pace.slowest + self._pace.save
        idle_seconds = sight.seconds - start.view.progress_seconds
        if idle_seconds > _STUCK_SECONDS + _STUCK_FACTOR * usual_seconds:
            raise RunEndedError(
                f"start {self.round.num_starts} logged nothing for {idle_seconds:.0f} s and was ended (see {start.log})"
            )

    def _strike(self, start: Start, kill: PlannedKill, sight: Sight) -> KillRecord:
        """Sends SIGKILL to the planned process, or to all ranks if that process does not exist."""
        training = start.training
        ranks = training.ranks()
        victim, who = kill.victim, f"all {numbered(len(ranks), 'ranks')}" if len(ranks) > 1 else "the only rank"
        chosen = training.writers() if victim == "writer" else ranks if victim == "rank" else {}
        rank = sorted(chosen)[int(kill.draw * len(chosen))] if chosen else 0
        if chosen and training.kill_one(chosen[rank]):
            who = f"rank {rank}" if victim == "rank" else f"writer of rank {rank}"
        else:
            victim = "group"
            training.kill_ranks()
        last_step = start.view.look().last_step
        record = KillRecord(
            number=len(self._kills) + 1,
            victim=victim,
            who=who,
            aim=kill.aim,
            phase=kill.phase if last_step is None else None,
            start=self.round.num_starts,
            at_step=last_step,
            saving=sight.staging[-1] if sight.staging else None,
        )
        self._kills.append(record)
        where = f"in a start ({kill.phase})" if last_step is None else f"at step {last_step}"
        saving = "" if record.saving is None else f", in the save {record.saving.partition('.')[0]}"
        self._display.print_line(f"  kill {record.number}: {who}, {where}{saving}")
        return record

    def _note_resume(self, start: Start) -> None:
        """Records the step from which the training after a kill resumed, as soon as that step is known."""
        record, resumed_from = self._unresumed, None
        if record is not None:
            resumed_from = start.view.restored_step
        has_begun = start.view.first_step_seconds is not None
        if record is None or (resumed_from is None and not has_begun):
            return
        self._unresumed = None
        record.resumed_from = resumed_from or 0
        record.lost_steps = max(0, self._reached_step - record.resumed_from)
        record.restart_seconds = start.view.first_step_seconds
        back = "" if record.restart_seconds is None else f" after {record.restart_seconds:.1f} s"
        origin = f"step {record.resumed_from}" if record.resumed_from else "the beginning"
        self._display.print_line(f"    resumed from {origin}{back}, {numbered(record.lost_steps, 'steps')} lost")

    def _take_stock(self, start: Start) -> None:
        """Reads the log of a training after all of its ranks have ended."""
        last_step = start.view.look().last_step
        self._note_resume(start)
        resumed_from = start.view.restored_step
        if last_step is not None or resumed_from is not None:
            self._reached_step = last_step or resumed_from or 0
        if last_step is not None:  # before its first step the log is that of the last training
            # The rows are compared now, because a later start removes the rows of the steps that it repeats.
            rows = {step: row for step, row in read_losses(self._run_dir).items() if step > (resumed_from or 0)}
            self.round.num_losses += sum(len(row) for row in rows.values())
            self.round.losses += compare_losses(self._losses, rows, self.round.num_starts)

    def _conclude(self, start: Start, struck: Sequence[KillRecord], ended_seconds: float | None) -> bool:
        """Records the outcome of each kill, and returns whether the training completed the run."""
        status = start.training.poll()
        for record in struck:
            record.outcome = "training continued"
        if not struck and (status != 0 or ended_seconds is None):
            what = f"ended with status {status}" if status else "left ranks running"
            raise RunEndedError(
                f"start {self.round.num_starts} {what}, without a kill: {read_last_words(start.log)} (see {start.log})"
            )
        if status == 0:
            if struck and struck[-1].victim == "group":
                self._kills.pop()  # the run had ended just before this kill, so nothing was killed
            return True
        last = self._unresumed = struck[-1]
        if last.victim == "writer":
            last.outcome = f"training ended with status {status}"
            return False
        # The other ranks may have completed another step.
        last.at_step = start.view.look().last_step
        if last.victim == "group":
            last.outcome = "all ended immediately"
        elif ended_seconds is None:
            last.outcome = f"the others still ran after {_OTHERS_END_SECONDS:.0f} s: killed"
        else:
            last.outcome = f"the others ended after {ended_seconds:.1f} s"
        return False
