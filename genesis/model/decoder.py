"""The decoder: a Llama-style language model, put together from its parts.

Legend of dimension letters:

    B  sequences of a micro-batch     S  tokens of a sequence     D  model width (`dim`)
    K  key and value heads            E  width of a head          V  vocabulary
    L  slots of a key-value cache     P  positions whose logits are asked for

A norm for each part, attention, feed-forward: each part has a file of its own and answers for its parameters
(`genesis.model.part`). There is no parallelism, optimizer or checkpoint code here: blocks are self-contained modules,
so that sharding, activation checkpointing and compilation are applied to them from outside.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor, nn
from torch.nn.functional import linear

from genesis.base.device import send
from genesis.base.errors import UserError
from genesis.model.attend.metadata import AttentionMetadata, CachedTokens
from genesis.model.attend.table import TORCH_KERNEL
from genesis.model.attention import AttentionConfig, build_layers_metadata
from genesis.model.delta import DeltaMetadata, GatedDeltaConfig, build_delta_metadata
from genesis.model.feed_forward import DenseConfig, FeedForwardConfig
from genesis.model.initial import INIT_STD, InitialValues, fill_normal
from genesis.model.mixture import MixtureConfig as MixtureConfig  # its name is then known to checkpoints
from genesis.model.norm import NormConfig
from genesis.model.part import EMBEDDINGS, HEAD, ParameterGroup, Part, Statistics, check_counts

T = TypeVar("T")

SHORT_FIELDS: Final = {
    "num_heads": ("attention", "num_heads"),
    "num_kv_heads": ("attention", "num_kv_heads"),
    "rope_theta": ("attention", "rope_theta"),
    "ffn_dim": ("feed_forward", "ffn_dim"),
    "norm_eps": ("norm", "eps"),
}
"""Fields of `DecoderConfig` that set a field of a part's configuration if that configuration is not given."""


class Parts(NamedTuple):
    """The configurations of a decoder's parts."""

    attention: AttentionConfig
    feed_forward: FeedForwardConfig
    norm: NormConfig


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder.

    The short fields (`num_heads`, `num_kv_heads`, `rope_theta`, `ffn_dim`, `norm_eps`) describe the usual parts. A part
    whose own configuration is given ignores them.

    Args:
        dim: Width of the residual stream.
        num_layers: Number of blocks.
        num_heads: Number of query heads; `dim / num_heads` is the width of each and must be even for rotary positions.
        num_kv_heads: Number of key and value heads; each serves `num_heads / num_kv_heads` query heads.
        ffn_dim: Width inside the feed-forward part.
        max_seq_len: Longest context in tokens.
        vocab_size: Rows of the embedding.
        rope_theta: Base of the rotary wavelengths.
        norm_eps: Added to the mean square in RMSNorm.
        dropout: Share of each part's output that is dropped before it joins the residual stream, in training.
        has_tied_embeddings: Whether the embedding is also the output weight.
        attention: The attention part; None for the part that the short fields describe.
        feed_forward: The feed-forward part; None for a dense part with `ffn_dim`.
        norm: The norms; None for RMSNorm with `norm_eps`.
        linear_attention: The part that most layers have in the place of attention; None if all layers have attention.

    Raises:
        UserError: The shape is invalid.
    """

    dim: int
    num_layers: int
    num_heads: int | None = None
    num_kv_heads: int | None = None
    ffn_dim: int | None = None
    max_seq_len: int
    vocab_size: int = 49_152
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    has_tied_embeddings: bool = True
    attention: AttentionConfig | None = None
    feed_forward: FeedForwardConfig | None = None
    norm: NormConfig | None = None
    linear_attention: GatedDeltaConfig | None = None

    def __post_init__(self) -> None:
        check_counts(self)
        for name, (part, _) in SHORT_FIELDS.items():
            value, default = getattr(self, name), vars(DecoderConfig)[name]
            if getattr(self, part) is None and value is None:
                raise UserError(f"{name} is missing: give it, or the configuration {part}")
            if getattr(self, part) is not None and value != default:
                raise UserError(f"{name} is {value}, but {part} is also given: remove {name}")
        self.parts.attention.check(self.dim, self.num_layers)
        self.parts.feed_forward.check(self.num_layers)
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout is {self.dropout}: it must be at least 0 and below 1")

    @property
    def parts(self) -> Parts:
        """The configurations of the parts; those that are not given follow from the short fields."""
        given: dict[str, dict[str, Any]] = {}
        for name, (part, field) in SHORT_FIELDS.items():
            given.setdefault(part, {})[field] = getattr(self, name)
        return Parts(
            self.attention or AttentionConfig(**given["attention"]),
            self.feed_forward or DenseConfig(**given["feed_forward"]),
            self.norm or NormConfig(**given["norm"]),
        )

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.parts.attention.head_width(self.dim)

    def is_linear(self, layer: int) -> bool:
        """Returns whether block number `layer`, counted from 0, has the linear part in the place of attention."""
        return self.linear_attention is not None and self.linear_attention.is_linear(layer)

    @property
    def num_attention_layers(self) -> int:
        """The number of blocks with attention."""
        return sum(not self.is_linear(layer) for layer in range(self.num_layers))


class KVCache:
    """Keys and values of the tokens that were already given to the model, one slot per token and sequence.

    Layers with linear attention have a state in their place, and the last inputs of their convolution.

    Sequences of a batch may have different lengths: pad them on the right and call `expect` with the lengths without
    padding, then `advance` with the same lengths after the forward. Slots of padding are overwritten before any token
    can attend to them, and states skip padding. The lengths are also known on the host, so that no forward waits for
    the device.
    """

    def __init__(
        self, config: DecoderConfig, batch_size: int, max_len: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        shape = (config.num_attention_layers, batch_size, max_len, config.parts.attention.num_kv_heads, config.head_dim)
        self.keys: Float[Tensor, "layers B L K E"] = torch.zeros(shape, device=device, dtype=dtype)
        self.values: Float[Tensor, "layers B L K E"] = torch.zeros(shape, device=device, dtype=dtype)
        self.states: Tensor | None = None
        self.tails: Tensor | None = None
        linear = config.linear_attention
        if linear is not None:
            rows = (config.num_layers - config.num_attention_layers, batch_size)
            state = (*rows, linear.num_value_heads, linear.key_dim, linear.value_dim)
            self.states = torch.zeros(state, device=device)  # float32, because every token adds to it
            tail = (*rows, linear.conv_width - 1, linear.num_channels)
            self.tails = torch.zeros(tail, device=device, dtype=dtype)
        self._num_new: Tensor | None = None
        self._num_shared = 0
        self._set_lengths(torch.zeros(batch_size, dtype=torch.int64))

    @classmethod
    def of(
        cls, keys: Float[Tensor, "layers B L K E"], values: Float[Tensor, "layers B L K E"], lengths: Sequence[int]
    ) -> "KVCache":
        """Returns a cache of these keys and values with these numbers of tokens of each sequence."""
        cache = cls.__new__(cls)
        cache.keys, cache.values, cache.states, cache.tails = keys, values, None, None
        cache._num_new, cache._num_shared = None, 0
        cache._set_lengths(torch.tensor(lengths, dtype=torch.int64))
        return cache

    def _set_lengths(self, lengths: Int64[Tensor, " B"]) -> None:
        self.host_lengths = lengths
        self.lengths: Int64[Tensor, " B"] = send(lengths, self.keys.device)
        self._is_on_host = self.keys.device.type == "cpu"  # where host and device share a tensor

    @property
    def cached(self) -> CachedTokens:
        """The numbers of tokens in the cache, for attention."""
        shortest, longest = self.host_lengths.aminmax()
        return CachedTokens(self.lengths, int(shortest), int(longest), self.keys.shape[2], self._num_new)

    def of_layers(self, config: DecoderConfig) -> list[tuple[Tensor, Tensor]]:
        """Returns what each layer reads and writes: keys and values, or its state and the convolution's inputs."""
        given: list[tuple[Tensor, Tensor]] = []
        num_linear = 0
        for layer in range(config.num_layers):
            # By index, because a view from an iteration over a tensor must not be written to.
            if self.states is not None and self.tails is not None and config.is_linear(layer):
                given.append((self.states[num_linear], self.tails[num_linear]))
                num_linear += 1
            else:
                given.append((self.keys[layer - num_linear], self.values[layer - num_linear]))
        return given

    def expect(self, num_tokens: Int64[Tensor, " B"]) -> None:
        """Sets how many tokens of each sequence in the next forward are not padding; without a call, all of them.

        Args:
            num_tokens: The numbers, on the host.
        """
        if self.states is not None:
            self._num_new = send(num_tokens, self.keys.device)

    def advance(self, num_tokens: Int64[Tensor, " B"] | int) -> None:
        """Adds the tokens of the last forward to each sequence's length.

        Args:
            num_tokens: The number of new tokens of each sequence, on the host.
        """
        self._num_new = None
        self.host_lengths += num_tokens
        if not self._is_on_host:
            if isinstance(num_tokens, Tensor):
                num_tokens = send(num_tokens, self.keys.device)
            self.lengths += num_tokens

    def view(self, start: int, stop: int) -> "KVCache":
        """Returns the cache of the sequences from `start` to `stop`, which shares memory with this one."""
        part = copy.copy(self)
        part.keys, part.values = self.keys[:, start:stop], self.values[:, start:stop]
        if self.states is not None and self.tails is not None:
            part.states, part.tails = self.states[:, start:stop], self.tails[:, start:stop]
        part.lengths, part.host_lengths = self.lengths[start:stop], self.host_lengths[start:stop]
        return part

    def share(self) -> None:
        """Copies the tokens of the first sequence to all others; from now on every new sequence starts after them."""
        assert self.states is None, "a state cannot go back to where a sequence starts"
        self._num_shared = int(self.host_lengths[0])
        for held in (self.keys, self.values):
            held[:, 1:, : self._num_shared] = held[:, :1, : self._num_shared]
        self.lengths.fill_(self._num_shared)
        self.host_lengths.fill_(self._num_shared)

    def copy_row(self, source: int, target: int) -> None:
        """Copies the keys and values of sequence `source` over those of sequence `target`."""
        # Only the slots in use: the rest of a row may be long, and is overwritten before it is read.
        length = int(self.host_lengths[source])
        self.keys[:, target, :length] = self.keys[:, source, :length]
        self.values[:, target, :length] = self.values[:, source, :length]
        for held in (self.states, self.tails):
            if held is not None:
                held[:, target] = held[:, source]
        self._set_length(target, length)

    def free_row(self, row: int, *, is_number: bool = True) -> None:
        """Makes room for a new sequence, which starts at the first slot, or after the tokens that all share.

        Args:
            row: The row of the sequence that ends.
            is_number: Whether all of its keys and values are finite. A mask gives old values a weight of zero, and
                zero times NaN would be NaN.
        """
        if not is_number:
            for slots in (self.keys, self.values):
                slots[:, row, self._num_shared :] = 0.0
        for held in (self.states, self.tails):
            if held is not None:
                held[:, row] = 0.0
        self._set_length(row, self._num_shared)

    def _set_length(self, row: int, length: int) -> None:
        self.lengths[row].fill_(length)
        self.host_lengths[row] = length


class Block(nn.Module):
    """One layer: attention or linear attention, then feed-forward, each added to the residual stream.

    The norms are applied to the inputs of the parts, or to their outputs.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        parts = config.parts
        self.has_norms_before = parts.norm.placement == "before"
        self.attention_norm = parts.norm.build(config.dim)
        self.is_linear = config.is_linear(layer)
        if config.linear_attention is not None and self.is_linear:
            self.linear_attention = config.linear_attention.build(config.dim)
        else:
            self.attention = parts.attention.build(config.dim, layer)
        self.feed_forward_norm = parts.norm.build(config.dim)
        self.feed_forward = parts.feed_forward.build(config.dim, layer)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "B S D"],
        metadata: AttentionMetadata | DeltaMetadata,
        cache: tuple[Tensor, Tensor] | None = None,
        logits_to_keep: Int64[Tensor, " P"] | None = None,
        counted: Bool[Tensor, "B S"] | None = None,
    ) -> tuple[Float[Tensor, "B S D"] | Float[Tensor, "P D"], Statistics | None]:
        """Returns the residual stream after this layer, and the statistics of its feed-forward part.

        The stream is returned for all positions, or for some positions of the flattened batch. The statistics are those
        of the `counted` tokens.
        """
        is_before = self.has_norms_before
        attention = self.linear_attention if self.is_linear else self.attention
        update = attention(self.attention_norm(x) if is_before else x, metadata, cache)
        x = x + self.dropout(update if is_before else self.attention_norm(update))
        # After the attention, whose keys and values need every position; feed-forward and head need only these.
        if logits_to_keep is not None:
            x = x.flatten(0, 1)[logits_to_keep]
            counted = None if counted is None else counted.flatten()[logits_to_keep]
        update, statistics = self.feed_forward(self.feed_forward_norm(x) if is_before else x, counted)
        return x + self.dropout(update if is_before else self.feed_forward_norm(update)), statistics


class BlockInputs(NamedTuple):
    """The inputs of blocks beside the residual stream.

    Args:
        metadata: What each block's attention needs to know of the tokens.
        held: What each block reads of a cache, and writes to it; None without a cache.
        logits_to_keep: See `Decoder.forward`.
        counted: See `Decoder.forward`.
    """

    metadata: Sequence[AttentionMetadata | DeltaMetadata]
    held: Sequence[tuple[Tensor, Tensor] | None]
    logits_to_keep: Int64[Tensor, " P"] | None
    counted: Bool[Tensor, "B S"] | None


def project(hidden: Float[Tensor, "B S D"], output_weight: Float[Tensor, "V D"]) -> Float[Tensor, "B S V"]:
    """The default head: returns the logits."""
    return linear(hidden, output_weight)


class Decoder(nn.Module):
    """The language model.

    It may be built on the meta device; `to_empty` and `init_weights` then allocate and fill it. It has no buffers.

    Attributes:
        groups: The blocks that one call of `run_blocks` runs, in order: by default all.
        attention_kernel: The kernel of attention without a cache, by its name in `genesis.model.attend.table`.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self._attention = config.parts.attention
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.groups: Sequence[range] = [range(config.num_layers)]
        self.attention_kernel = TORCH_KERNEL
        self.norm = config.parts.norm.build(config.dim)
        if not config.has_tied_embeddings:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        """The weight that turns hidden states into logits."""
        return self.embedding.weight if self.config.has_tied_embeddings else self.output.weight

    @property
    def parts(self) -> dict[str, Part]:
        """Every part by its canonical name; the embedding and the output weight are the decoder's own."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Part)}

    def list_float32(self) -> set[str]:
        """Returns the names of the parameters that are float32 in a decoder of any dtype, such as those of routers."""
        return {
            f"{name}.{parameter}"
            for name, part in self.parts.items()
            if part.keeps_float32
            for parameter, _ in part.named_parameters()
        }

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fills every parameter, with the same values for the same seed on any device, sharding and rank.

        Values are normal with deviation `INIT_STD`. Weights that write into the residual stream are scaled by
        1/sqrt(number of such weights), so that the stream's variance at the last layer does not grow with depth. Norms
        start at one. A rank computes only the values that it holds (`genesis.model.initial`).
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        fill_normal(self.embedding.weight, INIT_STD, f"{seed} embedding.weight")
        for name, part in self.parts.items():
            part.init_weights(InitialValues(f"{seed} {name}", residual_std))
        if not self.config.has_tied_embeddings:
            fill_normal(self.output.weight, INIT_STD, f"{seed} output.weight")

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the optimizer's group of each parameter by its canonical name, as its part defines it."""
        groups = {"embedding.weight": EMBEDDINGS}
        for name, part in self.parts.items():
            groups |= {f"{name}.{own}": group for own, group in part.parameter_groups().items()}
        return groups if self.config.has_tied_embeddings else {**groups, "output.weight": HEAD}

    def forward(
        self,
        input_ids: Int64[Tensor, "B S"],
        *,
        document_ids: Int32[Tensor, "B S"] | None = None,
        document_offsets: Int32[Tensor, " num_documents+1"] | None = None,
        cache: KVCache | None = None,
        logits_to_keep: Int64[Tensor, " P"] | None = None,
        head: Callable[[Tensor, Tensor], T] = project,  # type: ignore[assignment]  # a default cannot bind T
        has_statistics: bool = False,
        counted: Bool[Tensor, "B S"] | None = None,
    ) -> T | tuple[T, dict[str, Statistics]]:
        """Returns the result of `head` for the final hidden states and the output weight: by default the logits.

        Args:
            input_ids: Tokens.
            document_ids: Which document of its row each token belongs to; None for one document per row.
            document_offsets: Where these documents begin in the flattened batch, and its end; None to compute them.
            cache: Earlier tokens of the same sequences; this forward's are added to it, but only counted by `advance`.
            logits_to_keep: The positions of the flattened batch whose logits are returned; the last block computes
                only these positions. None for all positions.
            head: Called as `head(hidden, output_weight)` inside the forward, where a sharded weight is whole.
            has_statistics: Whether to return the parts' statistics as well, by the parts' canonical names.
            counted: The tokens that the statistics contain; None for all tokens.
        """
        if has_statistics and counted is None:
            counted = torch.ones_like(input_ids, dtype=torch.bool)
        x = self.embedding(input_ids)
        cached = None if cache is None else cache.cached
        metadata: Sequence[AttentionMetadata | DeltaMetadata]
        metadata = build_layers_metadata(
            self._attention, len(self.blocks), x, document_ids, document_offsets, cached, self.attention_kernel
        )
        if self.config.linear_attention is not None:
            linear = build_delta_metadata(x, document_ids, document_offsets, cached)
            metadata = [linear if self.config.is_linear(layer) else one for layer, one in enumerate(metadata)]
        held = [None] * len(self.blocks) if cache is None else cache.of_layers(self.config)
        inputs = BlockInputs(metadata, held, logits_to_keep, counted)
        statistics: dict[str, Statistics] = {}
        for blocks in self.groups:
            x, reported = self.run_blocks(blocks, x, inputs)
            statistics |= reported
        # Inside the forward, where FSDP2's hooks have gathered the output weight: elsewhere it may be a shard.
        out = head(self.norm(x), self.output_weight)
        return (out, statistics) if has_statistics else out

    def run_blocks(
        self, blocks: range, x: Float[Tensor, "B S D"], inputs: BlockInputs
    ) -> tuple[Float[Tensor, "B S D"] | Float[Tensor, "P D"], dict[str, Statistics]]:
        """Returns the residual stream after consecutive blocks, and the statistics of their parts by canonical names.

        Wrappers replace this method to recompute groups of blocks.
        """
        statistics: dict[str, Statistics] = {}
        for index in blocks:
            kept = inputs.logits_to_keep if index == len(self.blocks) - 1 else None
            x, reported = self.blocks[index](x, inputs.metadata[index], inputs.held[index], kept, inputs.counted)
            if reported is not None:
                statistics[f"blocks.{index}.feed_forward"] = reported
        return x, statistics
