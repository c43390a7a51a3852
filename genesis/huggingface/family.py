"""The names that a family of models has in Hugging Face's layout: its tensors, and the keys of its `config.json`.

Tensors keep their layout, because the decoder pairs rotary halves as transformers does. Tied embeddings occur once.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Final, Literal

from torch import Tensor

from genesis.errors import UserError
from genesis.model.attention import AttentionConfig
from genesis.model.decoder import DecoderConfig
from genesis.model.feed_forward import FeedForwardConfig

OUTPUT_WEIGHT: Final = "output.weight"


@dataclass(frozen=True)
class Family:
    """The tables of one `model_type`. Families differ only in these tables.

    Args:
        model_type: The value of this key in `config.json`.
        architecture: The class of transformers that loads the model.
        feed_forward: The feed-forward part of its blocks.
        tensors: The decoder's name of a parameter outside of the blocks, to the family's name.
        block_prefix: The beginning of the family's names, up to the number of a block.
        block_tensors: The decoder's name of a parameter within its block, to the family's name.
        keys: Key of `config.json` to field of `DecoderConfig`, in the order in which an export writes them.
        constants: Keys that an export also writes, with the same value for every shape.
        defaults: The value that transformers uses for a missing key; a `config.json` relies on it.
        only: Key to the values that the decoder can represent, in addition to null and a missing key.
        attention: Fields of `AttentionConfig` that differ from the defaults in all models of the family.
        free: Fields of `AttentionConfig` that `config.json` can set, in addition to those in `keys`.
        norm_placement: Where a block has its norms.
        windows: Which layers have the window where `config.json` does not list them: all; the last ones, from
            `max_window_layers` on; or those without rotary positions. None if models of the family have no window.
        has_norm_offset: Whether norms scale by 1 plus their weight.
        linear_keys: Key of `config.json` to field of `GatedDeltaConfig`, for families with linear layers.
        wrapped_type: The `model_type` of checkpoints that hold such a model beside others: its settings are in
            `text_config`, and its names begin with `model.language_model`.
        dropped: Beginnings of the names of tensors that belong to those other models.
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
    norm_placement: str = "before"
    windows: Literal["all", "last", "without_rope"] | None = None
    has_norm_offset: bool = False
    linear_keys: Mapping[str, str] = field(default_factory=dict)
    wrapped_type: str | None = None
    dropped: tuple[str, ...] = ()

    def can_hold(self, config: DecoderConfig) -> bool:
        """Whether a decoder consists of the parts of this family."""
        parts = config.parts
        attention = asdict(parts.attention)
        options = {one.name: one.default for one in fields(AttentionConfig) if one.default is not MISSING}
        options |= {**self.attention, "rope_theta": parts.attention.rope_theta}
        if parts.attention.qk_norm is not None:
            options["qk_norm_eps"] = parts.norm.eps  # config.json has one epsilon for all norms
        linear = config.linear_attention
        return (
            type(parts.feed_forward) is self.feed_forward
            and parts.norm.placement == self.norm_placement
            and parts.norm.has_offset == self.has_norm_offset
            and (linear is None or (bool(self.linear_keys) and linear.norm_eps == parts.norm.eps))
            and all(attention[name] == value for name, value in options.items() if name not in self.free)
        )

    def their_name(self, name: str) -> str:
        """Returns the family's name of the decoder's parameter `name`.

        Example:
            >>> from genesis.huggingface.llama import LLAMA
            >>> LLAMA.their_name("blocks.3.attention.query.weight")
            'model.layers.3.self_attn.q_proj.weight'
        """
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        return f"{self.block_prefix}.{block[1]}.{self.block_tensors[block[2]]}" if block else self.tensors[name]

    def is_dropped(self, name: str) -> bool:
        """Whether the tensor `name` of a checkpoint belongs to another model beside this one, such as one of images."""
        return name.startswith(self.dropped) if self.dropped else False

    def our_name(self, name: str) -> str:
        """Returns the decoder's name of the family's parameter `name`.

        Raises:
            UserError: The decoder has no such parameter.
        """
        if self.wrapped_type is not None:
            name = name.replace("model.language_model.", "model.", 1)
        block = re.fullmatch(rf"{re.escape(self.block_prefix)}\.(\d+)\.(.+)", name)
        ours = _find_key(self.block_tensors, block[2]) if block else _find_key(self.tensors, name)
        if ours is None:
            raise UserError(f"parameter {name!r} is unknown in models of type {self.model_type}")
        return f"blocks.{block[1]}.{ours}" if block else ours

    def to_theirs(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the decoder's state under the family's names; the tensors are the same, not copies."""
        return {self.their_name(name): tensor for name, tensor in state.items()}

    def to_ours(self, state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
        """Returns the family's state under the decoder's names; the tensors are the same, not copies.

        Args:
            state: The tensors of a transformers checkpoint. An output weight next to tied embeddings is a copy of them
                and is skipped.
            config: The decoder's shape.

        Raises:
            UserError: The decoder has no parameter for a tensor.
        """
        renamed = {self.our_name(name): tensor for name, tensor in state.items() if not self.is_dropped(name)}
        if config.has_tied_embeddings:
            renamed.pop(OUTPUT_WEIGHT, None)
        return renamed


def _find_key(names: Mapping[str, str], value: str) -> str | None:
    return next((ours for ours, theirs in names.items() if theirs == value), None)
