"""The one line of ranks that refuse their input."""

import pytest

from genesis.strategies.agree import describe_refusals, find_disagreement


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


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ([("flex", None)], None),
        ([("flex", None), ("flex", None)], None),
        ([("flex", "flex is wrong")], "flex is wrong"),
        ([("flex", None), ("flex", "flex is wrong"), ("flash", None)], "rank 1: flex is wrong"),
        ([("flex", None), ("flash", None), ("flex", None)], "(flex on ranks 0, 2; flash on rank 1)"),
    ],
)
def test_ranks_train_with_one_kernel_of_attention_or_not_at_all(
    found: list[tuple[str, str | None]], line: str | None
) -> None:
    reason = find_disagreement(found)
    assert (reason is None) == (line is None)
    assert line is None or line in str(reason)
