import csv
import dataclasses
import io
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from genesis.base.errors import UserError
from genesis.evaluate.plot import plot_results
from genesis.evaluate.results import Measure, Result, read_results, select_comparable, write_metrics, write_result
from genesis.evaluate.table import MAX_COLUMNS, build_table


def make_result(step: int, name: str = "animals", value: float | None = 0.25, subject: str | None = None) -> Result:
    measures = (
        Measure(subject or name, "acc", value, 0.05, is_higher_better=True, num_items=40),
        Measure(subject or name, "acc_norm", 0.5, None, is_higher_better=True, num_items=40),
    )
    return Result(f"step-{step:08d}", step, f"hash {step}", name, {"kind": "task", "limit": None}, measures)


def print_table(results: list[Result]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(build_table(results))
    return out.getvalue()


def test_results_come_back_as_they_were_by_step_and_name(tmp_path: Path) -> None:
    results = [make_result(10), make_result(200, "arc"), make_result(200)]
    for result in results:
        write_result(tmp_path, result, [{"doc_id": 0, "text": "\u00e9"}])
    assert read_results(tmp_path) == [results[0], results[2], results[1]]
    assert (tmp_path / "step-00000010" / "animals.jsonl").read_text() == '{"doc_id": 0, "text": "\u00e9"}\n'
    assert sorted(path.name for path in (tmp_path / "step-00000200").iterdir()) == [
        "animals.json",
        "animals.jsonl",
        "arc.json",
        "arc.jsonl",
    ]


def test_what_is_no_number_in_json_is_none(tmp_path: Path) -> None:
    write_result(tmp_path, make_result(1, value=math.nan))
    assert "NaN" not in (tmp_path / "step-00000001" / "animals.json").read_text()
    assert read_results(tmp_path)[0].measures[0].value is None


def test_a_result_answers_its_question_about_its_checkpoint_alone() -> None:
    result = make_result(1)
    assert result.answers({"kind": "task", "limit": None}, "hash 1")
    assert not result.answers({"kind": "task", "limit": 5}, "hash 1")
    assert not result.answers({"kind": "task", "limit": None}, "hash 2")


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 1}', '{"schema": 9, "measures": []}'])
def test_a_file_that_is_no_result_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "animals.json").write_text(content)
    with pytest.raises(UserError, match=r"animals\.json (is not the result|has schema 9)"):
        read_results(tmp_path)


def test_metrics_have_a_row_for_each_checkpoint_by_step(tmp_path: Path) -> None:
    write_metrics(tmp_path, [make_result(200), make_result(30), make_result(30, "arc", value=None)])
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["evaluation/animals_acc"], row["evaluation/arc_acc"]) for row in rows] == [
        ("30", "0.25", ""),
        ("200", "0.25", ""),
    ]


def test_answers_to_other_questions_and_of_other_checkpoints_do_not_stand_in_one_line() -> None:
    results = [make_result(step) for step in (1, 2, 3)]
    results[0] = dataclasses.replace(results[0], question={**results[0].question, "data_hash": "other rows"})
    hashes = {results[1].checkpoint: "another", results[2].checkpoint: results[2].hash}
    comparable, lines = select_comparable(results, hashes)
    assert comparable == results[2:]
    assert [line.split()[0] for line in lines] == [result.checkpoint for result in results[:2]]
    assert "with other settings" in lines[0]
    assert "was replaced after its evaluation" in lines[1]
    assert select_comparable(results, {}, results[:1])[0] == results[:1]


def test_results_can_be_read_without_torch_and_lm_eval() -> None:
    program = "import sys, genesis.evaluate.results; print({'torch', 'lm_eval', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


def test_the_table_has_a_row_for_each_measure_and_the_last_checkpoints() -> None:
    text = print_table([make_result(step, value=step / 100) for step in range(10, 10 * (MAX_COLUMNS + 3), 10)])
    assert "step 10 " not in text
    assert f"step {10 * (MAX_COLUMNS + 2)}" in text
    assert "and 2 earlier in metrics.csv" in text
    (row,) = [line for line in text.splitlines() if "acc " in line]
    assert row.split()[:4] == ["animals", "acc", "0.3000", "\u00b10.050"]


def test_a_group_shows_its_own_figures_and_else_those_of_its_tasks() -> None:
    group = make_result(1, "group")
    member = make_result(1, "group", subject="member")
    both = dataclasses.replace(group, measures=group.measures + member.measures)
    assert "member" not in print_table([both])
    assert "member" in print_table([member])


def test_the_picture_has_ink_and_no_results_have_no_picture(tmp_path: Path) -> None:
    plot_results([], tmp_path / "none.png")
    assert not list(tmp_path.iterdir())
    text = Result("step-00000001", 1, "", "heldout", {"kind": "heldout"}, (make_result(1).measures[0],))
    plot_results([make_result(1), make_result(2, value=0.5), text], tmp_path / "all.png")
    picture = imread(tmp_path / "all.png")
    assert picture.shape[1] > picture.shape[0]
    assert 0.01 < np.mean(picture[..., :3].min(axis=2) < 0.9) < 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["all.png"]
