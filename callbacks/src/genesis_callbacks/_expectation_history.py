"""What a run must save, by step, for `CheckpointVerification`: taken on each rank and shared with all."""

from lightning.pytorch import LightningModule, Trainer

from .checkpoint.expect import Expectation, build_expectation, count_state, merge_expectations
from .checkpoint.ranks import Ranks

_MAX_HISTORY = 16


class ExpectationHistory:
    """Records what the live run must save at each step; an optimizer's state appears and grows during training.

    Every rank has one and calls `share` at the same steps.

    Args:
        ranks: The run's.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._signature: tuple[int, ...] | None = None
        self._own: tuple[int, Expectation] | None = None
        self._history: list[tuple[int, Expectation]] = []

    @property
    def has_begun(self) -> bool:
        """Whether this rank has taken an expectation."""
        return self._own is not None

    def take(self, trainer: Trainer, module: LightningModule) -> bool:
        """Records what this rank must save now, if that changed; returns whether it did. No communication."""
        # Called at every batch: counting entries is cheap, and the full expectation walks over all tensors.
        signature = tuple(count_state(optimizer) for optimizer in trainer.optimizers)
        if signature == self._signature:
            return False
        self._signature = signature
        self._own = (trainer.global_step, build_expectation(module, trainer.optimizers))
        return True

    def share(self) -> None:
        """Gives all ranks what each must save. Communicates."""
        assert self._own is not None
        gathered = self._ranks.gather(self._own)
        # Ranks that saw no change since then give an older step; the change belongs to the newest.
        step = max(step for step, _ in gathered)
        self._history.append((step, merge_expectations([expectation for _, expectation in gathered])))
        del self._history[:-_MAX_HISTORY]

    def due_at(self, step: int) -> Expectation:
        """Returns what a checkpoint of `step` must hold."""
        due = self._history[0][1]  # for a checkpoint from before the first record, the oldest one is the nearest
        for first_step, expectation in self._history:
            if first_step <= step:
                due = expectation
        return due
