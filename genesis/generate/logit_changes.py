"""Changes the logits of a text before a token is sampled: by penalties of tokens that it has, and by a bias.

V  vocabulary
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from genesis.base.device import send
from genesis.generate.sampling_options import SamplingOptions


class LogitChanges:
    """The changes that one text's options ask for. No method waits for the device.

    The bias comes first, then the penalty of repetitions, then those by presence and by frequency.

    Args:
        options: The options.
        prompt: The ids of the prompt, whose tokens only the penalty of repetitions counts.
        vocab_size: Number of logits.
        device: The device of the logits.
    """

    def __init__(self, options: SamplingOptions, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self._options = options
        self._counts = torch.zeros(vocab_size, device=device)
        has_token = torch.zeros(vocab_size, dtype=torch.bool)
        has_token[torch.tensor(list(prompt))] = True
        self._in_prompt = send(has_token, device)
        bias = torch.zeros(vocab_size)
        for token, value in options.logit_bias:
            bias[token] = value
        self._bias = send(bias, device) if options.logit_bias else None

    def apply(self, logits: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        """Returns the changed logits."""
        options = self._options
        if self._bias is not None:
            logits = logits + self._bias
        is_new = self._counts > 0
        if options.repetition_penalty != 1.0:
            factor = torch.where(logits > 0, 1.0 / options.repetition_penalty, options.repetition_penalty)
            logits = torch.where(self._in_prompt | is_new, logits * factor, logits)
        return logits - options.presence_penalty * is_new - options.frequency_penalty * self._counts

    def add(self, token: Int64[Tensor, " 1"]) -> None:
        """Counts a new token of the text, which is on the device."""
        self._counts.index_add_(0, token, torch.ones_like(self._counts[:1]))
