import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import evaluate
from benchmarks.evaluate_tasks import MAX_NEW_TOKENS, NUM_EXAMPLES, TASKS, make_requests, read_pairs
from genesis.base.errors import UserError
from tests.evaluate.support import make_text
from tests.tiny_runs import build_decoder


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    path = tmp_path / "conversations.jsonl"
    chooser = random.Random(0)
    turns = [[make_text(chooser, number) for _ in range(2)] for number in (2, 3, 5)]
    messages = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in turns]
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in messages), encoding="utf-8")
    return path


@pytest.mark.bench
def test_a_short_measurement_of_every_kind_writes_a_record_with_equal_answers(
    exported: Path,
    conversations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(evaluate, "BATCH_SIZES", (1, 3))
    words = ["--model", str(exported), "--conversations", str(conversations), "--questions", "4", "--pairs", "2"]
    assert evaluate.main([*words, "--out", str(tmp_path / "record.json")]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert list(record["tasks"]) == list(TASKS)
    assert {task["kind"] for task in record["tasks"].values()} == {
        "loglikelihood",
        "loglikelihood_rolling",
        "generate_until",
    }
    for name, task in record["tasks"].items():
        assert task["requests"] == {"hellaswag-like": 16, "arc-like": 32, "documents": 2}.get(name, 8)
        assert task["is_equal"]
        assert task["num_equal"] == task["requests"]
        assert task["largest_difference"] < 1e-2
        assert {engine: len(seconds) for engine, seconds in task["cpu_seconds"].items()} == {
            "genesis": 2,
            "hf": 2,
            "products": 2,
        }
        assert task["hf_batch_size"] in (1, 3)
    page = (tmp_path / "record.md").read_text()
    assert page == capsys.readouterr().out
    assert "equal texts" in page
    assert str(tmp_path) not in page


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ([(-1.0, True), (-2.0, False)], [(-1.5, True), (-2.0, False)], (0.5, 2, False)),
        ([(-1.0, True), (-2.0, False)], [(-1.0, True), (-2.0, True)], (0.0, 1, False)),
        ([-5000.0], [-5000.04], (0.04, 1, True)),  # 8 millionths
        ([-5000.0], [-5000.06], (0.06, 1, False)),
        (["a", "b"], ["a", "c"], (0.0, 1, False)),
        (["a", "b"], ["a", "b"], (0.0, 2, True)),
    ],
)
def test_answers_that_differ_are_measured(ours: list[Any], theirs: list[Any], found: tuple[float, int, bool]) -> None:
    compared = evaluate.compare_answers(ours, theirs)
    assert compared.pop("largest_difference") == pytest.approx(found[0])
    assert tuple(compared.values()) == found[1:]


def test_the_products_are_those_of_the_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = build_decoder(0)
    with evaluate.record_shapes(decoder) as shapes:
        decoder(torch.ones(2, 5, dtype=torch.int64))
        decoder(torch.ones(1, 3, dtype=torch.int64), logits_to_keep=torch.tensor([2]))
    decoder(torch.ones(1, 3, dtype=torch.int64))
    assert shapes == [(10, 10), (3, 1)]
    multiplied: list[tuple[int, int]] = []
    product = evaluate.linear
    monkeypatch.setattr(evaluate, "linear", lambda x, w: multiplied.append((len(x), w.numel())) or product(x, w))
    monkeypatch.setattr(evaluate, "_POSITIONS", 4)
    evaluate.multiply(decoder, shapes)
    head = decoder.output_weight.numel()
    inside = sum(weight.numel() for weight in decoder.blocks.parameters() if weight.ndim == 2)
    assert sum(rows * size for rows, size in multiplied) == 13 * inside + 11 * head
    assert [rows for rows, size in multiplied if size == head] == [4, 4, 2, 1]


@pytest.mark.parametrize("name", list(TASKS))
def test_requests_are_alike_for_the_same_task_and_have_its_lengths(
    name: str, tmp_path: Path, conversations: Path
) -> None:
    asked = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        asked.append(make_requests(tmp_path / place / name, 4, read_pairs(conversations)))
    texts = [request.args for request in asked[0]]
    assert texts == [request.args for request in asked[1]]
    if name == "arc-like":
        assert all(12 <= len(context.split()) <= 35 for context, _ in texts)
    if name == "documents":
        assert all(100 <= len(text.split()) <= 700 for (text,) in texts)
    if TASKS[name].kind == "generate_until":
        num_examples = NUM_EXAMPLES if "shot" in name else 0
        assert all(context.count("Question: ") == num_examples + 1 for context, _ in texts)
        assert all(options["max_gen_toks"] == MAX_NEW_TOKENS for _, options in texts)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--pairs", "0"), "--pairs is 0: it must be at least 1"),
        (("--model", "no"), "no does not exist"),
        (("--tasks", "arc-like,cups"), "--tasks has 'cups'; there are hellaswag-like, arc-like"),
    ],
)
def test_a_wrong_option_is_refused(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        evaluate.main(words)
