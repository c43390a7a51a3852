"""What a user should know when a fit starts: how often it saves, and what a resume will not restore."""

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy

from genesis_callbacks.base.errors import numbered

from ._compat import read_ddp_options
from ._data_position import describe_lost_position
from ._save_options import SaveOptions
from ._triggers import describe_interval


def describe_start(trainer: Trainer, options: SaveOptions) -> list[str]:
    """Returns a sentence for each thing to know. No communication."""
    notices = (
        _describe_rarity(options),
        describe_interval(options.every_n_steps, trainer.accumulate_grad_batches, len(trainer.optimizers)),
        _describe_monitor(trainer, options.monitor),
        describe_lost_position(trainer),
        describe_bucket_order(trainer.strategy, trainer.world_size),
    )
    return [notice for notice in notices if notice is not None]


def _describe_rarity(options: SaveOptions) -> str | None:
    intervals = (options.every_n_steps, options.every_n_epochs, options.every_n_minutes, options.monitor)
    if any(interval is not None for interval in intervals):
        return None
    return (
        "No checkpoint is saved before training ends or gets a signal: a SIGKILL loses all work. Give every_n_steps, "
        "every_n_epochs or every_n_minutes."
    )


def _describe_monitor(trainer: Trainer, monitor: str | None) -> str | None:
    if monitor is None or trainer.enable_validation:
        return None
    return (
        f"monitor is {monitor!r}, but this fit runs no validation, which would log it: no checkpoint will be marked as "
        "the best."
    )


def describe_bucket_order(strategy: Strategy, world_size: int) -> str | None:
    """Returns a notice for people who compare a resumed run with one that was never killed; None if both are equal.

    DDP sorts gradients into other buckets once it has seen in which order they become ready. A gradient's place in its
    bucket decides in which order gloo and NCCL add the ranks' values. A resumed run starts with the first buckets
    again, so its first step can differ in the last bit from the same step of a run that was never killed.
    """
    # A sum of two values does not depend on their order; a sum of three floats does.
    if world_size <= 2 or not isinstance(strategy, DDPStrategy):
        return None
    # DDP never rebuilds its buckets with this option, because a parameter may be unused in the next step.
    if read_ddp_options(strategy).get("find_unused_parameters"):
        return None
    return (
        f"DDP changes the order in which it adds the gradients of {numbered(world_size, 'ranks')} after its first "
        "step: a resumed run can differ in the last bits from one that was never stopped. "
        "DDPStrategy(find_unused_parameters=True) makes it exact."
    )
