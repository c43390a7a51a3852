"""Adapters: small trained matrices beside the frozen weights of a decoder's linear layers and experts (LoRA, DoRA).

N  tokens, in any leading dimensions     I  input width     O  output width     R  rank

`attach_adapters` replaces linear layers of the blocks by `AdaptedLinear`, which keeps `weight` and `bias` and adds
`lora_A`, `lora_B` and, for DoRA, `lora_magnitude` next to them. The base's tensors keep their names, so that
checkpoints, sharding, activation checkpointing and compilation know nothing of adapters. Routed experts become
`AdaptedExperts` (`genesis.model.expert_adapter`) in the same way.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Final, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import dropout, linear

from genesis.base.errors import UserError, check_is_named
from genesis.model.cut import MatrixShares, held, take_rows
from genesis.model.decoder import Decoder
from genesis.model.expert_adapter import AdaptedExperts, ExpertAdapter, find_adapter, find_widths
from genesis.model.experts import STACKS, Experts
from genesis.model.initial import InitialValues
from genesis.model.language_model import LanguageModel
from genesis.model.nf4 import BLOCK, BYTES, Nf4Linear, Nf4Weight, dequantise
from genesis.model.nf4_experts import Nf4Experts
from genesis.model.part import ADAPTERS, MATRICES, VECTORS, ParameterGroup, Part, check_counts
from genesis_callbacks.base.local_shards import local_shards

MAGNITUDE: Final = "lora_magnitude"
ADAPTER_TENSORS: Final = ("lora_A", "lora_B", MAGNITUDE)
"""The names of an adapter's tensors in its layer."""
EXTRA_TENSORS: Final = {"embedding": "embedding.weight", "head": "output.weight"}
"""The allowed values of `also_train`: tensors of the decoder outside of the blocks."""
_MAX_MERGED_BYTES: Final = 2**31
_NUM_NAMED: Final = 3


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Adapters on the linear layers of the blocks, and on routed experts; the model's own weights are frozen.

    Args:
        rank: Width between the two matrices of an adapter.
        alpha: The update of an adapter is scaled by `alpha / rank`, or by `alpha / sqrt(rank)` with `rslora`.
        dropout: Share of an adapter's inputs that is dropped, in training.
        rslora: Whether the factor is `alpha / sqrt(rank)`, so that a larger rank does not make smaller updates.
        dora: Whether the length of each row of the adapted weight is trained separately from its direction.
        include: Patterns of the layers with adapters, such as `*.attention.*`; a pattern matches a whole name
            (`blocks.0.attention.query`), with `*` and `?` as in a shell.
        include_experts: Patterns of the stacks of routed experts with adapters, one for each expert: `*` for all, or
            such as `*.down`; the names are those of a mixture with `gate_up` and `down`
            (`blocks.0.feed_forward.experts.gate_up`). None by default. They have neither dropout nor DoRA, as in PEFT.
        exclude: Patterns of layers and stacks among these that get no adapters.
        also_train: Tensors outside of the blocks that are also trained: `embedding`, `head`.
        base: The base: a checkpoint or a run (its newest checkpoint), such as `genesis import` writes. None for that in
            `ckpt_path`, or the base of the checkpoint that is resumed.
        start: A directory with adapters in PEFT's format to start from; None for new ones.

    Raises:
        UserError: A value is invalid.

    References:
        Hu et al., LoRA, arXiv:2106.09685. Kalajdzievski, rsLoRA, arXiv:2312.03732. Liu et al., DoRA, arXiv:2402.09353.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    include: tuple[str, ...] = ("*",)
    include_experts: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    also_train: tuple[Literal["embedding", "head"], ...] = ()
    base: str | None = None
    start: str | None = None

    def __post_init__(self) -> None:
        check_counts(self)
        for name in ("include", "include_experts", "exclude", "also_train"):  # YAML and JSON give lists
            value = getattr(self, name)
            if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
                raise UserError(f"{name} is {value!r}: it must be a list of texts")
            object.__setattr__(self, name, tuple(value))
        for name in ("base", "start"):
            check_is_named(getattr(self, name), f"model.adapter.{name}")
        if not (self.alpha > 0.0 and math.isfinite(self.alpha)):
            raise UserError(
                f"alpha is {self.alpha:g}, so that adapters add nothing: it must be above 0, such as 2 * rank"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout of adapters is {self.dropout}: it must be at least 0 and below 1")
        if not self.include and not self.include_experts:
            raise UserError("include is empty, so that no layer has an adapter: give ['*'] for all linear layers")
        if self.include_experts and (self.dora or self.dropout > 0.0):
            given = "dora is true" if self.dora else f"dropout is {self.dropout}"
            raise UserError(
                f"{given}, and include_experts is {list(self.include_experts)}: adapters of experts have neither dora "
                "nor dropout, as in PEFT; leave out one of the two"
            )
        for extra in self.also_train:
            if extra not in EXTRA_TENSORS:
                raise UserError(f"also_train has {extra!r}: it must be {' or '.join(map(repr, EXTRA_TENSORS))}")

    @property
    def scaling(self) -> float:
        """The factor of an adapter's update."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class BaseFormat:
    """How the frozen weights of a base are stored.

    Args:
        dtype: The dtype of the weights; beside NF4 that of all others.
        is_nf4: Whether the linear layers of the blocks, without routers, are in NF4 (`genesis.model.nf4`).
    """

    dtype: torch.dtype = torch.float32
    is_nf4: bool = False


BASE_FORMATS: Final = {
    "float32": BaseFormat(),
    "bfloat16": BaseFormat(torch.bfloat16),
    "nf4": BaseFormat(torch.bfloat16, is_nf4=True),
}
"""The formats that `genesis import --dtype` writes, of a model in bfloat16."""


class AdaptedLinear(nn.Linear, Part):
    """A linear layer with an adapter: `W x + scaling * B A dropout(x)`, with DoRA times `m / ||W + scaling * B A||`.

    The base's weight stays in its own dtype and the adapter in float32. Each product runs in the dtype of its weight,
    so that a base in bfloat16 keeps the speed of bfloat16.

    Args:
        base: The layer to adapt; its parameters become this layer's parameters.
        config: The options of the adapters.

    Attributes:
        is_on: Whether the adapter takes part; without it this is the base's layer (`adapters_off`).
        merged: The weight of base and adapter together (`adapters_merged`); None to multiply by both.
        rows: The rows that this rank multiplies of a layer that is not cut, where ranks share its part; None for all.
        column_ranks: The ranks that share the columns of the weight; None for all columns on this rank.
    """

    lora_magnitude: nn.Parameter | None

    def __init__(self, base: nn.Linear, config: AdapterConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        for name, parameter in base.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.scaling, self.dropout = config.scaling, config.dropout
        self.is_on = True
        self.merged: Tensor | None = None
        self.rows: slice | Tensor | None = None
        self.column_ranks: MatrixShares | None = None
        self.draws_random_numbers = config.dropout > 0.0
        device = next(base.parameters()).device
        self.lora_A = nn.Parameter(torch.empty(config.rank, self.in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, config.rank, device=device))
        self.register_parameter(
            MAGNITUDE, nn.Parameter(torch.empty(self.out_features, device=device)) if config.dora else None
        )

    def init_weights(self, initial: InitialValues) -> None:
        """Initializes the adapter so that its update is zero: A as torch initializes `nn.Linear`, B with zeros.

        The base's weight must have its values, because DoRA's magnitude is the length of its rows.
        """
        initial.fill_uniform("lora_A", self.lora_A, 1.0 / math.sqrt(self.in_features))
        nn.init.zeros_(self.lora_B)
        self.fill_magnitude()

    @torch.no_grad()
    def fill_magnitude(self) -> None:
        """Fills DoRA's magnitude with the length of each row of the weight. Communicates if ranks share columns."""
        if self.lora_magnitude is None:
            return
        if self.column_ranks is not None:
            of_all = _gather(self.weight.float().square().sum(1)).sqrt()
            for own in local_shards("magnitude", self.lora_magnitude, "parameter"):
                own.data.copy_(of_all.narrow(0, own.part.offsets[0], own.part.sizes[0]))
            return
        # Weight and magnitude have the same sharding of rows, so that each rank has the rows that it needs.
        rows = local_shards("weight", self.weight, "parameter")
        lengths = local_shards("magnitude", self.lora_magnitude, "parameter")
        for weight, length in zip(rows, lengths, strict=True):
            assert weight.part.offsets[0] == length.part.offsets[0]
            length.data.copy_(weight.data.float().norm(dim=1))

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of each tensor of the adapter; the part around this layer returns the base's groups."""
        groups = {"lora_A": ADAPTERS, "lora_B": ADAPTERS}
        return groups if self.lora_magnitude is None else {**groups, MAGNITUDE: VECTORS}

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of the adapter, which multiplies every token; the part around this layer counts the base's."""
        adapter = 6 * (self.lora_A.numel() + self.lora_B.numel())
        multiplies_twice = self.lora_magnitude is not None and self.dropout > 0.0  # by the frozen weight
        return adapter + (4 * self.in_features * self.out_features if multiplies_twice else 0)

    def multiply(self, x: Float[Tensor, "*N I"], bias: Float[Tensor, " O"] | None) -> Float[Tensor, "*N O"]:
        """Returns the output of the base's layer with a bias, without the adapter's part."""
        return linear(x, take_rows(self.weight, self.rows), bias)

    def forward(self, x: Float[Tensor, "*N I"]) -> Float[Tensor, "*N O"]:
        """Returns the output of the base plus the adapter's update."""
        bias = None if self.bias is None else take_rows(self.bias, self.rows)
        if not self.is_on:
            return self.multiply(x, bias)
        if self.merged is not None:
            return linear(x, self.merged, bias)
        base = self.multiply(x, bias if self.lora_magnitude is None else None)
        if not torch.is_autocast_enabled(x.device.type):  # the base casts to its own dtype
            x = x.to(self.lora_A.dtype)
        dropped = dropout(x, self.dropout, self.training)
        low = linear(dropped, held(self.lora_A))
        update = linear(low * self.scaling, take_rows(self.lora_B, self.rows))
        if self.lora_magnitude is None:
            return base + update.to(base.dtype)
        scale = take_rows(self.lora_magnitude, self.rows) / self._row_lengths()
        changed = base + update
        if self.training and self.dropout > 0.0:
            # As in PEFT: what DoRA adds to the base's output, `(scale - 1) W x + scale * update`, sees the dropout.
            again = self.multiply(dropped.to(base.dtype), None)
            changed = again + update
            out: Tensor = (base + changed * scale - again).to(base.dtype)
        else:
            out = (changed * scale).to(base.dtype)
        return out if bias is None else out + bias

    @torch.no_grad()  # a constant in the gradient: section 4.3 of the paper
    def _row_lengths(self) -> Float[Tensor, " O"]:
        weight = take_rows(self.weight, self.rows)
        changed = weight + self.scaling * (take_rows(self.lora_B, self.rows) @ held(self.lora_A))
        if self.column_ranks is not None:
            return self.column_ranks.sum(changed.square().sum(1)).sqrt()
        lengths: Tensor = changed.norm(dim=1)
        return lengths


class AdaptedNf4Linear(Nf4Weight, AdaptedLinear):  # type: ignore[override]  # no parameter `weight`
    """An `AdaptedLinear` whose frozen weight is four tensors of bytes."""

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of each tensor: those of the adapter, and the frozen bytes."""
        return {**super().parameter_groups(), **dict.fromkeys(BYTES, MATRICES)}

    @torch.no_grad()
    def fill_magnitude(self) -> None:
        """Fills DoRA's magnitude with the length of each row. It gathers the bytes: a rank's rows need all scales."""
        if self.lora_magnitude is None:
            return
        whole = {name: _gather(getattr(self, name)) for name in BYTES}
        lengths = dequantise(whole, torch.float32).norm(dim=1)
        for local in local_shards("magnitude", self.lora_magnitude, "parameter"):
            local.data.copy_(lengths[local.part.offsets[0] : local.part.offsets[0] + local.part.sizes[0]])


def _gather(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    moved = tensor.to(tensor.device_mesh.device_type)  # shards of cpu_offload lie on the host
    assert isinstance(moved, DTensor)
    whole: Tensor = moved.full_tensor()
    return whole


def use_rows(layer: nn.Linear, rows: slice | Tensor | None) -> None:
    """Makes a linear layer multiply some of its rows, or with None all that this rank holds, and its adapter those."""
    if isinstance(layer, AdaptedLinear):
        layer.rows = rows
    else:
        layer.forward = partial(_multiply, layer, rows)  # type: ignore[method-assign]


def _multiply(layer: nn.Linear, rows: slice | Tensor | None, x: Tensor) -> Tensor:
    return linear(x, take_rows(layer.weight, rows), None if layer.bias is None else take_rows(layer.bias, rows))


def attach_adapters(
    decoder: LanguageModel, config: AdapterConfig, base: BaseFormat | None = None
) -> dict[str, AdaptedLinear | ExpertAdapter]:
    """Adds adapters to a newly built decoder in place, and freezes all other tensors except `config.also_train`.

    Args:
        decoder: Not wrapped yet, on the meta device or not.
        config: The adapters.
        base: How the base's weights are stored; None for float32. Adapters are float32.

    Returns:
        The adapted layers, and the adapters of experts, by the names that `select_layers` and `select_experts` give.

    Raises:
        UserError: A pattern matches no layer, or a layer cannot have the rank.
    """
    layers, stacks = select_layers(decoder, config), select_experts(decoder, config)
    base = base or BaseFormat()
    use_format(decoder.requires_grad_(False), base)
    adapted: dict[str, AdaptedLinear | ExpertAdapter] = {}
    for name in layers:
        layer = decoder.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        one = adapted[name] = (AdaptedNf4Linear if isinstance(layer, Nf4Linear) else AdaptedLinear)(layer, config)
        decoder.set_submodule(name, one)
    for name in dict.fromkeys(stack.rpartition(".")[0] for stack in stacks):
        plain = decoder.get_submodule(name)
        assert isinstance(plain, Experts)
        targets = tuple(target for target in STACKS if f"{name}.{target}" in stacks)
        kind = Nf4Experts if isinstance(plain, Nf4Experts) else AdaptedExperts
        experts = kind(plain, targets, rank=config.rank, scaling=config.scaling)
        decoder.set_submodule(name, experts)
        adapted |= {f"{name}.{target}": adapter for target, adapter in experts.list_adapters().items()}
    for extra in config.also_train:
        decoder.get_parameter(_find_extra(decoder, extra, base)).requires_grad_(True)
    return adapted


def use_format(decoder: LanguageModel, base: BaseFormat) -> None:
    """Gives a newly built decoder the weights of a base's format, in place."""
    decoder.to(base.dtype)
    if base.is_nf4 and not has_nf4(decoder):
        use_nf4(decoder)


def use_nf4(decoder: LanguageModel) -> None:
    """Replaces the linear layers and the experts of the blocks by bytes, whose values a restore must give, in place.

    Raises:
        UserError: A layer cannot be in NF4.
    """
    check_nf4(decoder)
    for name, layer in find_linears(decoder).items():
        decoder.set_submodule(name, Nf4Linear(layer))
    for name, experts in {stack.rpartition(".")[0]: one for stack, one in find_stacks(decoder).items()}.items():
        decoder.set_submodule(name, Nf4Experts(experts))


def check_nf4(decoder: LanguageModel) -> None:
    """Refuses a decoder that cannot have its linear layers in NF4.

    Raises:
        UserError: The width of a layer is no multiple of the block.
    """
    for name in list_nf4_weights(decoder):
        width = decoder.get_parameter(name).shape[-1]
        if width % BLOCK:
            raise UserError(
                f"NF4 takes widths that are multiples of {BLOCK}, and {name.removesuffix('.weight')} reads {width}: "
                "import it with --dtype bfloat16"
            )


def list_nf4_weights(decoder: LanguageModel) -> list[str]:
    """Returns the names of the weights that a base in NF4 has in 4 bits: linear layers of the blocks, and experts."""
    stacks = {stack.rpartition(".")[0]: stack.rpartition(".")[2] for stack in find_stacks(decoder)}
    of_experts = [f"{experts}.{name}" for experts in stacks for names in STACKS.values() for name in names]
    return [f"{name}.weight" for name in find_linears(decoder)] + of_experts


@contextmanager
def adapters_off(decoder: nn.Module) -> Iterator[None]:
    """Makes the forwards in the block those of the base. Their backward must be in the block, too."""
    layers = [module for module in decoder.modules() if isinstance(module, AdaptedLinear | AdaptedExperts)]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


@contextmanager
@torch.no_grad()
def adapters_merged(decoder: nn.Module) -> Iterator[None]:
    """Makes the forwards in the block multiply by one weight for base and adapter, a copy: faster for few tokens.

    For weights in float32 of which this rank has all, and up to `_MAX_MERGED_BYTES`; otherwise nothing changes. The
    results are those of base and adapter up to rounding.
    """
    layers = [module for module in decoder.modules() if isinstance(module, AdaptedLinear)]
    if all(_can_merge(layer) for layer in layers) and sum(one.weight.nbytes for one in layers) <= _MAX_MERGED_BYTES:
        for layer in layers:
            layer.merged = torch.addmm(layer.weight, layer.lora_B, layer.lora_A, alpha=layer.scaling)
            if layer.lora_magnitude is not None:
                layer.merged *= (layer.lora_magnitude / layer.merged.norm(dim=1)).unsqueeze(1)
    try:
        yield
    finally:
        for layer in layers:
            layer.merged = None


def _can_merge(layer: AdaptedLinear) -> bool:
    """Returns whether a layer has a whole weight in float32, of which it multiplies all rows."""
    if isinstance(layer, Nf4Weight) or layer.rows is not None or layer.column_ranks is not None:
        return False
    return layer.weight.dtype == torch.float32 and not isinstance(layer.weight, DTensor)


def has_nf4(decoder: nn.Module) -> bool:
    """Returns whether a decoder has weights in NF4."""
    return any(isinstance(module, Nf4Weight) for module in decoder.modules())


def read_plain_state(decoder: nn.Module) -> dict[str, Tensor]:
    """Returns a decoder's tensors by name, with weights in the place of the bytes of NF4."""
    layers = {name: module for name, module in decoder.named_modules() if isinstance(module, Nf4Weight)}
    held = {f"{name}.{tensor}" for name in layers for tensor in BYTES}
    state = {name: tensor for name, tensor in decoder.state_dict().items() if name not in held}
    return state | {
        f"{name}.weight" if isinstance(one, nn.Linear) else name: one.weight for name, one in layers.items()
    }


def select_layers(decoder: LanguageModel, config: AdapterConfig) -> dict[str, nn.Linear]:
    """Returns the linear layers that get adapters, by name: only layers of the blocks, and no routers.

    Raises:
        UserError: A pattern matches nothing, or a layer cannot have the rank.
    """
    linears, stacks = find_linears(decoder), find_stacks(decoder)
    check_patterns("model.adapter.include", config.include, linears, "linear layer of the blocks")
    check_patterns("model.adapter.include_experts", config.include_experts, stacks, "stack of routed experts")
    check_patterns("model.adapter.exclude", config.exclude, {**linears, **stacks}, "linear layer of the blocks")
    chosen = choose_by_name(linears, config.include, config.exclude)
    if not chosen and not choose_by_name(stacks, config.include_experts, config.exclude):
        raise UserError(
            f"model.adapter.exclude {list(config.exclude)} takes away every layer of include "
            f"{[*config.include, *config.include_experts]}: leave a layer"
        )
    for name, layer in chosen.items():
        _check_rank(config.rank, name, (layer.in_features, layer.out_features))
    return chosen


def select_experts(decoder: LanguageModel, config: AdapterConfig) -> dict[str, Experts]:
    """Returns the stacks of routed experts that get adapters, by name; `select_layers` checks the patterns.

    Raises:
        UserError: A stack cannot have the rank.
    """
    chosen = choose_by_name(find_stacks(decoder), config.include_experts, config.exclude)
    for name, experts in chosen.items():
        _check_rank(config.rank, name, find_widths(experts, name.rpartition(".")[2]))
    return chosen


def find_linears(decoder: LanguageModel) -> dict[str, nn.Linear]:
    """Returns the linear layers that may have adapters, by name: all linear layers of the blocks except routers."""
    return {
        f"{decoder.blocks_name}.{name}": module
        for name, module in decoder.get_submodule(decoder.blocks_name).named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in decoder.router_names
    }


def find_stacks(decoder: LanguageModel) -> dict[str, Experts]:
    """Returns the stacks of routed experts that may have adapters, by name, with the experts that have them."""
    return {
        f"{decoder.blocks_name}.{name}.{target}": module
        for name, module in decoder.get_submodule(decoder.blocks_name).named_modules()
        if isinstance(module, Experts)
        for target in STACKS
    }


_Module = TypeVar("_Module", bound=nn.Module)


def choose_by_name(found: Mapping[str, _Module], include: Sequence[str], exclude: Sequence[str]) -> dict[str, _Module]:
    """Returns the modules whose name a pattern of `include` matches and none of `exclude`."""
    return {
        name: module
        for name, module in found.items()
        if any(fnmatchcase(name, pattern) for pattern in include)
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    }


def check_patterns(option: str, patterns: Sequence[str], found: Mapping[str, nn.Module], what: str) -> None:
    """Refuses a pattern that matches no module.

    Args:
        option: The name of the option that has the patterns.
        patterns: As a shell writes them.
        found: The modules that may be chosen, by name.
        what: A noun for one of them.

    Raises:
        UserError: A pattern matches nothing.
    """
    for pattern in patterns:
        if not found:
            raise UserError(f"{option} has {pattern!r}, and the model has no {what}: leave it out")
        if not any(fnmatchcase(name, pattern) for name in found):
            raise UserError(
                f"{option} has {pattern!r}, which matches no {what}; their names are {list_names(tuple(found))}"
            )


def _check_rank(rank: int, name: str, widths: tuple[int, int]) -> None:
    width = min(widths)
    if rank > width:
        raise UserError(
            f"model.adapter.rank is {rank}, more than the width {width} of {name}: set it to {width} or less, or "
            f"exclude the layer by '*.{name.rpartition('.')[2]}'"
        )


def list_names(names: Sequence[str]) -> str:
    """Returns the names, or the first ones and the last, as a list in a sentence."""
    return ", ".join(names) if len(names) <= _NUM_NAMED else f"{', '.join(names[: _NUM_NAMED - 1])}, ..., {names[-1]}"


def _find_extra(decoder: LanguageModel, extra: str, base: BaseFormat) -> str:
    """Returns the name of the tensor that `also_train` names.

    Raises:
        UserError: The decoder has no such tensor, or its dtype is too coarse to be trained.
    """
    if not isinstance(decoder, Decoder):
        raise UserError(
            f"model.adapter.also_train has {extra!r}, and the model is of another library, whose tables stay frozen "
            "under adapters: leave it out, or train all weights without adapters"
        )
    if extra == "head" and decoder.config.has_tied_embeddings:
        raise UserError(
            "model.adapter.also_train has 'head', and the output weight is the embedding: name 'embedding', which "
            "trains both"
        )
    if base.dtype != torch.float32:
        raise UserError(
            f"model.adapter.also_train has {extra!r}, and the base is in {str(base.dtype).removeprefix('torch.')}, in "
            "which small updates are lost: give a base in float32"
        )
    return EXTRA_TENSORS[extra]


def is_adapter_tensor(name: str) -> bool:
    """Returns whether a name belongs to a tensor of an adapter.

    >>> is_adapter_tensor("blocks.0.attention.query.lora_A"), is_adapter_tensor("blocks.0.attention.query.weight")
    (True, False)
    """
    return name.rpartition(".")[2] in ADAPTER_TENSORS


def init_adapters(decoder: LanguageModel, seed: int) -> None:
    """Initializes all adapters, with the same values for the same seed under any sharding. Communicates for DoRA alone.

    The base must have its values, because DoRA starts with the lengths of its rows.
    """
    for name, part in decoder.parts.items():
        if isinstance(part, AdaptedLinear | ExpertAdapter):
            part.init_weights(InitialValues(f"{seed} {name}", residual_std=0.0))


@torch.no_grad()
def fill_trained(decoder: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Copies whole tensors by name into adapters and other trained parameters. Does not communicate."""
    for name, tensor in tensors.items():
        for local in local_shards(name, decoder.get_parameter(name), "parameter"):
            corner = zip(local.part.offsets, local.part.sizes, strict=True)
            local.data.copy_(tensor[tuple(slice(offset, offset + size) for offset, size in corner)])


def name_adapter_tensors(weight: str) -> dict[str, str]:
    """Returns the names of all tensors that an adapter of a weight may have, by their roles.

    >>> name_adapter_tensors("blocks.0.attention.query.weight")["lora_A"]
    'blocks.0.attention.query.lora_A'
    >>> name_adapter_tensors("blocks.0.feed_forward.experts.up")["lora_A"]
    'blocks.0.feed_forward.experts.gate_up_adapter.lora_A'
    """
    layer = find_adapter(weight)[0] if _is_stack(weight) else weight.removesuffix(".weight")
    return {tensor: f"{layer}.{tensor}" for tensor in ADAPTER_TENSORS}


def _is_stack(weight: str) -> bool:
    experts, _, name = weight.rpartition(".")
    return experts.rpartition(".")[2] == "experts" and any(name in names for names in STACKS.values())


def cut_adapter(weight: str, tensors: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Returns what `merge_rows` needs of an adapter for some rows of a weight, or for some experts of a stack.

    Args:
        weight: The weight's name.
        tensors: The adapter's whole tensors by their roles.
        rows: The rows or experts.
    """
    if not _is_stack(weight):
        return {tensor: value if tensor == "lora_A" else value[rows] for tensor, value in tensors.items()}
    _, place, count = find_adapter(weight)
    return {"lora_A": tensors["lora_A"][rows], "lora_B": tensors["lora_B"][rows].chunk(count, dim=1)[place]}


def merge_rows(tensors: Mapping[str, Float[Tensor, "..."]], scaling: float) -> Float[Tensor, "*G O I"]:
    """Returns rows of a layer's weight, or some experts of a stack, with the adapter added, in float64.

    Args:
        tensors: The rows of `weight`, and what `cut_adapter` returns for them.
        scaling: The factor of the adapters' update.
    """
    weight, low, high = (tensors[name].double() for name in ("weight", "lora_A", "lora_B"))
    if weight.ndim > 2:
        return torch.baddbmm(weight, high, low, alpha=scaling)
    merged = torch.addmm(weight, high, low, alpha=scaling)
    magnitude = tensors.get(MAGNITUDE)
    if magnitude is None:
        return merged
    scale: Tensor = magnitude.double() / merged.norm(dim=1)
    return merged * scale.unsqueeze(1)
