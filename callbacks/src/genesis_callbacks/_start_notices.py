"""What a user should know when a fit starts: how often it saves, and what a resume will not restore."""

from lightning.pytorch import Trainer

from ._bucket_order import describe_bucket_order
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
