"""The keys and the tensors of a GGUF file, for each family that llama.cpp has, from its names in transformers.

The package `gguf` knows the file's name of a tensor by the name that the family has in transformers, and the keys
follow from `config.json`. What is left for the tables here is how llama.cpp differs: the order of rows that it rotates,
and the options that it does not compute, which it would ignore without a word.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFValueType,
    Keys,
    TensorNameMap,
    get_tensor_name_map,
)
from torch import Tensor

from genesis.base.errors import UserError
from genesis.huggingface.family import Family, attention_of
from genesis.huggingface.latent import latents_of
from genesis.huggingface.shape import write_shape
from genesis.model.attention import AttentionConfig
from genesis.model.decoder import DecoderConfig
from genesis.model.latent import LatentAttentionConfig
from genesis.model.recipe import DECODER_PREFIX
from genesis.model.rotary import RopeScaling

_UINT, _FLOAT, _BOOL = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.BOOL
KEYS: Final[Mapping[str, tuple[str, GGUFValueType]]] = {
    "num_hidden_layers": (Keys.LLM.BLOCK_COUNT, _UINT),
    "max_position_embeddings": (Keys.LLM.CONTEXT_LENGTH, _UINT),
    "hidden_size": (Keys.LLM.EMBEDDING_LENGTH, _UINT),
    "intermediate_size": (Keys.LLM.FEED_FORWARD_LENGTH, _UINT),
    "vocab_size": (Keys.LLM.VOCAB_SIZE, _UINT),
    "num_attention_heads": (Keys.Attention.HEAD_COUNT, _UINT),
    "num_key_value_heads": (Keys.Attention.HEAD_COUNT_KV, _UINT),
    "rms_norm_eps": (Keys.Attention.LAYERNORM_RMS_EPS, _FLOAT),
    "rope_theta": (Keys.Rope.FREQ_BASE, _FLOAT),
    "num_local_experts": (Keys.LLM.EXPERT_COUNT, _UINT),
    "num_experts": (Keys.LLM.EXPERT_COUNT, _UINT),
    "n_routed_experts": (Keys.LLM.EXPERT_COUNT, _UINT),
    "num_experts_per_tok": (Keys.LLM.EXPERT_USED_COUNT, _UINT),
    "moe_intermediate_size": (Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, _UINT),
    "shared_expert_intermediate_size": (Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, _UINT),
    "n_shared_experts": (Keys.LLM.EXPERT_SHARED_COUNT, _UINT),
    "first_k_dense_replace": (Keys.LLM.LEADING_DENSE_BLOCK_COUNT, _UINT),
    "routed_scaling_factor": (Keys.LLM.EXPERT_WEIGHTS_SCALE, _FLOAT),
    "norm_topk_prob": (Keys.LLM.EXPERT_WEIGHTS_NORM, _BOOL),
    "q_lora_rank": (Keys.Attention.Q_LORA_RANK, _UINT),
    "kv_lora_rank": (Keys.Attention.KV_LORA_RANK, _UINT),
    "full_attention_interval": (Keys.LLM.FULL_ATTENTION_INTERVAL, _UINT),
    "linear_conv_kernel_dim": (Keys.SSM.CONV_KERNEL, _UINT),
    "linear_key_head_dim": (Keys.SSM.STATE_SIZE, _UINT),
    "linear_num_key_heads": (Keys.SSM.GROUP_COUNT, _UINT),
    "linear_num_value_heads": (Keys.SSM.TIME_STEP_RANK, _UINT),
    "embedding_multiplier": (Keys.LLM.EMBEDDING_SCALE, _FLOAT),
    "residual_multiplier": (Keys.LLM.RESIDUAL_SCALE, _FLOAT),
    "attention_multiplier": (Keys.Attention.SCALE, _FLOAT),
    "logits_scaling": (Keys.LLM.LOGIT_SCALE, _FLOAT),
}
"""Key of `config.json`, to the key of the file and the type of its value."""
_TURNED: Final = (".self_attn.q_proj.", ".self_attn.k_proj.")
"""Tensors whose rows are rotated by positions."""
_RENAMED: Final = {"e_score_correction_bias": "e_score_correction.bias", ".dt_bias": ".dt_proj.bias"}
"""Ends of names in transformers that the package knows with another end."""
_WHOLE: Final = ("_norm.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight", ".ssm_conv1d.weight")
"""Ends of the names of tensors that llama.cpp has in float32 in every file."""
_IMAGE_AXES: Final = [11, 11, 10, 0]
"""How Qwen3.5 divides positions among an image's axes, which are equal for text; llama.cpp asks for it."""


@dataclass(frozen=True)
class Architecture:
    """A family in llama.cpp.

    Args:
        arch: llama.cpp's number of its model.
        turns_neighbours: Whether it rotates neighbouring rows of a head together, and not those of the two halves.
        computes: Fields of `AttentionConfig` and of `DecoderConfig` that models of the family may set or leave out, and
            that it computes.
        scalings: The kinds of scaled rotary wavelengths that it computes.
        window_every: Each layer whose number, from 1, is a multiple of this has no window, and all others have it, with
            wavelengths that are not scaled; None if no layer has a window.
        window_theta: The base of the wavelengths in layers with the window; None for that of the others.
        only: Key of `config.json` to the values that it computes.
        equal: Pairs of keys whose values must be equal.
        has_output: Whether it asks for an output matrix also where this is the embedding.
    """

    arch: MODEL_ARCH
    turns_neighbours: bool = False
    computes: frozenset[str] = frozenset()
    scalings: tuple[str, ...] = ("linear", "yarn")
    window_every: int | None = None
    window_theta: float | None = None
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    equal: Sequence[tuple[str, str]] = ()
    has_output: bool = False

    @property
    def name(self) -> str:
        """Returns the name of the model in a file."""
        return MODEL_ARCH_NAMES[self.arch]


_ALWAYS: Final = frozenset({"head_dim", "rope_scaling"})
"""Options of attention that every model has, the latter as far as `Architecture.scalings` goes."""
_AS_WIDE: Final = ("attention_width", "hidden_size")
_ALL_HEADS: Final = ("num_key_value_heads", "num_attention_heads")
_ONE_WIDTH: Final = ("linear_key_head_dim", "linear_value_head_dim")
# llama.cpp has factors of single wavelengths for this model alone.
_LLAMA: Final = Architecture(MODEL_ARCH.LLAMA, turns_neighbours=True, scalings=("llama3", "linear", "yarn"))
_YARN: Final = {"has_whole_bounds": (True,), "beta_fast": (None, 32.0), "beta_slow": (None, 1.0)}
"""Options of YaRN to the values that llama.cpp has: it does not read the bounds of a file."""
_WINDOWS: Final = frozenset({"sliding_window", "window_layers", "window_rope_theta"})
_GEMMA_62_LAYERS: Final = 62
"""Number of layers of the Gemma 3 for which llama.cpp divides the width of the model by the number of heads."""
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Architecture(MODEL_ARCH.QWEN2, equal=(_AS_WIDE,)),
    "qwen3": Architecture(MODEL_ARCH.QWEN3),
    "granite": Architecture(MODEL_ARCH.GRANITE, turns_neighbours=True, computes=frozenset({"scales", "softmax_scale"})),
    "ministral3": Architecture(
        MODEL_ARCH.MISTRAL3, turns_neighbours=True, computes=frozenset({"query_growth"}), scalings=("yarn",)
    ),
    # It rotates neighbours, as the family does.
    "ernie4_5": Architecture(MODEL_ARCH.ERNIE4_5),
    "gemma3_text": Architecture(
        MODEL_ARCH.GEMMA3,
        computes=_WINDOWS | {"scales", "softmax_scale"},
        scalings=("linear",),
        window_every=6,
        window_theta=10_000.0,
    ),
    "qwen2_moe": Architecture(
        MODEL_ARCH.QWEN2MOE,
        only={"norm_topk_prob": (False,), "mlp_only_layers": ([],), "decoder_sparse_step": (1,), "qkv_bias": (True,)},
        equal=(_AS_WIDE,),
        has_output=True,
    ),
    "qwen3_moe": Architecture(
        MODEL_ARCH.QWEN3MOE, only={"norm_topk_prob": (True,), "mlp_only_layers": ([],), "decoder_sparse_step": (1,)}
    ),
    "olmo2": Architecture(MODEL_ARCH.OLMO2, equal=(_AS_WIDE,), has_output=True),
    "olmo3": Architecture(MODEL_ARCH.OLMO2, computes=_WINDOWS, window_every=4, equal=(_AS_WIDE,), has_output=True),
    "olmoe": Architecture(
        MODEL_ARCH.OLMOE, only={"norm_topk_prob": (False,)}, equal=(_AS_WIDE, _ALL_HEADS), has_output=True
    ),
    "smollm3": Architecture(
        MODEL_ARCH.SMOLLM3,
        turns_neighbours=True,
        computes=frozenset({"no_rope_every"}),
        only={"no_rope_layer_interval": (4,)},
    ),
    "dots1": Architecture(MODEL_ARCH.DOTS1, equal=(_ALL_HEADS,), has_output=True),
    "glm4_moe": Architecture(MODEL_ARCH.GLM4_MOE, computes=frozenset({"rotary_dim"})),
    # It has one epsilon for all norms, and rotates neighbours.
    "deepseek_v3": Architecture(
        MODEL_ARCH.DEEPSEEK2,
        scalings=(),
        only={"rms_norm_eps": (1e-6,), "rope_interleave": (True,)},
        has_output=True,
    ),
    "qwen3_5_text": Architecture(MODEL_ARCH.QWEN35, computes=frozenset({"rotary_dim"}), equal=(_ONE_WIDTH,)),
    "qwen3_5_moe_text": Architecture(MODEL_ARCH.QWEN35MOE, computes=frozenset({"rotary_dim"}), equal=(_ONE_WIDTH,)),
}
"""By `model_type`: the families that llama.cpp has."""


def find_architecture(family: Family, config: DecoderConfig) -> tuple[Architecture, dict[str, Any]]:
    """Returns llama.cpp's model of a decoder, and the content of the family's `config.json`.

    Raises:
        UserError: llama.cpp has no such family, or computes an option in another way.
    """
    instead = "leave out --gguf, which gives files for transformers"
    found = ARCHITECTURES.get(family.model_type)
    if found is None:
        raise UserError(f"no GGUF can be written of {family.model_type}, only of {', '.join(ARCHITECTURES)}: {instead}")
    content = write_shape(family, config)
    content["head_dim"] = _head_width(config)
    content["attention_width"] = content["head_dim"] * content["num_attention_heads"]
    latents = latents_of(config)
    unknown = find_uncomputed(found, family, config) if latents is None else _find_uncomputed_latents(latents)
    if unknown is not None:
        raise UserError(f"llama.cpp's {found.name} would compute something else, because {unknown}: {instead}")
    for key, values in found.only.items():
        if content[key] not in values:
            wanted = " or ".join(map(repr, values))
            raise UserError(
                f"llama.cpp has models with {key} {wanted} only, and this one has {content[key]!r}: {instead}"
            )
    for key, other in found.equal:
        if content.get(key) != content.get(other):
            raise UserError(
                f"llama.cpp's {found.name} has {key} and {other} of one size, and the model {content[key]} and "
                f"{content[other]}: {instead}"
            )
    return found, content


def find_uncomputed(architecture: Architecture, family: Family, config: DecoderConfig) -> str | None:
    """Returns an option of a decoder that llama.cpp would ignore, as a text; None if there is none.

    Only options in which models of the family differ are looked at: the others belong to llama.cpp's model.
    """
    attention = attention_of(config)
    for name in sorted(family.free - _ALWAYS - architecture.computes):
        if getattr(attention, name) is not None:
            return f"attention.{name} is {getattr(attention, name)!r}"
    if config.scales is not None and "scales" not in architecture.computes:
        return f"scales is {config.scales}"
    scaling = attention.rope_scaling
    if scaling is not None and scaling.kind not in architecture.scalings:
        return f"attention.rope_scaling.kind is {scaling.kind!r}"
    for name, known in _YARN.items():
        if scaling is not None and getattr(scaling, name) not in known:
            return f"attention.rope_scaling.{name} is {getattr(scaling, name)!r}"
    if architecture.arch == MODEL_ARCH.GEMMA3:
        width = config.dim / attention.num_heads if config.num_layers == _GEMMA_62_LAYERS else _head_width(config)
        if not math.isclose(attention.softmax_scale or _head_width(config) ** -0.5, width**-0.5, rel_tol=1e-6):
            return f"attention.softmax_scale is {attention.softmax_scale}, and not 1 / sqrt({width:g})"
    return _find_other_windows(architecture, config)


def _find_uncomputed_latents(latents: LatentAttentionConfig) -> str | None:
    if latents.rope_scaling is not None:
        return f"mixers.rope_scaling.kind is {latents.rope_scaling.kind!r}, whose factors it has in another place"
    if latents.query_latent_dim is None:
        return "mixers.query_latent_dim is None, which it takes from some numbers of layers"
    return None


def _find_other_windows(architecture: Architecture, config: DecoderConfig) -> str | None:
    attention, every = attention_of(config), architecture.window_every
    if every is None:
        return None
    layers = range(config.num_layers)
    if [attention.has_window(layer) for layer in layers] != [(layer + 1) % every != 0 for layer in layers]:
        have = [layer for layer in layers if attention.has_window(layer)]
        return f"attention.window_layers is {have}, and not all layers but each {every}th"
    wanted = architecture.window_theta or attention.rope_theta
    unscaled = attention.rope_theta if attention.rope_scaling is None else None
    if (attention.window_rope_theta or unscaled) != wanted:
        return f"attention.window_rope_theta is {attention.window_rope_theta}, and not {wanted}"
    return None


def _head_width(config: DecoderConfig) -> int:
    latents = latents_of(config)
    return attention_of(config).head_width(config.dim) if latents is None else latents.head_dim


def describe_model(
    architecture: Architecture, content: Mapping[str, Any], config: DecoderConfig
) -> dict[str, tuple[Any, GGUFValueType]]:
    """Returns the keys of a file about the model, each with the value and its type."""
    keys = {key: (content[theirs], kind) for theirs, (key, kind) in KEYS.items() if content.get(theirs) is not None}
    latents = latents_of(config)
    if latents is None:
        keys |= _describe_attention(attention_of(config), content["head_dim"])
    else:
        keys[Keys.Attention.KEY_LENGTH] = (latents.head_dim, _UINT)
        keys[Keys.Attention.VALUE_LENGTH] = (latents.value_dim, _UINT)
        keys[Keys.Rope.DIMENSION_COUNT] = (latents.rotary_dim, _UINT)
    if "n_group" in content:
        keys[Keys.LLM.EXPERT_GATING_FUNC] = (int(ExpertGatingFuncType.SIGMOID), _UINT)
        if (
            content["topk_group"] < content["n_group"]
        ):  # else all experts are free to choose, and llama.cpp asks for less
            keys[Keys.LLM.EXPERT_GROUP_COUNT] = (content["n_group"], _UINT)
            keys[Keys.LLM.EXPERT_GROUP_USED_COUNT] = (content["topk_group"], _UINT)
    if "linear_value_head_dim" in content:
        width = content["linear_value_head_dim"] * content["linear_num_value_heads"]
        keys[Keys.SSM.INNER_SIZE] = (width, _UINT)
    if architecture.arch in (MODEL_ARCH.QWEN35, MODEL_ARCH.QWEN35MOE):
        keys[Keys.Rope.DIMENSION_SECTIONS] = (_IMAGE_AXES, GGUFValueType.ARRAY)
    return {key.format(arch=architecture.name): value for key, value in keys.items()}


def _describe_attention(attention: AttentionConfig, head_dim: int) -> dict[str, tuple[Any, GGUFValueType]]:
    keys: dict[str, tuple[Any, GGUFValueType]] = {
        Keys.Attention.KEY_LENGTH: (head_dim, _UINT),
        Keys.Attention.VALUE_LENGTH: (head_dim, _UINT),
        Keys.Rope.DIMENSION_COUNT: (attention.rotary_dim or head_dim, _UINT),
    }
    if attention.sliding_window is not None:
        keys[Keys.Attention.SLIDING_WINDOW] = (attention.sliding_window, _UINT)
    if attention.query_growth is not None:
        keys[Keys.Attention.TEMPERATURE_SCALE] = (attention.query_growth, _FLOAT)
    return keys if attention.rope_scaling is None else keys | _describe_scaling(attention.rope_scaling)


def _describe_scaling(scaling: RopeScaling) -> dict[str, tuple[Any, GGUFValueType]]:
    """Returns the keys about scaled wavelengths; the kind "llama3" has a tensor instead."""
    if scaling.kind == "llama3":
        return {}
    keys: dict[str, tuple[Any, GGUFValueType]] = {
        Keys.Rope.SCALING_TYPE: (scaling.kind, GGUFValueType.STRING),
        Keys.Rope.SCALING_FACTOR: (scaling.factor, _FLOAT),
    }
    if scaling.kind == "yarn":
        # llama.cpp multiplies this by YaRN's own factor.
        magnitude = scaling.magnitude / replace(scaling, attention_factor=None).magnitude
        keys |= {
            Keys.Rope.SCALING_ORIG_CTX_LEN: (scaling.original_seq_len, _UINT),
            Keys.Rope.SCALING_ATTN_FACTOR: (magnitude, _FLOAT),
        }
    return keys


# ---- tensors


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, and how it follows from one of the checkpoint.

    Args:
        ours: The checkpoint's name; None for the factors of rotary wavelengths, which follow from the shape.
        name: The name in the file.
        shape: The shape in the file, largest stride first.
        kind: The type of its values.
        rows: The row of ours that each row of the file is; None for the same.
        columns: The same of columns.
        change: How values differ: not at all, by 1, which llama.cpp adds to no weight of a norm, or by the exponential,
            which it does not take of the rates of decay.
    """

    ours: str | None
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    rows: Tensor | None = None
    columns: Tensor | None = None
    change: str = "none"

    @property
    def is_plain(self) -> bool:
        """Whether the file has the rows of the checkpoint in their order."""
        return self.rows is None and self.columns is None and self.change == "none"

    def to_file(self, tensor: Tensor) -> Tensor:
        """Returns the checkpoint's whole tensor as the file has it, before it is quantised."""
        if self.rows is not None:
            tensor = tensor[self.rows]
        if self.columns is not None:
            tensor = tensor[:, self.columns]
        if self.change != "none":
            tensor = tensor.float() + 1.0 if self.change == "offset" else -tensor.float().exp()
        return tensor.reshape(self.shape)

    def to_ours(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns the file's tensor, in float32, as the decoder has it, of the given shape."""
        if self.change != "none":
            tensor = tensor - 1.0 if self.change == "offset" else (-tensor).log()
        tensor = tensor.reshape(tuple(shape))
        if self.columns is not None:
            tensor = tensor[:, self.columns.argsort()]
        return tensor if self.rows is None else tensor[self.rows.argsort()]


def plan_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    family: Family,
    config: DecoderConfig,
    kind: GGMLQuantizationType,
    kind_of_output: GGMLQuantizationType,
) -> list[StoredTensor]:
    """Returns the tensors of a file in their order.

    Args:
        shapes: The shape of each tensor of the checkpoint that is exported, by name.
        family: The family.
        config: The decoder's shape.
        kind: The type of matrices.
        kind_of_output: The type of the matrix that gives the logits.
    """
    architecture, content = find_architecture(family, config)
    names = get_tensor_name_map(architecture.arch, config.num_layers)
    output = _find_name(names, family.tensors["output.weight"])
    found = []
    for ours, shape in shapes.items():
        theirs = family.their_pattern(ours.removeprefix(DECODER_PREFIX)).replace(".{}", "")
        name = _find_name(names, theirs)
        is_output = name == output or (config.has_tied_embeddings and ours.endswith("embedding.weight"))
        placed = _place(ours, theirs, name, shape, architecture, content, family)
        chosen = _choose_kind(placed.name, placed.shape, kind_of_output if is_output else kind)
        found.append(replace(placed, kind=chosen))
        if is_output and name != output and architecture.has_output:
            found.append(StoredTensor(ours, output, shape, chosen))
    scaling = None if latents_of(config) else attention_of(config).rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        num_factors = (attention_of(config).rotary_dim or content["head_dim"]) // 2
        found.append(StoredTensor(None, "rope_freqs.weight", (num_factors,), GGMLQuantizationType.F32))
    return found


def rotary_factors(config: DecoderConfig) -> Tensor:
    """Returns by how much the wavelengths are scaled, each of them: llama.cpp divides the frequencies by it."""
    attention = attention_of(config)
    width = attention.rotary_dim or _head_width(config)
    periods = attention.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    scaling = attention.rope_scaling
    assert scaling is not None, "the file has the factors only then"
    return (1.0 / (periods * scaling.scale(periods, attention.rope_theta, torch.zeros(1, 1).long()))).float()


def _find_name(names: TensorNameMap, theirs: str) -> str:
    for end, known in _RENAMED.items():
        if theirs.endswith(end):
            theirs = theirs.removesuffix(end) + known
    name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
    assert name is not None, f"the tables have a tensor that llama.cpp has not: {theirs}"
    return name


def _place(
    ours: str,
    theirs: str,
    name: str,
    shape: tuple[int, ...],
    architecture: Architecture,
    content: Mapping[str, Any],
    family: Family,
) -> StoredTensor:
    """Returns how a tensor is arranged in the file."""
    rows = columns = None
    change = "none"
    if architecture.turns_neighbours and any(part in theirs for part in _TURNED):
        halves = torch.arange(shape[0]).view(-1, 2, content["head_dim"] // 2)
        rows = halves.transpose(1, 2).reshape(-1)
    if ".linear_attn." in theirs:
        rows, columns = _arrange_linear(theirs.rpartition("linear_attn.")[2], shape, content)
    elif family.has_norm_offset and name.endswith("norm.weight"):
        change = "offset"
    if theirs.endswith(".A_log"):
        change = "decay"
    squeezed = tuple(size for size in shape if size != 1) if theirs.endswith("conv1d.weight") else shape
    return StoredTensor(ours, name, squeezed, GGMLQuantizationType.F32, rows=rows, columns=columns, change=change)


def _arrange_linear(
    part: str, shape: tuple[int, ...], content: Mapping[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the rows and columns of a tensor of linear attention.

    Heads of values stand by their head of keys in transformers: those of the first one, then those of the second.
    llama.cpp has the first of each, then the second of each.
    """
    num_keys, num_values = content["linear_num_key_heads"], content["linear_num_value_heads"]
    if num_keys == num_values or part == "norm.weight":
        return None, None
    width = content["linear_value_head_dim"]
    width = {"in_proj_a.weight": 1, "in_proj_b.weight": 1, "A_log": 1, "dt_bias": 1}.get(part, width)
    heads = torch.arange(num_values * width).view(num_keys, num_values // num_keys, width)
    order = heads.transpose(0, 1).reshape(-1)
    if part == "out_proj.weight":
        return None, order
    first = shape[0] - num_values * width  # queries and keys, in one tensor with the values
    return torch.cat([torch.arange(first), first + order]), None


def _choose_kind(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """Returns the type of a tensor: float32 for vectors and the like, 16 bits where rows are no whole blocks."""
    if len(shape) < 2 or name.endswith(_WHOLE) or not name.endswith(".weight"):
        return GGMLQuantizationType.F32
    return kind if shape[-1] % block_size(kind) == 0 else GGMLQuantizationType.F16


def block_size(kind: GGMLQuantizationType) -> int:
    """Returns how many values of a row are quantised together."""
    size, _ = GGML_QUANT_SIZES[kind]
    return size


def count_stored_bytes(stored: StoredTensor) -> int:
    """Returns the bytes of a tensor in the file."""
    size, num_bytes = GGML_QUANT_SIZES[stored.kind]
    return math.prod(stored.shape) // size * num_bytes
