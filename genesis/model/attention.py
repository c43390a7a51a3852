"""Grouped-query attention with rotary positions, causal and within documents.

B  sequences of a micro-batch     S  tokens of a sequence     D  model width
H  query heads                    K  key and value heads      E  width of a head
L  slots of a key-value cache
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from genesis.base.errors import UserError, numbered
from genesis.model.attend.cache import KEYS_STEP, suits_lengths
from genesis.model.attend.mask import needs_expanded_keys
from genesis.model.attend.metadata import (
    AttentionMetadata,
    CachedTokens,
    Rows,
    UsedSlots,
    document_lengths,
    document_offsets,
    document_positions,
    row_offsets,
)
from genesis.model.attend.table import KERNELS, attend
from genesis.model.cut import MatrixShares, find_indivisible, held
from genesis.model.initial import InitialValues
from genesis.model.kv_cache import CacheTensor
from genesis.model.mixer import AttentionHeads, ForwardTokens, SequenceMixer, SequenceMixerConfig
from genesis.model.norm import RMSNorm
from genesis.model.part import MATRICES, VECTORS, ParameterGroup, check_counts
from genesis.model.rotary import RopeScaling, rotary_tables, rotate


@final
@dataclass(frozen=True)
class AttentionConfig(SequenceMixerConfig):
    """Grouped-query attention with rotary positions.

    Args:
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; each serves `num_heads / num_kv_heads` query heads.
        rope_theta: Base of the rotary wavelengths.
        head_dim: Width of each head, even for the rotary halves; None for `dim / num_heads`.
        rope_scaling: The scaling of rotary wavelengths; None for no scaling.
        no_rope_every: Every layer whose number, counted from 1, is a multiple of this has no rotary positions.
        sliding_window: Number of tokens that each token sees, itself included; None for all previous tokens.
        window_layers: The layers with the window, counted from 0; in other layers a token sees all previous tokens.
            None for all layers.
        has_qkv_bias: Whether query, key and value have biases.
        qk_norm: Which vectors of queries and keys an RMSNorm scales: those of each `head`, before rotation, or each
            whole `projection`, before it is split into heads; None for no norm.
        qk_norm_eps: Added to the mean square in these norms.
        qk_norm_has_offset: Whether these norms scale by 1 plus their weight, which then begins at 0.
        rotary_dim: Number of dimensions of a head that are rotated by positions, even: the first ones. None for all.
        has_output_gate: Whether each head's output is multiplied by the sigmoid of a gate, which the weight of the
            queries also computes: its rows are those of a head's query and then those of its gate, head after head.
        has_interleaved_rope: Whether positions turn neighbouring dimensions of a head together, instead of those of its
            two halves.
        window_rope_theta: Base of the rotary wavelengths in the layers with the window, where they are not scaled; None
            for those of the other layers.
        softmax_scale: The factor of the products of queries and keys; None for 1 / sqrt(width of a head).
        has_output_bias: Whether the projection of all heads' outputs has a bias.
        has_sinks: Whether the softmax of each head has a further logit, which is trained and has no value.
        query_growth: A query at position p is multiplied by 1 + `query_growth` ln(1 + floor(p / n)), where n is the
            original context of `rope_scaling`; None for no factor.

    Raises:
        UserError: The shape is invalid.
    """

    name: ClassVar[str] = "attention"

    num_heads: int
    num_kv_heads: int
    rope_theta: float = 500_000.0
    head_dim: int | None = None
    rope_scaling: RopeScaling | None = None
    no_rope_every: int | None = None
    sliding_window: int | None = None
    window_layers: tuple[int, ...] | None = None
    has_qkv_bias: bool = False
    qk_norm: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_has_offset: bool = False
    rotary_dim: int | None = None
    has_output_gate: bool = False
    has_interleaved_rope: bool = False
    window_rope_theta: float | None = None
    softmax_scale: float | None = None
    query_growth: float | None = None
    has_output_bias: bool = False
    has_sinks: bool = False

    def __post_init__(self) -> None:
        check_counts(self)
        if self.qk_norm not in (None, "head", "projection"):
            raise UserError(f"qk_norm is {self.qk_norm!r}: it must be 'head', 'projection' or null")
        if not 0.0 < self.qk_norm_eps < math.inf:
            raise UserError(f"qk_norm_eps is {self.qk_norm_eps}: it must be above 0 and finite")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        for name in ("rope_theta", "window_rope_theta", "softmax_scale", "query_growth"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise UserError(f"{name} is {value}: it must be above 0 and finite")
        if self.window_rope_theta is not None and self.window_layers is None:
            raise UserError(
                f"window_rope_theta is {self.window_rope_theta}, and window_layers is null: set it to the layers with "
                "the window, or give rope_theta alone"
            )
        if self.query_growth is not None and (self.rope_scaling is None or self.rope_scaling.original_seq_len is None):
            raise UserError(
                f"query_growth is {self.query_growth}: it needs the original_seq_len of rope_scaling, which is missing"
            )
        if self.window_layers is not None:
            self._check_window_layers()

    def _check_window_layers(self) -> None:
        layers: Any = self.window_layers
        if not isinstance(layers, list | tuple) or not all(type(layer) is int and layer >= 0 for layer in layers):
            raise UserError(f"window_layers is {layers!r}: it must be a list of numbers of layers, counted from 0")
        object.__setattr__(self, "window_layers", tuple(sorted({*layers})))  # YAML and JSON give lists
        if self.sliding_window is None or not layers:
            raise UserError(
                f"window_layers is {list(layers)} and sliding_window is {self.sliding_window}: give both, with at "
                "least one layer, or neither"
            )

    def check(self, dim: int, num_layers: int) -> None:
        """Checks that heads of a model of width `dim` have an even width, and that the layers with a window exist.

        Raises:
            UserError: The width is odd, or not a whole number, or there are fewer layers.
        """
        if self.window_layers is not None and self.window_layers[-1] >= num_layers:
            raise UserError(
                f"window_layers has {self.window_layers[-1]}, but the {numbered(num_layers, 'layers')} are counted "
                "from 0: remove it"
            )
        if self.rotary_dim is not None and (self.rotary_dim % 2 or self.rotary_dim > self.head_width(dim)):
            raise UserError(
                f"rotary_dim is {self.rotary_dim}: it must be even and at most the width of a head, "
                f"{self.head_width(dim)}"
            )
        if self.head_dim is not None:
            if self.head_dim % 2:
                raise UserError(f"head_dim is {self.head_dim}: it must be even")
        elif dim % self.num_heads or dim // self.num_heads % 2:
            raise UserError(
                f"dim {dim} does not give {numbered(self.num_heads, 'heads')} an even width: make it a multiple of "
                f"{2 * self.num_heads}"
            )

        if self.rope_scaling is not None:
            self.rope_scaling.check((self.rotary_dim or self.head_width(dim)) // 2)

    def head_width(self, dim: int) -> int:
        """Returns the width of one head."""
        return dim // self.num_heads if self.head_dim is None else self.head_dim

    def has_window(self, layer: int) -> bool:
        """Returns whether tokens see only the window in block number `layer`, counted from 0."""
        return self.sliding_window is not None and (self.window_layers is None or layer in self.window_layers)

    def find_uncut(self, num_ranks: int) -> str | None:
        """Returns the heads that the ranks cannot share. If there are more ranks, several use the same key head."""
        heads = self.num_kv_heads
        if heads % num_ranks and num_ranks % heads:
            return f"num_kv_heads {heads}"
        if heads % num_ranks and self.qk_norm == "projection":
            return f"num_kv_heads {heads} with qk_norm 'projection'"
        return find_indivisible({"num_heads": self.num_heads}, num_ranks)

    def build(self, dim: int, layer: int) -> "Attention":
        """Builds the part of block number `layer`, counted from 0."""
        return Attention(self, dim, layer)

    def build_metadata(self, tokens: ForwardTokens, layers: Sequence[int]) -> Sequence[AttentionMetadata]:
        """Returns one object for the layers with the window, and one for the others."""
        if self.window_layers is None:
            return [build_attention_metadata(self, tokens)] * len(layers)
        if tokens.document_ids is not None and tokens.offsets is None and KERNELS[tokens.kernel].needs_offsets:
            # Waits for the device, once for both kinds of layers.
            tokens = tokens._replace(offsets=document_offsets(tokens.document_ids))
        windowed = build_attention_metadata(self, tokens)
        others = replace(self, sliding_window=None, window_layers=None, window_rope_theta=None)
        whole = build_attention_metadata(others, tokens)
        if self.window_rope_theta is None:
            whole = whole._replace(cos=windowed.cos, sin=windowed.sin)  # one copy of the tables in memory
        return [windowed if self.has_window(layer) else whole for layer in layers]

    @property
    def reads_length(self) -> bool:
        """Whether the keys of a text depend on its length."""
        return self.rope_scaling is not None and self.rope_scaling.reads_length

    def cache_tensors(self, dim: int) -> tuple[CacheTensor, ...]:
        """Returns the keys, after rotation, and the values."""
        return (CacheTensor((self.num_kv_heads, self.head_width(dim))),) * 2

    def attention_heads(self, dim: int) -> AttentionHeads:
        """Returns the heads."""
        return AttentionHeads(self.num_heads, self.num_kv_heads, self.head_width(dim), self.has_sinks)

    def count_shared_heads(self) -> int:
        """Returns the number of query heads; ranks that need the same keys and values copy them."""
        return self.num_heads


def build_attention_metadata(
    config: AttentionConfig, tokens: ForwardTokens, *, expands_cache: bool = False
) -> AttentionMetadata:
    """Returns the metadata of layers that have the window, if there is one.

    Without a cache and without offsets, kernels that read offsets make the host wait for the device.

    Args:
        config: The options.
        tokens: The tokens of the forward.
        expands_cache: Whether keys and values are computed from what a cache holds: of the slots up to the longest row
            alone, where the kernel that takes the lengths of rows would be given all slots.
    """
    x, document_ids, offsets, kernel = tokens.x, tokens.document_ids, tokens.offsets, KERNELS[tokens.kernel]
    if tokens.cached is not None:
        assert document_ids is None, "a cache holds one document per row"
        by_lengths = not (config.has_sinks or expands_cache)
        return _build_cached_metadata(config, x, tokens.cached, by_lengths=by_lengths)
    seq_len, head_dim, window = x.shape[1], config.head_width(x.shape[2]), config.sliding_window
    assert offsets is None or document_ids is not None
    if document_ids is not None and offsets is None and kernel.needs_offsets:
        offsets = document_offsets(document_ids)
    window = None if window is None or window >= seq_len else window
    rows = Rows(x, head_dim, document_ids, offsets, window, config.has_sinks)
    positions = torch.arange(seq_len, device=x.device).unsqueeze(0)
    # With a kernel that reads no offsets, tables have one form whatever the documents: compiled blocks need one graph.
    if document_ids is not None and not (kernel.needs_offsets and rows.num_documents == x.shape[0]):
        positions = document_positions(document_ids)
    lengths = None
    if config.reads_length:
        lengths = torch.full_like(positions, seq_len) if document_ids is None else document_lengths(document_ids)
    return kernel.prepare(_begin_metadata(config, positions, head_dim, lengths), rows)


def _begin_metadata(
    config: AttentionConfig, positions: Int64[Tensor, "B S"], head_dim: int, lengths: Int64[Tensor, "B T"] | None
) -> AttentionMetadata:
    """Returns what follows from positions, in the layers with the window if there are any.

    Args:
        config: The options.
        positions: The place of each token in its text.
        head_dim: The width of a head.
        lengths: The lengths of texts, where `reads_length` asks for them.
    """
    theta, scaling = config.rope_theta, config.rope_scaling
    if config.window_rope_theta is not None:
        theta, scaling = config.window_rope_theta, None
    width, is_interleaved = config.rotary_dim or head_dim, config.has_interleaved_rope
    cos, sin = rotary_tables(positions, width, theta, scaling, lengths, is_interleaved=is_interleaved)
    if config.query_growth is None:
        return AttentionMetadata(cos, sin)
    original = None if config.rope_scaling is None else config.rope_scaling.original_seq_len
    assert original is not None, "the configuration has checked it"
    turns = positions[:, :, None, None] // original
    return AttentionMetadata(cos, sin, query_factor=1.0 + config.query_growth * (1.0 + turns).log())


def _build_cached_metadata(
    config: AttentionConfig, x: Float[Tensor, "B S D"], cached: CachedTokens, *, by_lengths: bool
) -> AttentionMetadata:
    batch_size, seq_len, device = x.shape[0], x.shape[1], x.device
    head_dim, window = config.head_width(x.shape[2]), config.sliding_window
    assert cached.longest + seq_len <= cached.num_slots, "the cache is full"
    positions = torch.arange(seq_len, device=device).unsqueeze(0) + cached.lengths.unsqueeze(1)
    lengths = (cached.lengths + (seq_len if cached.num_new is None else cached.num_new)).unsqueeze(1)
    begun = _begin_metadata(config, positions, head_dim, lengths)
    slots = (positions + torch.arange(batch_size, device=device).unsqueeze(1) * cached.num_slots).flatten()
    if (cached.longest or window is not None) and by_lengths and suits_lengths(x, head_dim):
        used = UsedSlots(
            num_keys=(cached.lengths + seq_len).to(torch.int32),
            query_offsets=row_offsets(batch_size, seq_len, device),
            key_offsets=row_offsets(batch_size, cached.num_slots, device),
        )
        return begun._replace(window=window, slots=slots, used=used)
    num_keys = cached.longest + seq_len
    is_windowed = window is not None and window < num_keys
    is_on_host = device.type == "cpu"
    is_plain = is_on_host and seq_len == 1 and cached.shortest == cached.longest  # the token sees every slot
    mask = None
    if is_windowed or (cached.longest and not is_plain):
        if not is_on_host:  # rounded up, so that shapes stay the same for many tokens
            num_keys = min(-(-num_keys // KEYS_STEP) * KEYS_STEP, cached.num_slots)
        held = torch.arange(num_keys, device=device)
        mask = (held <= positions.unsqueeze(2)).unsqueeze(1)
        if window is not None:
            mask &= (held > positions.unsqueeze(2) - window).unsqueeze(1)
    expands_keys = needs_expanded_keys(x, head_dim, mask)
    return begun._replace(mask=mask, slots=slots, num_keys=num_keys, expands_keys=expands_keys)


class Attention(SequenceMixer):
    """Grouped-query attention with rotary positions."""

    draws_random_numbers = False
    output_bias: nn.Parameter | None
    sinks: nn.Parameter | None

    def __init__(self, config: AttentionConfig, dim: int, layer: int) -> None:
        super().__init__()
        self.head_dim, self.qk_norm = config.head_width(dim), config.qk_norm
        self.window = config.sliding_window if config.has_window(layer) else None
        self.has_rope = config.no_rope_every is None or (layer + 1) % config.no_rope_every != 0
        self.has_output_gate, self.has_interleaved_rope = config.has_output_gate, config.has_interleaved_rope
        # The kernels divide by the root of the width, which the queries bring to the scale that is asked for.
        self.query_scale = 1.0 if config.softmax_scale is None else config.softmax_scale * math.sqrt(self.head_dim)
        query_dim, kv_dim = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.query = nn.Linear(dim, (1 + config.has_output_gate) * query_dim, bias=config.has_qkv_bias)
        self.key = nn.Linear(dim, kv_dim, bias=config.has_qkv_bias)
        self.value = nn.Linear(dim, kv_dim, bias=config.has_qkv_bias)
        self.output = nn.Linear(query_dim, dim, bias=False)
        # Of its own, because ranks that share the projection add their outputs, and one of them adds the bias.
        self.adds_output_bias = True
        self.register_parameter("output_bias", nn.Parameter(torch.empty(dim)) if config.has_output_bias else None)
        sinks = nn.Parameter(torch.empty(config.num_heads)) if config.has_sinks else None
        self.register_parameter("sinks", sinks)
        if config.qk_norm is not None:
            widths = (self.head_dim, self.head_dim) if config.qk_norm == "head" else (query_dim, kv_dim)
            self.query_norm, self.key_norm = (
                RMSNorm(width, config.qk_norm_eps, has_offset=config.qk_norm_has_offset) for width in widths
            )

    def init_weights(self, initial: InitialValues) -> None:
        """Initializes the four weights, and biases and sinks with zeros. The norms are parts of their own."""
        initial.fill("query.weight", self.query.weight)
        initial.fill("key.weight", self.key.weight)
        initial.fill("value.weight", self.value.weight)
        initial.fill_residual("output.weight", self.output.weight)
        for name in self._vectors:
            nn.init.zeros_(self.get_parameter(name))

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of each weight, bias and sink."""
        weights = dict.fromkeys(("query.weight", "key.weight", "value.weight", "output.weight"), MATRICES)
        return weights | dict.fromkeys(self._vectors, VECTORS)

    def share_matrices(self, ranks: MatrixShares) -> None:
        """Gives each rank some heads."""
        ranks.cut_linear(self.query, 0)
        num_kv_heads = self.key.out_features // self.head_dim
        for layer in (self.key, self.value):
            if num_kv_heads % ranks.size == 0:
                ranks.cut_linear(layer, 0)
            else:  # several ranks use the same head
                head = ranks.rank * num_kv_heads // ranks.size
                ranks.use_rows(layer, slice(head * self.head_dim, (head + 1) * self.head_dim))
        ranks.cut_linear(self.output, 1)
        self.adds_output_bias = ranks.rank == 0
        if self.sinks is not None:
            ranks.cut(self, "sinks")
        if self.qk_norm == "projection":
            self.query_norm.share_matrices(ranks)
            self.key_norm.share_matrices(ranks)

    @property
    def _vectors(self) -> tuple[str, ...]:
        biases = () if self.query.bias is None else ("query.bias", "key.bias", "value.bias")
        return (*biases, *(name for name in ("output_bias", "sinks") if getattr(self, name) is not None))

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of the weights, each of which multiplies every token."""
        return 6 * sum(linear.weight.numel() for linear in (self.query, self.key, self.value, self.output))

    def context_flops_per_token(self, context: int) -> int:
        """Two products of the width of all heads, query with key and weight with value, six operations each."""
        return 12 * self.output.in_features * min(context, self.window or context)

    def forward(
        self, x: Float[Tensor, "B S D"], metadata: AttentionMetadata, cache: tuple[Tensor, ...] | None = None
    ) -> Float[Tensor, "B S D"]:
        """Returns what each token gathers from those it may see."""
        heads = (*x.shape[:2], -1, self.head_dim)
        query, key, value = self.query(x), self.key(x), self.value(x).view(heads)
        gate = None
        if self.has_output_gate:
            query, gate = (part.flatten(2) for part in query.unflatten(2, (-1, 2, self.head_dim)).unbind(3))
        if self.qk_norm == "projection":
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = query.view(heads), key.view(heads)
        if self.qk_norm == "head":
            query, key = self.query_norm(query), self.key_norm(key)
        exchange = self.exchange
        if self.has_rope:
            tables = metadata.cos, metadata.sin
            cos, sin = tables if exchange is None else map(exchange.cut, tables)
            query, key = (rotate(part, cos, sin, is_interleaved=self.has_interleaved_rope) for part in (query, key))
        if self.query_scale != 1.0:
            query = query * self.query_scale
        if metadata.query_factor is not None:
            factor = metadata.query_factor if exchange is None else exchange.cut(metadata.query_factor)
            query = (query * factor).to(query.dtype)
        if cache is not None:
            key, value = remember((key, value), metadata, cache)
        if exchange is not None:
            query, key, value = exchange.to_heads(query, key, value)
        attended = attend(query, key, value, metadata, self._take_sinks())
        attended = (attended if exchange is None else exchange.to_tokens(attended)).flatten(2)
        return self._project(attended if gate is None else attended * gate.sigmoid())

    def _take_sinks(self) -> Float[Tensor, " H"] | None:
        """Returns the sinks of the heads that this rank computes."""
        if self.sinks is None:
            return None
        sinks = held(self.sinks)
        return sinks if self.exchange is None else self.exchange.cut_heads(sinks)

    def _project(self, attended: Tensor) -> Float[Tensor, "B S D"]:
        out: Tensor = self.output(attended)
        if self.output_bias is None:
            return out
        bias = self.output_bias if self.adds_output_bias else 0.0 * self.output_bias  # every rank has a gradient
        return out + bias.to(out.dtype)


def remember(
    fresh: Sequence[Float[Tensor, "B S ..."]], metadata: AttentionMetadata, cache: Sequence[Float[Tensor, "B L ..."]]
) -> list[Tensor]:
    """Stores what a layer keeps of each token of a forward, and returns it for these and all earlier tokens.

    Args:
        fresh: A tensor for each tensor of the cache.
        metadata: The metadata of the forward, which has the slots of its tokens.
        cache: The tensors of the layer.
    """
    assert metadata.slots is not None
    for kept, new in zip(cache, fresh, strict=True):
        kept.flatten(0, 1).index_copy_(0, metadata.slots, new.flatten(0, 1).to(kept.dtype))
    if metadata.used is not None:
        return [kept.to(new.dtype) for kept, new in zip(cache, fresh, strict=True)]
    # Slots beyond a row's own length hold padding or an earlier text; the mask hides them.
    return [kept[:, : metadata.num_keys].to(new.dtype) for kept, new in zip(cache, fresh, strict=True)]
