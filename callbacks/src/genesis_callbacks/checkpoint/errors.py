"""The errors of the checkpoint engine: one line each, with the value and the remedy."""

from genesis_callbacks.errors import UserError


class CheckpointError(UserError):
    """Something about a checkpoint that the user can mend, or must know; the base of the errors here."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint that is not whole: a file is missing, or holds other bytes than its manifest vouches for."""


class UnreadableCheckpointError(CheckpointError):
    """A file that the operating system does not let this process read, so that nobody knows whether it is whole."""

    exit_status = 1  # the disk's or the machine's doing: starting again may help


class SaveFailedError(CheckpointError):
    """A save that did not become a checkpoint; every rank raises it, and earlier checkpoints are untouched."""

    exit_status = 1  # the disk's or the machine's doing: starting again may help


class UnsupportedStateError(CheckpointError):
    """A state that cannot be written without pickle; the message names its key."""


class DirectoryInUseError(CheckpointError):
    """Another live run holds this checkpoint directory."""


class DriftError(CheckpointError):
    """What is restored and what restores it differ in something that must be the same."""
