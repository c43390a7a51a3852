"""The errors of the checkpoint engine: one line each, with the value and the remedy.

A `CheckpointError` is a `ValueError`: it is about a value or a file that the user gave. `SaveFailedError` is not,
because no value is wrong when a disk is full: `except ValueError` must not swallow it. `exit_status` is the command
line's.
"""

from genesis_callbacks.errors import RunEndedError, UserError, printable, printable_lines


class CheckpointError(UserError):
    """Something about a checkpoint that the user can fix, or must know; the base of all errors here but one.

    Its text may name what stands in a checkpoint, and is made printable.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message) if self.is_one_line else printable_lines(message))


class CorruptCheckpointError(CheckpointError):
    """A checkpoint that is not whole: a file is missing, or holds other bytes than its manifest vouches for."""

    exit_status = 1  # a check that failed


class UnreadableCheckpointError(CheckpointError):
    """A file that the operating system does not let this process read, so that it is unknown whether it is whole."""

    exit_status = 1  # the disk's or the machine's doing: starting again may help


class BaseCheckpointError(CheckpointError):
    """A base checkpoint that is missing, has changed, or is damaged; the checkpoints that name it may be whole."""

    exit_status = 1  # a check that failed


class SaveFailedError(RunEndedError):
    """A save that did not become a checkpoint; every rank raises it, and earlier checkpoints are untouched.

    It is the disk's or the machine's doing, and starting again may help: no `CheckpointError`, nor a `ValueError`.
    """


class UnsupportedStateError(CheckpointError):
    """A state that cannot be written without pickle; the message names its key."""


class DirectoryInUseError(CheckpointError):
    """Another live run holds this checkpoint directory."""


class DriftError(CheckpointError):
    """What is restored and what restores it differ in something that must be the same: a line for each difference."""

    is_one_line = False
