"""The errors of the checkpoint engine: one line each, with the value and the remedy.

A `CheckpointError` is a `ValueError`: it is about a value or a file that the user gave. `SaveFailedError` is not,
because no value is wrong when a disk is full: `except ValueError` must not swallow it. `exit_status` is the command
line's.
"""

from .errors import RunEndedError, UserError


class CheckpointError(UserError):
    """A problem with a checkpoint that the user can fix, or must know about; the base of all others here but one."""


class CorruptCheckpointError(CheckpointError):
    """A damaged checkpoint: a file is missing, or its bytes differ from the manifest."""

    exit_status = 1  # a check that failed


class UnreadableCheckpointError(CheckpointError):
    """A file that the operating system does not let this process read, so that its state is unknown."""

    exit_status = 1  # caused by the disk or the machine: starting again may help


class BaseCheckpointError(CheckpointError):
    """A base checkpoint that is missing, changed or damaged; the checkpoints that refer to it may be undamaged."""

    exit_status = 1  # a check that failed


class SaveFailedError(RunEndedError):
    """A save that did not become a checkpoint; every rank raises this error, and earlier checkpoints are unchanged.

    The cause is the disk or the machine, and starting again may help: it is neither a `CheckpointError` nor a
    `ValueError`.
    """


class UnsupportedStateError(CheckpointError):
    """State that cannot be written without pickle; the message has its key."""


class DirectoryInUseError(CheckpointError):
    """Another live run holds this checkpoint directory."""


class ExistingCheckpointsError(CheckpointError):
    """A run that would not continue the checkpoints of its directory, and was not asked to start over."""

    ends_all_ranks = True


class DriftError(CheckpointError):
    """The checkpoint and the restoring run differ in a value that must be equal; the message lists each difference."""

    is_one_line = False
