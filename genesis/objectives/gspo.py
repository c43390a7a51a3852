"""GSPO: a policy gradient whose importance ratios and clipping are those of whole sequences.

For an answer y of |y| tokens to a prompt x, with the advantage A of the answer within the answers to x:

    s = exp((log p(y|x) - log p_old(y|x)) / |y|)            p_old: the weights that wrote the answer
    loss = mean over answers of -min(s A, clip(s, 1 - low, 1 + high) A) + kl * KL

References:
    Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 to 7.
"""

from genesis.objectives.policy_gradient import PolicyGradient, PolicyOptions


class GSPO(PolicyGradient):
    """Group sequence policy optimization, on answers that the model has written during training (`data.prompts`).

    `GRPO` with `preset: gspo` is the same, with more options.

    Args:
        clip_low: How far the ratio of a sequence may fall below 1 before an answer worse than its group is no longer
            pushed down.
        clip_high: How far the ratio may rise above 1 before a better answer is no longer pushed up.
        kl: Factor of the KL to the reference, which is the model without its adapters; 0 for none.

    Raises:
        UserError: A value is out of its range.
    """

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4, kl: float = 0.0) -> None:
        super().__init__(PolicyOptions(ratio="sequence", clip_low=clip_low, clip_high=clip_high), kl)
