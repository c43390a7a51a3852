"""What a restore kept, rebuilt and started afresh."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RestoreReport:
    """One restore, told.

    Attributes:
        path: The checkpoint.
        step: Its step.
        kept: What is, bit for bit, what was saved.
        rebuilt: What holds the same in another form.
        afresh: What was not in the checkpoint, or could not be taken from it, and starts anew.
        changed: What this run does otherwise than the one that saved, with both values.
    """

    path: Path
    step: int
    kept: tuple[str, ...] = ()
    rebuilt: tuple[str, ...] = ()
    afresh: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """One paragraph for people."""
        sentences = [f"Restored step {self.step} from {self.path}."]
        for verb, items in (("Kept", self.kept), ("Rebuilt", self.rebuilt), ("Started afresh", self.afresh)):
            sentences.append(f"{verb}: {'; '.join(items) or 'nothing'}.")
        if self.changed:
            sentences.append(f"Changed: {'; '.join(self.changed)}.")
        return " ".join(sentences)
