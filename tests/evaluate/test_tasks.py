import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from genesis.base.errors import UserError
from genesis.evaluate.rows import read_split
from genesis.evaluate.task_template import TaskTemplateError
from genesis.evaluate.tasks import load_tasks
from tests.evaluate.support import write_choices, write_rows, write_task

# One worker reads lm-eval's thousands of task files, which takes seconds: tests of tasks that it knows are slow.
pytestmark = pytest.mark.xdist_group("tasks")

ROWS = [{"question": "a", "choices": ["b", "c"], "answer": 0}]
SETTINGS: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
}
ARC_ROW = {"id": "1", "question": "a", "choices": {"text": ["b", "c"], "label": ["A", "B"]}, "answerKey": "B"}


def only_task(spec: str, **options: Any) -> Any:
    (task,) = load_tasks(spec, **options).tasks["tasks"].values()
    return task


def test_a_folder_is_a_task_with_its_own_rows_and_their_hash(tmp_path: Path) -> None:
    spec = write_choices(tmp_path / "animals", num_rows=3)
    loaded = load_tasks(spec)
    assert loaded.name == "animals"
    assert len(loaded.tasks["tasks"]["animals"].eval_docs) == 3
    write_choices(tmp_path / "animals", num_rows=4)
    changed = load_tasks(spec)
    assert changed.data_hash != loaded.data_hash
    write_choices(tmp_path / "animals", num_rows=4, doc_to_target="0")
    assert load_tasks(spec).data_hash not in (changed.data_hash, loaded.data_hash)


def test_data_files_are_named_relative_to_the_folder(tmp_path: Path) -> None:
    write_rows(tmp_path / "own" / "rows" / "some.jsonl", ROWS)
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows/some.jsonl"}}}
    assert only_task(write_task(tmp_path / "own", {**SETTINGS, **files})).eval_docs[0]["question"] == "a"


@pytest.mark.slow
def test_rows_in_a_folder_of_a_known_name_are_asked_in_the_way_of_that_task(tmp_path: Path) -> None:
    write_rows(tmp_path / "arc_easy" / "test.jsonl", [ARC_ROW])
    task = only_task(f"{tmp_path}/arc_easy")
    assert task.doc_to_text(task.eval_docs[0]) == "Question: a\nAnswer:"
    assert task.doc_to_target(task.eval_docs[0]) == 1


@pytest.mark.slow
def test_a_folder_with_one_of_the_splits_is_asked_about_that(tmp_path: Path) -> None:
    write_rows(tmp_path / "arc_easy" / "validation.jsonl", [ARC_ROW, ARC_ROW])
    assert len(only_task(f"{tmp_path}/arc_easy").eval_docs) == 2


@pytest.mark.slow
def test_examples_need_the_rows_that_they_are_of(tmp_path: Path) -> None:
    write_rows(tmp_path / "arc_easy" / "test.jsonl", [ARC_ROW])
    with pytest.raises(UserError, match=r"task arc_easy needs few-shot examples; add train.jsonl"):
        load_tasks(f"{tmp_path}/arc_easy", num_fewshot=2)


@pytest.mark.slow
def test_rows_of_the_wrong_split_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "arc_easy" / "train.jsonl", [ARC_ROW])
    with pytest.raises(UserError, match=r"lacks the rows of task arc_easy; add test or validation.jsonl"):
        load_tasks(f"{tmp_path}/arc_easy")


@pytest.mark.slow
def test_an_unknown_task_is_told_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"lm-eval has no task 'helaswag'; did you mean hellaswag,"):
        load_tasks("helaswag")


@pytest.mark.slow
def test_a_folder_that_is_no_task_is_told_with_the_nearest(tmp_path: Path) -> None:
    write_rows(tmp_path / "arc_eazy" / "test.jsonl", [ARC_ROW])
    with pytest.raises(UserError, match=r"'arc_eazy' is not a task of lm-eval with rows; did you mean arc_easy"):
        load_tasks(f"{tmp_path}/arc_eazy")


@pytest.mark.parametrize(
    ("line", "reason"),
    [('{"question": "a"', "line 3 is not JSON"), ("[1]", "line 3 is a JSON list, not an object"), ("\xff", "line 3")],
)
def test_a_bad_row_is_told_by_file_and_line(tmp_path: Path, line: str, reason: str) -> None:
    spec = write_task(tmp_path / "animals", SETTINGS, test=ROWS)
    with (tmp_path / "animals" / "test.jsonl").open("ab") as file:
        file.write(b"\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(UserError, match=rf"animals/test.jsonl, {re.escape(reason)}"):
        load_tasks(spec)


def test_rows_whose_fields_change_type_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"a": "text"}, {"a": ["list"]}])
    with pytest.raises(UserError, match=r"rows.jsonl: a field has other types in other rows"):
        read_split([tmp_path / "rows.jsonl"])


def test_a_field_that_only_some_rows_have_is_refused_unless_it_is_null(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"a": 1, "b": None}, {"a": 2, "b": "x"}])
    assert read_split([tmp_path / "rows.jsonl"])["b"] == [None, "x"]
    write_rows(tmp_path / "rows.jsonl", [{"a": 1, "b": "x"}, {"a": 2}])
    with pytest.raises(UserError, match=r"rows.jsonl: row 2 lacks the field 'b'"):
        read_split([tmp_path / "rows.jsonl"])


@pytest.mark.parametrize("name", ["../../escaped", "a/b", ".hidden", ""])
def test_a_name_that_is_no_files_is_refused(tmp_path: Path, name: str) -> None:
    spec = write_task(tmp_path / "animals", {**SETTINGS, "task": name}, test=ROWS)
    with pytest.raises(UserError, match=r"cannot be a file name for results|is not a task in lm-eval's format"):
        load_tasks(spec)


def test_a_template_that_does_not_fit_the_rows_is_told(tmp_path: Path) -> None:
    spec = write_task(tmp_path / "animals", {**SETTINGS, "doc_to_text": "{{questio_}}"}, test=ROWS)
    with pytest.raises(UserError, match=r"animals/task.yaml is not a valid task: UndefinedError: 'questio_'"):
        load_tasks(spec)


def write_code(folder: Path) -> str:
    spec = write_task(folder, {}, test=ROWS)
    mark = folder / "executed"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef text(doc): return doc['question']\n")
    lines = [f"task: {folder.name}", "test_split: test", "output_type: multiple_choice", "doc_to_choice: choices"]
    lines += ["doc_to_target: answer", "doc_to_text: !function own.text"]
    (folder / "task.yaml").write_text("\n".join(lines))
    return spec


def test_python_in_a_task_is_refused_by_line_and_not_run(tmp_path: Path) -> None:
    spec = write_code(tmp_path / "animals")
    with pytest.raises(
        UserError, match=r"task.yaml, line 6 has !function, which runs code; .* allow it by --allow_code"
    ):
        load_tasks(spec)
    assert not (tmp_path / "animals" / "executed").exists()


def test_python_in_a_task_runs_where_it_is_allowed(tmp_path: Path) -> None:
    task = only_task(write_code(tmp_path / "animals"), may_run_code=True)
    assert task.doc_to_text(task.eval_docs[0]) == "a"


def test_python_in_an_included_file_is_refused(tmp_path: Path) -> None:
    spec = write_code(tmp_path / "animals")
    (tmp_path / "animals" / "task.yaml").rename(tmp_path / "animals" / "base.yml")
    (tmp_path / "animals" / "task.yaml").write_text("include: base.yml\ntask: animals\n")
    with pytest.raises(UserError, match=r"base.yml, line 6 has !function"):
        load_tasks(spec)


@pytest.mark.parametrize("included", ["/etc/passwd", "../other.yaml", "task.yaml"])
def test_what_is_included_lies_in_the_folder(tmp_path: Path, included: str) -> None:
    spec = write_task(tmp_path / "animals", {**SETTINGS, "include": included}, test=ROWS)
    with pytest.raises(UserError, match="which is not another file of"):
        load_tasks(spec)


def test_a_template_reaches_nothing_but_its_row(tmp_path: Path) -> None:
    template = "{{ question.__class__.__mro__ }}"
    spec = write_task(tmp_path / "animals", {**SETTINGS, "doc_to_text": template}, test=ROWS)
    with pytest.raises(UserError, match=r"SecurityError: access to attribute '__class__'"):
        load_tasks(spec)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 10**9 }}", "needs more than 64 MB of memory"),
        ("{% for a in range(99999) %}" + "a" * 20 + "{% endfor %}", "writes 1,999,980 characters"),
        ("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, "takes more than 0.1 s of processor time"),
    ],
)
def test_a_template_without_end_is_ended_at_a_limit(
    tmp_path: Path, template: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genesis.evaluate.task_template.SECONDS", 0.1 if "processor" in reason else 20.0)
    spec = write_task(tmp_path / "animals", {**SETTINGS, "doc_to_text": template}, test=ROWS)
    with pytest.raises(UserError, match=rf"animals/task.yaml is not a valid task: a template {reason}"):
        load_tasks(spec)


def test_an_expression_of_a_metric_without_end_is_ended_at_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genesis.evaluate.tasks._SECONDS", 0.2)
    row = {"question": "a", "end": 64 * "a" + "b"}
    metric = {
        "metric": "exact_match",
        "regexes_to_ignore": ["(a|aa)+$"],
        "aggregation": "mean",
        "higher_is_better": True,
    }
    shape = {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{end}}"}
    spec = write_task(tmp_path / "animals", {**shape, "metric_list": [metric]}, test=[row])
    (task,) = load_tasks(spec).tasks["tasks"].values()
    with pytest.raises(TaskTemplateError, match=r"a filter or a metric takes more than 0\.2 s of processor time"):
        task.process_results(row, ["a"])


def test_aliases_that_repeat_billions_of_values_and_files_without_end_are_refused(tmp_path: Path) -> None:
    spec = write_task(tmp_path / "animals", SETTINGS, test=ROWS)
    file = tmp_path / "animals" / "task.yaml"
    sound = file.read_text()
    file.write_text("a0: &a0 [1]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9)))
    with pytest.raises(UserError, match="has aliases"):
        load_tasks(spec)
    file.write_text(sound)
    os.mkfifo(tmp_path / "animals" / "other.yaml")
    with pytest.raises(UserError, match=r"other.yaml cannot be read: .*is a FIFO"):
        load_tasks(spec)


def test_a_metric_with_code_from_the_hub_is_refused(tmp_path: Path) -> None:
    metrics = [{"metric": "own", "hf_evaluate": True}]
    spec = write_task(tmp_path / "animals", {**SETTINGS, "metric_list": metrics}, test=ROWS)
    with pytest.raises(UserError, match="has hf_evaluate, which runs code"):
        load_tasks(spec)


def test_a_task_that_runs_what_a_model_writes_is_refused(tmp_path: Path) -> None:
    spec = write_task(tmp_path / "animals", {**SETTINGS, "unsafe_code": True}, test=ROWS)
    with pytest.raises(UserError, match="task animals executes code that a model writes"):
        load_tasks(spec)


@pytest.mark.slow
def test_without_a_network_a_task_of_the_hub_says_how_to_bring_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")  # a name that never has an address
    for settings, name in ((constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")):
        monkeypatch.setattr(settings, name, False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    with pytest.raises(UserError) as caught:
        load_tasks("hellaswag")
    (line,) = str(caught.value).splitlines()
    assert "the data of task hellaswag cannot be loaded from Hugging Face's Hub" in line
    assert "./hellaswag/validation.jsonl" in line


@pytest.mark.slow
def test_without_a_network_a_process_prints_nothing_else_about_a_task_of_the_hub(tmp_path: Path) -> None:
    program = "\n".join(
        [
            "from genesis.evaluate.environment import make_quiet",
            "make_quiet()",
            "from genesis.evaluate.tasks import load_tasks",
            "from genesis.base.errors import UserError",
            "try:",
            "    load_tasks('hellaswag')",
            "except UserError as error:",
            "    print(error)",
        ]
    )
    # A name that never has an address.
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": "https://hub.invalid", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, env=environment, check=True
    )
    (line,) = done.stdout.splitlines()
    assert "the data of task hellaswag cannot be loaded from Hugging Face's Hub" in line
    assert "./hellaswag/validation.jsonl" in line
    assert done.stderr == ""
