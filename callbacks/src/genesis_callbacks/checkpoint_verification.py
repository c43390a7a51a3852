"""Compares each checkpoint, right after it was saved, with what the live run says must be in it.

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

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from .async_process_checkpoint import AsyncProcessCheckpoint
from .checkpoint.contents import Contents, find_format, find_non_finite, read_contents
from .checkpoint.errors import CheckpointError
from .checkpoint.expect import (
    Expectation,
    build_expectation,
    count_state,
    find_problems,
    merge_expectations,
    name_buffers,
)
from .checkpoint.manifest import is_staging_name
from .checkpoint.ranks import Ranks
from .errors import RunEndedError

Holding = Literal["all", "weights"]
Fingerprint = tuple[tuple[str, int, int, int], ...]

_VERIFIED = "checkpoint/verified"
_BAD = "checkpoint/bad"
_SECONDS = "checkpoint/verify_seconds"
_NUM_NAMED = 3
# How long a checkpoint that was announced may take to appear, and one that grows to end at the fit's end.
_PATIENCE_SECONDS = 60.0
_MAX_HISTORY = 16
_REFUSED_STRATEGIES: dict[type[Strategy], str] = {
    FSDPStrategy: "FSDP1 (FSDPStrategy): its live parameters do not tell their names and shapes",
    DeepSpeedStrategy: "DeepSpeed: its live parameters do not tell their shapes",
}


class BadCheckpointError(RunEndedError):
    """A checkpoint does not hold what the live run says it must, by `on_bad="raise"`; every rank raises it."""


class BadCheckpointWarning(UserWarning):
    """The same, by `on_bad="warn"`."""


@dataclass(frozen=True)
class _Saved:
    """A checkpoint to be looked at, and what it is meant to hold; None goes by its format."""

    path: Path
    holding: Holding | None


@dataclass(frozen=True)
class _Verdict:
    """What is wrong with a checkpoint, and the step that it names."""

    problems: Sequence[str]
    step: int | None = None


def _take_fingerprint(path: Path) -> Fingerprint | None:
    """Returns what changes when a file, or one in a directory, is written; None where nothing is to be seen."""
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
        return False  # it has just gone


class _Watch:
    """Finds checkpoints that are new: those that callbacks announce, and those that appear in a directory.

    Args:
        directory: Where others write; None for nowhere.
        holding: What they write there.
        poll_seconds: How often the disk is looked at when nobody announced anything; what lies in `directory` is
            complete when it did not change for so long.
    """

    def __init__(self, directory: Path | None, holding: Holding | None, poll_seconds: float) -> None:
        self._directory, self._holding, self._poll_seconds = directory, holding, poll_seconds
        self._known: dict[Path, Fingerprint | None] = {}
        self._growing: dict[Path, tuple[Fingerprint | None, float]] = {}
        self._awaited: dict[_Saved, float] = {}
        self._look_seconds = 0.0
        for path in self._list_directory():
            self._known[path] = _take_fingerprint(path)

    def ignore_present(self, announced: Sequence[_Saved]) -> None:
        """Takes what was announced before training began as known: an earlier run saved it."""
        for path in {path for saved in announced for path in (saved.path, saved.path.resolve())}:
            self._known[path] = _take_fingerprint(path)

    def find_new(self, announced: Sequence[_Saved], *, is_last: bool) -> Iterator[tuple[_Saved, str | None]]:
        """Yields what has been saved since the last call, each with what is wrong already.

        Looks at the disk when something new is announced, and otherwise every `poll_seconds`.
        """
        is_due = is_last or self.is_due
        now_seconds = time.monotonic()
        if is_due:
            self._look_seconds = now_seconds
        for saved in dict.fromkeys(announced):
            if is_due or saved.path not in self._known:
                yield from self._look_at(saved, now_seconds)
        for saved in list(self._awaited):
            if is_due and saved not in announced:
                yield from self._look_at(saved, now_seconds)
        yield from self._give_up(announced, now_seconds, is_last=is_last)
        if is_due:
            yield from self._find_settled(now_seconds)

    def _look_at(self, saved: _Saved, now_seconds: float) -> Iterator[tuple[_Saved, str | None]]:
        fingerprint = _take_fingerprint(saved.path)
        if fingerprint is not None:
            self._awaited.pop(saved, None)
            if fingerprint != self._known.get(saved.path):
                self._known[saved.path] = fingerprint
                yield from self._resolve(saved)
        elif saved.path not in self._known:  # one that was there and is gone was removed
            self._awaited.setdefault(saved, now_seconds)

    def _give_up(
        self, announced: Sequence[_Saved], now_seconds: float, *, is_last: bool
    ) -> Iterator[tuple[_Saved, str | None]]:
        """Yields what should have appeared by now; what nobody speaks of any more was removed before it was seen."""
        for saved, since_seconds in list(self._awaited.items()):
            if is_last or now_seconds - since_seconds > _PATIENCE_SECONDS:
                del self._awaited[saved]
                self._known[saved.path] = None
                if saved in announced:
                    yield saved, "was announced as saved and is not there"

    def _resolve(self, saved: _Saved) -> Iterator[tuple[_Saved, str | None]]:
        """Yields it, unless it is a link to what is known already."""
        path = saved.path.resolve()
        if path == saved.path:
            yield saved, None
        elif (real := _take_fingerprint(path)) != self._known.get(path):
            self._known[path] = real
            yield _Saved(path, saved.holding), None

    def _list_directory(self) -> list[Path]:
        if self._directory is None or not self._directory.is_dir():
            return []
        paths = [path for path in self._directory.iterdir() if not path.name.startswith(".")]
        return [path for path in paths if not is_staging_name(path.name) and _looks_like_checkpoint(path)]

    def _find_settled(self, now_seconds: float) -> Iterator[tuple[_Saved, str | None]]:
        growing, self._growing = self._growing, {}
        for path in self._list_directory():
            fingerprint = _take_fingerprint(path)
            if fingerprint == self._known.get(path):
                continue
            before, since_seconds = growing.get(path, (None, now_seconds))
            if fingerprint != before:
                self._growing[path] = (fingerprint, now_seconds)
            elif now_seconds - since_seconds < self._poll_seconds:
                self._growing[path] = (fingerprint, since_seconds)
            else:
                self._known[path] = fingerprint
                yield _Saved(path, self._holding), None

    def forget(self, path: Path) -> None:
        """Looks at it again: it was written while it was read."""
        self._known[path] = ()

    @property
    def is_due(self) -> bool:
        """Whether the disk was not looked at for `poll_seconds`."""
        return time.monotonic() - self._look_seconds >= self._poll_seconds

    @property
    def growing(self) -> list[str]:
        """What in the directory may still be written, by name."""
        return sorted(path.name for path in self._growing)


class _Reader:
    """Reads checkpoints' bytes in a thread, one after the other, for what is not finite."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-verification")
        self._jobs: list[tuple[Contents, Fingerprint | None, Future[list[str]]]] = []

    def begin(self, contents: Contents, fingerprint: Fingerprint | None, buffers: frozenset[str]) -> None:
        self._jobs.append((contents, fingerprint, self._pool.submit(self._read, contents, buffers)))

    def _read(self, contents: Contents, buffers: frozenset[str]) -> list[str]:
        try:
            found = find_non_finite(contents, may_be_infinite=buffers, should_stop=self._stop.is_set)
        except (ValueError, OSError, OverflowError) as error:  # offsets in a checkpoint may be anything
            return [f"cannot be read: {error}"]
        if not found:
            return []
        some = ", ".join(f"{name} ({count:,} elements)" for name, count in list(found.items())[:_NUM_NAMED])
        return [f"{len(found):,} tensors hold values that are not finite, such as {some}"]

    def take_done(self, *, wait: bool) -> Iterator[tuple[Contents, list[str]]]:
        """Yields what was read and what is wrong with it; what changed or went away meanwhile is left out."""
        done = [job for job in self._jobs if wait or job[2].done()]
        self._jobs = [job for job in self._jobs if job not in done]
        for contents, fingerprint, future in done:
            problems = future.result()
            if _take_fingerprint(contents.path) == fingerprint:
                yield contents, problems

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


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
        on_bad: "raise" ends training on every rank with a `BadCheckpointError`; "warn" goes on, with a
            `BadCheckpointWarning` and a count.
        finite: Also reads every floating tensor, in a thread of rank 0 beside training, and looks for values that are
            not finite. Buffers may be infinite, as masks are.
        directory: Where other code writes checkpoints: each that appears there, or changes, and then stays as it is
            for `poll_seconds` is verified.
        directory_holds: What those are meant to hold: "all" or "weights"; None means weights for safetensors and all
            for the rest.
        ignore: Globs of the names of parameters and buffers that need not be saved, such as "teacher.*".
        poll_seconds: How often rank 0 looks at the disk for checkpoints that nobody announced.

    Attributes:
        num_verified: Checkpoints that held what they must, in the last fit; counted on rank 0.
        num_bad: Those that did not.
        last_verified: The newest that did, or None.
        last_problems: What was wrong with the newest bad one, or ().

    Raises:
        ValueError: An argument has no meaning.
        CheckpointError: In `setup`: the strategy hides what its live parameters are.
    """

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
        if on_bad not in ("raise", "warn"):
            raise ValueError(f"on_bad must be 'raise' or 'warn', not {on_bad!r}")
        if directory_holds not in (None, "all", "weights"):
            raise ValueError(f"directory_holds must be 'all', 'weights' or None, not {directory_holds!r}")
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
        # What follows lives from one fit's start to its end.
        self._ranks: Ranks | None = None
        self._ranks_world: Any = None
        self._watch: _Watch | None = None
        self._reader: _Reader | None = None
        self._vote: Callable[[], list[int]] | None = None
        self._signature: tuple[int, ...] | None = None
        self._own: tuple[int, Expectation] | None = None
        self._history: list[tuple[int, Expectation]] = []
        self._newest: tuple[Any, ...] = ()
        self._waiting: list[tuple[_Saved, str | None]] = []
        self._verdict = ""
        self._verify_seconds = 0.0

    # ---- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what it cannot compare, and joins the ranks. Communicates."""
        if stage != TrainerFn.FITTING:
            return
        for kind, reason in _REFUSED_STRATEGIES.items():
            if isinstance(trainer.strategy, kind):
                raise CheckpointError(f"CheckpointVerification cannot tell what a run must save under {reason}")
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._ranks is None or self._ranks_world is not world:
            self._ranks, self._ranks_world = Ranks(), world
        self._leave()
        self._watch = _Watch(
            self._directory if self._ranks.is_first else None, self._directory_holds, self._poll_seconds
        )
        self.num_verified = self.num_bad = 0
        self.last_verified, self.last_problems = None, ()
        self._verdict = ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says so where there is nothing to watch. No communication."""
        is_dry = trainer.fast_dev_run  # type: ignore[attr-defined]  # Lightning sets it
        if not (is_dry or self._directory is not None or list(_find_savers(trainer))):
            rank_zero_warn(
                "CheckpointVerification has nothing to watch: give the Trainer a ModelCheckpoint or an "
                "AsyncProcessCheckpoint, or this callback a directory"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Looks for what was saved since the batch before: all callbacks have had its end, and nothing has moved."""
        assert self._watch is not None
        if self._own is None:
            self._watch.ignore_present(list(_find_announced(trainer)))
            self._newest = _find_newest(trainer)
        self._advance(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes what the last save must hold: after this the strategy takes the run apart. Communicates."""
        if self._own is None:
            return
        assert self._ranks is not None
        self._end_vote()
        self._expect(trainer, pl_module)
        self._share()
        if self._ranks.is_first:
            self._look(trainer, is_last=False)  # a saver may have one to end and another to make before the fit's end

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Verifies all that is left, the last save with it. Communicates."""
        if self._own is None:
            return
        assert self._ranks is not None
        if self._ranks.is_first:
            self._finish(trainer)
        self._leave()
        self._raise_if_bad(self._ranks.broadcast(self._verdict))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stops reading. It does not communicate: other ranks may be gone."""
        self._leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stops reading. No communication."""
        self._leave()

    def _leave(self) -> None:
        self._watch = self._vote = self._signature = self._own = None
        self._history, self._waiting = [], []
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # ---- among the ranks

    def _advance(self, trainer: Trainer, module: LightningModule) -> None:
        ranks = self._ranks
        assert ranks is not None
        self._end_vote()
        has_changed = self._expect(trainer, module)
        if ranks.world_size == 1 and has_changed:
            self._share()
        if ranks.is_first:
            self._look(trainer, is_last=False)
            # What the other ranks hold of a state that has just appeared is known one batch later.
            if ranks.world_size == 1 or not has_changed:
                self._judge_waiting(trainer)
        if ranks.world_size == 1:
            self._raise_if_bad(self._verdict)
        else:
            self._vote = ranks.start_maximum([int(has_changed), int(bool(self._verdict))])

    def _end_vote(self) -> None:
        """Takes what the ranks said at the batch before: the same on all of them. It may communicate."""
        vote, self._vote = self._vote, None
        if vote is None:
            return
        has_changed, is_bad = vote()
        if has_changed:
            self._share()
        if is_bad:
            assert self._ranks is not None
            self._raise_if_bad(self._ranks.broadcast(self._verdict))

    def _raise_if_bad(self, verdict: str) -> None:
        self._verdict = ""
        if verdict:
            raise BadCheckpointError(verdict)

    def _expect(self, trainer: Trainer, module: LightningModule) -> bool:
        """Takes what this rank would have to save now, if that changed; says whether it did. No communication."""
        signature = tuple(count_state(optimizer) for optimizer in trainer.optimizers)
        if signature == self._signature:
            return False
        self._signature = signature
        self._own = (trainer.global_step, build_expectation(module, trainer.optimizers))
        return True

    def _share(self) -> None:
        """Tells all ranks what each must save. Communicates."""
        assert self._ranks is not None
        assert self._own is not None
        gathered = self._ranks.gather(self._own)
        step = max(step for step, _ in gathered)
        self._history.append((step, merge_expectations([expectation for _, expectation in gathered])))
        del self._history[:-_MAX_HISTORY]

    # ---- on rank 0

    def _look(self, trainer: Trainer, *, is_last: bool) -> None:
        assert self._watch is not None
        newest = _find_newest(trainer)
        if is_last or newest != self._newest or self._watch.is_due:
            self._newest = newest
            self._waiting += self._watch.find_new(list(_find_announced(trainer)), is_last=is_last)
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

    def _judge(self, saved: _Saved, step: int) -> _Verdict | None:
        """Returns what is wrong; None where that is not known yet, or the checkpoint is gone."""
        assert self._watch is not None
        fingerprint = _take_fingerprint(saved.path)
        if fingerprint is None:
            return None  # retention was faster
        verdict, contents, buffers = self._compare(saved, step)
        if _take_fingerprint(saved.path) != fingerprint:
            self._watch.forget(saved.path)
            return None
        if contents is None or verdict.problems or not self._is_finite_asked:
            return verdict
        if self._reader is None:
            self._reader = _Reader()
        self._reader.begin(contents, fingerprint, buffers)
        return None

    def _compare(self, saved: _Saved, step: int) -> tuple[_Verdict, Contents | None, frozenset[str]]:
        """Returns (what is wrong, what is there, which names are buffers'), by names and sizes alone."""
        try:
            contents = read_contents(saved.path)
        except (CheckpointError, OSError) as error:
            return _Verdict([str(error)]), None, frozenset()
        due = self._due_at(step if contents.step is None else contents.step)
        holding = saved.holding or ("weights" if contents.format == "safetensors" else "all")
        problems = find_problems(due, contents, has_optimizer=holding == "all", ignore=self._ignore)
        return _Verdict(problems, contents.step), contents, name_buffers(due, contents)

    def _due_at(self, step: int) -> Expectation:
        due = self._history[0][1]
        for first_step, expectation in self._history:
            if first_step <= step:
                due = expectation
        return due

    def _conclude(self, trainer: Trainer, path: Path, verdict: _Verdict) -> None:
        if verdict.problems:
            self.num_bad += 1
            self.last_problems = tuple(verdict.problems)
            self._tell(path, verdict)
        else:
            self.num_verified += 1
            self.last_verified = path
        values = {_VERIFIED: float(self.num_verified), _BAD: float(self.num_bad), _SECONDS: self._verify_seconds}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def _tell(self, path: Path, verdict: _Verdict) -> None:
        at_step = "" if verdict.step is None else f" of step {verdict.step}"
        message = f"the checkpoint{at_step} at {path} is not what this run must save: {'; '.join(verdict.problems)}"
        if self._on_bad == "warn":
            warnings.warn(f"{message} ({self.num_bad} bad so far)", BadCheckpointWarning, stacklevel=2)
        elif not self._verdict:
            self._verdict = (
                f"{message}. Training ends here, so that no more of it is lost: mend what saves (or name what need not "
                "be saved in ignore, or go on with on_bad='warn')"
            )

    def _finish(self, trainer: Trainer) -> None:
        """Looks until nothing is left to look at."""
        assert self._watch is not None
        deadline_seconds = time.monotonic() + _PATIENCE_SECONDS
        while True:
            self._look(trainer, is_last=True)
            if not self._waiting and not self._watch.growing:
                return
            if time.monotonic() > deadline_seconds:
                names = [*self._watch.growing, *(saved.path.name for saved, _ in self._waiting)]
                rank_zero_warn(f"not verified, because it still changes: {', '.join(names)}")
                return
            self._judge_waiting(trainer)
            if self._watch.growing:
                time.sleep(self._poll_seconds / 4)


# ---- who saves


def _find_savers(trainer: Trainer) -> Iterator[AsyncProcessCheckpoint | ModelCheckpoint]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it
        if isinstance(callback, AsyncProcessCheckpoint | ModelCheckpoint):
            yield callback


def _find_newest(trainer: Trainer) -> tuple[Any, ...]:
    """Returns what changes when one of the callbacks has saved, in no time."""
    return tuple(
        saver.last_saved
        if isinstance(saver, AsyncProcessCheckpoint)
        else (saver.best_model_path, saver.last_model_path, next(reversed(saver.best_k_models), None))
        for saver in _find_savers(trainer)
    )


def _find_announced(trainer: Trainer) -> Iterator[_Saved]:
    """Yields what the Trainer's callbacks say that they have saved, on this machine's disks."""
    for saver in _find_savers(trainer):
        if isinstance(saver, AsyncProcessCheckpoint):
            for path in saver.recent_saves:
                yield _Saved(path, "all" if saver.save_optimizer else "weights")
            continue
        for name in dict.fromkeys((saver.best_model_path, saver.last_model_path, *saver.best_k_models)):
            if name and "://" not in name:
                yield _Saved(Path(name), "weights" if saver.save_weights_only else "all")
