"""Checks of a recipe whose model answers prompts: the template, how answers end, and whether rewards can be learned.

One global batch of prompts is answered by the weights that training starts from, and trained for one step.
"""

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, Final

import lightning.pytorch as pl
import numpy as np

from genesis.base.errors import UserError, numbered
from genesis.data.prompt_data import Group, PromptData
from genesis.data.window import AccumulationWindow
from genesis.operations.doctor.checks import Check, judge
from genesis.recipe.resolved import ResolvedRecipe
from genesis.tokenizer.tokenizer import Tokenizer

PROMPT_CHECKS: Final = ("template", "answers", "rewards")
_MOST_PROMPTS: Final = 8
_ANSWER: Final = "So."
_FEW_FINISHED: Final = 0.5
_MUCH_WITHOUT: Final = 0.9


def plan_answers(recipe: ResolvedRecipe) -> dict[str, Any]:
    """Returns the options of a fit of one step, whose prompts are few, never replaced, and answered by the model."""
    num_prompts = min(recipe.count("data.global_batch_size"), _MOST_PROMPTS)
    num_answers = num_prompts * recipe.count("data.prompts.group_size")
    return {
        "data.global_batch_size": num_prompts,
        "data.micro_batch_size": gcd(num_answers, recipe.count("data.micro_batch_size")),
        "data.prompts.steps_per_rollout": 1,
        "data.prompts.max_resamples": 0,
        "data.prompts.rollouts": None,  # the model answers here: no server is asked
        "trainer.max_steps": 1,
        "schedule.warmup_updates": 0,
        "checkpoint.every_n_steps": None,
        "checkpoint.save_at_end": False,
    }


class WatchAnswers(pl.Callback):
    """Keeps the answers of the first rollout.

    Args:
        data: The prompts.
    """

    def __init__(self, data: PromptData) -> None:
        self._data = data
        self.groups: Mapping[int, Group] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: AccumulationWindow, batch_idx: int
    ) -> None:
        """Keeps the answers, which are dropped when they are trained."""
        self.groups = self.groups or dict(self._data.groups)


def check_template(data: PromptData) -> Check:
    """Looks whether an answer continues its prompt in the template, and ends with a token that stops the model."""
    prompt = next(prompt for prompts in data.prompts.of_source.values() for prompt in prompts)
    stops = ", ".join(sorted(repr(_spell(token, data.tokenizer)) for token in data.stop_ids)) or "none"
    try:
        whole = data.write_answer(prompt, _ANSWER)
    except UserError as error:
        return Check("template", "warning", f"the template writes no conversation with an answer: {error}")
    own, rest = list(prompt.ids), whole[len(prompt.ids) :]
    found = f"prompts have {numbered(len(own), 'tokens')} here, answers end with {stops}"
    if whole[: len(own)] != own:
        place = next((n for n, pair in enumerate(zip(own, whole, strict=False)) if len({*pair}) > 1), len(whole))
        return Check(
            "template",
            "warning",
            f"{found}; a conversation with an answer differs from its prompt at token {place}",
            "the model would see other tokens in training by conversations than here: compare the template's "
            "generation prompt with its turn of the assistant, unless tools or variables of the record explain it",
        )
    shown = "".join(_spell(token, data.tokenizer) for token in rest)
    return judge(
        "template",
        any(token in data.stop_ids for token in rest),
        f"{found}; the template writes the answer {_ANSWER!r} as {shown!r}",
        "the template closes no answer with a token that stops the model, so that each answer is cut: end its turns "
        "with eos, or with the control token that the model has learned",
    )


def check_answers(groups: Sequence[Group], longest: int | None) -> Check:
    """Looks whether answers end by themselves.

    Args:
        groups: The answers.
        longest: `data.prompts.max_new_tokens`.
    """
    is_finished = np.concatenate([group.is_finished for group in groups])
    lengths = [int(group.is_own(number).sum()) for group in groups for number in range(len(group.answers))]
    share = float(is_finished.mean())
    found = (
        f"{int(is_finished.sum())} of {numbered(len(lengths), 'answers')} ended by themselves; they have "
        f"{np.mean(lengths):.1f} tokens on average, at most {max(lengths)}"
    )
    limit = "the rest of data.seq_len" if longest is None else str(longest)
    more = " data.prompts.max_turns or data.seq_len, if episodes end there;" if groups[0].episodes is not None else ""
    remedy = (
        f"raise data.prompts.max_new_tokens, which is {limit};{more} look at the check `template`; or train on "
        "conversations first, so that the model ends its answers"
    )
    if share == 0.0:
        return Check("answers", "failed", found, f"all answers are cut: {remedy}")
    return Check("answers", "passed", found) if share >= _FEW_FINISHED else Check("answers", "warning", found, remedy)


def check_rewards(groups: Sequence[Group], names: Sequence[str], *, are_learned: bool) -> Check:
    """Looks whether rewards differ, within the groups in which they are compared.

    Args:
        groups: The answers.
        names: Those of the rewards.
        are_learned: Whether the objective learns them.
    """
    if not names:
        return Check("rewards", "does not apply", "there are no rewards")
    single = np.stack([group.single_rewards for group in groups])  # prompts, answers, rewards
    total = np.stack([group.rewards for group in groups])
    parts = [
        f"{name} {values.mean():.4g} on average, from {values.min():.4g} to {values.max():.4g}"
        for name, values in zip(names, np.moveaxis(single, 2, 0), strict=True)
    ]
    without = float((np.ptp(total, axis=1) == 0).mean())
    found = f"{'; '.join(parts)}; {without:.0%} of {numbered(len(total), 'prompts')} have equal rewards for all answers"
    constant = [name for name, values in zip(names, np.moveaxis(single, 2, 0), strict=True) if not np.ptp(values)]
    if without == 1.0 and are_learned:
        remedy = (
            "nothing would be learned: prompts may be too hard or too easy for the model, the reward may not read its "
            "form, or answers are equal; read the answers in RUN/rollouts, and train on conversations first"
        )
        return Check("rewards", "failed", found, remedy)
    if constant:
        what = f"{', '.join(constant)} is the same for all answers: look whether it reads the form of the answers"
        return Check("rewards", "warning", found, what)
    if without >= _MUCH_WITHOUT and are_learned:
        return Check("rewards", "warning", found, "few prompts teach anything: choose others, or raise group_size")
    return Check("rewards", "passed", found)


def _spell(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.spell([token], has_controls=True) if token < tokenizer.vocab_size else f"<id {token}>"
