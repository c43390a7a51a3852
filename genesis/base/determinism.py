"""`trainer.deterministic`: whether a run takes only kernels that repeat, what `auto` stands for, and what follows.

With it, the same step on the same device gives the same bits, so that a run that is killed and resumed ends with the
same weights as one that was never killed. On the CPU all kernels of a step repeat, and the option changes nothing.
"""

from collections.abc import Mapping
from typing import Any, Final

from genesis.base.errors import UserError

AUTO: Final = "auto"
UNREPEATABLE: Final = (
    "trainer.deterministic is false: on an accelerator, kernels may then add in any order, so that a resumed run does "
    "not equal, bit for bit, one that was never killed"
)


def check_deterministic(given: Any) -> None:
    """Refuses a value of `trainer.deterministic` that is no choice.

    Raises:
        UserError: It is neither auto, true nor false.
    """
    if given not in (AUTO, None, True, False):
        reason = ", with which torch takes kernels that do not repeat, with a warning" if given == "warn" else ""
        raise UserError(
            f"trainer.deterministic is {given!r}{reason}: give auto or true for runs that resume bit for bit, or false"
        )


def choose_deterministic(recorded: Mapping[str, Any] | None) -> bool:
    """Returns what `auto` stands for: the choice of the run that continues, and true for a new run.

    Args:
        recorded: The recipe of the checkpoint from which the run continues; None for a new run.
    """
    return True if recorded is None else bool(read_deterministic(recorded))


def read_deterministic(recipe: Mapping[str, Any]) -> Any:
    """Returns the choice in a recipe. Recipes of earlier versions without one are true: nobody had chosen otherwise."""
    trainer = recipe.get("trainer")
    given = trainer.get("deterministic") if isinstance(trainer, Mapping) else None
    return True if given in (None, AUTO) else given


def unify_deterministic(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a recipe whose choice is written out, so that recipes of earlier versions can be compared."""
    trainer = recipe.get("trainer")
    if not isinstance(trainer, Mapping):
        return recipe
    return {**recipe, "trainer": {**trainer, "deterministic": read_deterministic(recipe)}}


def note_unrepeatable(recipe: Mapping[str, Any]) -> str | None:
    """Returns one line for the user of a recipe whose runs need not repeat on an accelerator; None for others."""
    return UNREPEATABLE if read_deterministic(recipe) is False else None
