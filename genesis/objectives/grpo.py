"""GRPO and its relatives: each preset is a paper's choice of advantage, ratio, clip and normalisation.

    preset       paper             choices, in the terms of `genesis.objectives.policy_gradient`
    grpo         arXiv:2402.03300  the mean over answers of the mean over tokens of -min(r A, clip(r) A), A by group_std
    dr_grpo      arXiv:2503.20783  the sum over tokens / (answers * longest answer), A by group_mean
    dapo         arXiv:2503.14476  the mean over all tokens, with a clip that is higher above 1 than below
    cispo        arXiv:2506.13585  the mean over all tokens of -stop_gradient(min(r, 1 + high)) A log p(token)
    gspo         arXiv:2507.18071  the mean over answers of -min(r A, clip(r) A), r by sequence
    rloo         arXiv:2402.14740  the mean over answers of -min(r A, clip(r) A), r by product, A by leave_one_out
    reinforce++  arXiv:2501.03262  that of grpo, with A by batch_std

While nothing has moved, the gradient of rloo is that of REINFORCE, -A grad log p(y|x). The papers of rloo and
reinforce++ take the KL from the reward; here `kl` adds it to the loss, as GRPO has it.
"""

from typing import Final, Literal

from genesis.base.errors import UserError
from genesis.objectives.policy_gradient import (
    AdvantageForm,
    Clip,
    CutAnswers,
    Normalisation,
    PolicyGradient,
    PolicyOptions,
    Ratio,
    choose,
)

Preset = Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo", "reinforce++"]
PRESETS: Final[dict[str, PolicyOptions]] = {
    "grpo": PolicyOptions(),
    "dr_grpo": PolicyOptions(advantage="group_mean", normalisation="constant"),
    "dapo": PolicyOptions(clip_high=0.28, normalisation="token"),
    "cispo": PolicyOptions(clip="cispo", clip_low=1.0, clip_high=4.0, normalisation="token"),
    "gspo": PolicyOptions(ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    "rloo": PolicyOptions(advantage="leave_one_out", ratio="product"),
    "reinforce++": PolicyOptions(advantage="batch_std"),
}


class GRPO(PolicyGradient):
    """Group relative policy optimization and its relatives, on answers that the model writes (`data.prompts`).

    Args:
        preset: The paper whose choices are taken, where an option below is not given: grpo, dr_grpo, dapo, cispo, gspo,
            rloo or reinforce++.
        advantage: How rewards become advantages: group_std, group_mean, leave_one_out or batch_std.
        ratio: Whether ratios are those of tokens, of sequences (their geometric mean), or the product over an answer.
        clip: Whether a clipped ratio stops the gradient (ppo), bounds its weight (cispo), or there is no clip (none).
        clip_low: How far below 1 a ratio counts; with cispo 1 for no bound.
        clip_high: How far above 1 a ratio counts.
        normalisation: Whether the loss is a mean over answers of means over tokens (sequence), a mean over all tokens
            of the global batch (token), or a sum over tokens, divided by answers times longest length (constant).
        kl: Factor of the KL to the reference, which is the model without its adapters; 0 for none.
        cut_answers: Whether answers that the longest length has cut are learned, or masked: without a loss, and not
            counted where the loss is normalised.

    Raises:
        UserError: A value is out of its range, or two choices do not fit.
    """

    def __init__(
        self,
        preset: Preset = "grpo",
        advantage: AdvantageForm | None = None,
        ratio: Ratio | None = None,
        clip: Clip | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        normalisation: Normalisation | None = None,
        kl: float = 0.0,
        cut_answers: CutAnswers = "learn",
    ) -> None:
        if preset not in PRESETS:
            raise UserError(f"model.objective.preset is {preset!r}; it must be one of {', '.join(PRESETS)}")
        options = choose(
            PRESETS[preset],
            advantage=advantage,
            ratio=ratio,
            clip=clip,
            clip_low=clip_low,
            clip_high=clip_high,
            normalisation=normalisation,
        )
        super().__init__(options, kl, cut_answers)
