"""Multi-head latent attention, as a package of a user's own would bring it: one file, chosen by its class.

Keys and values of all heads come from one narrow latent of each token, and positions from a key that all heads share. A
cache holds only these two, which is a fraction of all keys and values.

B  sequences of a micro-batch     S  tokens of a sequence     D  model width
H  heads                          R  width of a latent        P  width of a rotated key
N  width of a query's and a key's part without positions      V  width of a value
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from genesis.base.errors import UserError
from genesis.model.attend.metadata import AttentionMetadata
from genesis.model.attend.table import attend
from genesis.model.attention import AttentionConfig, build_attention_metadata, remember, rotate
from genesis.model.initial import InitialValues
from genesis.model.kv_cache import CacheTensor
from genesis.model.mixer import AttentionHeads, ForwardTokens, SequenceMixer, SequenceMixerConfig
from genesis.model.norm import RMSNorm
from genesis.model.part import MATRICES, ParameterGroup, check_counts


@final
@dataclass(frozen=True)
class LatentAttentionConfig(SequenceMixerConfig):
    """Multi-head latent attention.

    Args:
        num_heads: Number of heads.
        latent_dim: Width of the latent from which keys and values are computed.
        key_dim: Width of the part of queries and keys without positions.
        rotary_dim: Width of the part with rotary positions, even; its key serves all heads.
        value_dim: Width of a head's value, at most that of a whole key.
        rope_theta: Base of the rotary wavelengths.
        norm_eps: Added to the mean square in the norm of latents.

    Raises:
        UserError: The shape is invalid.
    """

    num_heads: int
    latent_dim: int
    key_dim: int
    rotary_dim: int
    value_dim: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_counts(self)
        if self.rotary_dim % 2:
            raise UserError(f"rotary_dim is {self.rotary_dim}: it must be even")
        if self.value_dim > self.head_dim:
            raise UserError(f"value_dim is {self.value_dim}: it must be at most key_dim + rotary_dim, {self.head_dim}")

    @property
    def head_dim(self) -> int:
        """The width of a whole query and key."""
        return self.key_dim + self.rotary_dim

    def build(self, dim: int, layer: int) -> "LatentAttention":
        """Builds the part, the same in every block."""
        return LatentAttention(self, dim)

    def build_metadata(self, tokens: ForwardTokens, layers: Sequence[int]) -> Sequence[AttentionMetadata]:
        """Returns which tokens each token sees, as attention with heads of this width has it."""
        heads = AttentionConfig(
            self.num_heads, self.num_heads, self.rope_theta, head_dim=self.head_dim, rotary_dim=self.rotary_dim
        )
        return [build_attention_metadata(heads, tokens)] * len(layers)

    def cache_tensors(self, dim: int) -> tuple[CacheTensor, ...]:
        """Returns the latents, and the keys with positions."""
        return CacheTensor((self.latent_dim,)), CacheTensor((self.rotary_dim,))

    def attention_heads(self, dim: int) -> AttentionHeads:
        """Returns the heads: each has a key of its own."""
        return AttentionHeads(self.num_heads, self.num_heads, self.head_dim)


class LatentAttention(SequenceMixer):
    """Attention whose keys and values are computed from latents.

    References:
        DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434, equations 9 to 19; the queries are not compressed.
    """

    draws_random_numbers = False

    def __init__(self, config: LatentAttentionConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(dim, config.num_heads * config.head_dim, bias=False)
        self.compress = nn.Linear(dim, config.latent_dim + config.rotary_dim, bias=False)
        self.latent_norm = RMSNorm(config.latent_dim, config.norm_eps)
        self.expand = nn.Linear(config.latent_dim, config.num_heads * (config.key_dim + config.value_dim), bias=False)
        self.output = nn.Linear(config.num_heads * config.value_dim, dim, bias=False)

    def init_weights(self, initial: InitialValues) -> None:
        """Initializes the four weights. The norm is a part of its own."""
        for name in ("query", "compress", "expand"):
            initial.fill(f"{name}.weight", self.get_parameter(f"{name}.weight"))
        initial.fill_residual("output.weight", self.output.weight)

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of each weight."""
        return {f"{name}.weight": MATRICES for name in ("query", "compress", "expand", "output")}

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of the weights, each of which multiplies every token."""
        return 6 * sum(layer.weight.numel() for layer in (self.query, self.compress, self.expand, self.output))

    def context_flops_per_token(self, context: int) -> int:
        """Two products of all heads, query with key and weight with value, six operations for each element."""
        return 6 * self.config.num_heads * (self.config.head_dim + self.config.value_dim) * context

    def forward(
        self, x: Float[Tensor, "B S D"], metadata: AttentionMetadata, cache: tuple[Tensor, ...] | None = None
    ) -> Float[Tensor, "B S D"]:
        """Returns what each token gathers from those it may see."""
        config = self.config
        sizes = (config.key_dim, config.rotary_dim)
        query, rotated_query = self.query(x).unflatten(2, (config.num_heads, config.head_dim)).split(sizes, dim=-1)
        latent, rotated_key = self.compress(x).split((config.latent_dim, config.rotary_dim), dim=-1)
        latent = self.latent_norm(latent)
        rotated_key = rotate(rotated_key.unsqueeze(2), metadata.cos, metadata.sin).squeeze(2)
        if cache is not None:
            latent, rotated_key = remember((latent, rotated_key), metadata, cache)
        expanded = self.expand(latent).unflatten(2, (config.num_heads, config.key_dim + config.value_dim))
        key, value = expanded.split((config.key_dim, config.value_dim), dim=-1)
        rotated_key = rotated_key.unsqueeze(2).expand(-1, -1, config.num_heads, -1)
        whole_query = torch.cat((query, rotate(rotated_query, metadata.cos, metadata.sin)), dim=-1)
        # Kernels take keys and values of one width: zeros at the end of a value add nothing, and are cut off again.
        padded = pad(value, (0, config.head_dim - config.value_dim))
        attended = attend(whole_query, torch.cat((key, rotated_key), dim=-1), padded, metadata)
        out: Tensor = self.output(attended[..., : config.value_dim].flatten(2))
        return out
