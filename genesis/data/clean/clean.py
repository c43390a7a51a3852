"""Cleans text: writes shards that `genesis data prepare` reads, and a report of everything that was dropped.

The work is a function of the options and the input files, the *plan*. Each phase of the plan is a pipeline of
datatrove, divided into tasks; a task writes its files atomically, and then leaves a mark. A killed run therefore
continues with its unfinished tasks, and the result equals, byte for byte, that of a run that was never killed.

    OUT/.clean/plan.json        options and input files; a later attempt must have the same
    OUT/.clean/lock             held while a cleaning runs
    OUT/.clean/workers.lock     held by each process that runs tasks here
    OUT/.clean/logs/PHASE/      datatrove's marks, statistics and logs of each task
    OUT/.clean/work/            documents, signatures and indexes between phases; removed at the end
    OUT/.clean/jobs.json        the Slurm jobs that were submitted
"""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from genesis.base.errors import UserError, find_remedy, numbered
from genesis.base.progress import Stage, stage
from genesis.data.clean.decontaminate import Decontamination
from genesis.data.clean.execute import (
    Phase,
    check_ray,
    check_slurm,
    find_running_jobs,
    run_locally,
    run_on_ray,
    submit_to_slurm,
    wait_for_workers,
)
from genesis.data.clean.plan import CLEAN_DIRECTORY, CleanOptions, evaluation_key, plan_phases
from genesis.data.clean.report import MANIFEST_NAME, CleanReport, Finish, read_report, read_versions, write_json
from genesis.data.sources import InputFile, find_files, list_sources
from genesis.data.sources.files import READING, check_reading
from genesis.tokenizer.open import open_tokenizer
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.locks import lock_file, open_lock
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES, read_text

_PLAN_NAME = "plan.json"
_JOBS_NAME = "jobs.json"
_WORKERS_NAME = "workers.lock"
_EXECUTION = ("executor", "local", "slurm", "ray")
"""Options that do not change the result."""


@dataclass(frozen=True)
class Submitted:
    """The submitted Slurm jobs."""

    jobs: tuple[str, ...]


def clean_corpus(
    options: CleanOptions,
    *,
    restart: bool = False,
    note: Callable[[str], None] = lambda line: None,
) -> CleanReport | Submitted:
    """Cleans, or finishes an earlier attempt, and returns the report; a finished result is not changed.

    Args:
        options: The options.
        restart: Whether to discard the results of an earlier attempt.
        note: Called with lines about the files of each source, and about each phase that begins.

    Returns:
        The report, or with Slurm the submitted jobs: the same call returns the report after they have ended.

    Raises:
        UserError: The input, the disk or a changed plan prevents the work. Finished tasks are kept.
    """
    _check_executor(options)
    if options.tokenizer is not None:
        open_tokenizer(options.tokenizer)  # a wrong one is refused before the sources are listed
    files = _find_all_files(options, note)
    try:
        with _locked(options):
            wait_for_workers(options.work / _WORKERS_NAME)
            if restart or not (options.out / MANIFEST_NAME).exists():
                _refuse_running_jobs(options)
            if restart:
                _remove_attempt(options)
            plan = _describe_plan(options, files)
            _begin(options, plan)
            if not (options.out / MANIFEST_NAME).exists():
                submitted = _execute(options, files, plan, note)
                if submitted is not None:
                    return submitted
            _remove_left_overs(options)
            return read_report(options.out)
    except OSError as error:
        raise UserError(
            f"cannot write to {error.filename or options.out} ({error.strerror or error}); "
            f"{find_remedy(error) or 'fix the disk'}, and run the same command again: finished tasks are kept"
        ) from None


def _check_executor(options: CleanOptions) -> None:
    if options.executor == "slurm":
        check_slurm(options.slurm)
    elif options.executor == "ray":
        check_ray()


def _find_all_files(options: CleanOptions, note: Callable[[str], None]) -> dict[str, tuple[InputFile, ...]]:
    files = list_sources(options.sources, note)
    for number, chosen in enumerate(options.stages):
        if isinstance(chosen, Decontamination):
            for source in chosen.evaluation:
                files[evaluation_key(options.label(number), source.name)] = find_files(source)
    return files


def _execute(
    options: CleanOptions,
    files: dict[str, tuple[InputFile, ...]],
    plan: dict[str, Any],
    note: Callable[[str], None],
) -> Submitted | None:
    phases = plan_phases(options, files)
    indices = [phase.name for phase in phases if phase.name.endswith("-index")]
    phases.append(Phase("finish", (Finish(options, plan, indices),), 1))
    numbers = {phase.name: number for number, phase in enumerate(phases, 1)}

    @contextmanager
    def begin(phase: Phase, num_done: int) -> Iterator[Stage]:
        tasks = numbered(phase.num_tasks, "tasks")
        note(f"phase {numbers[phase.name]} of {len(phases)}: {phase.name}, {tasks}")
        with stage(phase.name, phase.num_tasks, "tasks", first=num_done) as shown:
            yield shown

    if options.executor == "slurm":
        return _submit(options, phases)
    if options.executor == "ray":
        run_on_ray(phases, options.logs, options.ray, begin)
    else:
        run_locally(phases, options.work / _WORKERS_NAME, options.logs, options.local, begin)
    return None


def _submit(options: CleanOptions, phases: list[Phase]) -> Submitted:
    jobs = submit_to_slurm(phases, options.logs, options.slurm)
    write_json(options.work / _JOBS_NAME, jobs)
    return Submitted(tuple(jobs))


# The directory of an attempt


@contextmanager
def _locked(options: CleanOptions) -> Iterator[None]:
    out = options.out
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose another out")
    if out.is_dir() and not options.work.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is not empty and was not made by `genesis data clean`; choose another out")
    options.work.mkdir(parents=True, exist_ok=True)
    with open_lock(options.work / "lock") as lock:
        try:
            lock_file(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, out)
        except BlockingIOError:
            raise UserError(f"another `genesis data clean` is running in {out}; wait for it or stop it") from None
        yield


def _refuse_running_jobs(options: CleanOptions) -> None:
    path = options.work / _JOBS_NAME
    if path.exists():
        running = find_running_jobs(load_json(read_text(path)))
        if running:
            raise UserError(
                f"Slurm jobs {', '.join(running)} are running in {options.out}; wait for them or scancel them"
            )


def _remove_left_overs(options: CleanOptions) -> None:
    """Removes intermediate files, and files that a killed task was writing."""
    shutil.rmtree(options.work / "work", ignore_errors=True)
    for staging in options.out.rglob("*.staging"):
        staging.unlink()


def _remove_attempt(options: CleanOptions) -> None:
    # The plan is removed last: without it, marks of finished tasks would be taken for marks of the next plan.
    (options.out / MANIFEST_NAME).unlink(missing_ok=True)
    (options.out / "report.json").unlink(missing_ok=True)
    for path in ("text", "dropped", *(f"{CLEAN_DIRECTORY}/{name}" for name in ("logs", "work", "shards", "examples"))):
        if (options.out / path).exists():
            shutil.rmtree(options.out / path)
    (options.work / _JOBS_NAME).unlink(missing_ok=True)
    (options.work / _PLAN_NAME).unlink(missing_ok=True)


def _begin(options: CleanOptions, plan: dict[str, Any]) -> None:
    """Writes the plan, or compares it with the plan of an earlier attempt."""
    path = options.work / _PLAN_NAME
    if not path.exists():
        if (options.out / MANIFEST_NAME).exists():
            raise UserError(f"{options.out} is a result without its plan; start again with --restart")
        write_json(path, plan)
        return
    before = load_json(read_text(path, MAX_DOCUMENT_BYTES))  # it lists every file
    check_reading(before, options.out, is_finished=(options.out / MANIFEST_NAME).exists())
    old, new = (dict(_flatten("", each)) for each in (before, plan))
    for place in dict.fromkeys((*old, *new)):
        if place not in old or place not in new or old[place] != new[place]:
            then, now = (repr(each[place]) if place in each else "missing" for each in (old, new))
            raise UserError(
                f"{options.out} was started with different options: {place} was {then} and is {now}; use the same, "
                "give another out, or start again with --restart"
            )


def _describe_plan(options: CleanOptions, files: dict[str, tuple[InputFile, ...]]) -> dict[str, Any]:
    described = {key: value for key, value in asdict(options).items() if key not in _EXECUTION}
    described["stages"] = [{"filter": chosen.name, **asdict(chosen)} for chosen in options.stages]
    for source in (
        *described["sources"],
        *(source for chosen in described["stages"] for source in chosen.get("evaluation", ())),
    ):
        if source["chat"] is None:
            del source["chat"]  # plans of earlier versions have no such key
    plan = {
        "version": READING,
        "datatrove": read_versions()["datatrove"],
        "options": described,
        "files": {
            f"{name}: {file.path}": {"bytes": file.num_bytes, "mtime_ns": file.mtime_ns, "identity": file.identity}
            for name, found in files.items()
            for file in found
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(plan, default=str))
    return plain


def _flatten(place: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(f"{place}.{key}" if place else str(key), inner)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _flatten(f"{place}[{index}]", inner)
    else:
        yield place, value
