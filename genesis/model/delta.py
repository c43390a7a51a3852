"""Linear attention by the gated delta rule: a state of fixed size in the place of keys and values of all tokens.

B  sequences of a micro-batch     S  tokens of a sequence     D  model width
K  key and query heads            H  value heads              E  width of a key     F  width of a value
W  taps of the convolution        C  channels of queries, keys and values: 2 K E + H F
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from genesis.base.errors import UserError
from genesis.model.attend.metadata import document_offsets, document_positions
from genesis.model.cut import MatrixShares, find_indivisible, held, take_rows
from genesis.model.delta_kernel import run_kernel, suits_kernel
from genesis.model.delta_proof import list_delta_proofs
from genesis.model.delta_rule import DeltaInputs, chunked, step
from genesis.model.initial import InitialValues
from genesis.model.kv_cache import CacheTensor
from genesis.model.mixer import ForwardTokens, KernelProof, SequenceMixer, SequenceMixerConfig
from genesis.model.part import MATRICES, VECTORS, ParameterGroup, check_counts


@final
@dataclass(frozen=True)
class GatedDeltaConfig(SequenceMixerConfig):
    """Linear attention by the gated delta rule.

    Args:
        num_key_heads: Number of heads of queries and keys.
        num_value_heads: Number of heads of values; `num_value_heads / num_key_heads` of them share queries and keys.
        key_dim: Width of a query and of a key.
        value_dim: Width of a value.
        conv_width: Number of tokens in the causal convolution before the rule, the token itself included.
        attention_every: As `model.decoder.linear_attention`, every layer whose number, counted from 1, is a multiple of
            this keeps its attention. Among `mixers`, the list decides.
        norm_eps: Added to the mean square in the norm of each head's output.

    Raises:
        UserError: The shape is invalid.
    """

    name: ClassVar[str] = "linear_attention"

    num_key_heads: int
    num_value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    conv_width: int = 4
    attention_every: int = 4
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_counts(self)
        if self.num_value_heads % self.num_key_heads:
            raise UserError(
                f"num_value_heads {self.num_value_heads} is not a multiple of num_key_heads {self.num_key_heads}"
            )
        if self.attention_every < 2:
            raise UserError("attention_every is 1, so that no layer is linear: remove linear_attention, or raise it")
        if not 0.0 < self.norm_eps < math.inf:
            raise UserError(f"norm_eps is {self.norm_eps}: it must be above 0 and finite")

    @property
    def num_channels(self) -> int:
        """The channels of queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def is_in(self, layer: int) -> bool:
        """Returns whether block number `layer`, counted from 0, has this part, and not attention."""
        return (layer + 1) % self.attention_every != 0

    def find_uncut(self, num_ranks: int) -> str | None:
        """Returns the heads that the ranks cannot share."""
        heads = {"num_key_heads": self.num_key_heads, "num_value_heads": self.num_value_heads}
        return find_indivisible(heads, num_ranks)

    def build(self, dim: int, layer: int) -> "GatedDelta":
        """Builds the part, the same in every block."""
        return GatedDelta(self, dim)

    def build_metadata(self, tokens: ForwardTokens, layers: Sequence[int]) -> Sequence["DeltaMetadata"]:
        """Returns one object for all layers."""
        return [build_delta_metadata(tokens)] * len(layers)

    def cache_tensors(self, dim: int) -> tuple[CacheTensor, ...]:
        """Returns the state, in float32 because every token adds to it, and the last inputs of the convolution."""
        state = (self.num_value_heads, self.key_dim, self.value_dim)
        tail = (self.conv_width - 1, self.num_channels)
        return CacheTensor(state, is_state=True, dtype=torch.float32), CacheTensor(tail, is_state=True)

    def count_shared_heads(self) -> int:
        """Returns the number of value heads; ranks that need the same queries and keys copy them."""
        return self.num_value_heads

    def list_proofs(self) -> tuple[KernelProof, ...]:
        """Returns the proof of the rule's kernels, if their package is installed."""
        return list_delta_proofs()


class DeltaMetadata(NamedTuple):
    """What the linear layers of a forward know about its tokens: computed once, read by every block."""

    positions: Int64[Tensor, "B S"] | None = None
    """Each token's place in its document, from 0; None if each row is one document, or continues a cache."""
    is_padding: Bool[Tensor, "B S"] | None = None
    """Tokens on the right of a row that change nothing in a cache; None without any."""
    offsets: Int32[Tensor, " num_documents+1"] | None = None
    """The index of each document's beginning in the flattened batch, and its end, where a kernel reads them."""


def build_delta_metadata(tokens: ForwardTokens) -> DeltaMetadata:
    """Returns the metadata of a forward."""
    x, document_ids, offsets, cached = tokens.x, tokens.document_ids, tokens.offsets, tokens.cached
    if cached is not None and cached.num_new is not None:
        return DeltaMetadata(is_padding=torch.arange(x.shape[1], device=x.device) >= cached.num_new.unsqueeze(1))
    if document_ids is None:
        return DeltaMetadata()
    # The dtype of the products, which the rule gets, is that of autocast or the one of `x`.
    is_autocast = torch.is_autocast_enabled(x.device.type)
    if not suits_kernel(x.device, torch.get_autocast_dtype(x.device.type) if is_autocast else x.dtype):
        offsets = None
    elif offsets is None:
        offsets = document_offsets(document_ids)
    return DeltaMetadata(document_positions(document_ids), offsets=offsets)


class GatedDelta(SequenceMixer):
    """Linear attention by the gated delta rule, after a short convolution, with a gated output.

    References:
        Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv:2412.06464, section 3.4.
    """

    draws_random_numbers = False
    measured_note = "linear layers are counted in chunks; the kernels of flash-linear-attention keep less"
    precise_layers = ("beta", "decay")  # they decide what a state keeps over thousands of tokens

    def __init__(self, config: GatedDeltaConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        self._channels: Tensor | None = None
        self.query_key_value = nn.Linear(dim, config.num_channels, bias=False)
        self.gate = nn.Linear(dim, config.num_value_heads * config.value_dim, bias=False)
        self.beta = nn.Linear(dim, config.num_value_heads, bias=False)
        self.decay = nn.Linear(dim, config.num_value_heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(config.num_channels, 1, config.conv_width))
        self.log_rate = nn.Parameter(torch.empty(config.num_value_heads))
        self.decay_bias = nn.Parameter(torch.empty(config.num_value_heads))
        self.norm_weight = nn.Parameter(torch.empty(config.value_dim))
        self.output = nn.Linear(config.num_value_heads * config.value_dim, dim, bias=False)

    @torch.no_grad()
    def init_weights(self, initial: InitialValues) -> None:
        """Initializes the weights; decay rates lie between 1 and 16, and time steps between 0.001 and 0.1.

        References:
            Dao and Gu, Transformers are SSMs (Mamba-2), arXiv:2405.21060, appendix D.2: rates and time steps.
        """
        for name in ("query_key_value", "gate", "beta", "decay"):
            initial.fill(f"{name}.weight", self.get_parameter(f"{name}.weight"))
        initial.fill_residual("output.weight", self.output.weight)
        initial.fill_uniform("conv_weight", self.conv_weight, self.config.conv_width**-0.5)
        initial.fill_uniform("log_rate", self.log_rate, 7.5)
        self.log_rate.add_(8.5).log_()
        # The logarithm of a time step is uniform; the bias is what softplus turns into it: x + log(1 - exp(-x)).
        initial.fill_uniform("decay_bias", self.decay_bias, 0.5)
        steps = self.decay_bias.add(0.5).mul(torch.log(torch.tensor(100.0)).item()).exp().mul(0.001)
        self.decay_bias.copy_(steps.add(torch.log(-torch.expm1(-steps))))
        nn.init.ones_(self.norm_weight)

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of each parameter; the convolution and all vectors never decay."""
        matrices = ("query_key_value", "gate", "beta", "decay", "output")
        vectors = ("conv_weight", "log_rate", "decay_bias", "norm_weight")
        return {f"{name}.weight": MATRICES for name in matrices} | dict.fromkeys(vectors, VECTORS)

    def share_matrices(self, ranks: MatrixShares) -> None:
        """Gives each rank some heads: of queries and keys, and those of the values that they serve."""
        config, size = self.config, ranks.size
        keys, values = config.num_key_heads * config.key_dim, config.num_value_heads * config.value_dim
        # One matrix has queries, keys and values, so that a rank's rows are three ranges of it.
        self._channels = torch.cat(
            [
                torch.arange(first + num // size * ranks.rank, first + num // size * (ranks.rank + 1), device="cpu")
                for first, num in ((0, keys), (keys, keys), (2 * keys, values))
            ]
        )
        ranks.use_rows(self.query_key_value, self._channels)
        for layer in (self.gate, self.beta, self.decay):
            ranks.cut_linear(layer, 0)
        for name in ("log_rate", "decay_bias"):
            ranks.cut(self, name)
        ranks.cut_linear(self.output, 1)
        heads = (config.num_key_heads // size, config.num_value_heads // size)
        self.config = replace(config, num_key_heads=heads[0], num_value_heads=heads[1])

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of the weights, and of the three products of a token with the state of each head."""
        linears = (self.query_key_value, self.gate, self.beta, self.decay, self.output)
        state = self.config.num_value_heads * self.config.key_dim * self.config.value_dim
        return 6 * (sum(part.weight.numel() for part in linears) + self.conv_weight.numel() + 3 * state)

    def forward(
        self, x: Float[Tensor, "B S D"], metadata: DeltaMetadata, cache: tuple[Tensor, ...] | None = None
    ) -> Float[Tensor, "B S D"]:
        """Returns what each token reads from the state of its document.

        Args:
            x: The input of the part.
            metadata: The documents of the tokens, and which of them are padding.
            cache: The state (B H E F, float32) and the last inputs of the convolution (B W-1 C) of each row; both are
                replaced in place by those after this forward. None without a cache.
        """
        mixed, beta, decay = self.query_key_value(x), self.beta(x), self.decay(x)
        taps, exchange = take_rows(self.conv_weight, self._channels), self.exchange
        log_rate, decay_bias = held(self.log_rate), held(self.decay_bias)
        if exchange is not None:
            # Before the convolution, which reads earlier tokens.
            *channels, beta, decay = exchange.to_heads(*self._split(mixed, 2), beta.unsqueeze(3), decay.unsqueeze(3))
            mixed, beta, decay = torch.cat([part.flatten(2) for part in channels], 2), beta.squeeze(3), decay.squeeze(3)
            taps = torch.cat([exchange.cut_heads(part).flatten(0, 1) for part in self._split(taps, 0)])
            log_rate, decay_bias = exchange.cut_heads(log_rate), exchange.cut_heads(decay_bias)
        mixed, beta = self._convolve(mixed, taps, metadata, cache), beta.sigmoid()
        decay = -log_rate.float().exp() * softplus(decay.float() + decay_bias.float())
        if metadata.is_padding is not None:
            beta, decay = (part.masked_fill(metadata.is_padding.unsqueeze(-1), 0.0) for part in (beta, decay))
        read = _apply_rule(
            DeltaInputs(*self._split(mixed, 2, beta.shape[2]), decay, beta),
            metadata,
            None if cache is None else cache[0],
        )
        if exchange is not None:
            read = exchange.to_tokens(read)
        gate = self.gate(x).view(read.shape)
        out: Tensor = self.output(self._gated_norm(read, gate).flatten(2).to(x.dtype))
        return out

    def _split(self, channels: Tensor, dim: int, num_value_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the queries, keys and values of some heads, by default of all, each with a dimension of heads."""
        config = self.config
        values = (config.num_value_heads if num_value_heads is None else num_value_heads) * config.value_dim
        keys = (channels.shape[dim] - values) // 2
        query, key, value = torch.split(channels, [keys, keys, values], dim=dim)
        before, after = channels.shape[:dim], channels.shape[dim + 1 :]
        queries, keyed = (part.view(*before, -1, config.key_dim, *after) for part in (query, key))
        return queries, keyed, value.view(*before, -1, config.value_dim, *after)

    def _gated_norm(self, read: Float[Tensor, "B S H F"], gate: Float[Tensor, "B S H F"]) -> Float[Tensor, "B S H F"]:
        normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return normed * self.norm_weight.float() * silu(gate.float())

    def _convolve(
        self,
        x: Float[Tensor, "B S C"],
        taps: Float[Tensor, "C 1 W"],
        metadata: DeltaMetadata,
        cache: tuple[Tensor, ...] | None,
    ) -> Float[Tensor, "B S C"]:
        """Returns the causal convolution of each channel within documents, after SiLU."""
        width, seq_len = self.config.conv_width, x.shape[1]
        if cache is None:
            padded = pad(x, (0, 0, width - 1, 0))
        else:
            padded = torch.cat((cache[1].to(x.dtype), x), dim=1)
            _keep_last(padded, metadata, cache[1])
        weight = taps.squeeze(1).to(x.dtype)
        mixed = x * weight[:, -1]
        for back in range(1, width):
            earlier = padded[:, width - 1 - back : width - 1 - back + seq_len]
            if metadata.positions is not None:
                earlier = earlier * (metadata.positions >= back).unsqueeze(-1)
            mixed = torch.addcmul(mixed, earlier, weight[:, width - 1 - back])
        return silu(mixed)


def _keep_last(padded: Tensor, metadata: DeltaMetadata, tail: Float[Tensor, "B W-1 C"]) -> None:
    """Stores the last inputs before a row's padding in `tail`."""
    width = tail.shape[1]
    if metadata.is_padding is None:
        tail.copy_(padded[:, padded.shape[1] - width :])
        return
    first = (~metadata.is_padding).sum(dim=1, keepdim=True)  # `padded` begins with `width` earlier inputs
    index = first + torch.arange(width, device=padded.device)
    tail.copy_(padded.gather(1, index.unsqueeze(-1).expand(-1, -1, padded.shape[2])))


# Without torch.compile, whose graph would repeat the loop over chunks for each of them.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def _apply_rule(inputs: DeltaInputs, metadata: DeltaMetadata, state: Tensor | None) -> Float[Tensor, "B S H F"]:
    device = inputs.value.device
    is_start = None if metadata.positions is None else metadata.positions == 0
    # The kernels know documents by their offsets alone, and would otherwise carry states from one to the next.
    has_borders = metadata.positions is None or metadata.offsets is not None
    with torch.autocast(device.type, enabled=False):
        if has_borders and suits_kernel(device, inputs.value.dtype):
            read, after = run_kernel(inputs, metadata.offsets, state)
        elif state is not None and inputs.value.shape[1] == 1:
            read, after = step(inputs, state)
        else:
            read, after = chunked(inputs, is_start, state)
    if state is not None and after is not None:
        state.copy_(after)
    return read.float()
