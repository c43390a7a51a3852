"""What is kept is decided purely."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from genesis_callbacks.checkpoint import Retention
from genesis_callbacks.checkpoint.retain import CommittedCheckpoint, plan_removals

CHECKPOINTS = [
    CommittedCheckpoint(f"step-{step}", step, sequence) for sequence, step in enumerate((10, 20, 30, 40, 50), start=1)
]


@pytest.mark.parametrize(
    ("retention", "removed"),
    [
        (Retention(), []),
        (Retention(keep_last=2), [10, 20, 30]),
        (Retention(keep_last=1, keep_every_n_steps=20), [10, 30]),
        (Retention(keep_last=9), []),
    ],
)
def test_examples(retention, removed):
    assert plan_removals(CHECKPOINTS, "step-50", retention) == [f"step-{step}" for step in removed]


def test_nothing_goes_where_nothing_is_verified():
    assert plan_removals(CHECKPOINTS, None, Retention(keep_last=1)) == []
    assert plan_removals(CHECKPOINTS, "step-60", Retention(keep_last=1)) == []


@given(
    steps=st.lists(st.integers(0, 99), unique=True, min_size=1),
    verified=st.integers(0, 98),
    keep_last=st.integers(1, 5),
    every=st.one_of(st.none(), st.integers(1, 9)),
    marked=st.sets(st.integers(0, 99).map(str)),
)
def test_the_newest_verified_always_stays_and_the_last_k_and_the_marked_too(steps, verified, keep_last, every, marked):
    kept = [CommittedCheckpoint(str(step), step, sequence) for sequence, step in enumerate(steps)]
    newest = kept[verified % len(kept)].name
    removed = plan_removals(kept, newest, Retention(keep_last, every), marked=marked)
    left = [one for one in kept if one.name not in removed]
    assert newest in {one.name for one in left}
    assert [one.name for one in kept[-keep_last:]] == [one.name for one in left[-min(keep_last, len(kept)) :]]
    assert not marked & set(removed)
    assert set(removed) | marked >= set(plan_removals(kept, newest, Retention(keep_last, every)))  # no other stays
    assert every is None or all(int(name) % every for name in removed)
    assert removed == [one.name for one in kept if one.name in removed]
