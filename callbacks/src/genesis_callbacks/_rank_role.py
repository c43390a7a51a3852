"""The one place that asks a strategy what a rank does in its run."""

from typing import Any

from .base.checkpoint_errors import CheckpointError
from .checkpoint.roles import RankRole


def read_rank_role(strategy: Any) -> RankRole:
    """Returns this rank's role, as the strategy gives it. No communication.

    The data rank is the `rank` of Lightning's `distributed_sampler_kwargs`, by which samplers and data modules choose
    their share of the data. Under DDP and FSDP2 it is the global rank; under tensor parallelism a whole group has the
    same one. The stage is the strategy's attribute `pipeline_stage`, an int. A strategy that cuts the model into stages
    has this attribute; without it the stage is 0.

    Args:
        strategy: The Trainer's, once it has set up its environment.

    Raises:
        CheckpointError: One of them is not a whole number from 0.
    """
    sampler = getattr(strategy, "distributed_sampler_kwargs", None)
    data_rank = getattr(strategy, "global_rank", 0) if sampler is None else sampler["rank"]
    stage = getattr(strategy, "pipeline_stage", 0)
    for name, value in (("data rank", data_rank), ("pipeline_stage", stage)):
        # The role becomes the key of the rank's section in the checkpoint. `type`, because a bool is an int, too.
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"the {name} of {type(strategy).__name__} is {value!r}: it must be a whole number from 0"
            )
    return RankRole(data_rank, stage)
