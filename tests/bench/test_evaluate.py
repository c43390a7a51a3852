import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from genesis.bench import evaluate
from genesis.errors import UserError
from tests.tiny_runs import SHAPE


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(SHAPE))
    return path


@pytest.mark.bench
def test_a_short_measurement_writes_a_record_with_equal_answers(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "_TEXT_BYTES", 300_000)
    monkeypatch.setattr(evaluate, "BATCH_SIZES", (1, 8))
    words = ("--config", str(config), "--questions", "4", "--pairs", "2", "--out", str(tmp_path / "record.json"))
    assert evaluate.main(words) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["tasks"].keys() == evaluate.TASKS.keys()
    for task in record["tasks"].values():
        assert task["requests"] == 16
        assert task["num_greedy_equal"] == 16
        assert task["largest_difference"] < 1e-3
        assert [len(seconds) for seconds in task["seconds"].values()] == [2, 2]
        assert task["hf_batch_size"] in (1, 8)
    page = (tmp_path / "record.md").read_text()
    assert page == capsys.readouterr().out
    assert str(tmp_path) not in page


def test_answers_that_differ_are_measured() -> None:
    def answer(value: float) -> Any:
        return lambda: [(value, True), (-2.0, False)]

    found = evaluate.measure({"genesis": answer(-1.0), "hf": answer(-1.5)}, 1)
    assert (found["largest_difference"], found["num_greedy_equal"]) == (0.5, 2)


def test_questions_are_alike_for_the_same_task_and_have_its_lengths(tmp_path: Path) -> None:
    asked = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        asked.append(evaluate.make_requests(tmp_path / place / "arc-like", 5))
    assert [request.args for request in asked[0]] == [request.args for request in asked[1]]
    (least, most), _ = evaluate.TASKS["arc-like"]
    assert all(least <= len(request.args[0].split()) <= most for request in asked[0])


@pytest.mark.parametrize(
    ("words", "reason"),
    [(("--pairs", "0"), "--pairs is 0: it must be at least 1"), (("--config", "no.yaml"), "there is no file no.yaml")],
)
def test_a_wrong_option_is_refused(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        evaluate.main(words)
