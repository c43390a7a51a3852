"""The decoder: a Llama-style language model in one file.

Legend of dimension letters:

    B  sequences of a micro-batch     S  tokens of a sequence     D  model width (`dim`)     F  feed-forward width
    H  query heads                    K  key and value heads      E  width of a head         V  vocabulary
    L  slots of a key-value cache     P  places that are asked for

RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU, no biases. Attention is causal and never
crosses a document. There is no parallelism, optimizer or checkpoint code here: blocks are self-contained modules, so
that sharding, activation checkpointing and compilation are applied to them from outside.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu

from genesis.errors import UserError
from genesis.model.initial import fill_normal

INIT_STD = 0.02

MIN_MEAN_DOCUMENT_TOKENS = 24
"""On CPU, shorter documents are masked: attention one by one would cost more in calls than it saves in work."""

T = TypeVar("T")


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder.

    Args:
        vocab_size: Rows of the embedding.
        dim: Width of the residual stream.
        num_layers: Blocks.
        num_heads: Query heads; `dim / num_heads` is the width of each and must be even for the rotary halves.
        num_kv_heads: Key and value heads; each serves `num_heads / num_kv_heads` query heads.
        ffn_dim: Width inside the feed-forward part.
        max_seq_len: Longest context in tokens.
        rope_theta: Base of the rotary wavelengths.
        norm_eps: Added to the mean square in RMSNorm.
        dropout: Share of each part's output that is dropped before it joins the residual stream, in training.
        has_tied_embeddings: Whether the embedding is the output weight too.

    Raises:
        UserError: A shape that cannot be built.
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    max_seq_len: int
    vocab_size: int = 49_152
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    has_tied_embeddings: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise UserError(f"{field.name} is {value}: it must be at least 1")
        if self.dim % self.num_heads or self.dim // self.num_heads % 2:
            raise UserError(
                f"dim {self.dim} does not give {self.num_heads} heads an even width: "
                f"make it a multiple of {2 * self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout is {self.dropout}: it must be at least 0 and below 1")
        if self.rope_theta <= 0.0 or self.norm_eps <= 0.0:
            raise UserError(f"rope_theta {self.rope_theta} and norm_eps {self.norm_eps} must be above 0")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads


class Layout(NamedTuple):
    """Where each token of a forward stands and what it may see: computed once, read by every block.

    At most one of `offsets` and `mask` is given; without either, each row is causal as a whole.
    """

    cos: Float[Tensor, "B S 1 E"]
    sin: Float[Tensor, "B S 1 E"]
    offsets: Int32[Tensor, " num_documents+1"] | None = None
    """Where documents begin in the flattened batch, and its end."""
    mask: Bool[Tensor, "B 1 S L"] | None = None
    slots: Int64[Tensor, "B S"] | None = None
    """Where in the cache these tokens go."""


class KVCache:
    """Keys and values of the tokens that were already given to the model, one slot per token and sequence.

    Sequences of a batch may have different lengths: give them padded on the right, then `advance` by what was real.
    What padding left behind is overwritten before anything may look at it.
    """

    def __init__(
        self, config: DecoderConfig, batch_size: int, max_len: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        shape = (config.num_layers, batch_size, max_len, config.num_kv_heads, config.head_dim)
        self.keys: Float[Tensor, "layers B L K E"] = torch.zeros(shape, device=device, dtype=dtype)
        self.values: Float[Tensor, "layers B L K E"] = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths: Int64[Tensor, " B"] = torch.zeros(batch_size, device=device, dtype=torch.int64)

    def advance(self, num_tokens: Int64[Tensor, " B"]) -> None:
        """Counts the tokens of each sequence in the forward that just ran as present."""
        self.lengths += num_tokens

    def view(self, start: int, stop: int) -> "KVCache":
        """Returns the cache of the sequences from `start` to `stop`; both share their memory."""
        part = copy.copy(self)
        part.keys, part.values = self.keys[:, start:stop], self.values[:, start:stop]
        part.lengths = self.lengths[start:stop]
        return part

    def copy_row(self, source: int, target: int) -> None:
        """Puts what is known of sequence `source` in the place of sequence `target`."""
        length = int(self.lengths[source])
        self.keys[:, target, :length] = self.keys[:, source, :length]
        self.values[:, target, :length] = self.values[:, source, :length]
        self.lengths[target] = length


class RMSNorm(nn.Module):
    """Divides by the root of the mean square, then scales each dimension.

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467, equation 4.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.dim))

    def forward(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        """Returns `x` normalised over its last dimension."""
        out: Tensor
        is_eager_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_eager_cpu and x.dtype == self.weight.dtype == torch.float32:
            out = _RMSNormCPU.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]  # torch's
        else:
            out = rms_norm(x, self.weight.shape, self.weight, self.eps)
        return out


class _RMSNormCPU(torch.autograd.Function):
    """The same in few passes over memory; on CPU torch puts its own together from parts, at four times the cost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        (grad,) = grads
        normed = x * scale
        products = (grad * normed).flatten(0, -2)
        with torch.autocast("cpu", enabled=False):
            grad_weight = products.new_ones(products.shape[0]) @ products
            inner = (products @ weight).view(scale.shape).div_(-x.shape[-1])
        return (grad * weight).addcmul_(normed, inner).mul_(scale), grad_weight, None


def rotary_tables(positions: Int64[Tensor, "B S"], head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns the cosine and the signed sine of each position's angles, for all dimensions of a head, in float32."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[:, :, None, None].float() * (1.0 / theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(
    x: Float[Tensor, "B S H E"], cos: Float[Tensor, "B S 1 E"], sin: Float[Tensor, "B S 1 E"]
) -> Float[Tensor, "B S H E"]:
    """Returns `x` turned by its position; dimension i of a head pairs with i + E/2, as in Hugging Face's Llama.

    References:
        Su et al., RoFormer, arXiv:2104.09864, equation 34.
    """
    first, second = x.chunk(2, dim=-1)
    turned: Tensor = torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)
    return turned.to(x.dtype)


def document_positions(document_ids: Int32[Tensor, "B S"]) -> Int64[Tensor, "B S"]:
    """Returns each token's place in its document, from 0."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    starts: Tensor = torch.where(_is_start(document_ids), index, 0).cummax(dim=1).values
    return index - starts


def document_offsets(document_ids: Int32[Tensor, "B S"]) -> Int32[Tensor, " num_documents+1"]:
    """Returns where documents begin in the flattened batch, and its end. Waits for the device: the count is data."""
    starts = _is_start(document_ids).flatten().nonzero().flatten()
    return pad(starts, (0, 1), value=document_ids.numel()).to(torch.int32)


def document_mask(document_ids: Int32[Tensor, "B S"]) -> Bool[Tensor, "B 1 S S"]:
    """Returns which tokens (last dimension) each token may see: those of its document up to itself."""
    is_same = document_ids[:, :, None] == document_ids[:, None, :]
    return is_same.tril().unsqueeze(1)


def _is_start(document_ids: Tensor) -> Tensor:
    return pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)


def attend(
    query: Float[Tensor, "B S H E"], key: Float[Tensor, "B L K E"], value: Float[Tensor, "B L K E"], layout: Layout
) -> Float[Tensor, "B S H E"]:
    """Returns softmax(query key^T / sqrt(E)) value over what `layout` lets each token see."""
    if layout.offsets is None:
        return _attend_rows(query, key, value, layout.mask)
    if query.device.type == "cpu":
        by_document: Tensor = _attend_each_document(query, key, value, layout.offsets)
        return by_document
    groups, seq_len = query.shape[2] // key.shape[2], query.shape[1]
    out = varlen_attn(
        query.flatten(0, 1),
        key.repeat_interleave(groups, dim=2).flatten(0, 1),  # torch 2.11's has no enable_gqa
        value.repeat_interleave(groups, dim=2).flatten(0, 1),
        layout.offsets,
        layout.offsets,
        seq_len,
        seq_len,
        window_size=(-1, 0),  # causal
    )
    return cast("Tensor", out).view(query.shape)


def _attend_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    out: Tensor = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def _attend_each_document(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> Tensor:
    lengths = offsets.diff().tolist()  # not traced by torch.compile, which would compile anew for every packing
    documents = zip(*(torch.split(x.flatten(0, 1), lengths) for x in (query, key, value)), strict=True)
    return torch.cat([_attend_rows(q[None], k[None], v[None], None)[0] for q, k, v in documents]).view(query.shape)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_dim, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def forward(
        self, x: Float[Tensor, "B S D"], layout: Layout, cache: tuple[Tensor, Tensor] | None = None
    ) -> Float[Tensor, "B S D"]:
        """Returns what each token gathers from those it may see."""
        heads = (*x.shape[:2], -1, self.head_dim)
        query = rotate(self.query(x).view(heads), layout.cos, layout.sin)
        key = rotate(self.key(x).view(heads), layout.cos, layout.sin)
        value = self.value(x).view(heads)
        if cache is not None:
            key, value = _remember(key, value, layout, cache)
        out: Tensor = self.output(attend(query, key, value, layout).flatten(2))
        return out


def _remember(key: Tensor, value: Tensor, layout: Layout, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    assert layout.slots is not None
    keys, values = cache
    rows = torch.arange(key.shape[0], device=key.device).unsqueeze(1)
    keys[rows, layout.slots] = key.to(keys.dtype)
    values[rows, layout.slots] = value.to(values.dtype)
    end = key.shape[1] if layout.mask is None else layout.mask.shape[-1]
    return keys[:, :end].to(key.dtype), values[:, :end].to(value.dtype)


class FeedForward(nn.Module):
    """SwiGLU.

    References:
        Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202, equation 6.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        """Returns down(silu(gate x) * up x)."""
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One layer: attention, then feed-forward, each normalised before and added after."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "B S D"],
        layout: Layout,
        cache: tuple[Tensor, Tensor] | None = None,
        places: Int64[Tensor, " P"] | None = None,
    ) -> Float[Tensor, "B S D"] | Float[Tensor, "P D"]:
        """Returns the residual stream after this layer: all of it, or at some places of the flattened batch."""
        x = x + self.dropout(self.attention(self.attention_norm(x), layout, cache))
        if places is not None:
            x = x.flatten(0, 1)[places]
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


def project(hidden: Float[Tensor, "B S D"], output_weight: Float[Tensor, "V D"]) -> Float[Tensor, "B S V"]:
    """The default head: returns the logits."""
    return linear(hidden, output_weight)


class Decoder(nn.Module):
    """The language model.

    May be built on the meta device: `to_empty` and `init_weights` then make it real. It has no buffers.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config)
        if not config.has_tied_embeddings:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        """The weight that turns hidden states into logits."""
        return self.embedding.weight if self.config.has_tied_embeddings else self.output.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fills every parameter: the same values for the same seed, whatever the device, the sharding or the rank.

        Normal with deviation `INIT_STD`; what writes into the residual stream is scaled by 1/sqrt(number of such
        writes), so that the stream's variance at the last layer does not grow with depth; norms begin at one. A rank
        draws only what it holds (`genesis.model.initial`).

        References:
            Radford et al., Language Models are Unsupervised Multitask Learners (GPT-2), section 2.3.
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        fill_normal(self.embedding.weight, INIT_STD, f"{seed} embedding.weight")
        for index, module in enumerate(self.blocks):
            block = cast("Block", module)  # or a wrapper that forwards attributes
            attention, feed_forward = block.attention, block.feed_forward
            for name, weight, std in (
                ("attention.query", attention.query.weight, INIT_STD),
                ("attention.key", attention.key.weight, INIT_STD),
                ("attention.value", attention.value.weight, INIT_STD),
                ("attention.output", attention.output.weight, residual_std),
                ("feed_forward.gate", feed_forward.gate.weight, INIT_STD),
                ("feed_forward.up", feed_forward.up.weight, INIT_STD),
                ("feed_forward.down", feed_forward.down.weight, residual_std),
            ):
                fill_normal(weight, std, f"{seed} blocks.{index}.{name}.weight")
            nn.init.ones_(block.attention_norm.weight)
            nn.init.ones_(block.feed_forward_norm.weight)
        nn.init.ones_(self.norm.weight)
        if not self.config.has_tied_embeddings:
            fill_normal(self.output.weight, INIT_STD, f"{seed} output.weight")

    def forward(
        self,
        input_ids: Int64[Tensor, "B S"],
        *,
        document_ids: Int32[Tensor, "B S"] | None = None,
        cache: KVCache | None = None,
        places: Int64[Tensor, " P"] | None = None,
        head: Callable[[Tensor, Tensor], T] = project,  # type: ignore[assignment]  # a default cannot bind T
    ) -> T:
        """Returns what `head` makes of the final hidden states and the output weight: the logits, if not given.

        Args:
            input_ids: Tokens.
            document_ids: Which document of its row each token belongs to; None for one document per row.
            cache: Earlier tokens of the same sequences; this forward's are added to it, but only counted by `advance`.
            places: Where in the flattened batch hidden states are wanted, so that the rest of it is not computed to the
                end; None for everywhere.
            head: Called as `head(hidden, output_weight)` inside the forward, where a sharded weight is whole.
        """
        x = self.embedding(input_ids)
        layout = self._lay_out(x, document_ids, cache)
        for index, block in enumerate(self.blocks):
            kept = places if index == len(self.blocks) - 1 else None
            x = block(x, layout, None if cache is None else (cache.keys[index], cache.values[index]), kept)
        return head(self.norm(x), self.output_weight)

    def _lay_out(self, x: Tensor, document_ids: Tensor | None, cache: KVCache | None) -> Layout:
        batch_size, seq_len, device = x.shape[0], x.shape[1], x.device
        positions = torch.arange(seq_len, device=device).unsqueeze(0)
        offsets = mask = slots = None
        if cache is not None:
            assert document_ids is None, "a cache holds one document per row"
            slots = positions = positions + cache.lengths.unsqueeze(1)
            num_cached = int(cache.lengths.max())
            assert num_cached + seq_len <= cache.keys.shape[2], "the cache is full"
            if num_cached:
                mask = (torch.arange(num_cached + seq_len, device=device) <= positions.unsqueeze(2)).unsqueeze(1)
        elif document_ids is not None:
            offsets = document_offsets(document_ids)
            num_documents = offsets.numel() - 1
            if num_documents > batch_size:
                positions = document_positions(document_ids)
            if num_documents == batch_size:
                offsets = None
            elif not self._suits_offsets(x, num_documents):
                offsets, mask = None, document_mask(document_ids)
        cos, sin = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        return Layout(cos, sin, offsets, mask, slots)

    def _suits_offsets(self, x: Tensor, num_documents: int) -> bool:
        """Whether attention document by document beats a mask, and exists at all (CUDA: flash kernels, 16 bits)."""
        if x.device.type == "cpu":
            return num_documents * MIN_MEAN_DOCUMENT_TOKENS <= x.shape[0] * x.shape[1]
        is_autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if is_autocast else x.dtype
        return dtype in (torch.float16, torch.bfloat16) and self.config.head_dim % 8 == 0
