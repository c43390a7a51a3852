"""Every pair of options trains for two steps on the fake device, or is refused by name before the first.

`python -m tests.fakecuda.matrix` runs every combination.
"""

import pytest

from tests.fakecuda.client import FakeDevice
from tests.fakecuda.combinations import Combination, all_combinations, choose_pairwise, tuned_combinations
from tests.fakecuda.matrix import TUNED_GOLDEN, describe, describe_tuned, golden_lines

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("fakecuda")]


TUNED = choose_pairwise(tuned_combinations())
NUM_FIRST = 10
"""So many of the first combinations have each option, and most pairs; CI runs these."""


def test_the_golden_texts_have_every_combination() -> None:
    assert list(golden_lines("")) == [str(combination) for combination in all_combinations()]
    assert list(golden_lines("", TUNED_GOLDEN)) == [str(combination) for combination in TUNED]


@pytest.mark.each
@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(combination, marks=[pytest.mark.repeat] * (number >= NUM_FIRST))
        for number, combination in enumerate(choose_pairwise(all_combinations()))
    ],
    ids=str,
)
def test_a_combination_trains_or_is_refused_as_the_golden_text_has_it(
    fake_device: FakeDevice, combination: Combination
) -> None:
    assert describe(fake_device, combination) == golden_lines("")[str(combination)]


@pytest.mark.parametrize("combination", TUNED, ids=str)
def test_fine_tuning_waits_for_the_device_where_it_did_or_is_refused_by_name(
    fake_device: FakeDevice, combination: Combination
) -> None:
    """Adapters and objectives with every pair of options: a wait that is new fails."""
    assert describe_tuned(fake_device, combination) == golden_lines("", TUNED_GOLDEN)[str(combination)]
