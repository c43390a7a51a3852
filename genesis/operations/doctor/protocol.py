"""The debug protocol: everything that a recipe should prove before it costs money, in one process and two forked ranks.

One fit of a few steps runs the checks of the model in front of its first step, is watched, and saves twice. A copy of
its directory resumes. A third fit repeats one window. Then one rank and two ranks train the same steps.
"""

import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
from rich.table import Table

from genesis.base.device import is_host
from genesis.base.errors import RunEndedError, UserError, numbered
from genesis.base.run_directory import RunDirectory
from genesis.data.corpus_data import CorpusData
from genesis.data.inspect import read_corpus_tokenizer
from genesis.data.prompt_data import PromptData
from genesis.data.stream_data import StreamData
from genesis.data.window import AccumulationWindow
from genesis.model.decoder import refuse_body
from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.objective import Objective
from genesis.operations.doctor.checks import Check, judge
from genesis.operations.doctor.forked_ranks import ForkedRanks, Step
from genesis.operations.doctor.model_checks import CHECKS, Scene
from genesis.operations.doctor.observe import Repeat, Watch
from genesis.operations.doctor.planned import PlannedFit, plan_fit
from genesis.operations.doctor.prompts import (
    PROMPT_CHECKS,
    WatchAnswers,
    check_answers,
    check_rewards,
    check_template,
    plan_answers,
)
from genesis.operations.doctor.recipe import (
    SINGLE,
    SINGLE_NOTE,
    AxisPlan,
    Build,
    BuiltRecipe,
    Capacity,
    Change,
    plan_axes,
    plan_cuts,
    plan_float8,
    plan_num_steps,
    plan_strategy,
)
from genesis.operations.doctor.run_checks import (
    Course,
    Peak,
    SavePlan,
    check_checkpoint,
    check_loader,
    check_memory,
    check_overfit,
    check_resume,
    describe_save,
    find_position,
    plan_save,
)
from genesis.operations.doctor.sample import show_sample
from genesis.optim.recipe import read_algorithm
from genesis.recipe.resolved import ResolvedRecipe
from genesis.tokenizer.tokenizer import Tokenizer
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks.base.run_directory import checkpoint_name
from genesis_callbacks.checkpoint import find_latest

_OVERFIT_LIMIT: Final = 0.1
_OVERFIT_STEPS: Final = 200
_LEARNING_RATES: Final = {"new": 1e-3, "adapter": 2e-3, "imported": 2e-4}
"""The lowest learning rate with which one batch is overfitted."""
_PEAK_STEP: Final = 2
"""Before the first save; the moments of the optimizer exist by then."""
_SPLIT_RANKS: Final = 2
_SPLIT_STEPS: Final = 3
_SPLIT_ROWS: Final = 4
_SPLIT_LIMIT_SECONDS: Final = 300.0
_SPLIT_TOLERANCE: Final = 2e-3


@dataclass
class Examination:
    """The results of the protocol.

    Args:
        checks: In the order of the table.
        changes: What differs from the recipe.
        sample: A row of the first batch.
        notes: What holds for the whole examination.
    """

    checks: list[Check] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    sample: Table | None = None
    notes: list[str] = field(default_factory=list)


def examine(
    build: Build, directory: Path, capacity: Callable[[BuiltRecipe], Capacity], progress: Callable[[str], None]
) -> Examination:
    """Runs the protocol on a recipe.

    Args:
        build: Builds the recipe with options in place of its own.
        directory: An empty directory on the disk of the checkpoints.
        capacity: Returns what the device can do.
        progress: Gets a line before each part.

    Raises:
        UserError: The recipe cannot be trained, for a reason that is the user's to correct.
        RunEndedError: The disk is full, or the run ended for another reason of its environment.
    """
    ranks = ForkedRanks(build, directory)  # before this process computes
    try:
        return _Protocol(build, directory, capacity, progress, ranks).run()
    finally:
        ranks.close()


class _Protocol:
    def __init__(
        self,
        build: Build,
        directory: Path,
        capacity: Callable[[BuiltRecipe], Capacity],
        progress: Callable[[str], None],
        ranks: ForkedRanks,
    ) -> None:
        self._build, self._directory, self._capacity = build, directory, capacity
        self._progress, self._ranks = progress, ranks
        self._found = Examination()
        self._options: dict[str, Any] = dict(SINGLE)
        self._num_steps = self._num_layers = 0
        self._objective: type[Objective] = CrossEntropy
        self._is_new = True
        self._straight = Watch()
        self._planned: PlannedFit | None = None

    def run(self) -> Examination:
        self._progress("reading the recipe")
        probe = self._build({**SINGLE, "run_dir": str(self._directory / "probe")})
        if probe.resolved.get("data.prompts") is not None:
            self._answer(probe.resolved)
            return self._found
        self._plan(probe)
        del probe
        straight = self._train_straight()
        if straight is not None:
            self._resume(straight)
        self._overfit()
        self._split()
        return self._found

    def _plan(self, probe: BuiltRecipe) -> None:
        resolved = self._recipe = probe.resolved
        self._objective = type(probe.module.objective)
        self._is_new = probe.start is None
        decoder, adapter = probe.module.decoder_config, probe.module.adapter_config
        refuse_body(decoder)  # its checks read the parts of a decoder
        capacity = self._capacity(probe)
        changes = plan_cuts(*(resolved, decoder, adapter, capacity), is_new=self._is_new, base=probe.module.base_format)
        others = (plan_strategy(resolved), plan_float8(resolved))
        self._found.changes = [*changes, *(change for change in others if change is not None)]
        self._found.notes.append(SINGLE_NOTE)
        self._options |= {change.key: change.now for change in self._found.changes}
        self._options["verification.on_bad"] = "warn"  # the check `checkpoint` names what is wrong
        layers = self._num_layers = self._options.get("model.decoder.num_layers", decoder.num_layers)
        batch, seq_len = (
            self._options.get(name, resolved.get(name)) for name in ("data.global_batch_size", "data.seq_len")
        )
        self._num_steps = plan_num_steps(
            replace(decoder, num_layers=layers), adapter, capacity, batch * seq_len, seq_len
        )

    def _plan_fit(self, built: BuiltRecipe) -> None:
        """Plans the fit with the recipe as it is built, which may be smaller than the whole one."""
        try:
            self._planned = plan_fit(built.resolved, is_host=is_host(built.trainer.strategy.root_device.type))
        except UserError as error:
            self._found.notes.append(f"figures that are not compared with a plan, which does not know them: {error}")

    @contextmanager
    def _time(self, *names: str, ends: tuple[type[Exception], ...] = ()) -> Iterator[list[Check]]:
        """Collects the checks of a part; an error within becomes a failure of the checks that are still missing.

        Args:
            names: The names of the part's checks.
            ends: Errors that end the examination instead.
        """
        collected: list[Check] = []
        begin = time.perf_counter()
        try:
            yield collected
        except ends:
            raise
        except Exception as error:  # any error of a user's recipe is what the check has found
            done = {check.name for check in collected}
            collected += [_describe_error(name, error) for name in names if name not in done]
        seconds = (time.perf_counter() - begin) / max(len(collected), 1)
        self._found.checks += [replace(check, seconds=check.seconds or seconds) for check in collected]

    # ---- parts

    def _answer(self, recipe: ResolvedRecipe) -> None:
        """Examines the prompts, the answers to some of them, and their rewards; the rest of the protocol needs text."""
        options = plan_answers(recipe)
        num_prompts = options["data.global_batch_size"]
        self._progress(f"answers to {numbered(num_prompts, 'prompts')}, and one step")
        self._found.notes.append(
            f"one device and one step, on the answers to {numbered(num_prompts, 'prompts')}, none of them replaced; "
            "`genesis rehearse` compares a killed run of this recipe with one that was not killed"
        )
        with self._time(*PROMPT_CHECKS, ends=(UserError, RunEndedError)) as checks:
            built = self._build({**SINGLE, **options, "run_dir": str(self._directory / "answers")})
            data = built.data.training
            assert isinstance(data, PromptData)
            checks.append(check_template(data))
            watch = WatchAnswers(data)
            with _quiet():
                built.fit(watch)
            groups, given = [*watch.groups.values()], data.prompt_options
            checks.append(check_answers(groups, given.max_new_tokens))
            names = [one.label for one in given.all_rewards]
            checks.append(check_rewards(groups, names, are_learned=built.module.objective.learns_rewards))

    def _train_straight(self) -> tuple[Course, int] | None:
        num_steps, step = self._num_steps, self._num_steps // 2
        self._progress(f"the model and its first batch, then {numbered(num_steps, 'steps')}")
        run_dir = self._directory / "straight"
        built = self._build(
            {
                **self._options,
                "run_dir": str(run_dir),
                "trainer.max_steps": num_steps,
                "checkpoint.every_n_steps": step,
                "checkpoint.save_at_end": True,
            }
        )
        self._plan_fit(built)
        watch = Watch(self._examine_model(built), peak_step=_PEAK_STEP)
        remember = _RememberSave(built.module.adapter_config is not None)
        with self._time("checkpoint", ends=(UserError, RunEndedError)) as checks:
            with _quiet():
                built.fit(watch, remember)
            checkpoints = RunDirectory(run_dir).checkpoints
            first = checkpoints / checkpoint_name(step)
            assert remember.plan is not None
            check = check_checkpoint(first if first.is_dir() else None, remember.plan, self._planned)
            checks.append(replace(check, found=f"{check.found}; {describe_save(built.checkpoint.statistics)}"))
            checks.append(check_loader(watch.feeds))
            last = find_latest(run_dir)
            assert last is not None
            self._straight = watch
            return Course(watch.windows, last, find_position(built.trainer)), step
        return None

    def _examine_model(self, built: BuiltRecipe) -> Callable[..., None]:
        def examine_model(trainer: pl.Trainer, module: pl.LightningModule, window: AccumulationWindow) -> None:
            scene = Scene(
                trainer,
                built.module,
                built.data,
                window,
                _find_tokenizer(built.data),
                self._is_new,
            )
            with self._time("sample") as checks:
                check, self._found.sample = show_sample(scene)
                checks.append(check)
            for name, check_model in CHECKS.items():
                with self._time(name) as checks:
                    checks.append(check_model(scene))

        return examine_model

    def _resume(self, straight: tuple[Course, int]) -> None:
        course, step = straight
        self._progress(f"a resume from step {step}")
        run_dir = self._directory / "resumed"
        shutil.copytree(
            self._directory / "straight",
            run_dir,
            ignore=shutil.ignore_patterns(course.last.name),
            copy_function=_link,
        )
        watch = Watch(tensor_steps=range(step + 2, self._num_steps))
        with self._time("resume") as checks:
            built = self._build(
                {
                    **self._options,
                    "run_dir": str(run_dir),
                    "ckpt_path": "latest",
                    "trainer.max_steps": self._num_steps,
                    "checkpoint.every_n_steps": step,
                    "checkpoint.save_at_end": True,
                    "data.prefetch_windows": 0,  # windows that come and go would hide a tensor that stays
                }
            )
            with _quiet():
                built.fit(watch)
            last = find_latest(run_dir)
            assert last is not None
            checks.append(check_resume(course, Course(watch.windows, last, find_position(built.trainer)), step))
        with self._time("memory") as checks:
            before, peak_bytes = self._straight, self._straight.peak_bytes
            planned_bytes = None if self._planned is None else self._planned.step_bytes
            peak = None if peak_bytes is None else Peak(peak_bytes, planned_bytes)
            checks.append(check_memory(before.resident, before.allocated, watch.tensors, step, peak))

    def _overfit(self) -> None:
        self._progress("one batch, until it is overfitted")
        least = self._objective.least_micro_batch
        options = {
            **self._options,
            "run_dir": str(self._directory / "overfit"),
            "data.micro_batch_size": least,
            "data.global_batch_size": least,
            "trainer.max_steps": _OVERFIT_STEPS,
            "checkpoint.every_n_steps": None,
            "checkpoint.save_at_end": False,
            **self._choose_rate(),
        }
        with self._time("overfit") as checks:
            built = self._build(options)
            what = numbered(least, self._objective.name_rows())
            repeat = Repeat(_OVERFIT_LIMIT)
            _repeat_first_window(built.data)
            if self._objective.label_options:
                own = ", ".join(f"{name} {value:g}" for name, value in self._objective.label_options.items())
                what += f", by its labels alone ({own})"
            with _quiet():
                built.fit(repeat)
            checks.append(check_overfit(repeat.losses, _OVERFIT_LIMIT, what))

    def _choose_rate(self) -> dict[str, Any]:
        """Returns a learning rate with which one batch is learned in a few steps, and no dropout."""
        kind = "adapter" if self._recipe.get("model.adapter") else "new" if self._is_new else "imported"
        options = self._without_dropout()
        if read_algorithm(self._recipe.get("model.optimizer"), "model.optimizer").lr < _LEARNING_RATES[kind]:
            options["model.optimizer.lr"] = _LEARNING_RATES[kind]
        for name, value in (self._objective.label_options or {}).items():
            options[f"model.objective.init_args.{name}"] = value
        return options

    def _without_dropout(self) -> dict[str, Any]:
        names = ("model.decoder.dropout", "model.adapter.dropout")
        return {name: 0.0 for name in names if self._recipe.get(name)}

    def _split(self) -> None:
        """Trains on one rank, on two, and last on the ranks of each axis of the recipe and of all of them."""
        self._progress(f"{_SPLIT_STEPS} steps on one rank and on {_SPLIT_RANKS}")
        axes = plan_axes(self._recipe, self._num_layers)
        # Each rank of a pipeline needs a micro-batch, and the ranks that read different data share the rows.
        num_rows = math.lcm(_SPLIT_ROWS, *(plan.num_ranks for plan in axes if plan.why_not is None))
        common = {
            **self._options,
            "trainer.accelerator": "cpu",
            "trainer.precision": "32-true",
            "trainer.max_steps": _SPLIT_STEPS,
            "data.micro_batch_size": self._objective.least_micro_batch,
            "data.global_batch_size": num_rows * self._objective.least_micro_batch,
            "checkpoint.every_n_steps": None,
            "checkpoint.save_at_end": False,
            **self._without_dropout(),
        }
        single = {**common, "run_dir": str(self._directory / "single"), "trainer.strategy": "replicated"}
        sharded = {
            **common,
            "run_dir": str(self._directory / "sharded"),
            "trainer.strategy": "sharded",
            "trainer.devices": _SPLIT_RANKS,
        }
        alone: list[Step] = []
        with self._time("sharded") as checks:
            alone = self._ranks.train(single, 1, _SPLIT_LIMIT_SECONDS)
            checks.append(
                check_split(alone, self._ranks.train(sharded, _SPLIT_RANKS, _SPLIT_LIMIT_SECONDS), _SPLIT_RANKS)
            )
        for plan in axes:
            self._check_axis(plan, common, alone)

    def _check_axis(self, plan: AxisPlan, common: Mapping[str, Any], alone: Sequence[Step]) -> None:
        why_not = plan.why_not if alone else "is compared with one rank, which did not train"
        if why_not is not None:
            self._found.checks.append(Check(plan.name, "does not apply", f"not checked: it {why_not}"))
            return
        given = " and ".join(f"{name} {ranks}" for name, ranks in plan.degrees.items())
        self._progress(f"{_SPLIT_STEPS} steps with {given}")
        options = {
            **common,
            "run_dir": str(self._directory / f"axis-{plan.name}"),
            "trainer.strategy": {"class_path": "genesis.strategies.Sharded", "init_args": dict(plan.options)},
            "trainer.devices": plan.num_ranks,
        }
        with self._time(plan.name) as checks:
            steps = self._ranks.train(options, plan.num_ranks, _SPLIT_LIMIT_SECONDS)
            checks.append(check_split(alone, steps, plan.num_ranks, name=plan.name, given=given))


def check_split(
    single: Sequence[Step], sharded: Sequence[Step], num_ranks: int, *, name: str = "sharded", given: str = ""
) -> Check:
    """Compares the steps of one rank with those of several, among which the model and the batch are split.

    Args:
        single: The steps of one rank.
        sharded: The same steps of several ranks.
        num_ranks: The number of ranks.
        name: The check's.
        given: The options of the axes; nothing if ranks split the batch alone.
    """
    differences = [
        abs(two - one) / max(abs(one), 1e-12)
        for before, now in zip(single, sharded, strict=True)
        for one, two in zip(before, now, strict=True)
    ]
    worst = max(differences) if all(map(math.isfinite, differences)) else math.inf
    first, other = single[0], sharded[0]
    return judge(
        name,
        worst <= _SPLIT_TOLERANCE,
        f"loss and norm of {numbered(len(single), 'steps')} differ by at most {worst:.1e}; first step: "
        f"{first.loss:.4f} and {first.grad_norm:.4f} on one rank, {other.loss:.4f} and {other.grad_norm:.4f} on "
        f"{num_ranks}",
        f"a part of the model does not compute the same with {given}: train without it, and check parts of your own"
        if given
        else "gradients are not summed over the ranks, or are divided twice: compare the scale of the loss with the "
        "number of ranks",
    )


class _RememberSave(pl.Callback):
    """Plans what a checkpoint must hold, from the live optimizers after the first step."""

    def __init__(self, has_base: bool) -> None:
        self._has_base = has_base
        self.plan: SavePlan | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: Any) -> None:
        if self.plan is None:
            assert isinstance(pl_module, GenesisModule)
            self.plan = plan_save(pl_module, trainer.optimizers, has_base=self._has_base)


def _describe_error(name: str, error: Exception) -> Check:
    text = " ".join(str(error).split()) or "no message"
    found = text if isinstance(error, UserError | RunEndedError) else f"{type(error).__name__}: {text}"
    return Check(name, "failed", found, "the part ended with this error; run it by `genesis fit` for the traceback")


def _find_tokenizer(data: CorpusDataModule) -> Tokenizer | None:
    training = data.training
    if isinstance(training, CorpusData):
        return read_corpus_tokenizer(training.corpus.path, training.corpus.manifest)
    return training.stream.tokenizer if isinstance(training, StreamData) else None


def _repeat_first_window(data: CorpusDataModule) -> None:
    """Makes data give the content of the first window with a label again and again; the position moves on."""
    training = data.training
    read = training.window
    kept: list[AccumulationWindow] = []

    def read_again(position: int) -> AccumulationWindow:
        window = read(position)
        if not kept and window.num_valid_tokens:
            kept.append(window)
        return replace(kept[0], data_position=window.data_position) if kept else window

    training.window = read_again  # type: ignore[method-assign]  # of this object alone


def _link(source: str, target: str) -> str:
    """Copies a file by a second name, where the file system can: checkpoints are never changed in place."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps warnings of a fit from the table: the checks name what is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
