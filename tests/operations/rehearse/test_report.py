"""The verdict is what the comparison says, and the words name what differs."""

import json

import pytest

from genesis.base.determinism import UNREPEATABLE
from genesis.operations.rehearse.compare import CheckpointComparison, LossDifference, TensorDifference, ValueDifference
from genesis.operations.rehearse.report import KillRecord, Report, Round, describe_kill, summarise

NAME = "step-00000060"
EQUAL = CheckpointComparison(NAME, NAME, num_tensors=44, tensors=(), values=(), others=("ranks.0.trainer.loops.epoch",))
WEIGHTS = CheckpointComparison(
    NAME, NAME, 44, (TensorDifference("model.embedding.weight", "changed", 0.125),), values=(), others=()
)
POSITION = CheckpointComparison(
    NAME, NAME, 44, (), (ValueDifference("ranks.0.trainer.CorpusDataModule.data_position", 480, 488),), ()
)


def kill(number: int) -> KillRecord:
    return KillRecord(
        number,
        "rank",
        "rank 1",
        "save",
        number,
        39,
        "step-00000040.staging-ab_1",
        "the others ended after 2.5 s",
        30,
        9,
    )


def report(*rounds: Round, num_kills: int = 2, failure: str | None = None, seq_len: int = 2048) -> Report:
    return Report(
        command="genesis rehearse --config c.yaml",
        directory="runs/rehearsals/c",
        seed=1,
        num_wanted=2,
        max_steps=60,
        every_n_steps=10,
        seq_len=seq_len,
        kills=[kill(number) for number in range(1, num_kills + 1)],
        rounds=list(rounds),
        failure=failure,
    )


def round_of(checkpoints: CheckpointComparison | None, *losses: LossDifference) -> Round:
    return Round("killed", 3, checkpoints, num_losses=70, losses=list(losses))


def test_equal_rounds_with_all_kills_are_equal() -> None:
    found = report(round_of(EQUAL), round_of(EQUAL))
    assert found.verdict == "equal"
    assert found.lost_steps == 18
    assert "bit for bit" in summarise(found)[-1]


@pytest.mark.parametrize(("seq_len", "num_blocks"), [(256, 2), (385, 4), (384, 3), (2048, 16)])
def test_sequences_of_few_blocks_of_keys_are_named(seq_len: int, num_blocks: int) -> None:
    found = report(round_of(EQUAL), round_of(EQUAL), seq_len=seq_len)
    lines = [line for line in summarise(found) if "blocks of keys" in line]
    assert len(lines) == (num_blocks < 4)
    assert all(f"{seq_len} tokens have at most {num_blocks} blocks" in line for line in lines)
    assert found.to_json()["key_blocks"] == num_blocks


@pytest.mark.parametrize(
    ("of_one", "words"),
    [
        (round_of(WEIGHTS), "model.embedding.weight: changed, by at most 1.250e-01"),
        (round_of(POSITION), "data_position: 480 straight, 488 killed"),
        (round_of(EQUAL, LossDifference(41, "train/loss", "5.5", "5.6", 2)), "5.5 straight, 5.6 in start 2"),
    ],
)
def test_any_difference_in_any_round_is_named(of_one: Round, words: str) -> None:
    found = report(round_of(EQUAL), of_one)
    assert found.verdict == "different"
    assert words in "\n".join(summarise(found))


def test_a_loss_that_differs_before_any_resume_points_at_the_recipe() -> None:
    before, after = (LossDifference(step, "train/loss", "5.5", "5.6", start) for step, start in ((7, 1), (41, 2)))
    assert "the recipe is not deterministic" in summarise(report(round_of(WEIGHTS, before, after)))[-1]
    assert "may lack state that the recipe needs" in summarise(report(round_of(WEIGHTS, after)))[-1]


def test_kernels_that_need_not_repeat_are_named_even_if_the_runs_were_equal() -> None:
    found = report(round_of(EQUAL))
    assert UNREPEATABLE not in summarise(found)
    found.note = UNREPEATABLE
    assert UNREPEATABLE in summarise(found)
    assert found.to_json()["note"] == UNREPEATABLE


def test_fewer_kills_than_wanted_are_not_a_success() -> None:
    found = report(round_of(EQUAL), num_kills=1)
    assert found.verdict == "too short"
    assert "1 of 2 kills" in summarise(found)[-1]


def test_a_failure_is_told_with_its_reason_whatever_else_was_found() -> None:
    found = report(round_of(EQUAL), failure="start 3 ended with status 1")
    assert found.verdict == "failed"
    assert "start 3 ended with status 1" in summarise(found)[-1]
    assert report().verdict == "failed"


def test_the_report_is_plain_json() -> None:
    content = json.loads(json.dumps(report(round_of(WEIGHTS)).to_json()))
    assert content["verdict"] == "different"
    assert content["kills"][0]["resumed_from"] == 30
    assert content["rounds"][0]["checkpoints"]["tensors"][0]["name"] == "model.embedding.weight"


def test_a_row_says_victim_save_resume_and_loss() -> None:
    row = describe_kill(kill(1))
    assert row == ("1", "rank 1", "39", "step-00000040", "the others ended after 2.5 s", "step 30", "9", "")
