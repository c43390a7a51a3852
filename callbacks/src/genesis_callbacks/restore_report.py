"""Reports the parts that a restore kept, rebuilt and reset."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .base.manifest import Manifest
from .checkpoint.collect import MODEL_PREFIX


@dataclass(frozen=True)
class RestoreReport:
    """The report of one restore.

    Attributes:
        path: The checkpoint.
        step: Its step.
        kept: State that is bit for bit the saved state.
        rebuilt: State with the saved values in another form, such as another sharding.
        reset: State that was not in the checkpoint, or could not be taken from it, and starts from scratch.
        changed: Differences between this run and the run that saved, with both values.
    """

    path: Path
    step: int
    kept: tuple[str, ...] = ()
    rebuilt: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The report as lines: what was restored, and below it each part that was kept, rebuilt, reset or changed."""
        groups = [("kept", self.kept), ("rebuilt", self.rebuilt), ("reset", self.reset), ("changed", self.changed)]
        lines = [f"Restored step {self.step} from {self.path}."]
        for verb, items in groups[: 4 if self.changed else 3]:
            lines += [f"  {verb:<7}  {item}" for item in items or ("nothing",)]
        return "\n".join(lines)


def describe_model(manifest: Manifest) -> str:
    """Returns how many tensors of the model a checkpoint has, and how many of them lie in its base."""
    num_tensors = sum(name.startswith(MODEL_PREFIX) for name in manifest.tensors)
    base = manifest.base
    return f"{num_tensors} model tensors" + (f" ({len(base.names)} of them in the base {base.path})" if base else "")


def name_classes(state_keys: Sequence[str]) -> str:
    """Returns the names of callbacks without the arguments that Lightning's keys of their states have."""
    return ", ".join(key.partition("{")[0] for key in state_keys)
