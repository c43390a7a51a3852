"""Reads a decoder's shape from a `config.json` of any family, and writes it."""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import UserError
from genesis.huggingface.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from genesis.huggingface.directory import CONFIG_NAME, read_json, reads_directory
from genesis.huggingface.dots1 import DOTS1
from genesis.huggingface.ernie4_5 import ERNIE4_5
from genesis.huggingface.family import OUTPUT_WEIGHT, Family, TensorNames, attention_of
from genesis.huggingface.gemma3 import GEMMA3
from genesis.huggingface.glm4_moe import GLM4_MOE
from genesis.huggingface.gpt_oss import GPT_OSS
from genesis.huggingface.granite import GRANITE, GRANITE_HYBRID
from genesis.huggingface.latent import latents_of
from genesis.huggingface.linear import find_linear_differences, read_linear, read_rotary_dim, write_linear
from genesis.huggingface.llama import LLAMA
from genesis.huggingface.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from genesis.huggingface.mixtral import MIXTRAL
from genesis.huggingface.mxfp4 import is_mxfp4
from genesis.huggingface.olmo2 import OLMO2
from genesis.huggingface.olmo3 import OLMO3
from genesis.huggingface.options import (
    find_context,
    read_multipliers,
    read_no_rope_every,
    read_rope,
    read_windows,
    settle_rope,
    write_multipliers,
    write_rope,
    write_windows,
)
from genesis.huggingface.phi3 import PHI3
from genesis.huggingface.qwen2 import QWEN2
from genesis.huggingface.qwen2_moe import QWEN2_MOE
from genesis.huggingface.qwen3 import QWEN3
from genesis.huggingface.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from genesis.huggingface.qwen3_moe import OLMOE, QWEN3_MOE
from genesis.huggingface.smollm3 import SMOLLM3
from genesis.model.decoder import SHORT_FIELDS, DecoderConfig, refuse_body
from genesis.model.feed_forward import DenseConfig, FeedForwardConfig
from genesis.model.foreign.config import PREFIX, TransformersConfig
from genesis.model.latent import LatentAttentionConfig
from genesis.model.mixer import SequenceMixerConfig
from genesis.model.mixture import MixtureConfig
from genesis.model.recipe import build_decoder_config

FAMILIES: Final[tuple[Family, ...]] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    OLMO2,
    MINISTRAL,
    SMOLLM3,
    OLMO3,
    MINISTRAL3,
    ERNIE4_5,
    GRANITE,
    GRANITE_HYBRID,
    PHI3,
    GEMMA3,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    OLMOE,
    DOTS1,
    GLM4_MOE,
    GPT_OSS,
    DEEPSEEK_V3,
    DEEPSEEK_V2,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
)
_MAX_LAYERS: Final = 1_000
_CAUSAL, _SCORING = "ForCausalLM", "ForSequenceClassification"
_SCORED_AS: Final = {"gemma3_text": "Gemma3Text", "qwen3_5_text": "Qwen3_5Text"}
"""The beginnings of the names of transformers' classes for reward models, where they are not those of causal models."""
_WITHOUT_SCORES: Final = frozenset(
    {"granite", "granitemoehybrid", "ernie4_5", "glm4_moe", "dots1", "olmoe", "qwen3_5_moe_text"}
)
"""Families without a class for reward models in transformers."""
FP8_BLOCK: Final = 128
"""Rows, and columns, of a block of a weight in FP8 that has a scale."""
_DERIVED: Final = ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings")
"""Keys whose values need a conversion to the decoder's fields."""
_ROPE_OF_PARTS: Final = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})
"""Keys beside the base of the wavelengths: the rotated share of a head, and the division of positions among an image's
axes, which are equal for text."""


@reads_directory
def read_shape(directory: Path) -> tuple[Family, DecoderConfig]:
    """Returns the family of a directory in Hugging Face's layout, and the decoder's shape from its `config.json`.

    Raises:
        UserError: The file is missing, or has a setting that the decoder cannot represent; the message names the key.
    """
    path = directory / CONFIG_NAME
    content = read_json(path)
    wrapped = [one for one in FAMILIES if one.wrapped_type == content.get("model_type") is not None]
    if wrapped and isinstance(content.get("text_config"), dict):
        inner = content["text_config"].get("model_type")
        text = next((one for one in wrapped if one.model_type == inner), wrapped[0])
        content = {**content["text_config"], "model_type": text.model_type} | {
            key: content[key] for key in ("tie_word_embeddings", "quantization_config") if key in content
        }
    family = next((family for family in FAMILIES if family.model_type == content.get("model_type")), None)
    if family is None:
        raise UserError(
            f"{path}: model_type is {content.get('model_type')!r}, which the decoder cannot represent; "
            f"it must be {', '.join(family.model_type for family in FAMILIES[:-1])} or {FAMILIES[-1].model_type}; "
            "`genesis import --as transformers` imports any causal model of transformers, to train and not to serve it"
        )
    content = {**family.defaults, **content}
    if is_scoring(content):
        family = score_by(family, path)
    num_layers = content.get("num_hidden_layers")
    if type(num_layers) is not int or not 1 <= num_layers <= _MAX_LAYERS:
        raise UserError(f"{path}: num_hidden_layers is {num_layers!r}; it must be from 1 to {_MAX_LAYERS:,}")
    return _drop_extra_layers(path, content, family), _build_shape(path, content, family)


def is_scoring(content: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` is that of a classifier, as which transformers has reward models."""
    names = content.get("architectures")
    return isinstance(names, list) and len(names) == 1 and str(names[0]).endswith(_SCORING)


def score_by(family: Family, where: object) -> Family:
    """Returns the family of the same models with a score in the place of logits.

    Args:
        family: The family of the models that write text.
        where: What has such a model, for the message.

    Raises:
        UserError: transformers has no class for them.
    """
    if family.model_type in _WITHOUT_SCORES:
        raise UserError(
            f"{where}: transformers has no class for reward models of type {family.model_type}; export as --format "
            "safetensors, or start from a model of another type, such as llama or qwen3"
        )
    name = _SCORED_AS.get(family.model_type, family.architecture.removesuffix(_CAUSAL))
    return replace(family, architecture=name + _SCORING, tensors={**family.tensors, OUTPUT_WEIGHT: "score.weight"})


def _read_num_scores(path: Path, content: Mapping[str, Any]) -> int:
    """Returns the number of labels of a model for classification, which must be that of a reward model."""
    labels = content.get("id2label")
    number = content.get("num_labels", len(labels) if isinstance(labels, dict) else 2)  # transformers' default
    if number != 1:
        raise UserError(
            f"{path}: num_labels is {number!r}, and a reward model has 1: classifiers of several labels are not read"
        )
    return 1


def _drop_extra_layers(path: Path, content: dict[str, Any], family: Family) -> Family:
    """Returns the family that leaves out the layers which a checkpoint has behind the last one."""
    key = family.extra_layers
    if key is None or not content.get(key):
        return family
    number, first = content[key], content["num_hidden_layers"]
    if type(number) is not int or not 0 < number <= _MAX_LAYERS:
        raise UserError(f"{path}: {key} is {number!r}; it must be from 0 to {_MAX_LAYERS:,}")
    extra = tuple(f"{family.block_prefix}.{layer}." for layer in range(first, first + number))
    return replace(family, dropped=(*family.dropped, *extra))


def is_exported_as_another(model_type: Any, written: Family) -> bool:
    """Whether models of a type have other names of tensors than the family as which one of them is exported.

    Of a type that is unknown here, and of one that transformers opens with a model of images around the text model, all
    names are others.
    """
    family = next((family for family in FAMILIES if model_type in (family.model_type, family.wrapped_type)), None)
    if family is None or (model_type == family.wrapped_type and not _opens_as_text(family)):
        return True
    shared = family.block_tensors.keys() & written.block_tensors.keys()
    return not family.is_written or any(family.block_tensors[name] != written.block_tensors[name] for name in shared)


def _opens_as_text(family: Family) -> bool:
    """Whether transformers' class for causal models leaves out what a wrapped type has around the text model."""
    names = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return bool(names.get(family.wrapped_type) == family.architecture)


def find_family(config: DecoderConfig) -> Family:
    """Returns the family that a decoder is exported as.

    Raises:
        UserError: No family has these parts.
    """
    refuse_body(config)
    latents = latents_of(config)
    if config.mixers is not None and latents is None:
        names = dict.fromkeys(type(mixer).__name__ for mixer in config.mixers)
        raise UserError(f"no family of Hugging Face's has layers of {', '.join(names)}; export as --format safetensors")
    part = type(config.parts.feed_forward)
    written = [family for family in FAMILIES if family.is_written and (family.latent is None) == (latents is None)]
    candidates = [family for family in written if family.feed_forward is part]
    if not candidates:
        beside = "" if latents is None else f" beside a {type(latents).__name__}"
        raise UserError(f"no family of Hugging Face's has a {part.__name__}{beside}; export as --format safetensors")
    found = ((one, one.find_differences(config) + find_linear_differences(config, one)) for one in candidates)
    closest, differences = min(found, key=lambda pair: len(pair[1]))
    if differences:
        raise UserError(
            f"no family of Hugging Face's has this decoder; the closest is {closest.model_type}, but "
            f"{' and '.join(differences)}; export as --format safetensors"
        )
    return closest if config.num_scores is None else score_by(closest, "the model")


class BodyNames:
    """The `TensorNames` of a model of transformers, whose tensors have its own names behind a prefix.

    Args:
        model_type: Its type.
    """

    block_prefix = ""  # stacks of experts have no adapters there

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

    def their_name(self, name: str) -> str:
        """Returns the name without the prefix."""
        return name.removeprefix(PREFIX)

    def our_name(self, name: str) -> str:
        """Returns the name with the prefix."""
        return PREFIX + name

    def is_dropped(self, name: str) -> bool:
        """False: a body has no others beside it."""
        return False

    def unwrap(self, name: str) -> str:
        """Returns the name itself."""
        return name


def find_names(config: DecoderConfig) -> TensorNames:
    """Returns the names of a model's tensors in transformers.

    Raises:
        UserError: No family has the parts of a decoder.
    """
    if isinstance(config.body, TransformersConfig):
        return BodyNames(config.body.config["model_type"])
    return find_family(config)


def write_shape(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for transformers, plain JSON."""
    content: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    if config.num_scores is not None:
        content |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # transformers' names of one label
    feed_forward = config.parts.feed_forward
    for key, field in family.keys.items():
        content[key] = _read_field(config, field)
        if key == "rope_theta":  # transformers 4 reads this key; transformers 5 reads the other one
            content |= write_rope(config, family)
    mixture: dict[str, Any] = {}
    if family.mixture is not None and isinstance(feed_forward, MixtureConfig):
        mixture = family.mixture.write(feed_forward, config.num_layers)
    latents = latents_of(config)
    if family.latent is not None and latents is not None:
        rope = {"rope_theta": latents.rope_theta} | write_rope(config, family)
        return {**content, **mixture, **family.latent.write(latents), **rope, **family.constants}
    attention = attention_of(config)
    content |= write_windows(attention, family, config.num_layers) | write_multipliers(config, family)
    content |= {key: getattr(attention, name) == value for key, (name, value) in family.switches.items()}
    if family.linear_keys:
        content |= write_linear(config, family)
    if "rotary_dim" in family.free:
        head_dim = attention.head_width(config.dim)
        share = (attention.rotary_dim or head_dim) / head_dim
        content["rope_parameters"] = {**content["rope_parameters"], "partial_rotary_factor": share}
        content["partial_rotary_factor"] = share  # for programs that read the older key, or else take the default
    content |= mixture
    if "no_rope_every" in family.free:
        every = attention.no_rope_every or config.num_layers + 1
        content["no_rope_layer_interval"] = every
        content["no_rope_layers"] = [int((layer + 1) % every != 0) for layer in range(config.num_layers)]
    return {**content, **family.constants}


def _read_field(config: DecoderConfig, field: str) -> Any:
    if field == "head_dim":  # a family writes it where ours follows from the model's width
        return attention_of(config).head_width(config.dim)
    part, name = SHORT_FIELDS.get(field, (None, field))
    return getattr(config if part is None else getattr(config.parts, part), name)


def _build_shape(path: Path, content: dict[str, Any], family: Family) -> DecoderConfig:
    _check_only(path, content, family)
    plain = {key: field for key, field in family.keys.items() if key not in _DERIVED}
    null = [key for key in (*plain, "rms_norm_eps") if content.get(key) is None]
    if null:
        raise UserError(f"{path}: {null[0]} is null; give its value")
    shape = {field: content[key] for key, field in plain.items()}
    shape["has_tied_embeddings"] = bool(content["tie_word_embeddings"])
    if is_scoring(content):
        shape["num_scores"] = _read_num_scores(path, content)
    eps = content["rms_norm_eps"]
    if family.latent is not None:
        rope = read_rope(path, content, family)
        shape["max_seq_len"] = find_context(rope, content)
        shape["mixers"] = [name_part(LatentAttentionConfig, family.latent.read(path, content, rope))]
        return build_decoder_config(_add_parts(path, content, family, shape), where=str(path))
    num_heads = shape.pop("num_heads")
    is_partial = "rotary_dim" in family.free
    rope = read_rope(path, content, family, _ROPE_OF_PARTS if is_partial else frozenset())
    shape["max_seq_len"] = find_context(rope, content)
    attention = {"num_heads": num_heads, "num_kv_heads": content.get("num_key_value_heads") or num_heads}
    no_rope_every = read_no_rope_every(path, content) if "no_rope_every" in family.free else None
    head_dim = content.get("head_dim") or _divide(shape["dim"], num_heads)
    rotary_dim = read_rotary_dim(path, content, head_dim) if is_partial and isinstance(head_dim, int) else None
    linear: dict[str, Any] = {}
    if family.linear_keys:
        linear = read_linear(path, content, family)
        content = {**content, "layer_types": None}
    sliding_window, window_layers = read_windows(
        *(path, content, family, no_rope_every), keeps_long="window_rope_theta" in rope
    )
    rope = settle_rope(rope, sliding_window, window_layers)
    attention["rope_theta"] = rope.pop("rope_theta")
    factors = read_multipliers(path, content, family, head_dim)
    shape["scales"] = factors["scales"]
    options = {
        **family.attention,
        **_read_switches(path, content, family),
        "head_dim": _read_head_dim(content, shape["dim"], num_heads),
        **rope,
        **factors["attention"],
        "sliding_window": sliding_window,
        "window_layers": window_layers,
        "no_rope_every": no_rope_every,
        "rotary_dim": rotary_dim,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if "qk_norm" in options:
        options["qk_norm_eps"] = eps
    if options:
        shape["attention"] = {**attention, **options}
    else:
        shape |= attention
    return build_decoder_config(_add_parts(path, content, family, shape | linear), where=str(path))


def _add_parts(path: Path, content: dict[str, Any], family: Family, shape: dict[str, Any]) -> dict[str, Any]:
    """Returns the shape with its norms and its feed-forward part."""
    eps = content["rms_norm_eps"]
    if family.norm_placement == "before" and not family.has_norm_offset:
        shape["norm_eps"] = eps
    else:
        shape["norm"] = {"eps": eps, "placement": family.norm_placement, "has_offset": family.has_norm_offset}
    if family.mixture is not None:
        shape["feed_forward"] = name_part(MixtureConfig, family.mixture.read(path, content))
    elif family.activation != "silu":
        dense = {"ffn_dim": shape.pop("ffn_dim"), "activation": family.activation}
        shape["feed_forward"] = name_part(DenseConfig, dense)
    return shape


def name_part(part: type[FeedForwardConfig | SequenceMixerConfig], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part that is chosen by its class as a recipe has it."""
    return {"class_path": f"{part.__module__}.{part.__qualname__}", "init_args": dict(options)}


def _check_only(path: Path, content: dict[str, Any], family: Family) -> None:
    quantisation = content.get("quantization_config")
    is_read = is_in_fp8_blocks(quantisation) or (family.reads_mxfp4 and is_mxfp4(content))
    if quantisation is not None and not is_read:
        raise UserError(
            f"{path}: quantization_config is {quantisation!r}: quantised weights are not supported; use the model in "
            "bfloat16, or convert this one with transformers (from_pretrained, dequantize(), save_pretrained)"
        )
    for key, allowed in family.only.items():
        value = content.get(key)
        if value is not None and value not in allowed:
            wanted = " or ".join(map(repr, allowed)) or "null"
            raise UserError(f"{path}: {key} is {value!r}, which the decoder cannot represent; it must be {wanted}")


def is_in_fp8_blocks(quantisation: Any) -> bool:
    """Returns whether a `quantization_config` describes weights in FP8 with a scale for each block of 128 times 128."""
    return (
        isinstance(quantisation, dict)
        and quantisation.get("quant_method") == "fp8"
        and quantisation.get("fmt") in (None, "e4m3")
        and quantisation.get("weight_block_size") == [FP8_BLOCK, FP8_BLOCK]
    )


def _read_switches(path: Path, content: dict[str, Any], family: Family) -> dict[str, Any]:
    for key in family.switches:
        if type(content[key]) is not bool:
            raise UserError(f"{path}: {key} is {content[key]!r}; it must be true or false")
    return {name: value for key, (name, value) in family.switches.items() if content[key]}


def _read_head_dim(content: dict[str, Any], dim: Any, num_heads: Any) -> Any:
    """Returns the width of a head if it differs from the model's width divided by the number of heads."""
    head_dim = content.get("head_dim")
    return None if head_dim == _divide(dim, num_heads) else head_dim


def _divide(dim: Any, num_heads: Any) -> int | None:
    if isinstance(dim, int) and isinstance(num_heads, int) and num_heads > 0:
        return dim // num_heads
    return None
