"""Where a run's data stand: the position that a checkpoint records, and whether the loaders have taken it.

Lightning saves the state of each loader that has `state_dict` and `load_state_dict`. It restores the state of some
loaders too early (before samplers know their epoch) and of others not at all (loaders that `configure_optimizers`
built). It also begins the iterator before the random generators are restored.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torchmetrics import Metric

from genesis_callbacks.base.errors import numbered

from ._compat import begin_next_epoch, list_loaders, load_loader_states, loader_generators, read_loader_states

OnLostDataPosition = Literal["raise", "warn"]
_STATES = "combined_loader"


class LostDataPositionWarning(UserWarning):
    """A loader did not take its saved state, and training continues by `on_lost_data_position="warn"`."""


def read_saved_states(fit_loop: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the loaders' states in the saved state of a fit's loop, for each loader that had one."""
    states: list[dict[str, Any]] = fit_loop.get("state_dict", {}).get(_STATES, [])
    return states


def write_states(fit_loop: Mapping[str, Any], states: Sequence[dict[str, Any]]) -> None:
    """Puts the loaders' states into the state of a fit's loop, if it has any."""
    if _STATES in fit_loop["state_dict"]:
        fit_loop["state_dict"][_STATES] = list(states)


def _is_batch_end(fit_loop: Mapping[str, Any]) -> bool:
    """Returns whether a loop's state is that of `on_train_batch_end`: the batch is not counted as completed yet."""
    # Lightning counts a batch as processed before that hook and as completed after it.
    batch = fit_loop["epoch_loop.batch_progress"]["current"]
    return bool(batch["completed"] < batch["processed"])


def is_epoch_over(fit_loop: Mapping[str, Any]) -> bool:
    """Returns whether a loop's state is that after an epoch's last batch, or after training."""
    if _is_batch_end(fit_loop):
        return bool(fit_loop["epoch_loop.batch_progress"]["is_last_batch"])
    # A save outside of `on_train_batch_end` (a validation, the end of training) may see the epoch's own counts.
    epoch = fit_loop["epoch_progress"]["current"]
    return bool(epoch["ready"] == epoch["processed"] > 0)


def count_epoch(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """Returns a loop's state that counts its current epoch.

    Earlier releases, which had no `begin_next_epoch`, counted one epoch too few in a run that had continued after an
    epoch's last batch. With such a state Lightning would begin the epoch again.
    """
    progress = fit_loop["epoch_progress"]
    if not _is_batch_end(fit_loop) or progress["current"]["ready"] > progress["current"]["processed"]:
        return fit_loop
    counted = {
        name: {**counts, "ready": counts["ready"] + 1, "started": counts["started"] + 1}
        for name, counts in progress.items()
    }
    return {**fit_loop, "epoch_progress": counted}


def find_difference(saved: Any, live: Any, path: str = "") -> str | None:
    """Returns the first key at which two states differ, with both values, or None.

    Example:
        >>> find_difference({"epoch": 1, "batch": 7}, {"epoch": 1, "batch": 0})
        'batch is 0, but 7 was saved'
    """
    if isinstance(saved, Mapping) and isinstance(live, Mapping):
        if saved.keys() != live.keys():
            key = min(map(str, saved.keys() ^ live.keys()))
            return f"{_join(path, key)} was {'saved and is missing now' if key in saved else 'not saved'}"
        pairs = [(key, saved[key], live[key]) for key in saved]
    elif isinstance(saved, list | tuple) and isinstance(live, list | tuple) and len(saved) == len(live):
        pairs = [(index, *both) for index, both in enumerate(zip(saved, live, strict=True))]
    else:
        return None if _is_equal(saved, live) else f"{path} is {_show(live)}, but {_show(saved)} was saved"
    found = (find_difference(one, other, _join(path, key)) for key, one, other in pairs)
    return next((difference for difference in found if difference is not None), None)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_equal(saved: Any, live: Any) -> bool:
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
        return saved.dtype == live.dtype and torch.equal(saved, live)
    if isinstance(saved, np.ndarray) and isinstance(live, np.ndarray):
        return np.array_equal(saved, live)
    # `1 == True == 1.0` in Python, and a loader that returns another type has not restored what was saved.
    return type(saved) is type(live) and bool(saved == live)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"another {type(value).__name__}"


def _name_stateless(trainer: Trainer) -> list[str]:
    """Returns the classes of the fit's loaders whose position in the epoch is not saved."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it
    if datamodule is not None and type(datamodule).state_dict is not LightningDataModule.state_dict:
        return []  # it keeps the position itself
    return sorted(
        {
            type(loader).__name__
            for loader in list_loaders(trainer)
            if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"))
        }
    )


def describe_lost_position(trainer: Trainer) -> str | None:
    """Returns a notice for a fit with loaders whose position is not saved, otherwise None."""
    names = _name_stateless(trainer)
    if not names or trainer.num_training_batches <= 1:
        return None
    return (
        f"The position of {' and '.join(names)} in an epoch is not saved (no state_dict): after a resume within an "
        "epoch, some of its samples come twice and others not at all. genesis_callbacks.ResumableLoader continues "
        "exactly; so does every loader from a save at an epoch's end (every_n_epochs=1)."
    )


def describe_reset_position(trainer: Trainer, fit_loop: Mapping[str, Any]) -> list[str]:
    """Returns what belongs to a position within an epoch, and could not be restored."""
    progress = fit_loop["epoch_loop.batch_progress"]
    num_used = progress["current"]["ready"]  # with the batch of the save, whose training has ended
    if progress["is_last_batch"] or num_used == 0:
        return []
    found = []
    metrics = [
        name
        for name, module in trainer.lightning_module.named_modules()
        if isinstance(module, Metric)
        and not any(module._persistent.values())
        and not getattr(module, "counts_validation_alone", False)  # a validation begins with nothing
    ]
    if metrics:
        found.append(
            f"what the metrics {', '.join(metrics)} counted in this epoch: they begin at the resume "
            "(metric.persistent(True) lets them be saved)"
        )
    names = _name_stateless(trainer)
    if names:
        found.append(
            f"the position of {' and '.join(names)} in the epoch: {num_used} of "
            f"{numbered(trainer.num_training_batches, 'batches')} were used, and the others are read from the loader's "
            "beginning: some samples come twice, others not at all (genesis_callbacks.ResumableLoader continues "
            "exactly)"
        )
    return found


def place(trainer: Trainer, fit_loop: Mapping[str, Any], generators: Sequence[torch.Tensor] | None) -> str | None:
    """Puts the loaders of a restored fit where the checkpoint left them; returns why that was not possible, or None.

    To be called in `on_train_start`, before the process's generators are restored: the next epoch's iterator draws
    from those, and an iterator made here must not. No communication.

    Args:
        trainer: The fit's.
        fit_loop: The saved state of its loop.
        generators: States of the generators that the loaders have for themselves; None where they are not known.
    """
    problem = _load(trainer, fit_loop)
    # After `_load`: its `iter()` lets samplers draw from these generators, and the saved states lie after that draw.
    own = loader_generators(trainer)
    if generators is not None and len(own) == len(generators):
        for generator, state in zip(own, generators, strict=True):
            generator.set_state(state)
    elif generators is not None:
        saved = numbered(len(generators), "random generators")
        problem = problem or f"the checkpoint has {saved} of loaders, but there are {len(own)} now"
    if is_epoch_over(fit_loop):
        begin_next_epoch(trainer)
    return problem


def _load(trainer: Trainer, fit_loop: Mapping[str, Any]) -> str | None:
    saved = read_saved_states(fit_loop)
    if not saved:
        return None
    try:
        # `ready` counts the epoch that runs, so its number from 0 is one less.
        load_loader_states(trainer, saved, max(fit_loop["epoch_progress"]["current"]["ready"] - 1, 0))
    except RuntimeError as error:
        return str(error)
    # A loader may accept a state and ignore it. Asking it again is the only check that works for every kind of loader.
    for index, (state, live) in enumerate(zip(saved, read_loader_states(trainer), strict=True)):
        difference = find_difference(state, live)
        if difference is not None:
            return (
                f"loader {index} did not take its state ({difference}): after load_state_dict and iter(), its "
                "state_dict must return the saved state"
            )
    return None
