"""What `genesis plan` computes of a recipe, as the figures that the doctor compares with what it measures."""

from dataclasses import dataclass
from typing import Final

from genesis.operations.doctor.facts import PlannedSaves
from genesis.operations.plan.checkpoints import count_checkpoints
from genesis.operations.plan.recipe import Recipe, read_recipe
from genesis.operations.plan.state import build_model
from genesis.operations.plan.timeline import play_step
from genesis.recipe.resolved import ResolvedRecipe

_SAVE: Final = "save"


@dataclass(frozen=True)
class PlannedFit:
    """What the plan has for a fit on one device.

    Args:
        step_bytes: Memory of the device's tensors at the highest point of a step without a save.
        num_tensors: Weights, and moments of the optimizer, in a checkpoint.
        checkpoint_bytes: Their bytes.
    """

    step_bytes: int
    num_tensors: int
    checkpoint_bytes: int


def plan_fit(resolved: ResolvedRecipe, *, is_host: bool) -> PlannedFit:
    """Returns the plan's figures for a recipe, as it trains on one device.

    Args:
        resolved: The recipe.
        is_host: Whether it trains on the CPU.

    Raises:
        UserError: The plan does not know such a recipe.
    """
    recipe = read_recipe(resolved.override([("trainer.accelerator", "cpu")] if is_host else []), num_ranks=1)
    timeline = play_step(recipe.workload, recipe.layout)
    steps = [sum(terms.values()) for phase, terms in timeline.peaks.items() if phase != _SAVE]
    model = build_model(recipe.workload)
    bill = count_checkpoints(model, recipe.workload, recipe.saves, recipe.num_steps)
    return PlannedFit(max(steps), _count_tensors(recipe), bill.checkpoint_bytes)


def _count_tensors(recipe: Recipe) -> int:
    """Returns the number of tensors with elements that each checkpoint has; counters of steps are none."""
    count = 0
    for parameter in build_model(recipe.workload).parameters:
        if not parameter.is_trained and recipe.workload.adapter is not None:
            continue  # in the base
        count += 1
        if parameter.is_trained and recipe.saves.has_optimizer:
            count += recipe.workload.optimizer.count_moments(parameter.group)
    return count


def plan_saves(recipe: Recipe) -> PlannedSaves:
    """Returns the checkpoints of a whole run and the disk that they need."""
    bill = count_checkpoints(build_model(recipe.workload), recipe.workload, recipe.saves, recipe.num_steps)
    return PlannedSaves(bill.checkpoint_bytes, bill.num_kept, bill.disk_bytes)
