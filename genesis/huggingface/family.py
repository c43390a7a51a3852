"""The names that a family of models has in Hugging Face's layout: its tensors, and the keys of its `config.json`.

Tensors keep their layout, because the decoder pairs rotary halves as transformers does. Tied embeddings occur once.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from genesis.base.errors import UserError, numbered
from genesis.huggingface.latent import LatentTable, latents_of
from genesis.huggingface.mixture import MixtureTable
from genesis.model.attention import AttentionConfig
from genesis.model.decoder import DecoderConfig, Scales
from genesis.model.feed_forward import DenseConfig, FeedForwardConfig
from genesis.model.mixture import MixtureConfig

OUTPUT_WEIGHT: Final = "output.weight"
IMPORTED_AS: Final = "imported_as"
"""The entry of an imported checkpoint's identity with the `model_type` of the files."""
_STACKED: Final = {"mlp.experts.gate_up_proj": ("gate", "up"), "mlp.experts.down_proj": ("down",)}
"""The stacks of all experts in files that have them, to the decoder's stacks, which follow in dimension 1."""


_NUM_VECTOR_DIMS: Final = 2
"""Dimensions of a vector for each expert; a stack of matrices has one more."""


class TensorNames(Protocol):
    """How the names of a model's tensors become those of transformers, and back."""

    @property
    def model_type(self) -> str:
        """The value of this key in `config.json`."""

    @property
    def block_prefix(self) -> str:
        """The beginning of the names in a block whose stacks of experts may have adapters, up to the block's number."""

    def their_name(self, name: str) -> str:
        """Returns transformers' name of our parameter `name`."""

    def our_name(self, name: str) -> str:
        """Returns our name of transformers' parameter `name`."""

    def is_dropped(self, name: str) -> bool:
        """Returns whether a tensor belongs to another model in the same files."""

    def unwrap(self, name: str) -> str:
        """Returns the name that transformers' parameter `name` has in a model without others."""


@dataclass(frozen=True)
class Family:
    """The tables of one `model_type`. Families differ only in these tables.

    Args:
        model_type: The value of this key in `config.json`.
        architecture: The class of transformers that loads the model.
        feed_forward: The feed-forward part of its blocks.
        tensors: The decoder's name of a parameter outside of the blocks, to the family's name.
        block_prefix: The beginning of the family's names, up to the number of a block.
        block_tensors: The decoder's name of a parameter within its block, to the family's name. Several with one name
            are the rows of one tensor, in this order.
        keys: Key of `config.json` to field of `DecoderConfig`, in the order in which an export writes them.
        constants: Keys that an export also writes, with the same value for every shape.
        defaults: The value that transformers uses for a missing key; a `config.json` relies on it.
        only: Key to the values that the decoder can represent, in addition to null and a missing key.
        attention: Fields of `AttentionConfig` that differ from the defaults in all models of the family.
        free: Fields of `AttentionConfig` that `config.json` can set, in addition to those in `keys`.
        switches: Key of `config.json` that is true or false, to a field of `AttentionConfig` and its value if true.
        norm_placement: Where a block has its norms.
        windows: Which layers have the window where `config.json` does not list them: all; the last ones, from
            `max_window_layers` on; those without rotary positions; or, where a list is usual and no key switches the
            window off, all but each whose number is a multiple of `sliding_window_pattern`. None if models of the
            family have no window.
        has_window_rope: Whether layers with the window have rotary wavelengths of their own, whose base is
            `rope_local_base_freq` where `rope_parameters` does not have it.
        activation: The activation of dense feed-forward parts.
        rope_kinds: The kinds of scaled rotary wavelengths; None for all kinds.
        multipliers: Key of `config.json` to what a constant factor of the decoder is: a field of `Scales`, or
            `softmax_scale`, and the power of the key's value that this field has.
        has_norm_offset: Whether norms scale by 1 plus their weight.
        linear_keys: Key of `config.json` to field of `GatedDeltaConfig`, for families with linear layers.
        latent: The keys of its latent attention; None if it has plain attention, of which the fields above are.
        wrapped_type: The `model_type` of checkpoints that hold such a model beside others: its settings are in
            `text_config`, and its names begin with `model.language_model`.
        dropped: Beginnings of the names of tensors that belong to those other models.
        extra_layers: Key of `config.json` with the number of layers behind the last one, which predict further tokens
            and are left out like the tensors in `dropped`; None if there is no such key.
        mixture: The keys of its mixtures of experts; None if its feed-forward parts are dense.
        stacks: The decoder's name of a stack of all experts' weights within its block, to the family's name of one
            expert's weight, with `{}` for the expert.
        woven: The family's names, within a block, of tensors of all experts whose last dimension is that of outputs, in
            which those of the decoder's tensors with this name take turns.
        reads_mxfp4: Whether weights in MXFP4 are read, dequantised to bfloat16.
        unpack: Returns the tensors that one of the family's stands for, under the names in `block_tensors`, for tensors
            that another arrangement of the same weights has; given the name within the block, the tensor and the shape.
        is_written: Whether models are exported as this family; otherwise another family has the same parts.
    """

    model_type: str
    architecture: str
    feed_forward: type[FeedForwardConfig]
    tensors: Mapping[str, str]
    block_prefix: str
    block_tensors: Mapping[str, str]
    keys: Mapping[str, str]
    constants: Mapping[str, Any]
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    attention: Mapping[str, Any] = field(default_factory=dict)
    free: frozenset[str] = frozenset({"head_dim", "rope_scaling"})
    switches: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    norm_placement: str = "before"
    windows: Literal["all", "last", "without_rope", "listed"] | None = None
    has_window_rope: bool = False
    activation: str = "silu"
    rope_kinds: tuple[str, ...] | None = None
    multipliers: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    has_norm_offset: bool = False
    linear_keys: Mapping[str, str] = field(default_factory=dict)
    latent: LatentTable | None = None
    wrapped_type: str | None = None
    dropped: tuple[str, ...] = ()
    extra_layers: str | None = None
    mixture: MixtureTable | None = None
    stacks: Mapping[str, str] = field(default_factory=dict)
    woven: frozenset[str] = frozenset()
    reads_mxfp4: bool = False
    unpack: Callable[[str, Tensor, DecoderConfig], Mapping[str, Tensor] | None] | None = None
    is_written: bool = True

    def find_differences(self, config: DecoderConfig) -> list[str]:
        """Returns what this family does not have of a decoder, as a text for each option; none if it has all of it.

        Raises:
            TypeError: The decoder's feed-forward part is not the family's.
        """
        parts, feed_forward = config.parts, config.parts.feed_forward
        if type(feed_forward) is not self.feed_forward:
            raise TypeError(f"{self.model_type} has no {type(feed_forward).__name__}")
        latents = latents_of(config)
        compared: dict[str, tuple[Any, Any]] = {
            "norm.placement": (parts.norm.placement, self.norm_placement),
            "norm.has_offset": (parts.norm.has_offset, self.has_norm_offset),
            **self._compare_scales(config),
        }
        if self.latent is not None and latents is not None:
            compared |= self.latent.compare(latents)
        else:
            compared |= self._compare_attention(config)
        if isinstance(feed_forward, DenseConfig):
            compared["feed_forward.activation"] = (feed_forward.activation, self.activation)
        scaling = (latents or attention_of(config)).rope_scaling
        if scaling is not None and self.rope_kinds is not None and scaling.kind not in self.rope_kinds:
            compared["attention.rope_scaling.kind"] = (scaling.kind, self.rope_kinds[0])
        if scaling is not None and scaling.kind == "dynamic":
            assert scaling.original_seq_len is not None
            # config.json has the original context alone.
            compared["max_seq_len"] = (config.max_seq_len, int(scaling.original_seq_len * scaling.factor))
        found = [f"{name} is {ours!r}, not {theirs!r}" for name, (ours, theirs) in compared.items() if ours != theirs]
        if self.mixture is not None and isinstance(feed_forward, MixtureConfig):
            found += self.mixture.find_differences(feed_forward, config.num_layers)
        return found

    def _compare_attention(self, config: DecoderConfig) -> dict[str, tuple[Any, Any]]:
        """Returns each option of attention that no key sets, and what it is in this family."""
        own = attention_of(config)
        attention = asdict(own)
        options = {one.name: one.default for one in fields(AttentionConfig) if one.default is not MISSING}
        options |= {**self.attention, "rope_theta": own.rope_theta}
        options |= {name: value for name, value in self.switches.values() if attention[name] == value}
        if own.qk_norm is not None:
            options["qk_norm_eps"] = config.parts.norm.eps  # config.json has one epsilon for all norms
        return {
            f"attention.{name}": (attention[name], value) for name, value in options.items() if name not in self.free
        }

    def _compare_scales(self, config: DecoderConfig) -> dict[str, tuple[float, float]]:
        """Returns each factor of the decoder that no key of its own sets, and what it is in this family."""
        set_by_keys = {field for key, (field, _) in self.multipliers.items() if key not in self.keys}
        due = {
            field: getattr(config, self.keys[key]) ** power
            for key, (field, power) in self.multipliers.items()
            if key in self.keys
        }
        held = asdict(config.scales or Scales())
        return {
            f"scales.{name}": (value, due.get(name, 1.0)) for name, value in held.items() if name not in set_by_keys
        }

    def list_fused(self, name: str) -> list[str]:
        """Returns the decoder's names, within a block, of the parts of a tensor with this name there, in order."""
        return [ours for ours, theirs in self.block_tensors.items() if theirs == name]

    def their_name(self, name: str) -> str:
        """Returns the family's name of the decoder's parameter `name`.

        Example:
            >>> from genesis.huggingface.llama import LLAMA
            >>> LLAMA.their_name("blocks.3.attention.query.weight")
            'model.layers.3.self_attn.q_proj.weight'
        """
        return self.their_pattern(name).replace("{}", "*")

    def their_pattern(self, name: str) -> str:
        """Returns the family's name of the decoder's parameter `name`, with `{}` for the expert if it is a stack."""
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        if block is None:
            return self.tensors[name]
        return f"{self.block_prefix}.{block[1]}.{self.stacks.get(block[2]) or self.block_tensors[block[2]]}"

    def is_dropped(self, name: str) -> bool:
        """Whether the tensor `name` of a checkpoint belongs to another model beside this one, such as one of images."""
        return name.startswith(self.dropped) if self.dropped else False

    def unwrap(self, name: str) -> str:
        """Returns the name that a parameter has in a checkpoint of this model alone.

        Example:
            >>> from genesis.huggingface.qwen3_5 import QWEN3_5
            >>> QWEN3_5.unwrap("model.language_model.norm.weight")
            'model.norm.weight'
        """
        if self.wrapped_type is None:
            return name
        # The last one is the spelling of transformers 4, where the output weight lies in the text model, too.
        for start, own in (
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.", ""),
        ):
            if name.startswith(start):
                return own + name.removeprefix(start)
        return name

    def our_name(self, name: str) -> str:
        """Returns the decoder's name of the family's parameter `name`.

        Raises:
            UserError: The decoder has no such parameter.
        """
        return self._find(name)[0]

    def _find(self, name: str) -> tuple[str, int | None]:
        """Returns the decoder's name of the family's parameter `name`, and the number of its expert within a stack."""
        name = self.unwrap(name)
        block = re.fullmatch(rf"{re.escape(self.block_prefix)}\.(\d+)\.(.+)", name)
        if block is not None:
            for ours, pattern in self.stacks.items():
                expert = re.fullmatch(re.escape(pattern).replace(r"\{\}", r"(\d{1,6})"), block[2])
                if expert is not None:
                    return f"blocks.{block[1]}.{ours}", int(expert[1])
        if block and len(parts := self.list_fused(block[2])) > 1:
            raise UserError(f"parameter {name!r} holds {numbered(len(parts), 'weights')} of the decoder")
        found = _find_key(self.block_tensors, block[2]) if block else _find_key(self.tensors, name)
        if found is None:
            raise UserError(f"parameter {name!r} is unknown in models of type {self.model_type}")
        return (f"blocks.{block[1]}.{found}" if block else found), None

    def place(self, name: str, tensor: Tensor, config: DecoderConfig) -> list["Placed"]:
        """Returns what a tensor of a checkpoint is in the decoder; nothing for a tensor of another model.

        Raises:
            UserError: The decoder has no parameter for it.
        """
        if self.is_dropped(name):
            return []
        inner = re.fullmatch(r"(.*?\.layers\.\d+)\.(.+)", name)
        if self.stacks and inner is not None and inner[2] in _STACKED:
            number = inner[1].rpartition(".")[2]
            names = [f"blocks.{number}.feed_forward.experts.{part}" for part in _STACKED[inner[2]]]
            return [Placed(one, None, part) for one, part in zip(names, tensor.chunk(len(names), 1), strict=True)]
        if inner is not None and inner[2] in self.woven:
            start, parts = f"blocks.{inner[1].rpartition('.')[2]}.", self.list_fused(inner[2])
            return [
                Placed(start + one, None, part) for one, part in zip(parts, _unweave(name, tensor, parts), strict=True)
            ]
        if inner is not None and len(parts := self.list_fused(inner[2])) > 1:
            start = f"blocks.{inner[1].rpartition('.')[2]}."
            return [Placed(start + one, None, rows) for one, rows in _split(name, tensor, parts, config).items()]
        unpacked = None
        if self.unpack is not None and inner is not None:
            unpacked = self.unpack(inner[2], tensor, config)
        if unpacked is not None and inner is not None:
            return [Placed(*self._find(f"{inner[1]}.{one}"), part) for one, part in unpacked.items()]
        return [Placed(*self._find(name), tensor)]

    def to_theirs(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the decoder's state under the family's names; those of one tensor alone are the same or views."""
        found: dict[str, Tensor] = {}
        woven: dict[str, list[Tensor]] = {}
        for name, pattern in self.order(state).items():
            tensor = state[name]
            if self.is_woven(pattern):
                woven.setdefault(pattern, []).append(tensor)
                continue
            if "{}" in pattern:
                found |= {pattern.format(expert): part for expert, part in enumerate(tensor)}
            else:
                found[pattern] = torch.cat([found[pattern], tensor]) if pattern in found else tensor
        return found | {pattern: weave(parts) for pattern, parts in woven.items()}

    def is_woven(self, name: str) -> bool:
        """Returns whether a tensor with this name in files is one of `woven`."""
        return any(name.endswith(f".{one}") for one in self.woven)

    def order(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the family's pattern of each of the decoder's names; the parts of one tensor follow each other."""
        patterns = {name: self.their_pattern(name) for name in names}
        first: dict[str, int] = {}
        for place, pattern in enumerate(patterns.values()):
            first.setdefault(pattern, place)
        ranks = {ours: rank for rank, ours in enumerate(self.block_tensors)}
        place_of = {name: (first[one], ranks.get(name.split(".", 2)[-1], 0)) for name, one in patterns.items()}
        return {name: patterns[name] for name in sorted(patterns, key=place_of.__getitem__)}

    def to_ours(self, state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
        """Returns the family's state under the decoder's names; only stacks of experts are copies.

        Args:
            state: The tensors of a transformers checkpoint. An output weight next to tied embeddings is a copy of them
                and is skipped.
            config: The decoder's shape.

        Raises:
            UserError: The decoder has no parameter for a tensor, or an expert is missing.
        """
        found = assemble(
            (placed for name, tensor in state.items() for placed in self.place(name, tensor, config)), self
        )
        if config.has_tied_embeddings:
            found.pop(OUTPUT_WEIGHT, None)
        return found


def attention_of(config: DecoderConfig) -> AttentionConfig:
    """Returns the attention of a decoder that a family can have."""
    attention = config.parts.attention
    assert attention is not None, "`find_family` refuses decoders with other mixers"
    return attention


class Placed(NamedTuple):
    """A tensor of a checkpoint, or a part of it, in the decoder."""

    name: str
    """The decoder's name."""
    expert: int | None
    """The number of the expert within the stack of this name; None if it is the whole tensor."""
    data: Tensor


def assemble(
    placed: Iterable[Placed], family: Family, stack: Callable[[list[Tensor]], Tensor] = torch.stack
) -> dict[str, Tensor]:
    """Returns the decoder's tensors, with the weights of single experts stacked.

    Args:
        placed: All tensors, in any order.
        family: The family, for its names in messages.
        stack: Stacks tensors of one shape.

    Raises:
        UserError: An expert is missing, or experts differ in shape or dtype.
    """
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, expert, data in placed:
        if expert is None:
            found[name] = data
        else:
            experts.setdefault(name, {})[expert] = data
    for name, parts in experts.items():
        pattern = family.their_pattern(name)
        missing = next((number for number in range(max(parts) + 1) if number not in parts), None)
        if missing is not None:
            raise UserError(f"{pattern.format(missing)} is missing")
        first = parts[0]
        other = next((k for k, one in parts.items() if one.shape != first.shape or one.dtype != first.dtype), None)
        if other is not None:
            raise UserError(f"{pattern.format(other)} has another shape or type than {pattern.format(0)}")
        found[name] = stack([parts[number] for number in range(len(parts))])
    return found


def _split(name: str, tensor: Tensor, parts: Sequence[str], config: DecoderConfig) -> dict[str, Tensor]:
    """Returns the rows of a tensor that holds several weights, by the decoder's names within a block."""
    attention = attention_of(config)
    width = attention.head_width(config.dim)
    heads = {
        "attention.query.weight": attention.num_heads * width,
        "attention.key.weight": attention.num_kv_heads * width,
        "attention.value.weight": attention.num_kv_heads * width,
    }
    sizes = [heads.get(part, len(tensor) // len(parts) if tensor.ndim else 0) for part in parts]
    if tensor.ndim != 2 or sum(sizes) != len(tensor):
        raise UserError(f"{name} is {list(tensor.shape)}, which are not the rows that config.json requires")
    return dict(zip(parts, torch.split(tensor, sizes), strict=True))


def weave(parts: Sequence[Tensor]) -> Tensor:
    """Returns tensors of all experts as a family has them in a tensor that is woven."""
    turned = [part.mT if part.ndim > _NUM_VECTOR_DIMS else part for part in parts]
    return torch.stack(turned, dim=-1).flatten(-2)


def _unweave(name: str, tensor: Tensor, parts: Sequence[str]) -> list[Tensor]:
    """Returns the tensors of all experts in one that is woven, as views."""
    if tensor.ndim < _NUM_VECTOR_DIMS or tensor.shape[-1] % len(parts):
        raise UserError(f"{name} is {list(tensor.shape)}, which has no place for {numbered(len(parts), 'weights')}")
    found = (tensor[..., index :: len(parts)] for index in range(len(parts)))
    return [part.mT if part.ndim > _NUM_VECTOR_DIMS else part for part in found]


def _find_key(names: Mapping[str, str], value: str) -> str | None:
    return next((ours for ours, theirs in names.items() if theirs == value), None)
