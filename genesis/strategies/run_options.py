"""What a strategy has to know of a run, beside the ranks, to say whether they can share it."""

from collections.abc import Sequence
from dataclasses import dataclass

from genesis.data.training_data import TrainingOptions
from genesis.model.decoder import DecoderConfig
from genesis.objectives.objective import Objective


@dataclass(frozen=True)
class RunOptions:
    """What decides whether ranks can share a run.

    Args:
        decoder: The model.
        objective: What training minimises.
        whole_matrices: The optimizer's algorithm if it needs whole matrices, and the command trains; else None.
        data: The rows and batches of the run; None if they are not known.
        unshared: The options of the run by name that work on whole layers alone, such as float8.
    """

    decoder: DecoderConfig
    objective: Objective
    whole_matrices: str | None = None
    data: TrainingOptions | None = None
    unshared: Sequence[str] = ()
