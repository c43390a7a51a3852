"""Every pair of options trains for three steps on the fake device, or is refused by name before the first.

`python -m tests.fakecuda.matrix` runs every combination.
"""

import pytest

from tests.fakecuda.client import FakeDevice
from tests.fakecuda.combinations import Combination, all_combinations, choose_pairwise
from tests.fakecuda.matrix import describe, golden_lines

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("fakecuda")]


def test_the_golden_text_has_every_combination() -> None:
    assert list(golden_lines("")) == [str(combination) for combination in all_combinations()]


@pytest.mark.parametrize("combination", choose_pairwise(all_combinations()), ids=str)
def test_a_combination_trains_or_is_refused_as_the_golden_text_has_it(
    fake_device: FakeDevice, combination: Combination
) -> None:
    assert describe(fake_device, combination) == golden_lines("")[str(combination)]
