"""Recipes are compared by what they do: schedules in any spelling, and options that a release did not have yet."""

from typing import Any

import pytest

from genesis.train.recipe_policy import RECIPE_POLICY, align_schedule
from genesis_callbacks.checkpoint.drift import compare_mappings

WSD = {"shape": "wsd", "by": "updates"}
BEGUN = {**WSD, "total_updates": 5000, "warmup_updates": 100, "decay_share": 0.3, "floor_share": 0.05}


def differ(before: dict[str, Any], now: dict[str, Any], steps: tuple[Any, Any]) -> set[str]:
    recipes = [
        {"schedule": schedule, "trainer": {"max_steps": max_steps}}
        for schedule, max_steps in zip((before, now), steps, strict=True)
    ]
    assert RECIPE_POLICY.align is align_schedule
    return {key for key, *_ in compare_mappings(recipes[0], align_schedule(*recipes))}


@pytest.mark.parametrize(
    ("before", "now", "steps", "differences"),
    [
        (BEGUN, {**BEGUN, "total_updates": None, "warmup_updates": None, "warmup_share": 0.02}, (5000, 5000), set()),
        (BEGUN, {**WSD, "warmup_share": 0.02, "decay_updates": 1500, "floor_share": 0.05}, (5000, 5000), set()),
        (BEGUN, {**WSD, "warmup_share": 0.02, "decay_share": 0.3, "floor_share": 0.05}, (40, 5000), {"trainer"}),
        (BEGUN, {**BEGUN, "warmup_updates": 101}, (5000, 5000), {"warmup_updates"}),
        (BEGUN, {**BEGUN, "total_updates": None}, (5000, 6000), {"trainer", "total_updates"}),
        (BEGUN, {**BEGUN, "total_updates": None, "floor_share": 0.1}, (5000, 5000), {"total_updates", "floor_share"}),
        (BEGUN, {**BEGUN, "total_updates": None, "max_replays": 2}, (5000, 5000), {"total_updates", "max_replays"}),
        ({"warmup_share": 0.1}, {"warmup_share": 0.1}, (100, 200), {"trainer"}),  # consent for the steps is enough
        ({"warmup_updates": 3}, {"warmup_share": 0.1}, (-1, -1), {"warmup_updates", "warmup_share"}),  # epochs
        ({"shape": "own"}, {"shape": "own"}, (9, 9), set()),
        ({"total_updates": "x"}, {"total_updates": 5}, (5, 5), {"total_updates"}),
        ({"total_updates": 1e999}, {"total_updates": 5}, (5, 5), {"total_updates"}),
        ({"by": ["updates"]}, {"by": "updates"}, ("5", 5), {"trainer", "by"}),
        ({"unknown": 1}, {}, (5, 5), {"unknown"}),
    ],
)
def test_schedules_are_equal_if_they_are_the_same_however_they_are_written(
    before: dict[str, Any], now: dict[str, Any], steps: tuple[Any, Any], differences: set[str]
) -> None:
    found = differ(before, now, steps)
    assert {key.removeprefix("schedule.").partition(".")[0] for key in found} == differences


def test_prompts_of_a_release_with_one_reward_are_those_of_this_one() -> None:
    before = {"data": {"prompts": {"reward": "reward.py:score", "group_size": 8}}}
    added = {"rewards": [], "max_resamples": 0, "rollouts": None}
    now = {"data": {"prompts": {**before["data"]["prompts"], **added}}}
    assert RECIPE_POLICY.unify is not None
    assert not list(compare_mappings(RECIPE_POLICY.unify(before), RECIPE_POLICY.unify(now)))
    now["data"]["prompts"]["max_resamples"] = 2
    differences = compare_mappings(RECIPE_POLICY.unify(before), RECIPE_POLICY.unify(now))
    assert [key for key, *_ in differences] == ["data.prompts.max_resamples"]
    assert RECIPE_POLICY.kind_of("data.prompts.reward_seconds") == "free"
    assert RECIPE_POLICY.kind_of("data.prompts.rollouts.url") == "free"
    assert RECIPE_POLICY.kind_of("data.prompts.rollouts.max_lag") != "free"
