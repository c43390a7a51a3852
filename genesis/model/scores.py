"""Scores of texts, by a decoder whose output weight has one row: a reward model.

The score of a text is the product of that row with the hidden state of the text's last token, in float32.

A  texts     S  tokens of a row     D  model width
"""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.nn.functional import linear

from genesis.base.errors import UserError
from genesis.model.decoder import Decoder, DecoderConfig

SCORES_ALONE: Final = (
    "is a reward model, which scores texts and writes none: ask it by POST /v1/score of `genesis serve`, or name it in "
    "data.prompts.rewards"
)


def compute_scores(
    hidden: Float[Tensor, "B S D"], weight: Float[Tensor, "1 D"], positions: Int64[Tensor, " A"]
) -> Float32[Tensor, " A"]:
    """Returns the scores of texts by the positions of their last tokens in the flattened batch."""
    with torch.autocast(hidden.device.type, enabled=False):
        return linear(hidden.flatten(0, 1)[positions].float(), weight.float()).squeeze(1)


@torch.no_grad()
def score_text(decoder: Decoder, ids: Sequence[int]) -> float:
    """Returns the score of one text.

    Args:
        decoder: A reward model, in evaluation mode.
        ids: The tokens of the text: at least one, at most the model's context.
    """
    device = decoder.output_weight.device
    last = torch.zeros(1, dtype=torch.int64, device=device)
    found: Tensor = decoder(
        torch.tensor([list(ids)], device=device),
        logits_to_keep=last + (len(ids) - 1),
        head=lambda hidden, weight: compute_scores(hidden[None], weight, last),
    )
    return float(found)


def refuse_scores(config: DecoderConfig, what: object) -> None:
    """Refuses a reward model where a model writes text.

    Args:
        config: The model's shape.
        what: Its name for the message.

    Raises:
        UserError: It is one.
    """
    if config.num_scores is not None:
        raise UserError(f"{what} {SCORES_ALONE}")
