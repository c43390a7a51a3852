"""Shortens the demo: the recipe with fewer steps, and with all intervals of steps scaled by the same ratio."""

from typing import Any

from genesis.base.errors import UserError

MIN_STEPS = 40
"""The least number of steps; a shorter demo has too few steps between two saves for a kill between them."""

_SCALED = (
    "checkpoint.every_n_steps",
    "checkpoint.keep_every_n_steps",
    "trainer.log_every_n_steps",
    "trainer.val_check_interval",
)
_VALIDATION_SEQUENCES = 64


def scale_recipe(recipe: dict[str, Any], num_steps: int) -> tuple[str, ...]:
    """Returns the options of `genesis fit` that shorten a demo's recipe to `num_steps` steps.

    Raises:
        UserError: `num_steps` is fewer than `MIN_STEPS`.
    """
    if num_steps < MIN_STEPS:
        raise UserError(f"--steps is {num_steps}; give at least {MIN_STEPS}, so that a kill comes between two saves")
    ratio = num_steps / recipe["trainer"]["max_steps"]
    options = [("trainer.max_steps", num_steps), ("data.limit_validation_sequences", _VALIDATION_SEQUENCES)]
    for name in _SCALED:
        group, _, option = name.partition(".")
        options.append((name, max(1, round(recipe[group][option] * ratio))))
    return tuple(word for name, value in options for word in (f"--{name}", str(value)))
