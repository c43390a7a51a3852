"""The warnings of `AsyncProcessCheckpoint`."""


class SaveFailedWarning(UserWarning):
    """A save failed and training continues, by `on_save_failure="warn"`; the message holds the reason."""


class SaveSkippedWarning(UserWarning):
    """A save was due while the one before still ran, by `when_busy="skip"`."""


class LostRankWarning(UserWarning):
    """Training ended because the process of another rank is gone. One rank of each node issues it."""


class TornSnapshotWarning(UserWarning):
    """Training changed a tensor while it was staged; the save is repeated, and staging is blocking from now on."""


class SlowDeviceWarning(UserWarning):
    """Saves use a slower path on this device: memory was short or not pinned, or a proof at the start failed."""
