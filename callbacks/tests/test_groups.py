"""Optimizer groups are matched by the names of their parameters, over ranks that hold different parameters."""

import pytest
import torch

from genesis_callbacks.checkpoint import CheckpointError
from genesis_callbacks.checkpoint.sections import check_groups, find_options, name_saved_groups

WHOLE = (("a.w", "b.w", "c.w"), ("table",), ("a.b", "b.b", "c.b"))
FIRST = (("a.w", "b.w"), ("table",), ("a.b", "b.b"))
SECOND = (("c.w",), ("c.b",))
DECAYS = (0.1, 0.05, 0.0)


def save(groups, decays=DECAYS):
    return [
        {"weight_decay": decay, "lr": torch.tensor(0.5), "params": list(names)}
        for names, decay in zip(groups, decays, strict=True)
    ]


def options(live, own, *others):
    return [group.get("weight_decay") for group in find_options(0, live, own, iter(others))]


@pytest.mark.parametrize("live", [[WHOLE], [FIRST, SECOND], [SECOND, FIRST], [WHOLE, WHOLE]])
@pytest.mark.parametrize("saved", [[WHOLE], [FIRST, SECOND], [WHOLE, WHOLE]])
def test_any_split_of_the_same_groups_is_taken(live, saved):
    check_groups(0, live, saved)


@pytest.mark.parametrize(
    ("live", "detail"),
    [
        ([FIRST], "such as c.b"),
        ([WHOLE, (("new",),)], "such as new"),
        ([(("b.w", "a.w", "c.w"), *WHOLE[1:])], "order or grouping"),
        ([(("a.w", "b.w", "c.w", "table"), WHOLE[2])], "order or grouping"),
        ([(("a.w",), ("b.w", "c.w"), *WHOLE[1:])], "order or grouping"),
        ([(WHOLE[2], *WHOLE[:2])], "order or grouping"),
    ],
)
@pytest.mark.parametrize("saved", [[WHOLE], [FIRST, SECOND]])
def test_other_parameters_groups_and_orders_are_refused(live, detail, saved):
    with pytest.raises(CheckpointError, match=f"optimizer 0 updates other parameters .*{detail}"):
        check_groups(0, live, saved)


def test_each_group_gets_the_options_of_its_parameters():
    second = save(SECOND, (0.1, 0.0))
    assert options(WHOLE, save(FIRST), second) == [0.1, 0.05, 0.0]
    assert options(WHOLE, second, save(FIRST)) == [0.1, 0.05, 0.0]
    assert options(SECOND, save(WHOLE)) == [0.1, 0.0]
    assert options(FIRST, second, save(FIRST)) == [0.1, 0.05, 0.0]


def test_an_empty_group_is_kept_or_dropped_on_either_side():
    kept = (("c.w",), (), ("c.b",))
    assert options(kept, save(kept)) == [0.1, 0.05, 0.0]
    assert options(kept, save(SECOND, (0.1, 0.0))) == [0.1, None, 0.0]
    assert options(SECOND, save(kept)) == [0.1, 0.0]
    check_groups(0, [FIRST, kept], [FIRST, SECOND])


def test_parameters_that_were_saved_with_other_options_are_not_put_into_one_group():
    with pytest.raises(CheckpointError, match=r"0 has c\.w in a group .* another saved weight_decay \(0\.1 and 0\.2\)"):
        options(WHOLE, save(FIRST), save(SECOND, (0.2, 0.0)))


def test_names_are_those_of_the_saved_groups():
    assert name_saved_groups(save(WHOLE)) == WHOLE
