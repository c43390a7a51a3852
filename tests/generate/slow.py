"""Text written the slow obvious way."""

import torch

from genesis.model.decoder import Decoder

NO_STOP: frozenset[int] = frozenset()


def slow_greedy(decoder: Decoder, prompt: list[int], num_tokens: int) -> list[int]:
    """One whole forward of one text for each token."""
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(int(decoder(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]
