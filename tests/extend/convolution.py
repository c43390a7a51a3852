"""A gated short convolution as a mixer: this file is all that it needs. Its cache is a state: the inputs of few tokens.

B  rows     S  tokens of a row     D  model width     W  tokens that an output reads
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from genesis.model.attend.metadata import document_positions
from genesis.model.initial import InitialValues
from genesis.model.kv_cache import CacheTensor
from genesis.model.mixer import ForwardTokens, SequenceMixer, SequenceMixerConfig
from genesis.model.part import MATRICES, ParameterGroup, check_counts


class Places(NamedTuple):
    """The place of each token in its document, and the number of tokens of each row without padding; or None."""

    positions: Tensor | None
    num_new: Tensor | None


@dataclass(frozen=True)
class ConvolutionConfig(SequenceMixerConfig):
    """The options.

    Args:
        width: Tokens that an output reads, its own among them.
    """

    width: int = 4

    def __post_init__(self) -> None:
        check_counts(self)

    def build(self, dim: int, layer: int) -> "Convolution":
        """Builds the part."""
        return Convolution(dim, self.width)

    def build_metadata(self, tokens: ForwardTokens, layers: Sequence[int]) -> Sequence[Places]:
        """Returns the same for all layers."""
        if tokens.cached is not None:
            places = Places(None, tokens.cached.num_new)
        elif tokens.document_ids is not None:
            places = Places(document_positions(tokens.document_ids), None)
        else:
            places = Places(None, None)
        return [places] * len(layers)

    def cache_tensors(self, dim: int) -> tuple[CacheTensor, ...]:
        """Returns the inputs of the last tokens."""
        return (CacheTensor((self.width - 1, dim), is_state=True),)


class Convolution(SequenceMixer):
    """Sums gated inputs of the last tokens of a document, channel by channel."""

    draws_random_numbers = False

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.inward = nn.Linear(dim, 3 * dim, bias=False)
        self.taps = nn.Parameter(torch.empty(width, dim))
        self.outward = nn.Linear(dim, dim, bias=False)

    def init_weights(self, initial: InitialValues) -> None:
        """Fills the three weights."""
        initial.fill("inward.weight", self.inward.weight)
        initial.fill("taps", self.taps)
        initial.fill_residual("outward.weight", self.outward.weight)

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of each weight."""
        return {"inward.weight": MATRICES, "taps": MATRICES, "outward.weight": MATRICES}

    @property
    def flops_per_token(self) -> int:
        """Six for each weight."""
        return 6 * sum(weight.numel() for weight in self.parameters())

    def forward(self, x: Tensor, metadata: Places, cache: tuple[Tensor, ...] | None = None) -> Tensor:
        """Returns the update of the residual stream."""
        gate, scale, value = self.inward(x).chunk(3, dim=-1)
        inputs, before = gate * value, len(self.taps) - 1
        past = inputs.new_zeros(len(x), before, x.shape[2]) if cache is None else cache[0].to(inputs.dtype)
        known = torch.cat([past, inputs], dim=1)  # [B, W - 1 + S, D]
        total = torch.zeros_like(inputs)
        for back, tap in enumerate(self.taps):
            earlier = known[:, before - back : before - back + x.shape[1]]
            if metadata.positions is not None:  # not into the document before
                earlier = earlier * (metadata.positions >= back)[..., None]
            total = total + tap * earlier
        if cache is not None:
            num_new = metadata.num_new if metadata.num_new is not None else x.new_full((len(x),), x.shape[1])
            last = num_new.long()[:, None] + torch.arange(before, device=x.device)  # without the padding
            cache[0].copy_(known.gather(1, last[..., None].expand(-1, -1, x.shape[2])))
        return self.outward(scale * total)  # type: ignore[no-any-return]  # torch's
