"""A recipe that cannot be rehearsed is refused with the remedy."""

from typing import Any

import pytest

from genesis.base.errors import UserError
from genesis.operations.rehearse.recipe import RehearsedRecipe, check_extra, read_recipe
from genesis.recipe.resolved import ResolvedRecipe


def resolved(max_steps: int = 60, every_n_steps: int | None = 10, logger: Any = None, **data: Any) -> ResolvedRecipe:
    content = {
        "trainer": {"max_steps": max_steps, "logger": logger},
        "model": {"decoder": {"max_seq_len": 256}},
        "data": {"seq_len": 256, **data},
        "checkpoint": {"every_n_steps": every_n_steps, "mode": "sync"},
    }
    return ResolvedRecipe.complete(content, "the recipe")


def test_a_recipe_with_an_end_and_saves_is_taken() -> None:
    assert read_recipe(resolved()) == RehearsedRecipe(max_steps=60, every_n_steps=10, seq_len=256)


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        (resolved(max_steps=-1), ("trainer.max_steps is -1", "--trainer.max_steps 60")),
        (resolved(every_n_steps=None), ("checkpoint.every_n_steps is not set", "--checkpoint.every_n_steps 10")),
        (resolved(every_n_steps=60), ("every_n_steps is 60", "max_steps 60", "--checkpoint.every_n_steps 10")),
        (
            resolved(prompts={"rollouts": {"by": "openai", "url": "http://a"}}),
            ("data.prompts.rollouts.by is openai", "--data.prompts.rollouts null"),
        ),
        (resolved(logger=False), ("trainer.logger is false", "--trainer.logger null")),
    ],
)
def test_one_that_cannot_be_rehearsed_is_refused_with_the_remedy(
    recipe: ResolvedRecipe, parts: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as refused:
        read_recipe(recipe)
    assert "\n" not in str(refused.value)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize("option", ["--run_dir", "--run_dir=elsewhere", "--ckpt_path", "--print_config"])
def test_options_that_the_rehearsal_gives_itself_are_refused(option: str) -> None:
    with pytest.raises(UserError, match=option):
        check_extra(["--trainer.max_steps", "60", option, "x"])


def test_other_options_are_handed_on() -> None:
    check_extra(["--trainer.max_steps", "60", "--checkpoint.mode=process"])
