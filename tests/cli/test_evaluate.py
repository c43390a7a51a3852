import csv
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from genesis.cli.table import COMMANDS, Command
from genesis.evaluate import watch as watching
from genesis.evaluate.task_question import TaskQuestion
from tests.cli.conftest import Genesis
from tests.cli.test_configs import CONFIGS
from tests.commands import PIPE, ForkedCommand, start_genesis
from tests.evaluate.support import write_choices, write_rows
from tests.tiny_runs import build_decoder, save

DEADLINE_SECONDS = 200
POLL_SECONDS = 0.05
NEWEST = "step-00000003"


@pytest.fixture
def animals(tmp_path: Path) -> str:
    return write_choices(tmp_path / "animals", num_rows=4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the names of the questions that are really answered."""
    names: list[str] = []
    answer = TaskQuestion.answer

    def count(question: TaskQuestion, *arguments: Any) -> Any:
        names.append(question.name)
        return answer(question, *arguments)

    monkeypatch.setattr(TaskQuestion, "answer", count)
    return names


def read_metrics(run: Path) -> list[dict[str, str]]:
    with (run / "evaluations" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_identity(run: Path) -> dict[str, Any]:
    content = json.loads((run / "checkpoints" / "step-00000001" / "manifest.json").read_text())
    identity: dict[str, Any] = content["identity"]
    return identity


def test_held_out_text_alone_gives_what_validation_gives(genesis: Genesis, recipe: Path, tmp_path: Path) -> None:
    assert genesis("fit", "--config", str(recipe)).status == 0
    outcome = genesis("evaluate", str(tmp_path / "run"), "--json", "--checkpoints", "all")
    assert (outcome.status, len(json.loads(outcome.out))) == (0, 2)
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        validated = {row["step"]: row for row in csv.DictReader(file) if row["validation/loss"]}
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == ["2", "4"]
    for row in rows:
        for metric in ("bits_per_byte", "loss"):
            expected = float(validated[row["step"]][f"validation/{metric}"])
            assert float(row[f"evaluation/web_{metric}"]) == pytest.approx(expected, rel=1e-5)


def test_a_task_gives_a_table_json_items_metrics_and_a_picture(genesis: Genesis, own_run: Path, animals: str) -> None:
    outcome = genesis("evaluate", str(own_run), "--tasks", animals)
    assert outcome.status == 0
    assert re.search(r"animals +acc +0\.\d{4} \u00b10", outcome.out)
    place = own_run / "evaluations"
    result = json.loads((place / NEWEST / "animals.json").read_text())
    assert (result["checkpoint"], result["step"], result["question"]["limit"]) == (NEWEST, 3, None)
    assert result["hash"] == (own_run / "checkpoints" / NEWEST / "COMMITTED").read_text()
    items = [json.loads(line) for line in (place / NEWEST / "animals.jsonl").read_text().splitlines()]
    assert [len(item["resps"]) for item in items] == [6] * 4
    (accuracy,) = [measure["value"] for measure in result["measures"] if measure["metric"] == "acc"]
    assert accuracy == sum(item["acc"] for item in items) / 4
    assert [(row["step"], float(row["evaluation/animals_acc"])) for row in read_metrics(own_run)] == [("3", accuracy)]
    assert (place / "evaluations.png").stat().st_size > 1000
    assert not list(place.rglob("*staging*"))


def test_what_stands_answered_is_not_computed_again(
    genesis: Genesis, own_run: Path, animals: str, asked: list[str]
) -> None:
    ask = ("evaluate", str(own_run), "--tasks", animals, "--limit", "2")
    genesis(*ask)
    first = genesis(*ask, "--json").out
    assert asked == ["animals-limit2"]
    genesis(*ask[:-1], "3")
    genesis(*ask, "--again")
    assert asked == ["animals-limit2", "animals-limit3", "animals-limit2"]
    assert json.loads(first)[0]["seconds"] > 0


def test_other_rows_or_another_checkpoint_of_that_name_are_another_question(
    genesis: Genesis, own_run: Path, animals: str, asked: list[str], tmp_path: Path
) -> None:
    ask = ("evaluate", str(own_run), "--tasks", animals)
    genesis(*ask)
    write_choices(tmp_path / "animals", num_rows=3)
    genesis(*ask)
    shutil.rmtree(own_run / "checkpoints" / NEWEST)
    save(own_run / "checkpoints", 3, build_decoder(9), read_identity(own_run))
    genesis(*ask)
    assert asked == ["animals"] * 3


def test_all_checkpoints_of_a_run_are_evaluated_and_one_that_is_named_alone(
    genesis: Genesis, own_run: Path, animals: str
) -> None:
    genesis("evaluate", str(own_run / "checkpoints" / "step-00000001"), "--tasks", animals)
    assert [row["step"] for row in read_metrics(own_run)] == ["1"]
    outcome = genesis("evaluate", str(own_run), "--tasks", animals, "--checkpoints", "all")
    assert [row["step"] for row in read_metrics(own_run)] == ["1", "2", "3"]
    assert "step 1" in outcome.out
    assert "step 3" in outcome.out


def damage(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_refused_and_the_others_are_evaluated(
    genesis: Genesis, own_run: Path, animals: str
) -> None:
    damage(own_run / "checkpoints" / "step-00000002")
    alone = genesis("evaluate", str(own_run / "checkpoints" / "step-00000002"), "--tasks", animals)
    assert alone.status == 1
    assert re.fullmatch(r"genesis: error: \S+step-00000002: .* does not have the hash that was saved.*\n", alone.err)
    outcome = genesis("evaluate", str(own_run), "--tasks", animals, "--checkpoints", "all")
    assert outcome.status == 2
    assert "step-00000002" in outcome.err
    assert [row["step"] for row in read_metrics(own_run)] == ["1", "3"]


def test_a_checkpoint_outside_of_a_run_says_where_its_results_go(
    genesis: Genesis, own_run: Path, animals: str, tmp_path: Path
) -> None:
    moved = (own_run / "checkpoints" / NEWEST).rename(tmp_path / NEWEST)
    tokenizer = ("--tokenizer", str(own_run))
    outcome = genesis("evaluate", str(moved), "--tasks", animals, *tokenizer)
    assert outcome.status == 2
    assert "give the directory of its results by --out" in outcome.err
    assert genesis("evaluate", str(moved), "--tasks", animals, *tokenizer, "--out", str(tmp_path / "out")).status == 0
    assert (tmp_path / "out" / NEWEST / "animals.json").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--limit", "0"), "--limit is 0: it must be at least 1"),
        (("--num_fewshot", "-1"), "--num_fewshot is -1: it must be at least 0"),
        (("--batch_tokens", "0"), "--batch_tokens is 0: it must be at least 1"),
        (("--until_step", "3"), "--until_step has no effect without --watch"),
        (("--tasks", "./no/"), "no such folder: no"),
        pytest.param(
            ("--tasks", "helaswag"),
            "lm-eval has no task 'helaswag'; did you mean hellaswag",
            marks=pytest.mark.slow,  # lm-eval reads all of its tasks for the names
        ),
        (("--heldout", "no.txt"), "no such file or folder of held-out text: no.txt"),
        ((), "the recipe has no corpus, and therefore no validation set; give --heldout PATH"),
        (("--limt", "3"), "did you mean --limit?"),
    ],
)
def test_a_wrong_option_is_one_line(
    genesis: Genesis, run: Path, tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    outcome = genesis("evaluate", str(run), "--out", str(tmp_path), *options)
    assert outcome.status == 2
    assert reason in outcome.err
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        (
            {"question": "a", "choices": ["b", "c"], "answer": 7},
            (),
            "a row's answer is not among its choices: {'question'",
        ),
        ({"question": "a", "choices": [], "answer": 0}, (), "task odd failed on its rows or settings"),
        (
            {"question": "a", "choices": ["b", "c"], "answer": 0},
            ("--num_fewshot", "9"),
            "task odd failed on its rows or settings",
        ),
    ],
)
def test_rows_that_cannot_be_asked_are_told_and_nothing_is_written(
    genesis: Genesis, own_run: Path, tmp_path: Path, row: dict[str, Any], options: tuple[str, ...], reason: str
) -> None:
    spec = write_choices(tmp_path / "odd")
    good = {"question": "a", "choices": ["b", "c"], "answer": 1}
    write_rows(tmp_path / "odd" / "test.jsonl", [good, row])
    write_rows(tmp_path / "odd" / "train.jsonl", [row] * 2)
    outcome = genesis("evaluate", str(own_run), "--tasks", spec, *options)
    assert outcome.status == 2
    assert reason in outcome.err.splitlines()[-1]
    assert not (own_run / "evaluations").exists()


def write_too_long(folder: Path) -> str:
    """A task whose second row has a choice that is longer than the model's context."""
    spec = write_choices(folder)
    good = {"question": "a", "choices": ["b", "c"], "answer": 1}
    write_rows(folder / "test.jsonl", [good, {**good, "choices": ["b", "alpha " * 300]}, good])
    return spec


def test_a_choice_longer_than_the_context_is_named_and_the_other_tasks_are_finished(
    genesis: Genesis, own_run: Path, animals: str, tmp_path: Path
) -> None:
    spec = write_too_long(tmp_path / "plants")
    outcome = genesis("evaluate", str(own_run), "--tasks", f"{spec},{animals}")
    assert outcome.status == 1
    error = outcome.err.splitlines()[-1]
    assert error.startswith(f"genesis: error: {NEWEST}: task plants, row 2: the continuation ' alpha alpha")
    assert re.search(r"has \d{3} tokens, but the model's context is 256$", error)
    assert re.search(r"animals +acc +0\.\d{4}", outcome.out)
    assert {path.name for path in (own_run / "evaluations" / NEWEST).glob("*.json")} == {"animals.json"}
    alone = genesis("evaluate", str(own_run), "--tasks", spec)
    assert (alone.status, alone.out) == (1, "")


def test_watching_finishes_the_other_tasks_of_each_checkpoint(
    genesis: Genesis, own_run: Path, animals: str, tmp_path: Path
) -> None:
    outcome = watch(genesis, own_run, f"{write_too_long(tmp_path / 'plants')},{animals}", until_step=3)
    assert outcome.status == 1
    assert outcome.err.count("task plants, row 2: ") == 3
    assert [row["step"] for row in read_metrics(own_run)] == ["1", "2", "3"]


def test_a_task_asked_twice_is_refused(genesis: Genesis, run: Path, animals: str) -> None:
    outcome = genesis("evaluate", str(run), "--tasks", f"{animals},{animals}")
    assert (outcome.status, "animals is given twice" in outcome.err) == (2, True)


def test_one_checkpoint_cannot_be_watched(genesis: Genesis, checkpoint: Path, animals: str) -> None:
    outcome = genesis("evaluate", str(checkpoint), "--watch", "--tasks", animals)
    assert (outcome.status, "--watch needs a run" in outcome.err) == (2, True)


def test_without_the_extra_the_command_names_it(genesis: Genesis, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("genesis.evaluate.tasks")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "genesis.cli.evaluate_tasks", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (command,) = [command for command in COMMANDS if command.name == "evaluate"]
    assert isinstance(command, Command)
    outcome = genesis("evaluate", "run", "--tasks", "./x")
    assert outcome.status == 2
    assert "pip install 'genesis-lm[evaluate]'" in outcome.err


# ---- --watch


def watch(genesis: Genesis, run: Path, spec: str, until_step: int) -> Any:
    return genesis("evaluate", str(run), "--tasks", spec, "--watch", "--until_step", str(until_step))


def test_watching_takes_the_newest_first_and_ends_with_all(genesis: Genesis, own_run: Path, animals: str) -> None:
    outcome = watch(genesis, own_run, animals, until_step=3)
    assert outcome.status == 0
    assert [line.split(":")[0] for line in outcome.out.splitlines()] == [NEWEST, "step-00000002", "step-00000001"]
    assert [row["step"] for row in read_metrics(own_run)] == ["1", "2", "3"]
    assert watch(genesis, own_run, animals, until_step=3).out == ""


def test_watching_passes_over_what_is_damaged_or_removed_meanwhile(
    genesis: Genesis, own_run: Path, animals: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(own_run / "checkpoints" / NEWEST)
    answer = watching.answer_questions

    def remove_first(checkpoint: Path, *arguments: Any) -> Any:
        if checkpoint.name == "step-00000002":
            shutil.rmtree(checkpoint)
        return answer(checkpoint, *arguments)

    monkeypatch.setattr(watching, "answer_questions", remove_first)
    outcome = watch(genesis, own_run, animals, until_step=3)
    assert outcome.status == 2
    assert "step-00000003 is passed over: " in outcome.err
    assert "step-00000002 was removed before it was evaluated" in outcome.err
    assert [row["step"] for row in read_metrics(own_run)] == ["1"]


def test_watching_sees_what_a_run_commits_later(
    genesis: Genesis, own_run: Path, animals: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(_: float) -> None:
        save(own_run / "checkpoints", 4, build_decoder(4), read_identity(own_run))

    monkeypatch.setattr(watching.time, "sleep", commit)  # it waits: the run goes on
    assert watch(genesis, own_run, animals, until_step=4).status == 0
    assert [row["step"] for row in read_metrics(own_run)] == ["1", "2", "3", "4"]


def test_watching_writes_to_the_tensorboard_of_the_run(genesis: Genesis, recipe: Path, tmp_path: Path) -> None:
    logger = CONFIGS / "loggers" / "tensorboard.yaml"
    assert genesis("fit", "--config", str(recipe), "--config", str(logger)).status == 0
    run = tmp_path / "run"
    outcome = genesis("evaluate", str(run), "--watch", "--until_step", "4")
    assert outcome.status == 0
    (file,) = run.rglob("events.out.tfevents.*.evaluate")
    assert list(file.parent.glob("events.out.tfevents.*[!e]"))  # training's
    events = EventAccumulator(str(file)).Reload().Scalars("evaluation/web_bits_per_byte")
    found = {str(event.step): event.value for event in events}
    wanted = {row["step"]: float(row["evaluation/web_bits_per_byte"]) for row in read_metrics(run)}
    assert found == pytest.approx(wanted, rel=1e-6)
    assert wanted.keys() == {"2", "4"}


def wait_for(is_there: Callable[[], bool], process: ForkedCommand) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(POLL_SECONDS)


@pytest.mark.slow
def test_ctrl_c_ends_watching_with_130_and_nothing_half_written(own_run: Path, animals: str) -> None:
    process = start_genesis("evaluate", own_run, "--tasks", animals, "--watch", stdout=PIPE, stderr=PIPE)
    metrics = own_run / "evaluations" / "metrics.csv"
    try:
        wait_for(lambda: metrics.exists() and len(read_metrics(own_run)) == 3, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not [path for path in own_run.rglob("*") if "staging" in path.name]
