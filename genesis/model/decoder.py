"""The decoder: a Llama-style language model, put together from its parts.

Legend of dimension letters:

    B  sequences of a micro-batch     S  tokens of a sequence     D  model width (`dim`)
    V  vocabulary                     P  positions whose logits are asked for

A layer has a sequence mixer, a feed-forward part, and a norm for each: every part has a file of its own and answers for
its parameters (`genesis.model.part`). There is no parallelism, optimizer or checkpoint code here: blocks are
self-contained modules, so that sharding, activation checkpointing and compilation are applied to them from outside.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor, nn

from genesis.base.errors import UserError, numbered
from genesis.model.attention import AttentionConfig
from genesis.model.delta import GatedDeltaConfig
from genesis.model.exchange import HeadExchange
from genesis.model.feed_forward import DenseConfig, FeedForwardConfig
from genesis.model.initial import INIT_STD, InitialValues, fill_normal
from genesis.model.kv_cache import CacheTensor, KVCache
from genesis.model.language_model import BodyConfig, BodyShape, LanguageModel, project
from genesis.model.mixer import (
    AttentionHeads,
    ForwardTokens,
    KernelProof,
    SequenceMixer,
    SequenceMixerConfig,
)
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
_OUTPUT_NORMS: Final = {
    "before": (None, None),
    "after": ("attention_norm", "feed_forward_norm"),
    "both": ("attention_output_norm", "feed_forward_output_norm"),
}
"""The norms of the outputs of mixer and feed-forward part, for each placement of norms."""
_MIXTURE_PARTS: Final = ("router", "experts")
"""The parts of a mixture that are listed by themselves; the rest of it is dense."""


class Parts(NamedTuple):
    """The configurations of a decoder's parts. Attention is None if `DecoderConfig.mixers` lists other mixers."""

    attention: AttentionConfig | None
    feed_forward: FeedForwardConfig
    norm: NormConfig


@dataclass(frozen=True)
class Scales:
    """Constant factors of a decoder's streams, as Granite and Gemma have them.

    Args:
        embedding: The factor of the embedded tokens, not of an output weight that is tied to them.
        residual: The factor of each part's output before it joins the residual stream.
        logits: The factor of the logits.

    Raises:
        UserError: A factor is not a finite number above 0.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 < value < math.inf:
                raise UserError(f"{name} is {value}: it must be above 0 and finite")


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
        attention: The attention of all layers; None for the attention that the short fields describe.
        feed_forward: The feed-forward part; None for a dense part with `ffn_dim`.
        norm: The norms; None for RMSNorm with `norm_eps`.
        linear_attention: The mixer that most layers have in the place of attention; None if all layers have attention.
        mixers: The sequence mixers of the layers in their order; the list begins again where it ends before the last
            layer. None for layers with attention, and `linear_attention` if it is given. A list that these two can
            describe becomes these two.
        body: A whole model that another library defines, in the place of all parts; None for a decoder of parts.
        scales: Constant factors of embedding, parts and logits; None if all of them are 1.
        num_scores: 1 for a reward model, whose output weight has this number of rows and is never the embedding: it
            scores texts (`genesis.model.scores`). None for a model that writes them.

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
    mixers: tuple[SequenceMixerConfig, ...] | None = None
    body: BodyConfig | None = None
    scales: Scales | None = None
    num_scores: int | None = None

    def __post_init__(self) -> None:
        check_counts(self)
        if self.body is not None:
            self._check_body_alone()
            return
        self._settle_mixers()
        self._settle_scores()
        if self.scales == Scales():
            object.__setattr__(self, "scales", None)  # equal decoders get equal fields, as for mixers
        for name, (part, _) in SHORT_FIELDS.items():
            value, default, owner = getattr(self, name), vars(DecoderConfig)[name], find_owner(self, name)
            if getattr(self, owner) is None and value is None:
                raise UserError(f"{name} is missing: give it, or the configuration {part}")
            if getattr(self, owner) is not None and value != default:
                raise UserError(f"{name} is {value}, but {owner} is also given: remove {name}")
        for mixer in self.mixers or (self.parts.attention, self.linear_attention):
            if mixer is not None:
                mixer.check(self.dim, self.num_layers)
        self.parts.feed_forward.check(self.num_layers)
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout is {self.dropout}: it must be at least 0 and below 1")

    def _check_body_alone(self) -> None:
        """Refuses options of parts beside a body, which has none of them."""
        left = {field.name for field in fields(self)} - {*BodyShape._fields, "body"}
        given = next((name for name in sorted(left) if getattr(self, name) != vars(DecoderConfig)[name]), None)
        if given is not None:
            raise UserError(f"{given} is {getattr(self, given)}, and body is given, which has no such part: remove one")

    def _settle_scores(self) -> None:
        """Unties the output weight of a reward model: equal decoders get equal fields, as for mixers."""
        if self.num_scores not in (None, 1):
            raise UserError(f"num_scores is {self.num_scores}: it must be 1, or null for a model that writes text")
        if self.num_scores is not None:
            object.__setattr__(self, "has_tied_embeddings", False)

    def _settle_mixers(self) -> None:
        """Replaces a list of mixers by the fields that earlier releases can also read, if they can describe it."""
        if self.mixers is None:
            return
        given = next((name for name in ("attention", "linear_attention") if getattr(self, name) is not None), None)
        if given is not None:
            raise UserError(f"mixers and {given} are both given: remove {given}, or put it into the list")
        if not 0 < len(self.mixers) <= self.num_layers:
            raise UserError(
                f"mixers has {numbered(len(self.mixers), 'entries')}: it must have at least 1 and at most num_layers"
            )
        short = _find_short_form(tuple(self.mixers))
        # Equal decoders get equal fields, whichever way they were described: a resume compares them.
        object.__setattr__(self, "mixers", tuple(self.mixers) if short is None else None)
        if short is not None:
            object.__setattr__(self, "attention", short[0])
            object.__setattr__(self, "linear_attention", short[1])

    @property
    def num_output_rows(self) -> int:
        """The rows of the output weight."""
        return self.vocab_size if self.num_scores is None else self.num_scores

    @property
    def parts(self) -> Parts:
        """The configurations of the parts; those that are not given follow from the short fields.

        Raises:
            UserError: A body has none.
        """
        refuse_body(self)
        given: dict[str, dict[str, Any]] = {}
        for name, (part, field) in SHORT_FIELDS.items():
            given.setdefault(part, {})[field] = getattr(self, name)
        attention = self.attention
        if attention is None and self.mixers is None:
            attention = AttentionConfig(**given["attention"])
        return Parts(
            attention,
            self.feed_forward or DenseConfig(**given["feed_forward"]),
            self.norm or NormConfig(**given["norm"]),
        )

    def list_mixers(self) -> list[tuple[SequenceMixerConfig, list[int]]]:
        """Returns each mixer with the numbers of its layers, counted from 0; nothing for a body, which has its own."""
        if self.body is not None:
            return []
        attention, linear = self.parts.attention, self.linear_attention
        found: list[tuple[SequenceMixerConfig, list[int]]] = []
        for layer in range(self.num_layers):
            if self.mixers is not None:
                mixer = self.mixers[layer % len(self.mixers)]
            else:
                assert attention is not None, "without a list there is attention"
                mixer = linear if linear is not None and linear.is_in(layer) else attention
            layers = next((layers for known, layers in found if known == mixer), None)
            if layers is None:
                found.append((mixer, [layer]))
            else:
                layers.append(layer)
        return found

    @property
    def attention_heads(self) -> AttentionHeads | None:
        """The widest heads for which the kernel of attention is chosen; None if no layer has such heads."""
        found = (mixer.attention_heads(self.dim) for mixer, _ in self.list_mixers())
        known = [heads for heads in found if heads]
        widest = max(known, key=lambda heads: heads.head_dim, default=None)
        return widest and widest._replace(has_sinks=any(heads.has_sinks for heads in known))

    @property
    def cache_tensors(self) -> list[tuple[CacheTensor, ...]]:
        """The tensors that each layer keeps of earlier tokens."""
        found: list[tuple[CacheTensor, ...]] = [()] * self.num_layers
        for mixer, layers in self.list_mixers():
            for layer in layers:
                found[layer] = mixer.cache_tensors(self.dim)
        return found

    @property
    def can_share_beginnings(self) -> bool:
        """Whether texts can share what a cache holds of the tokens with which they begin.

        A state cannot go back to an earlier token, and keys may depend on the length of the whole text.
        """
        has_states = any(tensor.is_state for of_layer in self.cache_tensors for tensor in of_layer)
        return not has_states and not self.reads_length

    @property
    def reads_length(self) -> bool:
        """Whether the keys of a text depend on its length, so that its parts cannot be read one by one."""
        return any(mixer.reads_length for mixer, _ in self.list_mixers())

    def list_proofs(self) -> tuple[KernelProof, ...]:
        """Returns the proofs of the kernels of all mixers, each once."""
        proofs = (proof for mixer, _ in self.list_mixers() for proof in mixer.list_proofs())
        return tuple({proof.name: proof for proof in proofs}.values())

    def count_cache_bytes(self, num_rows: int, num_slots: int, element_bytes: int) -> int:
        """Returns the bytes of a cache.

        Args:
            num_rows: The number of sequences.
            num_slots: The number of tokens of a sequence that fit; 0 for the states alone.
            element_bytes: The bytes of an element of the model.
        """
        tensors = (tensor for of_layer in self.cache_tensors for tensor in of_layer)
        return sum(tensor.count_bytes(num_rows, num_slots, element_bytes) for tensor in tensors)

    def count_cache_bytes_per_token(self, element_bytes: int) -> int:
        """Returns the bytes of a cache for one more token of a sequence; states do not grow."""
        states, one = (self.count_cache_bytes(1, num_slots, element_bytes) for num_slots in (0, 1))
        return one - states


def find_owner(config: DecoderConfig, field: str) -> str:
    """Returns the field whose value replaces a short field, or the name itself if it is no short field."""
    owner = SHORT_FIELDS.get(field, (field,))[0]
    return "mixers" if owner == "attention" and config.mixers is not None else owner


def _find_short_form(
    mixers: tuple[SequenceMixerConfig, ...],
) -> tuple[AttentionConfig, GatedDeltaConfig | None] | None:
    """Returns `attention` and `linear_attention` of a list of mixers; None if these cannot describe it."""
    lengths = range(1, len(mixers) + 1)
    period = next(length for length in lengths if all(one == mixers[i % length] for i, one in enumerate(mixers)))
    *others, last = mixers[:period]
    if not isinstance(last, AttentionConfig):
        return None
    if not others:
        return last, None
    first = others[0]
    if not isinstance(first, GatedDeltaConfig) or any(other != first for other in others):
        return None
    return last, replace(first, attention_every=period)


class SequenceShare(Protocol):
    """The share of a rank in the tokens of each row, of which other ranks have the rest (`genesis.strategies`)."""

    def cut(self, rows: Tensor) -> Tensor:
        """Returns this rank's tokens of whole rows (B S ...). Does not communicate, and has no gradient."""

    def gather(self, x: Tensor) -> Tensor:
        """Returns whole rows of the tokens of all ranks."""

    def scatter(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens of the sum of all ranks' rows."""


class Block(nn.Module):
    """One layer: a sequence mixer, then feed-forward, each added to the residual stream.

    The norms are applied to the inputs of the parts, to their outputs, or to both.

    Attributes:
        mixer_share: How the mixer gets whole rows if ranks share its matrices and this rank's stream has some tokens
            of each row; its output is then summed over these ranks. None if it takes the stream as it is.
        feed_forward_share: The same for the feed-forward part.
    """

    def __init__(self, config: DecoderConfig, mixer: SequenceMixerConfig, layer: int) -> None:
        super().__init__()
        parts = config.parts
        self._placement = parts.norm.placement
        self.residual_scale = 1.0 if config.scales is None else config.scales.residual
        self.attention_norm = parts.norm.build(config.dim)
        # Under the mixer's own name, which checkpoints have; initial values follow from it, too.
        self._mixer_name = mixer.name
        self.add_module(mixer.name, mixer.build(config.dim, layer))
        self.feed_forward_norm = parts.norm.build(config.dim)
        self.feed_forward = parts.feed_forward.build(config.dim, layer)
        if self._placement == "both":
            self.attention_output_norm = parts.norm.build(config.dim)
            self.feed_forward_output_norm = parts.norm.build(config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.mixer_share: SequenceShare | None = None
        self.feed_forward_share: SequenceShare | None = None

    @property
    def sequence_mixer(self) -> SequenceMixer:
        """The sequence mixer, whatever its name."""
        mixer: SequenceMixer = getattr(self, self._mixer_name)
        return mixer

    def forward(
        self,
        x: Float[Tensor, "B S D"],
        metadata: Any,
        cache: tuple[Tensor, ...] | None = None,
        logits_to_keep: Int64[Tensor, " P"] | None = None,
        counted: Bool[Tensor, "B S"] | None = None,
    ) -> tuple[Float[Tensor, "B S D"] | Float[Tensor, "P D"], Statistics | None]:
        """Returns the residual stream after this layer, and the statistics of its feed-forward part.

        The stream is returned for all positions, or for some positions of the flattened batch. The statistics are those
        of the `counted` tokens: of this rank's, or of whole rows where ranks share the feed-forward part's matrices.
        """
        is_before = self._placement != "after"
        given = self.attention_norm(x) if is_before else x
        share = self.mixer_share
        update = self.sequence_mixer(given if share is None else share.gather(given), metadata, cache)
        update = update if share is None else share.scatter(update)
        after_mixer, after_feed_forward = _OUTPUT_NORMS[self._placement]
        x = self._join(x, update, after_mixer)
        # After the mixer, whose keys, values or states need every position; feed-forward and head need only these.
        if logits_to_keep is not None:
            x = x.flatten(0, 1)[logits_to_keep]
            counted = None if counted is None else counted.flatten()[logits_to_keep]
        given = self.feed_forward_norm(x) if is_before else x
        share = self.feed_forward_share
        update, statistics = self.feed_forward(given if share is None else share.gather(given), counted)
        update = update if share is None else share.scatter(update)
        return self._join(x, update, after_feed_forward), statistics

    def _join(self, x: Tensor, update: Tensor, norm: str | None) -> Tensor:
        """Returns the residual stream with the output of a part, to which the norm of this name applies."""
        update = self.dropout(update if norm is None else self.get_submodule(norm)(update))
        return x + update if self.residual_scale == 1.0 else torch.add(x, update, alpha=self.residual_scale)


class BlockInputs(NamedTuple):
    """The inputs of blocks beside the residual stream.

    Args:
        metadata: What each block's mixer needs to know of the tokens.
        held: What each block reads of a cache, and writes to it; None without a cache.
        logits_to_keep: See `Decoder.forward`.
        counted: See `Decoder.forward`; of this rank's tokens.
        counted_in_rows: The same of the rows that ranks which share matrices gather for parts that are cut.
    """

    metadata: Sequence[Any]
    held: Sequence[tuple[Tensor, ...] | None]
    logits_to_keep: Int64[Tensor, " P"] | None
    counted: Bool[Tensor, "B S"] | None
    counted_in_rows: Bool[Tensor, "B S"] | None


class Decoder(LanguageModel):
    """The language model that is put together from parts.

    It may be built on the meta device; `to_empty` and `init_weights` then allocate and fill it. It has no buffers.
    `run_blocks` runs one of `groups` after the other. Where this decoder has `blocks_elsewhere`, it may also lack its
    embedding, its last norm and its output weight, and `genesis.strategies.pipeline` runs it.

    Attributes:
        share: This rank's share of the tokens of each row if ranks share matrices; None for whole rows.
        context: The ranks that share rows alone (context parallelism), whose shares `share` divides further; None for
            whole rows.

    Raises:
        UserError: The configuration describes a model that another library defines (`build_model`).
    """

    blocks_name = "blocks"

    def __init__(self, config: DecoderConfig) -> None:
        refuse_body(config)
        super().__init__(config.num_layers, config.max_seq_len)
        self.config = config
        self._mixers = config.list_mixers()
        mixers = {layer: mixer for mixer, layers in self._mixers for layer in layers}
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, mixers[layer], layer) for layer in range(config.num_layers))
        self.share: SequenceShare | None = None
        self.context: HeadExchange | None = None
        self.norm = config.parts.norm.build(config.dim)
        if not config.has_tied_embeddings:
            self.output = nn.Linear(config.dim, config.num_output_rows, bias=False)

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        """The weight that turns hidden states into logits, or into scores."""
        return self.embedding.weight if self.config.has_tied_embeddings else self.output.weight

    def draws_random_numbers(self, block: nn.Module) -> bool:
        """Returns whether the block, or one of its parts, has dropout."""
        return self.config.dropout > 0 or any(
            part.draws_random_numbers for part in block.modules() if isinstance(part, Part)
        )

    def new_cache(self, num_rows: int, num_slots: int) -> KVCache:
        """Returns an empty cache for sequences of at most `num_slots` tokens, beside the output weight."""
        weight = self.output_weight
        return KVCache(self.config.cache_tensors, num_rows, num_slots, weight.device, weight.dtype)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fills every parameter, with the same values for the same seed on any device, sharding and rank.

        Values are normal with deviation `INIT_STD`. Weights that write into the residual stream are scaled by
        1/sqrt(number of such weights), so that the stream's variance at the last layer does not grow with depth. Norms
        start at one. A rank computes only the values that it holds (`genesis.model.initial`).
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        held = dict(self.named_children())
        if "embedding" in held:
            fill_normal(self.embedding.weight, INIT_STD, f"{seed} embedding.weight")
        for name, part in self.parts.items():
            part.init_weights(InitialValues(f"{seed} {name}", residual_std))
        if "output" in held:
            fill_normal(self.output.weight, INIT_STD, f"{seed} output.weight")

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the optimizer's group of each parameter by its canonical name, as its part defines it."""
        held = dict(self.named_children())
        groups = {"embedding.weight": EMBEDDINGS} if "embedding" in held else {}
        for name, part in self.parts.items():
            groups |= {f"{name}.{own}": group for own, group in part.parameter_groups().items()}
        return {**groups, "output.weight": HEAD} if "output" in held else groups

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
        """Returns the result of `head`; see `LanguageModel.forward`.

        Args:
            input_ids: See there, as for the other arguments.
            document_ids: See there.
            document_offsets: See there.
            cache: Earlier tokens of the same sequences; this forward's are added to it, but only counted by `advance`.
            logits_to_keep: The positions of the flattened batch whose logits are returned; the last block computes
                only these positions. None for all positions.
            head: See there.
            has_statistics: See there.
            counted: See there.
        """
        if has_statistics and counted is None:
            counted = torch.ones_like(input_ids, dtype=torch.bool)
        x = self.embed(input_ids)
        inputs = self.prepare(x, input_ids, document_ids, document_offsets, cache, logits_to_keep, counted)
        statistics: dict[str, Statistics] = {}
        for blocks in self.groups:
            x, reported = self.run_blocks(blocks, x, inputs)
            statistics |= reported
        out = self.finish(x, head)
        return (out, statistics) if has_statistics else out

    # ---- the pieces of a forward, of which a stage of a pipeline runs some

    def embed(self, input_ids: Int64[Tensor, "B S"]) -> Float[Tensor, "B S D"]:
        """Returns the residual stream before the first block, of this rank's tokens."""
        embedded: Tensor = self.embedding(input_ids if self.context is None else self.context.cut(input_ids))
        if self.config.scales is None:
            return embedded
        # Rounded to the weight's type, as Gemma multiplies: 50.596 is 50.5 in bfloat16.
        return embedded * embedded.new_full((), self.config.scales.embedding)

    def prepare(
        self,
        x: Float[Tensor, "B S D"],
        input_ids: Int64[Tensor, "B S"],
        document_ids: Int32[Tensor, "B S"] | None = None,
        document_offsets: Int32[Tensor, " num_documents+1"] | None = None,
        cache: KVCache | None = None,
        logits_to_keep: Int64[Tensor, " P"] | None = None,
        counted: Bool[Tensor, "B S"] | None = None,
    ) -> BlockInputs:
        """Returns what blocks get beside the residual stream.

        Args:
            x: The residual stream of this rank's tokens before any block.
            input_ids: Whole rows, like `document_ids`, `document_offsets` and `counted`.
            document_ids: See `forward`, as for the other arguments.
            document_offsets: See `forward`.
            cache: See `forward`.
            logits_to_keep: See `forward`.
            counted: See `forward`.
        """
        counted_in_rows = counted
        for share in (self.context, self.share):
            if share is not None:
                # The metadata is that of whole rows: `x` has some tokens of each.
                x = x.new_empty(()).expand(*input_ids.shape, x.shape[2])
                counted_in_rows, counted = counted, None if counted is None else share.cut(counted)
        cached = None if cache is None else cache.cached
        tokens = ForwardTokens(x, document_ids, document_offsets, cached, self.attention_kernel)
        metadata: list[Any] = [None] * self.config.num_layers
        for mixer, layers in self._mixers:
            for layer, of_layer in zip(layers, mixer.build_metadata(tokens, layers), strict=True):
                metadata[layer] = of_layer
        held = [None] * self.config.num_layers if cache is None else cache.of_layers()
        return BlockInputs(metadata, held, logits_to_keep, counted, counted_in_rows)

    def finish(self, x: Float[Tensor, "B S D"], head: Callable[[Tensor, Tensor], T]) -> T:
        """Returns the result of `head` for the residual stream after the last block; see `forward`."""
        # Inside a forward, where FSDP2's hooks have gathered the output weight: elsewhere it may be a shard.
        hidden = self.norm(x)
        # The hidden states, and not the logits: every head then gets these logits, whatever it computes of them.
        return head(hidden if self.config.scales is None else hidden * self.config.scales.logits, self.output_weight)

    def run_blocks(
        self, blocks: range, x: Float[Tensor, "B S D"], inputs: BlockInputs
    ) -> tuple[Float[Tensor, "B S D"] | Float[Tensor, "P D"], dict[str, Statistics]]:
        """Returns the residual stream after consecutive blocks, and the statistics of their parts by canonical names.

        Wrappers replace this method to recompute groups of blocks.
        """
        statistics: dict[str, Statistics] = {}
        for index in blocks:
            kept = inputs.logits_to_keep if index == self.config.num_layers - 1 else None
            block = self.blocks[index]
            counted = inputs.counted if block.feed_forward_share is None else inputs.counted_in_rows
            x, reported = block(x, inputs.metadata[index], inputs.held[index], kept, counted)
            if reported is not None:
                statistics[f"blocks.{index}.feed_forward"] = reported
        return x, statistics

    # ---- costs

    @property
    def flops_per_token(self) -> int:
        """Those of the parts, and six for each element of the output weight."""
        return 6 * self.output_weight.numel() + sum(part.flops_per_token for part in self.parts.values())

    def context_flops_per_token(self, context: int) -> int:
        """Returns the sum of all parts."""
        return sum(part.context_flops_per_token(context) for part in self.parts.values())

    @property
    def num_inactive_parameters(self) -> int:
        """Those of all mixtures."""
        return sum(part.num_inactive_parameters for part in self.parts.values())

    def name_part(self, parameter: str) -> str:
        """Returns the name of the mixer or feed-forward part, of a part of a mixture, `norms`, or the tensor's own."""
        if "norm" in parameter:
            return "norms"
        first, *rest = parameter.split(".")
        if first != self.blocks_name:
            return first
        return next((part for part in _MIXTURE_PARTS if f"{part}." in parameter), rest[1])


def refuse_body(config: DecoderConfig) -> None:
    """Refuses a model that another library defines, where parts of Genesis are needed.

    Raises:
        UserError: It is one.
    """
    if config.body is not None:
        raise UserError(
            f"the model is of another library ({type(config.body).__name__}), and this needs a decoder of Genesis: it "
            "can be trained, validated, and exported by `genesis export`, for transformers or vLLM"
        )


def build_model(config: DecoderConfig) -> LanguageModel:
    """Returns the model of a configuration, without values: a decoder of parts, or its body.

    Raises:
        UserError: The body cannot be built.
    """
    if config.body is None:
        return Decoder(config)
    return config.body.build(BodyShape(*(getattr(config, name) for name in BodyShape._fields)))
