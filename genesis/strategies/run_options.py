"""What a strategy has to know of a run, beside the ranks, to say whether they can share it."""

from collections.abc import Sequence
from dataclasses import dataclass

from genesis.model.decoder import DecoderConfig
from genesis.objectives.objective import Objective


@dataclass(frozen=True)
class RunOptions:
    """What decides whether ranks can share a run.

    Args:
        decoder: The model.
        objective: What training minimises.
        whole_matrices: The optimizer's algorithm if it needs whole matrices, and the command trains; else None.
        seq_len: The tokens of a row; None if the data is not known.
        batch_sizes: The sequences of a step over all ranks, and those of a micro-batch; None if the command does not
            train, or the data is not known.
        unshared: The options of the run by name that work on whole layers alone, such as float8.
    """

    decoder: DecoderConfig
    objective: Objective
    whole_matrices: str | None = None
    seq_len: int | None = None
    batch_sizes: tuple[int, int] | None = None
    unshared: Sequence[str] = ()
