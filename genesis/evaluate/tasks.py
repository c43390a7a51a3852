"""Loads lm-eval's tasks by names and folders.

A name is a task, group or tag of lm-eval; its data come from the Hub. A folder is a user's task, with a `task.yaml` in
lm-eval's format, or with rows for the task of lm-eval that has the folder's name. No code in a folder is executed:
`!function` is refused, and templates run in a sandbox, in a process with limits (`genesis.evaluate.task_template`).
"""

import difflib
import functools
import re
import signal
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

import datasets
import huggingface_hub.constants
import lm_eval.utils
import yaml
from lm_eval.tasks import TaskManager

from genesis.base.errors import UserError
from genesis.evaluate.rows import Splits, find_splits, hash_own, read_split
from genesis.evaluate.task_template import TaskTemplateError, TaskTemplates
from genesis.recipe.yaml import check_aliases
from genesis_callbacks.base.untrusted import MAX_TEXT_BYTES, check_file, read_file

TASK_NAME: Final = "task.yaml"
_SPLIT_FIELDS: Final = ("training_split", "validation_split", "test_split", "fewshot_split")
_NUM_NEAREST: Final = 3
_SECONDS: Final = 60.0
"""Processor time for the filters of a task's answers, and for the metrics of one answer."""
_SECONDS_PER_QUESTION: Final = 0.05
"""More for the filters, for each question of the task. lm-eval's own take about a millisecond."""
_NAME: Final = re.compile(r"\w[\w.+ -]*")
_TEMPLATES = lm_eval.utils.env


@dataclass(frozen=True)
class LoadedTasks:
    """The tasks of one name or folder.

    Args:
        name: The name of the task, group or tag.
        tasks: The argument of `lm_eval.evaluator.evaluate`: all tasks, and their groups.
        data_hash: A hash of rows, settings and code, if they are the user's own.

    Raises:
        UserError: The name cannot be used as a file name.
    """

    name: str
    tasks: dict[str, Any]
    data_hash: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"the task name {self.name!r} cannot be a file name for results; use letters, digits and _ . + -"
            )


def load_tasks(spec: str, num_fewshot: int | None = None, *, may_run_code: bool = False) -> LoadedTasks:
    """Returns the tasks of a name or a folder.

    Args:
        spec: A name of lm-eval, or the path of a folder, which has a slash in it.
        num_fewshot: Examples before each question; None for the task's own number, or 0 without one.
        may_run_code: Whether `task.yaml` may name Python functions, and templates run without a sandbox.

    Raises:
        UserError: The task does not exist, its data cannot be loaded, or it would run code.
    """
    lm_eval.utils.env = _TEMPLATES if may_run_code else TaskTemplates()
    loaded = _load_folder(Path(spec), num_fewshot, may_run_code) if "/" in spec else _load_name(spec)
    for task in loaded.tasks["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(
                f"task {task.task_name} executes code that a model writes, which is not supported; choose another task"
            )
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"task {task.task_name} needs more than text, which is not supported; choose another task")
        _set_fewshot(task, num_fewshot)
        if not may_run_code:
            task.process_results = _limit(task.process_results, lambda: _SECONDS)  # of one question
            task.apply_filters = _limit(task.apply_filters, functools.partial(_filter_seconds, task))
    return loaded


def _filter_seconds(task: Any) -> float:
    return _SECONDS + _SECONDS_PER_QUESTION * len(task.instances)


def _limit(function: Callable[..., Any], limit: Callable[[], float]) -> Callable[..., Any]:
    """Returns a function of a task that fails at a limit: a filter, or a metric, may have an expression without end."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():  # which alone gets signals
            return function(*arguments, **options)
        seconds = limit()

        def end(number: int, frame: object) -> NoReturn:
            raise TaskTemplateError(
                f"an expression of a filter or a metric takes more than {seconds:g} s of processor time; --allow_code "
                "runs a task of your own without this limit"
            )

        before = signal.signal(signal.SIGPROF, end)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return function(*arguments, **options)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.signal(signal.SIGPROF, before)

    return call


def _set_fewshot(task: Any, num_fewshot: int | None) -> None:
    """Applies the number of examples as lm-eval's own command does."""
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)


# ---- by name


@cache
def _known() -> TaskManager:
    return TaskManager()


def _load_name(name: str) -> LoadedTasks:
    if name not in _known().task_index:
        near = difflib.get_close_matches(name, _known().all_tasks, n=_NUM_NEAREST)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        folder = f"; for the folder of that name write ./{name}" if Path(name).is_dir() else ""
        raise UserError(f"lm-eval has no task {name!r}{hint}{folder}")
    _skip_retries_without_network()
    try:
        return LoadedTasks(name, _known().load([name]))
    except (OSError, datasets.exceptions.DatasetNotFoundError) as error:
        reason = " ".join(str(error).split())
        config = _known().task_index[name].cfg or {}
        split = config.get("test_split") or config.get("validation_split") or "test"
        raise UserError(
            f"the data of task {name} cannot be loaded from Hugging Face's Hub ({reason}); put its rows into a "
            f"folder of its name, such as ./{name}/{split}.jsonl, and give --tasks ./{name}"
        ) from None


def _skip_retries_without_network() -> None:
    """Uses cached data without retries while the Hub's host name cannot be resolved."""
    if urllib.request.getproxies():
        return
    host = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True


# ---- by folder


def _load_folder(folder: Path, num_fewshot: int | None, may_run_code: bool) -> LoadedTasks:
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}; a task of your own is a folder with {TASK_NAME} and *.jsonl")
    if (folder / TASK_NAME).is_file():
        return _load_own(folder.resolve(), may_run_code)
    return _load_known_on_own_rows(folder.resolve(), num_fewshot)


def _load_own(folder: Path, may_run_code: bool) -> LoadedTasks:
    file = folder / TASK_NAME
    if not may_run_code:
        _check_runs_nothing(file, folder)
    for other in sorted((*folder.rglob("*.yaml"), *folder.rglob("*.yml"))):
        try:
            check_file(other, MAX_TEXT_BYTES)
        except OSError as error:
            raise UserError(f"{other} cannot be read: {error.strerror or error}; remove it") from None
    # lm-eval indexes every YAML file of the folder, and silently skips those that it cannot read.
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    entry = next((entry for entry in manager.task_index.values() if entry.yaml_path == file), None)
    if entry is None or not isinstance(entry.name, str):
        raise UserError(f"{file} is not a task in lm-eval's format: it needs 'task: NAME', and its includes must exist")
    config: dict[str, Any] = entry.cfg
    kind = config.get("dataset_path")
    if kind not in (None, "json"):
        if kind in ("csv", "parquet", "text", "arrow", "pandas"):
            raise UserError(f"{file} has dataset_path {kind}; rows of your own are JSONL: remove dataset_path")
        return LoadedTasks(entry.name, _build(manager, entry.name, {}, file), hash_own(folder, {}))
    splits = find_splits(folder, (config.get("dataset_kwargs") or {}).get("data_files"))
    for field in _SPLIT_FIELDS:
        if config.get(field) not in (None, *splits):
            raise UserError(
                f"{file} has {field} {config[field]}, but its rows are in {', '.join(splits)}; use one of these splits"
            )
    return LoadedTasks(entry.name, _build(manager, entry.name, _own_rows(splits), file), hash_own(folder, splits))


def _load_known_on_own_rows(folder: Path, num_fewshot: int | None) -> LoadedTasks:
    entry = _known().task_index.get(folder.name)
    if entry is None or not entry.cfg or "dataset_path" not in entry.cfg:
        near = difflib.get_close_matches(folder.name, _known().all_subtasks, n=_NUM_NEAREST)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise UserError(f"{folder} has no {TASK_NAME}, and {folder.name!r} is not a task of lm-eval with rows{hint}")
    splits, wanted = find_splits(folder), {field: entry.cfg.get(field) for field in _SPLIT_FIELDS}
    asked = [wanted[field] for field in ("test_split", "validation_split") if wanted[field]]
    if not any(split in splits for split in asked):
        raise UserError(f"{folder} lacks the rows of task {folder.name}; add {' or '.join(asked)}.jsonl")
    missing = {field: None for field, split in wanted.items() if split is not None and split not in splits}
    own = entry.cfg.get("num_fewshot")
    examples = wanted["fewshot_split"] or wanted["training_split"]
    if examples not in (None, *splits) and (own if num_fewshot is None or own == 0 else num_fewshot):
        raise UserError(f"task {folder.name} needs few-shot examples; add {examples}.jsonl to {folder}")
    tasks = _build(_known(), folder.name, {**_own_rows(splits), **missing}, folder)
    return LoadedTasks(folder.name, tasks, hash_own(folder, splits))


def _own_rows(splits: Splits) -> dict[str, Any]:
    """Returns the setting that makes a task use given rows instead of loading a data set."""
    return {"custom_dataset": lambda **_: {split: read_split(paths) for split, paths in splits.items()}}


def _build(manager: TaskManager, name: str, changes: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Returns a task with some settings changed; an inline group is lm-eval's way to change them."""
    try:
        loaded = manager.load([{"group": "own", "task": [{"task": name, **changes}]}])
    except UserError:
        raise
    except Exception as error:  # a task may raise anything for invalid settings and rows
        reason = describe_failure(error)
        raise UserError(f"{place} is not a valid task: {reason}") from error
    return {"tasks": loaded["tasks"], "groups": {}, "group_map": {}}


def describe_failure(error: Exception) -> str:
    """Returns the reason that a task's templates, settings or rows give, in one line."""
    own = f"{error}" if isinstance(error, TaskTemplateError) else f"{type(error).__name__}: {error}"
    return " ".join(own.split())


def _check_runs_nothing(file: Path, folder: Path, seen: frozenset[Path] = frozenset()) -> None:
    """Refuses Python functions, in the file and in its includes, and metrics whose code comes from the Hub."""
    try:
        root = yaml.compose(read_file(file), yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if root is not None:
        check_aliases(root, file)
    for node, key in _list_nodes(root):
        what = node.tag if node.tag.startswith("!") else "hf_evaluate" if key == "hf_evaluate" else None
        if what:
            raise UserError(
                f"{file}, line {node.start_mark.line + 1} has {what}, which runs code; read the code, then allow it by "
                "--allow_code"
            )
        if key == "include" and isinstance(node, yaml.ScalarNode):
            included = (file.parent / node.value).resolve()
            if not included.is_relative_to(folder) or included in seen | {file}:
                raise UserError(f"{file} includes {node.value}, which is not another file of {folder}")
            _check_runs_nothing(included, folder, seen | {file})


def _list_nodes(root: yaml.Node | None) -> Iterator[tuple[yaml.Node, str | None]]:
    """Yields every node with its key, or with the key of the list that contains it."""
    waiting: list[tuple[yaml.Node | None, str | None]] = [(root, None)]
    seen = set()
    while waiting:
        node, key = waiting.pop()
        if node is None or id(node) in seen:  # an anchor may contain itself
            continue
        seen.add(id(node))
        yield node, key
        if isinstance(node, yaml.SequenceNode):
            waiting += [(child, key) for child in node.value]
        elif isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                waiting += [(name, None), (value, name.value if isinstance(name, yaml.ScalarNode) else None)]
