"""The number of steps of a run whose length is given in epochs or tokens: functions of data and options."""

from typing import Final

from genesis.base.errors import UserError
from genesis.data.stream_data import StreamData
from genesis.data.training_data import TrainingData
from genesis.recipe.run_length import count_steps_of_tokens

TRAINER_MAX_EPOCHS: Final = "trainer.max_epochs"
DATA_MAX_EPOCHS: Final = "data.max_epochs"


def count_steps(data: TrainingData, max_epochs: int | None) -> tuple[str, int] | None:
    """Returns the option that gives the length, with its value, and the number of steps; None if none does.

    Args:
        data: The data, open.
        max_epochs: The Trainer's; -1 or None for no limit.

    Raises:
        UserError: Two options give a length, or these data do not have the number that one counts.
    """
    options, size = data.options, data.options.global_batch_size
    if options.num_epochs is not None and options.num_tokens is not None:
        raise UserError(
            f"data.num_epochs {options.num_epochs} and data.num_tokens {options.num_tokens} both say how long to "
            "train; leave one out"
        )
    if options.num_tokens is not None:
        if data.kind != "text":
            raise UserError(
                f"data.num_tokens is {options.num_tokens}, and pairs of answers and prompts are not counted in tokens; "
                "give data.num_epochs or trainer.max_steps"
            )
        num_steps = count_steps_of_tokens(
            options.num_tokens, position=0, seq_len=options.seq_len, global_batch_size=size
        )
        return f"data.num_tokens {options.num_tokens}", num_steps
    if max_epochs is not None and max_epochs > 0 and options.num_epochs is None:
        if isinstance(data, StreamData):
            raise UserError(
                f"trainer.max_epochs is {max_epochs}, but nobody has counted the sequences of a stream; give "
                "trainer.max_steps or data.num_tokens"
            )
        return TRAINER_MAX_EPOCHS, max_epochs * data.num_windows
    end = data.cursor.order.end
    if end is None:
        return None
    option = DATA_MAX_EPOCHS if options.num_epochs is None else f"data.num_epochs {options.num_epochs}"
    return option, end // size


def count_steps_left(data: TrainingData) -> int | None:
    """Returns the number of steps from the data's position on; None if the data never end, or nobody knows."""
    options, position, last = data.options, data.cursor.position, data.cursor.last_position
    lengths = [] if last is None else [max(0, last - position) // options.global_batch_size]
    if options.num_tokens is not None:
        size = options.global_batch_size
        lengths.append(
            count_steps_of_tokens(
                options.num_tokens, position=position, seq_len=options.seq_len, global_batch_size=size
            )
        )
    return min(lengths, default=None)
