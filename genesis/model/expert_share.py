"""Numbers of ranks among which the experts of a mixture can be shared. Pure."""

from collections.abc import Iterator

from genesis.base.errors import UserError
from genesis.model.mixture import MixtureConfig


def check_expert_share(feed_forward: object, ranks: int, ranks_of_group: int, optimizer: str | None) -> None:
    """Checks that ranks can share the experts of a model.

    Args:
        feed_forward: The config of the model's feed-forward part.
        ranks: `expert_parallel`.
        ranks_of_group: The ranks that share one copy of the model.
        optimizer: The name of the optimizer: Muon needs whole matrices. None without training.

    Raises:
        UserError: The model has no experts, or the numbers do not divide each other.
    """
    if ranks == 1:
        return
    if not isinstance(feed_forward, MixtureConfig):
        raise UserError(
            f"expert_parallel is {ranks}, but the model has no experts: leave it at 1, or give "
            "model.decoder.feed_forward a MixtureConfig"
        )
    num_experts, needs_whole = feed_forward.num_experts, optimizer == "muon"
    remedy = f"choose {_join(_list_fitting(num_experts, ranks_of_group, needs_whole))}"
    if ranks_of_group % ranks:
        raise UserError(
            f"expert_parallel {ranks} does not divide the {ranks_of_group} ranks that shard the model: {remedy}"
        )
    if num_experts % ranks:
        raise UserError(
            f"expert_parallel {ranks} does not divide num_experts {num_experts}, and every rank holds as many experts: "
            f"{remedy}"
        )
    held, holders = num_experts // ranks, ranks_of_group // ranks
    if needs_whole and held % holders:
        raise UserError(
            f"optimizer.name is 'muon', which needs whole matrices, and with expert_parallel {ranks} always {holders} "
            f"ranks hold the same {held} experts, which they can't share without cutting one: {remedy}, or adamw"
        )


def _list_fitting(num_experts: int, ranks_of_group: int, needs_whole: bool) -> Iterator[int]:
    for ranks in range(1, ranks_of_group + 1):
        is_even = ranks_of_group % ranks == 0 and num_experts % ranks == 0
        is_whole = ranks == 1 or (num_experts // ranks) % (ranks_of_group // ranks) == 0
        if is_even and (is_whole or not needs_whole):
            yield ranks


def _join(fitting: Iterator[int]) -> str:
    *first, last = (str(ranks) for ranks in fitting)
    return f"expert_parallel {', '.join(first)} or {last}" if first else f"expert_parallel {last}"
