"""Reads the settings that a rehearsal needs from the resolved recipe."""

from collections.abc import Sequence
from dataclasses import dataclass

from genesis.base.errors import UserError
from genesis.data.sizes import resolve_recipe
from genesis.objectives.find import find_objective
from genesis.recipe.resolved import ResolvedRecipe

_OWN_OPTIONS = ("--run_dir", "--ckpt_path", "--print_config")


@dataclass(frozen=True)
class RehearsedRecipe:
    """The part of a resolved recipe that kills are planned from.

    Args:
        max_steps: The last step of the run.
        every_n_steps: Steps from one save to the next.
        seq_len: Tokens of a sequence.
    """

    max_steps: int
    every_n_steps: int
    seq_len: int


def check_extra(extra: Sequence[str]) -> None:
    """Refuses options that the rehearsal itself passes to its trainings.

    Raises:
        UserError: The arguments have such an option.
    """
    for word in extra:
        if word.partition("=")[0] in _OWN_OPTIONS:
            raise UserError(
                f"{word} is set by the rehearsal itself; remove it after -- (--dir sets the directory of both runs)"
            )


def read_recipe(recipe: ResolvedRecipe) -> RehearsedRecipe:
    """Returns the settings of a recipe that a rehearsal needs.

    Raises:
        UserError: The run has no last step, saves no checkpoint before its end, or has no log.
    """
    max_steps, every_n_steps = recipe.get("trainer.max_steps", -1), recipe.get("checkpoint.every_n_steps")
    if max_steps < 1:
        raise UserError(f"trainer.max_steps is {max_steps}: a rehearsal needs an end; add -- --trainer.max_steps 60")
    if every_n_steps is None:
        raise UserError(
            "checkpoint.every_n_steps is not set: there would be no checkpoint to resume from; add "
            f"-- --checkpoint.every_n_steps {max(1, max_steps // 6)}"
        )
    if every_n_steps >= max_steps:
        raise UserError(
            f"checkpoint.every_n_steps is {every_n_steps} and trainer.max_steps {max_steps}: after every kill the run "
            f"would start from the beginning; add -- --checkpoint.every_n_steps {max(1, max_steps // 6)}, or more steps"
        )
    if recipe.get("data.prompts.rollouts.by", "local") != "local":
        raise UserError(
            "data.prompts.rollouts.by is openai, and a rehearsal has runs of its own, whose weights no server sees: "
            "add -- --data.prompts.rollouts null"
        )
    if recipe.get("trainer.logger") is False:
        raise UserError("trainer.logger is false: a rehearsal follows metrics.csv; add -- --trainer.logger null")
    learns_from = find_objective(recipe.get("model.objective")).learns_from
    seq_len = resolve_recipe(recipe, 1, learns_from).count("data.seq_len")
    return RehearsedRecipe(max_steps, every_n_steps, seq_len)
