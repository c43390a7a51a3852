"""Compares each checkpoint, right after it was saved, with the live run that it must hold.

    trainer = Trainer(callbacks=[CheckpointVerification(), ModelCheckpoint(every_n_train_steps=500)], ...)

    logged                      unit and meaning, at each verdict
    checkpoint/verified         checkpoints of this fit that hold what they must
    checkpoint/bad              those that do not
    checkpoint/verify_seconds   time of the training thread for the last one

It communicates where there are several ranks, over a gloo group of its own: one small reduction for each batch, in the
background, and one exchange when an optimizer's state appears or grows. Only rank 0 reads checkpoints. Alone it does
not communicate.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from genesis_callbacks.base.errors import numbered

from ._argument_types import checking
from ._refused_strategies import refuse_to_compare
from .async_process_checkpoint import AsyncProcessCheckpoint
from .base.checkpoint_errors import CheckpointError
from .base.errors import RunEndedError
from .base.events import EventLog
from .base.run_directory import is_staging_name
from .checkpoint.contents import Contents, find_format, find_non_finite, read_contents
from .checkpoint.expect import (
    Expectation,
    build_expectation,
    count_state,
    find_problems,
    merge_expectations,
    name_buffers,
)
from .checkpoint.ranks import Ranks, WorldRanks

Holding = Literal["all", "weights"]
Fingerprint = tuple[tuple[str, int, int, int], ...]

PATIENCE_SECONDS = 60.0
"""How long an announced checkpoint may take to appear, and how long a growing one may take after the fit's end."""

_NUM_NAMED = 3
_MAX_HISTORY = 16
_VERIFIED = "checkpoint/verified"
_BAD = "checkpoint/bad"
_SECONDS = "checkpoint/verify_seconds"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint to be verified, and what it is meant to hold; with None its format decides."""

    path: Path
    holding: Holding | None


Found = tuple[SavedCheckpoint, str | None]
"""A checkpoint, and what is wrong with it already."""


def take_fingerprint(path: Path) -> Fingerprint | None:
    """Returns values that change when a file, or one in a directory, is written; None if the path does not exist."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(file.name, file.stat()) for file in files]
    except OSError:
        return None
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _looks_like_checkpoint(path: Path) -> bool:
    try:
        return find_format(path) is not None
    except OSError:
        return False  # retention may remove a checkpoint between the listing and this look


class CheckpointWatch:
    """Finds new checkpoints: those that callbacks announce, and those that appear in a directory.

    Args:
        directory: Where other code writes checkpoints; None for no such directory.
        holding: What that code writes there.
        poll_seconds: Interval of disk checks when no callback announced a checkpoint. A checkpoint in `directory`
            counts as complete when it did not change for so long.
    """

    def __init__(self, directory: Path | None, holding: Holding | None, poll_seconds: float) -> None:
        self._directory, self._holding, self._poll_seconds = directory, holding, poll_seconds
        self._known: dict[Path, Fingerprint | None] = {}
        self._growing: dict[Path, tuple[Fingerprint | None, float]] = {}
        self._awaited: dict[SavedCheckpoint, float] = {}
        self._look_seconds = 0.0
        for path in self._list_directory():
            self._known[path] = take_fingerprint(path)

    def ignore_present(self, announced: Sequence[SavedCheckpoint]) -> None:
        """Marks checkpoints that were announced before training began as known: an earlier run saved them."""
        for path in {path for saved in announced for path in (saved.path, saved.path.resolve())}:
            self._known[path] = take_fingerprint(path)

    def find_new(self, announced: Sequence[SavedCheckpoint], *, is_last: bool) -> Iterator[Found]:
        """Yields the checkpoints that were saved since the last call, each with a problem that is known already.

        It reads the disk when a new checkpoint is announced, and otherwise every `poll_seconds`.
        """
        is_due = is_last or self.is_due
        now_seconds = time.monotonic()
        if is_due:
            self._look_seconds = now_seconds
        for saved in dict.fromkeys(announced):
            if is_due or saved.path not in self._known:
                yield from self._look_at(saved, now_seconds)
        # `announced` holds only the newest few of a callback; an awaited one may have left that list meanwhile.
        for saved in list(self._awaited):
            if is_due and saved not in announced:
                yield from self._look_at(saved, now_seconds)
        yield from self._give_up(announced, now_seconds, is_last=is_last)
        if is_due:
            yield from self._find_settled(now_seconds)

    def _look_at(self, saved: SavedCheckpoint, now_seconds: float) -> Iterator[Found]:
        fingerprint = take_fingerprint(saved.path)
        if fingerprint is not None:
            self._awaited.pop(saved, None)
            if fingerprint != self._known.get(saved.path):
                self._known[saved.path] = fingerprint
                yield from self._resolve(saved)
        elif saved.path not in self._known:  # a known checkpoint that is gone was removed by retention
            self._awaited.setdefault(saved, now_seconds)

    def _give_up(self, announced: Sequence[SavedCheckpoint], now_seconds: float, *, is_last: bool) -> Iterator[Found]:
        """Yields checkpoints that should have appeared by now.

        A checkpoint that is no longer announced was removed before it was seen, which is no problem.
        """
        for saved, since_seconds in list(self._awaited.items()):
            if is_last or now_seconds - since_seconds > PATIENCE_SECONDS:
                del self._awaited[saved]
                self._known[saved.path] = None
                if saved in announced:
                    yield saved, "was reported as saved but does not exist"

    def _resolve(self, saved: SavedCheckpoint) -> Iterator[Found]:
        """Yields the checkpoint, unless it is a link to a known one."""
        path = saved.path.resolve()  # ModelCheckpoint's save_last="link" makes such links
        if path == saved.path:
            yield saved, None
        elif (real := take_fingerprint(path)) != self._known.get(path):
            self._known[path] = real
            yield SavedCheckpoint(path, saved.holding), None

    def _list_directory(self) -> list[Path]:
        if self._directory is None or not self._directory.is_dir():
            return []
        paths = [path for path in self._directory.iterdir() if not path.name.startswith(".")]
        return [path for path in paths if not is_staging_name(path.name) and _looks_like_checkpoint(path)]

    def _find_settled(self, now_seconds: float) -> Iterator[Found]:
        # Foreign code announces nothing, and many formats write in place: only a pause shows that a save has ended.
        growing, self._growing = self._growing, {}
        for path in self._list_directory():
            fingerprint = take_fingerprint(path)
            if fingerprint == self._known.get(path):
                continue
            before, since_seconds = growing.get(path, (None, now_seconds))
            if fingerprint != before:
                self._growing[path] = (fingerprint, now_seconds)
            elif now_seconds - since_seconds < self._poll_seconds:
                self._growing[path] = (fingerprint, since_seconds)
            else:
                self._known[path] = fingerprint
                yield SavedCheckpoint(path, self._holding), None

    def forget(self, path: Path) -> None:
        """Makes a later call yield the checkpoint again, because it was written while it was read."""
        self._known[path] = ()  # no fingerprint equals an empty one, so the next look finds a change

    @property
    def is_due(self) -> bool:
        """Whether the disk was not looked at for `poll_seconds`."""
        return time.monotonic() - self._look_seconds >= self._poll_seconds

    @property
    def growing(self) -> list[str]:
        """Names of the checkpoints in the directory that may still be written."""
        return sorted(path.name for path in self._growing)


def find_savers(trainer: Trainer) -> Iterator[AsyncProcessCheckpoint | ModelCheckpoint]:
    """Yields the Trainer's callbacks that save."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it
        if isinstance(callback, AsyncProcessCheckpoint | ModelCheckpoint):
            yield callback


def find_event_log(trainer: Trainer, path: Path) -> EventLog | None:
    """Returns the event log of the run that holds a checkpoint; None for a checkpoint that other code saved."""
    for saver in find_savers(trainer):
        if isinstance(saver, AsyncProcessCheckpoint) and saver.directory == path.parent:
            return saver.events
    return None


def find_newest(trainer: Trainer) -> tuple[Any, ...]:
    """Returns values that change when one of the callbacks has saved. It reads no disk, so it may run every batch."""
    return tuple(
        saver.last_saved
        if isinstance(saver, AsyncProcessCheckpoint)
        else (saver.best_model_path, saver.last_model_path, next(reversed(saver.best_k_models), None))
        for saver in find_savers(trainer)
    )


def find_announced(trainer: Trainer) -> Iterator[SavedCheckpoint]:
    """Yields the checkpoints that the Trainer's callbacks report as saved, on this machine's disks."""
    for saver in find_savers(trainer):
        if isinstance(saver, AsyncProcessCheckpoint):
            for path in saver.recent_saves:
                yield SavedCheckpoint(path, "all" if saver.save_optimizer else "weights")
            continue
        for name in dict.fromkeys((saver.best_model_path, saver.last_model_path, *saver.best_k_models)):
            # ModelCheckpoint has "" where it saved nothing; a URL names an object store, which is not verified.
            if name and "://" not in name:
                yield SavedCheckpoint(Path(name), "weights" if saver.save_weights_only else "all")


class FiniteReader:
    """Searches checkpoints for values that are not finite, in a thread, one checkpoint after the other."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-verification")
        self._jobs: list[tuple[Contents, Fingerprint | None, Future[list[str]]]] = []

    def begin(self, contents: Contents, fingerprint: Fingerprint | None, buffers: frozenset[str]) -> None:
        """Starts to read; `buffers` may be infinite, and `fingerprint` is that of the files as they are now."""
        self._jobs.append((contents, fingerprint, self._pool.submit(self._read, contents, buffers)))

    def _read(self, contents: Contents, buffers: frozenset[str]) -> list[str]:
        try:
            found = find_non_finite(contents, may_be_infinite=buffers, should_stop=self._stop.is_set)
        except (ValueError, OSError, OverflowError) as error:  # offsets in a checkpoint may be anything
            return [f"cannot be read: {error}"]
        if not found:
            return []
        some = ", ".join(f"{name} ({numbered(count, 'elements')})" for name, count in list(found.items())[:_NUM_NAMED])
        return [f"values that are not finite in {numbered(len(found), 'tensors')}, such as {some}"]

    def take_done(self, *, wait: bool) -> Iterator[tuple[Contents, list[str]]]:
        """Yields each checkpoint that was read, with its problems; one that changed or was removed is left out."""
        done = [job for job in self._jobs if wait or job[2].done()]
        self._jobs = [job for job in self._jobs if job not in done]
        for contents, fingerprint, future in done:
            problems = future.result()
            # Retention may have removed files under the reader: a problem in them says nothing about what was saved.
            if take_fingerprint(contents.path) == fingerprint:
                yield contents, problems

    def close(self) -> None:
        """Ends the thread after the block that it reads."""
        self._stop.set()  # before `shutdown`, which waits for the job that runs
        self._pool.shutdown(wait=True, cancel_futures=True)


class ExpectationHistory:
    """Records what the live run must save at each step; an optimizer's state appears and grows during training.

    Every rank has one and calls `share` at the same steps.

    Args:
        ranks: The run's.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._signature: tuple[int, ...] | None = None
        self._own: tuple[int, Expectation] | None = None
        self._history: list[tuple[int, Expectation]] = []

    @property
    def has_begun(self) -> bool:
        """Whether this rank has taken an expectation."""
        return self._own is not None

    def take(self, trainer: Trainer, module: LightningModule) -> bool:
        """Records what this rank must save now, if that changed; returns whether it did. No communication."""
        # Called at every batch: counting entries is cheap, and the full expectation walks over all tensors.
        signature = tuple(count_state(optimizer) for optimizer in trainer.optimizers)
        if signature == self._signature:
            return False
        self._signature = signature
        self._own = (trainer.global_step, build_expectation(module, trainer.optimizers))
        return True

    def share(self) -> None:
        """Gives all ranks what each must save. Communicates."""
        assert self._own is not None
        gathered = self._ranks.gather(self._own)
        # Ranks that saw no change since then give an older step; the change belongs to the newest.
        step = max(step for step, _ in gathered)
        self._history.append((step, merge_expectations([expectation for _, expectation in gathered])))
        del self._history[:-_MAX_HISTORY]

    def due_at(self, step: int) -> Expectation:
        """Returns what a checkpoint of `step` must hold."""
        due = self._history[0][1]  # for a checkpoint from before the first record, the oldest one is the nearest
        for first_step, expectation in self._history:
            if first_step <= step:
                due = expectation
        return due


class BadCheckpointError(RunEndedError):
    """A checkpoint does not hold what the live run says it must, by `on_bad="raise"`; every rank raises it."""


class BadCheckpointWarning(UserWarning):
    """The same, by `on_bad="warn"`."""


@dataclass(frozen=True)
class _Verdict:
    """What is wrong with a checkpoint, and the step that it names."""

    problems: Sequence[str]
    step: int | None = None


class CheckpointVerification(Callback):
    """Stops a run, or warns, when a checkpoint that it has just saved does not hold what it must.

    It watches every `AsyncProcessCheckpoint` and `ModelCheckpoint` of the Trainer, and a directory that other code
    writes. A checkpoint must hold each parameter and persistent buffer of the module and, where it is meant to, all
    state that the optimizers had at its step, with the live names, global shapes and dtypes, in files that are
    there and long enough. That is looked at in the training thread of rank 0, without reading tensors. All ranks stop
    alike, one batch later. The last save is verified before `fit` returns. What was there when training began is
    not looked at, nor is what lies on an object store.

    Every rank has one with the same arguments. It communicates as the module says. Not thread-safe. It has no state.

    Args:
        on_bad: "raise" ends training on every rank with a `BadCheckpointError`; "warn" continues, with a
            `BadCheckpointWarning` and a count.
        finite: Also reads every floating tensor, in a thread of rank 0 beside training, and looks for values that are
            not finite. Buffers may be infinite, as masks are.
        directory: Where other code writes checkpoints: each that appears there, or changes, and then stays as it is
            for `poll_seconds` is verified.
        directory_holds: What those are meant to hold: "all" or "weights"; None means weights for safetensors and all
            for the rest.
        ignore: Globs of the names of parameters and buffers that need not be saved, such as "teacher.*".
        poll_seconds: Interval at which rank 0 checks the disk for checkpoints that no callback announced.

    Attributes:
        num_verified: Checkpoints that held what they must, in the last fit; counted on rank 0.
        num_bad: Those that did not.
        last_verified: The newest that did, or None.
        last_problems: What was wrong with the newest bad one, or ().

    Raises:
        ValueError: An argument has no meaning.
        CheckpointError: In `setup`: the strategy hides what its live parameters are.
    """

    @checking
    def __init__(
        self,
        *,
        on_bad: Literal["raise", "warn"] = "raise",
        finite: bool = False,
        directory: str | Path | None = None,
        directory_holds: Holding | None = None,
        ignore: Sequence[str] = (),
        poll_seconds: float = 1.0,
    ) -> None:
        if poll_seconds <= 0:
            raise ValueError(f"poll_seconds must be positive, not {poll_seconds}")
        self.num_verified = 0
        self.num_bad = 0
        self.last_verified: Path | None = None
        self.last_problems: tuple[str, ...] = ()
        self._on_bad = on_bad
        self._is_finite_asked = finite
        self._directory = None if directory is None else Path(directory).resolve()
        self._directory_holds = directory_holds
        self._ignore = tuple(ignore)
        self._poll_seconds = poll_seconds
        self._world = WorldRanks()
        # What follows lives from one fit's start to its end.
        self._ranks: Ranks | None = None
        self._due: ExpectationHistory | None = None
        self._watch: CheckpointWatch | None = None
        self._reader: FiniteReader | None = None
        self._vote: Callable[[], list[int]] | None = None
        self._newest: tuple[Any, ...] = ()
        self._waiting: list[Found] = []
        self._verdict = ""
        self._verify_seconds = 0.0

    # ---- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses strategies whose runs it cannot compare, and joins the ranks. Communicates."""
        if stage != TrainerFn.FITTING:
            return
        refuse_to_compare(trainer.strategy)
        self._ranks = self._world.join()
        self._leave()
        self._due = ExpectationHistory(self._ranks)
        self._watch = CheckpointWatch(
            self._directory if self._ranks.is_first else None, self._directory_holds, self._poll_seconds
        )
        self.num_verified = self.num_bad = 0
        self.last_verified, self.last_problems = None, ()
        self._verdict = ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warns if there is nothing to watch. No communication."""
        # Not in `setup`: by now every callback is set up, and a saver that one of them added counts.
        is_dry = trainer.fast_dev_run  # type: ignore[attr-defined]  # Lightning sets it
        if not (is_dry or self._directory is not None or list(find_savers(trainer))):
            rank_zero_warn(
                "CheckpointVerification has nothing to watch: give the Trainer a ModelCheckpoint or an "
                "AsyncProcessCheckpoint, or this callback a directory"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Looks for checkpoints that were saved since the batch before."""
        # At a batch's start, because savers run last at a batch's end and no parameter has changed since: the live
        # state is still the state that the save had to store.
        assert self._watch is not None
        assert self._due is not None
        if not self._due.has_begun:
            self._watch.ignore_present(list(find_announced(trainer)))
            self._newest = find_newest(trainer)
        self._advance(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records what the last save must hold, before the strategy's teardown. Communicates."""
        if self._due is None or not self._due.has_begun:
            return
        assert self._ranks is not None
        self._end_vote()
        self._due.take(trainer, pl_module)
        self._due.share()
        if self._ranks.is_first:
            self._look(trainer, is_last=False)  # a saver may still finish one save and make another before the fit ends

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Verifies all remaining checkpoints, including the last save. Communicates."""
        if self._due is None or not self._due.has_begun:
            return
        assert self._ranks is not None
        if self._ranks.is_first:
            self._finish(trainer)
        # Before the verdict is raised, since an error in this hook must not leave the reading thread behind.
        self._leave()
        self._raise_if_bad(self._ranks.broadcast(self._verdict))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stops reading. It does not communicate: other ranks may be gone."""
        self._leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stops reading. No communication."""
        self._leave()

    def _leave(self) -> None:
        self._watch = self._vote = self._due = None
        self._waiting = []
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # ---- among the ranks

    def _advance(self, trainer: Trainer, module: LightningModule) -> None:
        ranks, due = self._ranks, self._due
        assert ranks is not None
        assert due is not None
        self._end_vote()
        has_changed = due.take(trainer, module)
        if ranks.world_size == 1 and has_changed:
            due.share()
        if ranks.is_first:
            self._look(trainer, is_last=False)
            # The other ranks' share of a state that has just appeared is known one batch later, after `_end_vote`.
            if ranks.world_size == 1 or not has_changed:
                self._judge_waiting(trainer)
        if ranks.world_size == 1:
            self._raise_if_bad(self._verdict)
        else:
            # Rank 0 may not raise alone: the others would wait for it in the next collective. Its verdict is a vote,
            # and all ranks read the result at the start of the next batch.
            self._vote = ranks.start_maximum([int(has_changed), int(bool(self._verdict))])

    def _end_vote(self) -> None:
        """Reads the ranks' vote of the batch before, which is the same on all of them. It may communicate."""
        vote, self._vote = self._vote, None
        if vote is None:
            return
        assert self._ranks is not None
        assert self._due is not None
        has_changed, is_bad = vote()
        if has_changed:
            self._due.share()
        if is_bad:
            self._raise_if_bad(self._ranks.broadcast(self._verdict))

    def _raise_if_bad(self, verdict: str) -> None:
        self._verdict = ""
        if verdict:
            raise BadCheckpointError(verdict)

    # ---- on rank 0

    def _look(self, trainer: Trainer, *, is_last: bool) -> None:
        assert self._watch is not None
        newest = find_newest(trainer)
        if is_last or newest != self._newest or self._watch.is_due:
            self._newest = newest
            self._waiting += self._watch.find_new(list(find_announced(trainer)), is_last=is_last)
        if self._reader is not None:
            for contents, problems in self._reader.take_done(wait=is_last):
                self._conclude(trainer, contents.path, _Verdict(problems, contents.step))

    def _judge_waiting(self, trainer: Trainer) -> None:
        waiting, self._waiting = self._waiting, []
        for saved, problem in waiting:
            began_seconds = time.perf_counter()
            verdict = _Verdict([problem]) if problem is not None else self._judge(saved, trainer.global_step)
            self._verify_seconds = time.perf_counter() - began_seconds
            if verdict is not None:
                self._conclude(trainer, saved.path, verdict)

    def _judge(self, saved: SavedCheckpoint, step: int) -> _Verdict | None:
        """Returns the verdict; None if it is not known yet, or if the checkpoint is gone."""
        assert self._watch is not None
        fingerprint = take_fingerprint(saved.path)
        if fingerprint is None:
            return None  # retention was faster
        verdict, contents, buffers = self._compare(saved, step)
        # A checkpoint that changed while it was read gets no verdict: a half-written file looks like a bad one.
        if take_fingerprint(saved.path) != fingerprint:
            self._watch.forget(saved.path)
            return None
        if contents is None or verdict.problems or not self._is_finite_asked:
            return verdict
        if self._reader is None:
            self._reader = FiniteReader()
        self._reader.begin(contents, fingerprint, buffers)
        return None

    def _compare(self, saved: SavedCheckpoint, step: int) -> tuple[_Verdict, Contents | None, frozenset[str]]:
        """Returns (the verdict, the contents, the names of buffers), by names and sizes alone."""
        try:
            contents = read_contents(saved.path)
        except (CheckpointError, OSError) as error:
            return _Verdict([str(error)]), None, frozenset()
        assert self._due is not None
        due = self._due.due_at(step if contents.step is None else contents.step)
        holding = saved.holding or ("weights" if contents.format == "safetensors" else "all")
        problems = find_problems(due, contents, has_optimizer=holding == "all", ignore=self._ignore)
        return _Verdict(problems, contents.step), contents, name_buffers(due, contents)

    def _conclude(self, trainer: Trainer, path: Path, verdict: _Verdict) -> None:
        log = find_event_log(trainer, path)
        if verdict.problems:
            self.num_bad += 1
            self.last_problems = tuple(verdict.problems)
            if log is not None:
                error = BadCheckpointError("; ".join(verdict.problems))
                log.write("failed", step=verdict.step, checkpoint=path, error=error)
            self._tell(path, verdict)
        else:
            self.num_verified += 1
            self.last_verified = path
            if log is not None:
                finite = ", all values finite" if self._is_finite_asked else ""
                log.write("verified", step=verdict.step, checkpoint=path, text=f"equal to the live run's{finite}")
        values = {_VERIFIED: float(self.num_verified), _BAD: float(self.num_bad), _SECONDS: self._verify_seconds}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def _tell(self, path: Path, verdict: _Verdict) -> None:
        at_step = "" if verdict.step is None else f" of step {verdict.step}"
        message = f"the checkpoint{at_step} at {path} is incomplete or wrong: {'; '.join(verdict.problems)}"
        if self._on_bad == "warn":
            warnings.warn(f"{message} ({self.num_bad} bad so far)", BadCheckpointWarning, stacklevel=2)
        elif not self._verdict:
            self._verdict = (
                f"{message}. Training ends here, so that no more of it is lost: fix the code that saves (or list "
                "tensors that need not be saved in ignore, or continue with on_bad='warn')"
            )

    def _finish(self, trainer: Trainer) -> None:
        """Verifies until no checkpoint waits and none grows, or until time is up."""
        assert self._watch is not None
        deadline_seconds = time.monotonic() + PATIENCE_SECONDS
        while True:
            self._look(trainer, is_last=True)
            if not self._waiting and not self._watch.growing:
                return
            if time.monotonic() > deadline_seconds:
                names = [*self._watch.growing, *(saved.path.name for saved, _ in self._waiting)]
                rank_zero_warn(f"not verified, because files still change: {', '.join(names)}")
                return
            self._judge_waiting(trainer)
            if self._watch.growing:
                time.sleep(self._poll_seconds / 4)
