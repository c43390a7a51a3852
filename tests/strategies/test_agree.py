"""The one line of ranks that refuse their input."""

import pytest

from genesis.strategies.agree import describe_refusals


@pytest.mark.parametrize(
    ("refusals", "line"),
    [
        (["no room", "no room"], "no room"),
        ([None, "no room"], "rank 1: no room"),
        (["no room", None, "no room"], "ranks 0, 2: no room"),
        (["no room", "no directory"], "rank 0: no room (and 1 other rank refused)"),
        ([None, "no room", "no directory", "no memory"], "rank 1: no room (and 2 other ranks refused)"),
    ],
)
def test_a_reason_is_printed_once_with_its_ranks(refusals: list[str | None], line: str) -> None:
    assert describe_refusals(refusals) == line
