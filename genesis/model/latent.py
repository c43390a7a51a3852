"""Multi-head latent attention: keys and values of all heads come from one narrow latent of each token.

Positions turn a part of each query, and a key that all heads share. A cache holds the latent and this key alone. For
one new token of each row, queries are brought into the space of latents, so that no key or value of an earlier token is
computed again.

B  sequences of a micro-batch     S  tokens of a sequence     D  model width       H  heads
R  width of a latent              P  width of a rotated key   L  slots of a cache
N  width of the part of a query and a key without positions   V  width of a value
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from genesis.base.errors import UserError
from genesis.model.attend.metadata import AttentionMetadata
from genesis.model.attend.table import attend
from genesis.model.attention import AttentionConfig, build_attention_metadata, remember
from genesis.model.cut import MatrixShares, find_indivisible, held
from genesis.model.initial import InitialValues
from genesis.model.kv_cache import CacheTensor
from genesis.model.mixer import AttentionHeads, ForwardTokens, SequenceMixer, SequenceMixerConfig
from genesis.model.norm import RMSNorm
from genesis.model.part import MATRICES, ParameterGroup, check_counts
from genesis.model.rotary import RopeScaling, rotate


@final
@dataclass(frozen=True)
class LatentAttentionConfig(SequenceMixerConfig):
    """Multi-head latent attention, as DeepSeek-V2 and DeepSeek-V3 have it.

    Args:
        num_heads: Number of heads.
        latent_dim: Width of the latent from which keys and values are computed.
        key_dim: Width of the part of queries and keys without positions.
        rotary_dim: Width of the part with rotary positions, even; its key serves all heads.
        value_dim: Width of a head's value, at most that of a whole key.
        query_latent_dim: Width of the latent from which queries are computed; None for queries of the token itself.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: Their scaling; None for no scaling.
        softmax_growth: The products of queries and keys are multiplied by (1 + `softmax_growth` ln(factor) / 10)^2,
            where the factor is that of `rope_scaling`; 0 for no factor.
        has_interleaved_rope: Whether positions turn neighbouring dimensions together, instead of those of two halves.
        norm_eps: Added to the mean square in the norms of latents.

    Raises:
        UserError: The shape is invalid.
    """

    name: ClassVar[str] = "attention"

    num_heads: int
    latent_dim: int
    key_dim: int
    rotary_dim: int
    value_dim: int
    query_latent_dim: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    softmax_growth: float = 0.0
    has_interleaved_rope: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_counts(self)
        if self.rotary_dim % 2:
            raise UserError(f"rotary_dim is {self.rotary_dim}: it must be even")
        if self.value_dim > self.head_dim:
            raise UserError(f"value_dim is {self.value_dim}: it must be at most key_dim + rotary_dim, {self.head_dim}")
        for name in ("rope_theta", "norm_eps"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}: it must be above 0 and finite")
        if not 0.0 <= self.softmax_growth < math.inf:
            raise UserError(f"softmax_growth is {self.softmax_growth}: it must be at least 0 and finite")
        if self.softmax_growth and self.rope_scaling is None:
            raise UserError(f"softmax_growth is {self.softmax_growth}: it needs rope_scaling, which is missing")
        if self.rope_scaling is not None:
            self.rope_scaling.check(self.rotary_dim // 2)

    @property
    def head_dim(self) -> int:
        """The width of a whole query and key."""
        return self.key_dim + self.rotary_dim

    @property
    def softmax_factor(self) -> float:
        """The factor of the products of queries and keys, beside 1 / sqrt(width of a key)."""
        factor = 1.0 if self.rope_scaling is None else self.rope_scaling.factor
        return (1.0 + 0.1 * self.softmax_growth * math.log(factor)) ** 2

    @property
    def reads_length(self) -> bool:
        """Whether the keys of a text depend on its length."""
        return self.rope_scaling is not None and self.rope_scaling.reads_length

    def build(self, dim: int, layer: int) -> "LatentAttention":
        """Builds the part, the same in every block."""
        return LatentAttention(self, dim)

    def build_metadata(self, tokens: ForwardTokens, layers: Sequence[int]) -> Sequence[AttentionMetadata]:
        """Returns which tokens each token sees, as attention with such heads has it; one object for all layers."""
        is_narrow = tokens.cached is not None and tokens.x.shape[1] == 1
        heads = AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=1 if is_narrow else self.num_heads,
            rope_theta=self.rope_theta,
            head_dim=self.latent_dim + self.rotary_dim if is_narrow else self.head_dim,
            rope_scaling=self.rope_scaling,
            rotary_dim=self.rotary_dim,
            has_interleaved_rope=self.has_interleaved_rope,
        )
        return [build_attention_metadata(heads, tokens, expands_cache=not is_narrow)] * len(layers)

    def cache_tensors(self, dim: int) -> tuple[CacheTensor, ...]:
        """Returns the latent of a token, and its rotated key behind it."""
        return (CacheTensor((1, self.latent_dim + self.rotary_dim)),)

    def attention_heads(self, dim: int) -> AttentionHeads:
        """Returns the heads of a forward without a cache: each has a key of its own."""
        return AttentionHeads(self.num_heads, self.num_heads, self.head_dim)

    def count_shared_heads(self) -> int:
        """Returns the number of heads."""
        return self.num_heads

    def find_uncut(self, num_ranks: int) -> str | None:
        """Returns the heads that the ranks cannot share; each rank computes all latents."""
        return find_indivisible({"num_heads": self.num_heads}, num_ranks)


class LatentAttention(SequenceMixer):
    """Attention whose keys and values are computed from latents.

    References:
        DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434, equations 9 to 19 and, for the cache, section 2.1.2.
    """

    draws_random_numbers = False

    def __init__(self, config: LatentAttentionConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        width, query_dim = config.query_latent_dim, config.num_heads * config.head_dim
        if width is None:
            self.query = nn.Linear(dim, query_dim, bias=False)
        else:
            self.compress_query = nn.Linear(dim, width, bias=False)
            self.query_norm = RMSNorm(width, config.norm_eps)
            self.expand_query = nn.Linear(width, query_dim, bias=False)
        self.compress = nn.Linear(dim, config.latent_dim + config.rotary_dim, bias=False)
        self.latent_norm = RMSNorm(config.latent_dim, config.norm_eps)
        self.expand = nn.Linear(config.latent_dim, config.num_heads * (config.key_dim + config.value_dim), bias=False)
        self.output = nn.Linear(config.num_heads * config.value_dim, dim, bias=False)

    @property
    def _linears(self) -> dict[str, nn.Linear]:
        return {name: layer for name, layer in self.named_children() if isinstance(layer, nn.Linear)}

    def init_weights(self, initial: InitialValues) -> None:
        """Initializes the weights. The norms are parts of their own."""
        for name, layer in self._linears.items():
            fill = initial.fill_residual if name == "output" else initial.fill
            fill(f"{name}.weight", layer.weight)

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of each weight."""
        return {f"{name}.weight": MATRICES for name in self._linears}

    def share_matrices(self, ranks: MatrixShares) -> None:
        """Gives each rank some heads; every rank computes the latents."""
        ranks.cut_linear(self.query if self.config.query_latent_dim is None else self.expand_query, 0)
        ranks.cut_linear(self.expand, 0)
        ranks.cut_linear(self.output, 1)

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of the weights, each of which multiplies every token."""
        return 6 * sum(layer.weight.numel() for layer in self._linears.values())

    def context_flops_per_token(self, context: int) -> int:
        """Two products of all heads, query with key and weight with value, six operations for each element."""
        return 6 * self.config.num_heads * (self.config.head_dim + self.config.value_dim) * context

    def forward(
        self, x: Float[Tensor, "B S D"], metadata: AttentionMetadata, cache: tuple[Tensor, ...] | None = None
    ) -> Float[Tensor, "B S D"]:
        """Returns what each token gathers from those it may see."""
        config, exchange = self.config, self.exchange
        if config.query_latent_dim is None:
            query = self.query(x)
        else:
            query = self.expand_query(self.query_norm(self.compress_query(x)))
        plain, turning = query.unflatten(2, (-1, config.head_dim)).split((config.key_dim, config.rotary_dim), dim=-1)
        latent, key = self.compress(x).unsqueeze(2).split((config.latent_dim, config.rotary_dim), dim=-1)
        tables = metadata.cos, metadata.sin
        cos, sin = tables if exchange is None else map(exchange.cut, tables)
        turning, key = (rotate(part, cos, sin, is_interleaved=config.has_interleaved_rope) for part in (turning, key))
        held_of_tokens = torch.cat((self.latent_norm(latent), key), dim=-1)
        if cache is not None:
            (held_of_tokens,) = remember((held_of_tokens,), metadata, cache)
        if cache is not None and x.shape[1] == 1:
            attended = self._attend_latents(plain, turning, held_of_tokens, metadata)
        else:
            attended = self._attend_heads(plain, turning, held_of_tokens, metadata)
        out: Tensor = self.output(attended.flatten(2))
        return out

    def _attend_heads(
        self,
        plain: Float[Tensor, "B S H N"],
        turned: Float[Tensor, "B S H P"],
        latents: Float[Tensor, "B L 1 R+P"],
        metadata: AttentionMetadata,
    ) -> Float[Tensor, "B S H V"]:
        """Attends over the keys and values of all heads, which are computed from the latents."""
        config, exchange = self.config, self.exchange
        latent, key = torch.split(latents, [config.latent_dim, config.rotary_dim], dim=-1)
        expanded = self.expand(latent.squeeze(2)).unflatten(2, (-1, config.key_dim + config.value_dim))
        plain_key, value = expanded.split((config.key_dim, config.value_dim), dim=-1)
        whole_key = torch.cat((plain_key, key.to(plain_key.dtype).expand(-1, -1, plain_key.shape[2], -1)), dim=-1)
        query = torch.cat((plain, turned), dim=-1)
        if config.softmax_factor != 1.0:
            query = query * config.softmax_factor
        if exchange is not None:
            query, whole_key, value = exchange.to_heads(query, whole_key, value)
        # Kernels take keys and values of one width: zeros at the end of a value add nothing, and are cut off again.
        padded = pad(value, (0, config.head_dim - config.value_dim))
        attended = attend(query, whole_key, padded, metadata)[..., : config.value_dim]
        return attended if exchange is None else exchange.to_tokens(attended)

    def _attend_latents(
        self,
        plain: Float[Tensor, "B S H N"],
        turned: Float[Tensor, "B S H P"],
        latents: Float[Tensor, "B L 1 R+P"],
        metadata: AttentionMetadata,
    ) -> Float[Tensor, "B S H V"]:
        """Attends over the latents, of which one serves all heads as key and as value.

        A query times an expanded key is a query, times the weight that expands keys, times the latent.
        """
        config = self.config
        weight = self._find_expanding_weight(latents)
        by_head = weight.reshape(-1, config.key_dim + config.value_dim, config.latent_dim)
        of_keys, of_values = torch.split(by_head, [config.key_dim, config.value_dim], dim=1)
        query = torch.cat((torch.einsum("bshn,hnr->bshr", plain, of_keys), turned), dim=-1)
        # The kernels divide by the root of the latent's width, and not of a key's.
        query = query * (config.softmax_factor * math.sqrt(query.shape[-1] / config.head_dim))
        gathered = attend(query.to(latents.dtype), latents, latents, metadata)[..., : config.latent_dim]
        return torch.einsum("bshr,hvr->bshv", gathered, of_values)

    def _find_expanding_weight(self, x: Tensor) -> Float[Tensor, "H*(N+V) R"]:
        """Returns the weight that expands latents, with what an adapter adds to it, whatever form it has."""
        if type(self.expand) is nn.Linear:
            return held(self.expand.weight)
        expanded: Tensor = self.expand(torch.eye(self.config.latent_dim, device=x.device, dtype=x.dtype))
        return expanded.mT
