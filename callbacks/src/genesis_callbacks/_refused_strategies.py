"""The strategies that callbacks refuse, each with the reason or what to use instead."""

from collections.abc import Mapping

from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy

from .base.checkpoint_errors import CheckpointError

_NOT_SAVED: dict[type[Strategy], str] = {
    FSDPStrategy: "FSDP1 (FSDPStrategy): use ModelParallelStrategy with fully_shard",
    DeepSpeedStrategy: "DeepSpeed: use ModelParallelStrategy with fully_shard",
    XLAStrategy: "XLA: there is no support for it",
    SingleDeviceXLAStrategy: "XLA: there is no support for it",
}
_NOT_COMPARED: dict[type[Strategy], str] = {
    FSDPStrategy: "FSDP1 (FSDPStrategy): the names and shapes of its parameters are hidden during training",
    DeepSpeedStrategy: "DeepSpeed: the shapes of its parameters are hidden during training",
}


def refuse_to_save(strategy: Strategy) -> None:
    """Refuses a strategy whose runs `AsyncProcessCheckpoint` cannot save.

    Raises:
        CheckpointError: It is one of them.
    """
    _refuse(strategy, _NOT_SAVED, "AsyncProcessCheckpoint cannot save a run")


def refuse_to_compare(strategy: Strategy) -> None:
    """Refuses a strategy whose runs `CheckpointVerification` cannot compare with a checkpoint.

    Raises:
        CheckpointError: It is one of them.
    """
    _refuse(strategy, _NOT_COMPARED, "CheckpointVerification cannot list the tensors that a run must save")


def _refuse(strategy: Strategy, reasons: Mapping[type[Strategy], str], what: str) -> None:
    for kind, reason in reasons.items():
        if isinstance(strategy, kind):
            raise CheckpointError(f"{what} under {reason}")
