"""A difference between two runs is found and named, and what both have alike is not."""

from genesis.operations.rehearse.compare import (
    LossDifference,
    ValueDifference,
    compare_losses,
    find_differences,
    find_unlogged,
)

STRAIGHT = {
    1: {"train/loss": "5.5"},
    2: {"train/loss": "5.25", "validation/loss": "6.0"},
    3: {"train/loss": "5.125"},
}


def test_a_replayed_step_with_the_same_loss_is_no_difference() -> None:
    assert compare_losses(STRAIGHT, {2: STRAIGHT[2], 3: STRAIGHT[3]}, start=2) == []


def test_a_loss_that_differs_in_its_last_digit_is_named_with_its_step() -> None:
    killed = {2: {"train/loss": "5.250000000000001", "validation/loss": "6.0"}, 3: {"train/loss": "5.125"}}
    assert compare_losses(STRAIGHT, killed, start=4) == [
        LossDifference(2, "train/loss", "5.25", "5.250000000000001", 4)
    ]


def test_a_validation_loss_is_compared_too() -> None:
    (difference,) = compare_losses(STRAIGHT, {2: {"validation/loss": "6.5"}}, start=1)
    assert (difference.step, difference.column) == (2, "validation/loss")


def test_a_step_that_one_log_lacks_is_named() -> None:
    assert find_unlogged(STRAIGHT, STRAIGHT) == []
    assert find_unlogged(STRAIGHT, {1: STRAIGHT[1], 2: {"validation/loss": "6.0"}}) == [2, 3]


def test_values_that_differ_are_found_wherever_they_stand() -> None:
    one = {"ranks": [{"position": 8, "seed": 1}, {"position": 8}], "step": 3}
    other = {"ranks": [{"position": 8, "seed": 1}, {"position": 9}], "step": 3, "extra": None}
    assert list(find_differences(one, one)) == []
    assert list(find_differences(one, other)) == [ValueDifference("ranks.1.position", 8, 9)]
    assert list(find_differences([1, 2], [1], "list")) == [ValueDifference("list", [1, 2], [1])]
