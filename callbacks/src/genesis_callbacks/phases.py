"""What a run does between two training steps, for those who tell work from a hang.

    phase       what it is
    start       a fit before training, such as a restore; no heartbeat is written
    train       training steps
    validate    a validation within training
    save        a checkpoint is copied or written in the training thread
    generate    a model writes texts to learn from
    reference   a pass of another model's weights over the data
    ended       the fit came to its end
    failed      the fit ended by an exception

`Heartbeat` writes the phase to the disk, and `HangWatch` has a limit for each. Code that works for long inside of a
hook names its phase by `in_phase`, and calls `note_progress` after each part of the work. No torch is imported here.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Final, Literal, TypeVar, get_args

__all__ = ["PHASES", "Phase", "PhaseListener", "in_phase", "note_progress"]

Kind = TypeVar("Kind")
Phase = Literal["start", "train", "validate", "save", "generate", "reference", "ended", "failed"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)


class PhaseListener:
    """A callback that follows the phases. They nest; the innermost one counts."""

    def enter_phase(self, phase: Phase) -> None:
        """Notes that a phase begins."""

    def leave_phase(self) -> None:
        """Notes that the innermost phase ends."""

    def note_progress(self) -> None:
        """Notes that a part of the phase's work is done."""


@contextlib.contextmanager
def in_phase(trainer: Any, phase: Phase) -> Iterator[None]:
    """Counts a `with` block as this phase. Without a listener it does nothing; it does not communicate.

    Args:
        trainer: The Trainer, whose callbacks follow the phases.
        phase: What the block does.

    Example:
        >>> from types import SimpleNamespace
        >>> with in_phase(SimpleNamespace(callbacks=[]), "generate"):
        ...     pass
    """
    listeners = find_callbacks(trainer, PhaseListener)
    for listener in listeners:
        listener.enter_phase(phase)
    try:
        yield
    finally:
        for listener in listeners:
            listener.leave_phase()


def note_progress(trainer: Any) -> None:
    """Notes that a part of the phase's work is done, such as a batch of a pass. Cheap: call it as often as you like."""
    for listener in find_callbacks(trainer, PhaseListener):
        listener.note_progress()


def find_callbacks(trainer: Any, kind: type[Kind]) -> list[Kind]:
    """Returns the Trainer's callbacks of a class."""
    # Through `vars`: Lightning's annotations leave the attribute out.
    return [callback for callback in vars(trainer).get("callbacks", ()) if isinstance(callback, kind)]
