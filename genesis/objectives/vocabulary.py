"""What an objective computes with the output weight: a strategy may hold the weight, or the tokens, in parts.

N  tokens (all leading dimensions together)     D  model width     V  vocabulary     A  sums over tokens
"""

from typing import Final

from jaxtyping import Float, Float32, Int64
from torch import Tensor

from genesis.model import loss
from genesis.objectives import distillation_loss
from genesis.objectives.distillation_loss import DistillationSums, TeacherClasses


class Vocabulary:
    """The losses over a vocabulary that this rank has whole, for all tokens of its rows.

    A strategy whose ranks share the vocabulary or the tokens of rows has its own. Labels, classes and masks are those
    of whole rows everywhere: a vocabulary takes this rank's part of them.

    Args:
        softcap: The bound of logits (`LanguageModel.softcap`); None without one.
    """

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    def sum_cross_entropy(
        self, hidden: Float[Tensor, "*N D"], weight: Float[Tensor, "V D"], labels: Int64[Tensor, "*N"]
    ) -> Float32[Tensor, ""]:
        """Returns the sum of -log p(label) over the labels that are not ignored, in nats."""
        return loss.sum_cross_entropy(hidden, weight, labels, self._softcap)

    def token_losses(
        self, hidden: Float[Tensor, "*N D"], weight: Float[Tensor, "V D"], labels: Int64[Tensor, "*N"]
    ) -> Float32[Tensor, " N"]:
        """Returns -log p(label) of each token, 0 where the label is ignored: of all tokens whose labels are given.

        Ranks that share the tokens of rows return 0 for the tokens of the others; `sum_over_rows` adds the sums.
        """
        return loss.token_losses(hidden, weight, labels, self._softcap)

    def bounded(self, softcap: float | None) -> "Vocabulary":
        """Returns the vocabulary for a model whose logits have a bound; ranks share none of such a model."""
        if softcap is None:
            return self
        is_whole = type(self) is Vocabulary
        assert is_whole
        return Vocabulary(softcap)

    def sum_distillation(
        self,
        hidden: Float[Tensor, "*N D"],
        weight: Float[Tensor, "V D"],
        labels: Int64[Tensor, "*N"],
        classes: TeacherClasses,
        *,
        temperature: float,
        share: float,
    ) -> DistillationSums:
        """Returns the sums of `genesis.objectives.distillation_loss`, over the labels that are not ignored."""
        return distillation_loss.sum_distillation(hidden, weight, labels, classes, temperature=temperature, share=share)

    def sum_over_rows(self, sums: Float32[Tensor, " A"]) -> Float32[Tensor, " A"]:
        """Returns sums over tokens, such as those of an answer, of all ranks that share the rows' tokens.

        An objective that trains where ranks share rows calls it for each sum of `token_losses` that becomes a term, a
        figure, or a part of anything that is not linear: terms and figures are those of whole rows on every rank.
        """
        return sums


WHOLE: Final = Vocabulary()
"""The vocabulary of ranks that share neither the output weight nor the tokens of rows."""
