"""Rollouts of policy gradients: ratios of tokens, several rewards, replaced prompts; on ranks, killed and resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from genesis.base.errors import UserError
from genesis.data.prompts import RewardOptions
from genesis.objectives import GRPO
from genesis.objectives.objective import Objective
from genesis_callbacks.testing import run_ranks
from tests.tiny_runs import build_decoder, save
from tests.train.rollouts import STEPS, answer, build_data, build_module, read_log, write_case
from tests.train.support import build_trainer
from tests.train.test_rollout import AXES, KillBeforeStep, KillInGeneration, assert_same_bits, list_answers

pytestmark = pytest.mark.xdist_group("rollouts")

REWARD = """
def coarse(messages, text, columns):
    return float("e" in text)

def rare(messages, text, columns):
    return float("z" in text)
"""
FAMILY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dapo": (
        {"preset": "dapo", "clip_low": 0.01, "clip_high": 0.01, "cut_answers": "mask"},
        {"max_resamples": 2, "max_new_tokens": 28},
    ),
    "reinforce++": ({"preset": "reinforce++"}, {}),
    "rloo": ({"preset": "rloo", "clip_low": 0.05, "clip_high": 0.05}, {}),
}
FIGURES = (
    "reward",
    "reward_coarse",
    "reward_overlong",
    "ratio",
    "clipped",
    "answer_tokens",
    "entropy",
    "finished",
    "loss",
)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("case"), REWARD)


def answer_family(name: str, directory: str, case: str, strategy: str, *arguments: Any) -> dict[str, Any]:
    choices, prompts = FAMILY[name]
    rewards = (
        RewardOptions(f"{case}/reward.py:coarse"),
        RewardOptions(f"{case}/reward.py:rare", weight=0.1),
        RewardOptions("overlong", buffer_tokens=6, weight=0.5),
    )
    prompts = {"reward": None, "rewards": rewards, **prompts}
    return answer(directory, case, strategy, *arguments, prompts=prompts, module={"objective": GRPO(**choices)})


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY)
def test_rollouts_of_the_family_repeat_after_a_kill_and_on_two_ranks(name: str, case: Path, tmp_path: Path) -> None:
    (straight,) = run_ranks(answer_family, 1, name, str(tmp_path / "straight"), str(case), "replicated")
    log = read_log(tmp_path / "straight")
    assert len(log) == STEPS
    # Exactly: the old log-probabilities come from the same forward, in the same micro-batches.
    assert [row["train/first_ratio_error"] for row in log if "train/first_ratio_error" in row] == [0.0, 0.0]
    assert [row["train/ratio"] == 1.0 for row in log] == [True, False, False] * 2
    for row in log:
        total = row["train/reward_coarse"] + 0.1 * row["train/reward_rare"] + 0.5 * row["train/reward_overlong"]
        assert row["train/reward"] == pytest.approx(total, abs=1e-5)
        assert -1.0 <= row["train/reward_overlong"] <= 0.0
        assert {"train/reward_coarse_spread", "train/reward_coarse_no_signal"} <= row.keys()
        assert row.get("train/masked", 1 - row["train/finished"]) == pytest.approx(1 - row["train/finished"], abs=1e-6)
    if name == "dapo":
        assert all(row["train/asked"] >= 1.0 for row in log)
        assert any(row["train/asked"] > 1.0 for row in log)
        assert any(row["train/masked"] > 0.0 for row in log)
    sample = json.loads(next(iter(sorted((tmp_path / "straight" / "rollouts").iterdir()))).read_text().splitlines()[0])
    assert {"reward", "reward_coarse", "reward_rare", "reward_overlong"} <= sample.keys()

    killer = KillInGeneration() if name == "dapo" else KillBeforeStep()
    arguments = (name, str(tmp_path / "killed"), str(case), "replicated", STEPS)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(answer_family, 1, *arguments, killer)
    (resumed,) = run_ranks(answer_family, 1, *arguments)
    assert resumed["restored"] in (3, 4)
    assert_same_bits(straight, resumed)

    ranks = run_ranks(answer_family, 2, name, str(tmp_path / "two"), str(case), "replicated")
    for step in range(STEPS):
        assert list_answers([batch for rank in ranks for batch in rank["batches"][step : step + 1]]) == list_answers(
            [straight["batches"][step][: len(rank["batches"][step])] for rank in ranks[:1]]
        ) + list_answers([straight["batches"][step][len(ranks[0]["batches"][step]) :]])
        for extra in ("reward", "advantage", "spread", "reward_of.coarse", *(["num_asked"] if name == "dapo" else [])):
            assert [value for rank in ranks for value in rank["extras"][step][extra]] == straight["extras"][step][extra]
    for weight, tensor in straight["weights"].items():
        assert float((ranks[0]["weights"][weight] - tensor).abs().max()) < 1e-5
    check_logs(log, read_log(tmp_path / "two"))


def check_logs(log: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    for one, two in zip(log, other, strict=True):
        for name in FIGURES:
            assert two[f"train/{name}"] == pytest.approx(one[f"train/{name}"], abs=1e-5), name
        assert one.get("train/first_ratio_error") == two.get("train/first_ratio_error")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), AXES[:3])
def test_ranks_that_share_prompts_have_the_ratios_of_tokens_of_one_process(
    case: Path, tmp_path: Path, strategy: str, world_size: int
) -> None:
    (alone,) = run_ranks(answer_family, 1, "dapo", str(tmp_path / "alone"), str(case), "replicated")
    ranks = run_ranks(answer_family, world_size, "dapo", str(tmp_path / "shared"), str(case), strategy)
    for rank in ranks:
        assert list_answers(rank["batches"]) == list_answers(alone["batches"])
        for weight, tensor in rank["weights"].items():
            assert float((tensor - alone["weights"][weight]).abs().max()) < 5e-5, weight
    check_logs(read_log(tmp_path / "alone"), read_log(tmp_path / "shared"))


def answer_masked(directory: str, case: str, max_steps: int) -> dict[str, Any]:
    objective = GRPO("dapo", cut_answers="mask")
    options: dict[str, Any] = {"prompts": {"max_new_tokens": 1}, "module": {"objective": objective}}
    return answer(directory, case, "replicated", max_steps, **options)


@pytest.mark.slow
def test_a_window_whose_answers_are_all_masked_changes_no_weight(tmp_path: Path) -> None:
    case = write_case(tmp_path / "case")
    arguments = (str(tmp_path / "run"), str(case))
    one, other = (run_ranks(answer_masked, 1, *arguments, steps)[0]["weights"] for steps in (1, STEPS))
    assert read_log(tmp_path / "run") == []  # windows that are skipped have no figures
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def continue_as(directory: str, case: str, objective: Objective, max_steps: int, steps: int = 3) -> dict[str, Any]:
    prompts = {"steps_per_rollout": steps}
    return answer(directory, case, "replicated", max_steps, module={"objective": objective}, prompts=prompts)


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize("steps", [3, 1])
def test_a_run_that_turns_to_ratios_of_tokens_answers_again(tmp_path: Path, steps: int) -> None:
    case = write_case(tmp_path / "case")
    run_ranks(continue_as, 1, str(tmp_path / "run"), str(case), GRPO("gspo"), 2)
    run_ranks(continue_as, 1, str(tmp_path / "run"), str(case), GRPO("dapo"), 4, steps)
    log = read_log(tmp_path / "run")
    assert [row.get("train/first_ratio_error") for row in log] == [0.0, None, 0.0, None if steps == 3 else 0.0]


def test_a_function_that_hangs_ends_the_run_in_one_line(tmp_path: Path) -> None:
    case = write_case(tmp_path, "import time\n\ndef reward(messages, text, columns):\n    time.sleep(1000)\n")
    data = build_data(case, reward_seconds=0.5)
    with pytest.raises(
        UserError, match=r"took longer than 0\.5 s for answer 1 to .*prompts\.jsonl, line \d; correct it"
    ):
        build_trainer("auto", 1, STEPS, []).fit(build_module(data), data)


def answer_scored(directory: str, case: str, strategy: str, *arguments: Any) -> dict[str, Any]:
    rewards = (
        RewardOptions("reward_model", "helpful", weight=2.0, model=f"{case}/scorer"),
        RewardOptions("reward_model", "harmless", model=f"{case}/other"),
        RewardOptions(f"{case}/reward.py:coarse", weight=0.1),
    )
    options: dict[str, Any] = {"prompts": {"reward": None, "rewards": rewards}, "module": {"objective": GRPO("grpo")}}
    return answer(directory, case, strategy, *arguments, **options)


@pytest.mark.slow
@pytest.mark.each
def test_reward_models_as_rewards_repeat_after_a_kill_and_on_two_ranks(tmp_path: Path) -> None:
    case = write_case(tmp_path / "case", REWARD)
    for seed, name in enumerate(("scorer", "other")):
        shutil.copytree(case / "tokenizer", case / name)
        save(case / name / "checkpoints", 1, build_decoder(seed, num_scores=1), {}, num_scores=1)
    (straight,) = run_ranks(answer_scored, 1, str(tmp_path / "straight"), str(case), "replicated")
    log = read_log(tmp_path / "straight")
    assert len(log) == STEPS
    for row in log:
        total = 2 * row["train/reward_helpful"] + row["train/reward_harmless"] + 0.1 * row["train/reward_coarse"]
        assert row["train/reward"] == pytest.approx(total, abs=1e-5)
        assert {"train/reward_helpful_spread", "train/reward_harmless_no_signal"} <= row.keys()
    arguments = (str(tmp_path / "killed"), str(case), "replicated", STEPS)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(answer_scored, 1, *arguments, KillInGeneration())
    (resumed,) = run_ranks(answer_scored, 1, *arguments)
    assert_same_bits(straight, resumed)
    ranks = run_ranks(answer_scored, 2, str(tmp_path / "two"), str(case), "replicated")
    for step in range(STEPS):
        for extra in ("reward", "reward_of.helpful", "advantage"):
            assert [value for rank in ranks for value in rank["extras"][step][extra]] == straight["extras"][step][extra]
