"""Whether all rows of a run have one length, because torch.compile makes a kernel of its own for each other length.

Ranks that share the tokens of rows need a length that they divide, and a pipeline has one schedule for one shape.

The form of a kernel for several lengths would follow from the first length that a process meets, so that a resumed run
could compute other bits than one that was never killed.
"""

import lightning.pytorch as pl

from genesis.base.device import is_host
from genesis.model.attend.table import AUTO, FLEX


def has_fixed_rows(trainer: pl.Trainer) -> bool:
    """Returns whether the rows of a Trainer's run are padded to one length.

    They are with compiled blocks or attention, where ranks share rows, and in a pipeline.
    """
    kernel = getattr(trainer.lightning_module, "attention", None)
    is_kernel_compiled = kernel in (AUTO, FLEX.name) and not is_host(trainer.strategy.root_device.type)
    needs_them = bool(getattr(trainer.strategy, "needs_fixed_rows", False))
    return bool(getattr(trainer.strategy, "compile_blocks", False)) or is_kernel_compiled or needs_them
