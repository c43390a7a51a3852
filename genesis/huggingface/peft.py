"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, written and read strictly.

`genesis export` identifies the base by a fingerprint of its tensors, in the header of the safetensors file. Other
programs ignore the fingerprint; without it, an adapter for another base of the same shape cannot be recognised.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Set
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor

from genesis.base.errors import UserError
from genesis.huggingface.directory import read_json, reads_directory
from genesis.huggingface.family import OUTPUT_WEIGHT, Family, TensorNames
from genesis.huggingface.weights import open_tensors
from genesis.model.adapter import EXTRA_TENSORS, MAGNITUDE, AdapterConfig
from genesis.model.expert_adapter import ADAPTER_SUFFIX
from genesis.model.experts import DOWN, GATE_UP
from genesis_callbacks.checkpoint import Manifest

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
FINGERPRINT: Final = "genesis_base"
"""The key of the base's fingerprint in the header of the safetensors file."""
BASE_FORMAT: Final = "genesis_base_format"
"""The key of how the base holds its weights: `nf4`, or `plain`."""
_PREFIX: Final = "base_model.model."
_SUFFIXES: Final = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
_EXPERTS: Final = "mlp.experts"
"""The module of transformers that has a block's experts, in every family: its stacks are parameters of it."""
_STACK_PARAMETERS: Final = {GATE_UP: "gate_up_proj", DOWN: "down_proj"}
_NESTED: Final = "base_layer"
"""PEFT wraps the module once for each adapted parameter, in their order, so that the outer wrapper has the last."""
_TAKEN_AS_EXPERTS: Final = dict.fromkeys(
    ("qwen2_moe", "qwen3_moe", "dots1", "glm4_moe", "deepseek_v2", "deepseek_v3"),
    frozenset({"gate_proj", "up_proj", "down_proj"}),
)
"""The names of linear layers that PEFT takes for those of single experts, as earlier versions of transformers had them,
wherever they are in models of these types."""
_NUM_NAMED: Final = 3
_ALPHA_SHOWN: Final = 40
_HASH_SHOWN: Final = 16
_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "layer_replication": (None,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "trainable_token_indices": (None,),
    "lora_bias": (False,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    # Other initialisations (pissa, olora, corda, loftq, ...) change the base's weights, too.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
"""PEFT options with the only values that the decoder's adapters support."""


def fingerprint(manifest: Manifest, prefix: str) -> str:
    """Returns a hash of a base's tensors, which depends only on their values, not on when the base was imported.

    Args:
        manifest: The base's manifest.
        prefix: The prefix of the decoder's tensor names in the manifest.
    """
    records = [
        (name.removeprefix(prefix), record.dtype, list(record.shape), record.digest)
        for name, record in sorted(manifest.tensors.items())
        if name.startswith(prefix)
    ]
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def name_adapter_tensor(name: str, family: TensorNames, *, is_nested: bool = False) -> str:
    """Returns PEFT's name of an adapter's tensor, or of another tensor that is trained together with adapters.

    Args:
        name: The decoder's name.
        family: The base's family.
        is_nested: Whether it belongs to an adapter of experts that have another one on later weights.

    Example:
        >>> from genesis.huggingface.llama import LLAMA
        >>> name_adapter_tensor("blocks.3.attention.query.lora_A", LLAMA)
        'base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight'
        >>> name_adapter_tensor("blocks.3.feed_forward.experts.gate_up_adapter.lora_A", LLAMA, is_nested=True)
        'base_model.model.model.layers.3.mlp.experts.base_layer.lora_A.weight'
    """
    layer, _, tensor = name.rpartition(".")
    if tensor not in _SUFFIXES:
        return _PREFIX + family.their_name(name)
    if layer.endswith(ADAPTER_SUFFIX):
        nested = f".{_NESTED}" if is_nested else ""
        return f"{_PREFIX}{family.block_prefix}.{layer.split('.')[1]}.{_EXPERTS}{nested}.{_SUFFIXES[tensor]}"
    return f"{_PREFIX}{_name_module(layer, family)}.{_SUFFIXES[tensor]}"


def name_adapter_tensors_of_peft(names: Collection[str], family: TensorNames) -> dict[str, str]:
    """Returns PEFT's name of each tensor of a model's adapters, and of those that are trained together with them.

    Args:
        names: The decoder's names, all of them.
        family: The base's family.
    """
    inner, outer = f".{GATE_UP}{ADAPTER_SUFFIX}.", f".{DOWN}{ADAPTER_SUFFIX}."
    return {
        name: name_adapter_tensor(name, family, is_nested=inner in name and name.replace(inner, outer) in names)
        for name in names
    }


def to_peft(name: str, tensor: Tensor, family: TensorNames) -> Tensor:
    """Returns an adapter's tensor as PEFT stores it.

    Those of experts are matrices there: the expert is the first index of the rows of A, and the last of the columns of
    B, whose rows are in the order of the base's outputs.

    Args:
        name: The decoder's name.
        tensor: The decoder's tensor.
        family: The base's family.
    """
    if not _is_of_experts(name):
        return tensor
    if name.endswith("lora_A"):
        return tensor.flatten(0, 1)
    rows = tensor.permute(1, 2, 0).flatten(1)
    return rows.reshape(2, -1, rows.shape[1]).transpose(0, 1).flatten(0, 1) if _is_woven(name, family) else rows


def _is_woven(name: str, family: TensorNames) -> bool:
    """Returns whether the outputs of `gate` and `up` take turns in a family's files."""
    is_of_both = f".{GATE_UP}{ADAPTER_SUFFIX}." in name
    return is_of_both and isinstance(family, Family) and f"{_EXPERTS}.{_STACK_PARAMETERS[GATE_UP]}" in family.woven


def _from_peft(name: str, tensor: Tensor, shape: tuple[int, ...], family: TensorNames) -> Tensor:
    """Returns PEFT's tensor in the decoder's shape."""
    if not _is_of_experts(name):
        return tensor
    if name.endswith("lora_A"):
        return tensor.view(shape)
    num_experts, width, rank = shape
    if _is_woven(name, family):
        tensor = tensor.reshape(-1, 2, tensor.shape[1]).transpose(0, 1).flatten(0, 1)
    return tensor.view(width, rank, num_experts).permute(2, 0, 1).contiguous()


def _is_of_experts(name: str) -> bool:
    return name.rpartition(".")[0].endswith(ADAPTER_SUFFIX)


def name_tied_output(family: TensorNames) -> str:
    """Returns PEFT's name of the output weight, which PEFT stores in addition to a trained embedding tied to it."""
    return _PREFIX + family.their_name(OUTPUT_WEIGHT)


def _name_module(layer: str, family: TensorNames) -> str:
    return family.their_name(f"{layer}.weight").removesuffix(".weight")


def build_adapter_config(
    config: AdapterConfig,
    family: TensorNames,
    *,
    layers: Collection[str],
    linears: Collection[str],
    experts: Collection[str] = (),
    stacks: Collection[str] = (),
    is_tied: bool,
    base_name: str | None,
) -> dict[str, Any]:
    """Returns the content of `adapter_config.json`.

    Args:
        config: The adapters.
        family: The base's family.
        layers: The names of the layers with adapters.
        linears: The names of all linear layers in the blocks.
        experts: The names of the stacks of experts with adapters.
        stacks: The names of all stacks of experts.
        is_tied: Whether the output weight is the embedding.
        base_name: Name or path under which PEFT finds the base; None for no name.

    Raises:
        UserError: PEFT would put adapters on other weights than the decoder has them.
    """
    fused = _find_fused(layers, family)
    if fused is not None:
        raise UserError(
            f"models of type {family.model_type} hold {fused} with others in one tensor, which has one adapter in "
            "PEFT: export the whole model with --merge"
        )
    leaves = {_leaf(layer, family) for layer in layers}
    is_regular = all((_leaf(layer, family) in leaves) == (layer in layers) for layer in linears)
    taken = sorted(leaves & _TAKEN_AS_EXPERTS.get(family.model_type, frozenset()))
    if taken:
        raise UserError(
            f"PEFT takes adapters on {', '.join(taken)} of a model of type {family.model_type} as those of its "
            "experts, and has no form for those of shared experts and dense layers: export the whole model with --merge"
        )
    targets = _name_parameters(experts, stacks, family)
    extras = [_name_module(EXTRA_TENSORS[extra].removesuffix(".weight"), family) for extra in config.also_train]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": config.rank,
        "lora_alpha": config.alpha if config.alpha % 1 else int(config.alpha),
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "target_modules": sorted(leaves if is_regular else {_name_module(layer, family) for layer in layers}),
        **({"target_parameters": targets} if targets else {}),
        "modules_to_save": [extra.rpartition(".")[2] for extra in extras] or None,
        # PEFT copies a module that is trained as a whole, and would use the base's weights for a tied output weight.
        **({"ensure_weight_tying": True} if extras and is_tied else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _find_fused(layers: Iterable[str], family: TensorNames) -> str | None:
    """Returns a layer that the files of a family hold in one tensor with others; None if there is none."""
    if not isinstance(family, Family):  # models of transformers are trained as they are
        return None
    names = {layer: family.block_tensors[f"{layer.split('.', 2)[2]}.weight"] for layer in layers}
    return next((layer for layer, name in names.items() if len(family.list_fused(name)) > 1), None)


def _leaf(layer: str, family: TensorNames) -> str:
    return _name_module(layer, family).rpartition(".")[2]


def _name_parameters(experts: Collection[str], stacks: Collection[str], family: TensorNames) -> list[str]:
    """Returns PEFT's targets for stacks of experts: one for all blocks where all have the adapter."""
    found = set()
    for target, parameter in _STACK_PARAMETERS.items():
        chosen = [stack for stack in experts if stack.endswith(f".{target}")]
        if chosen and len(chosen) == sum(stack.endswith(f".{target}") for stack in stacks):
            found.add(f"{_EXPERTS}.{parameter}")
        else:
            found |= {_name_parameter(stack, family) for stack in chosen}
    return sorted(found)


def _name_parameter(stack: str, family: TensorNames) -> str:
    """Returns PEFT's name of a stack of experts, such as `blocks.0.feed_forward.experts.down`."""
    number, target = stack.split(".")[1], stack.rpartition(".")[2]
    return f"{family.block_prefix}.{number}.{_EXPERTS}.{_STACK_PARAMETERS[target]}"


def is_adapter_export(directory: Path) -> bool:
    """Returns whether a directory holds adapters in PEFT's format."""
    return (directory / CONFIG_NAME).is_file()


@reads_directory
def read_peft_config(directory: Path, family: TensorNames) -> AdapterConfig:
    """Returns the options of adapters in PEFT's format; the layers are those that the file of weights has.

    Args:
        directory: The directory of the two files.
        family: The base's family.

    Raises:
        UserError: The files cannot be read, or have options or layers that the decoder's adapters do not have.
    """
    if not is_adapter_export(directory):
        raise UserError(f"{directory} has no {CONFIG_NAME}: give a directory with adapters in PEFT's format")
    path, content = directory / WEIGHTS_NAME, read_json(directory / CONFIG_NAME)
    options = _read_options(directory / CONFIG_NAME, content)
    try:
        with open_tensors(path) as file:
            names = list(_name_of_text_model(path, file.keys(), family))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    suffix = f".{_SUFFIXES['lora_A']}"
    stacks = _find_stacks(names, family, content)
    names = [name for name in names if _match_experts(name, family) is None]
    try:
        ours = {name: family.our_name(_drop_suffix(name.removeprefix(_PREFIX))) for name in names}
    except UserError as error:
        raise UserError(f"{path}: {error}; give adapters for this base") from None
    layers = sorted(one.removesuffix(".weight") for name, one in ours.items() if name.endswith(suffix))
    extras = {extra for extra, name in EXTRA_TENSORS.items() if name in ours.values()}
    if content.get("ensure_weight_tying"):
        extras.discard("head")  # PEFT's copy of the embedding
    given = {"include": tuple(layers), "include_experts": tuple(sorted(stacks)), "also_train": tuple(sorted(extras))}
    return AdapterConfig(**options | given)


def _name_of_text_model(path: Path, names: Iterable[str], family: TensorNames) -> dict[str, str]:
    """Returns the names of a file's tensors by those that they have beside the text model alone.

    Adapters trained beside a model that also reads images have longer names. Those of its vision tower are left out, as
    an import leaves out the tower.

    Raises:
        UserError: Two tensors have the same name beside the text model.
    """
    found: dict[str, str] = {}
    for name in names:
        inner = name.removeprefix(_PREFIX)
        if family.is_dropped(inner):
            continue
        own = name.removesuffix(inner) + family.unwrap(inner)
        if own in found:
            raise UserError(f"{path}: {name} and {found[own]} are one tensor of the text model: export them again")
        found[own] = name
    return found


def _find_stacks(names: Iterable[str], family: TensorNames, content: Mapping[str, Any]) -> set[str]:
    """Returns the decoder's names of the stacks of experts that have adapters in a file."""
    found: dict[str, set[bool]] = {}
    for match in filter(None, (_match_experts(name, family) for name in names)):
        found.setdefault(match[1], set()).add(match[2] is not None)
    # In a model that also reads images, a target may begin within the name of the text model.
    listed = {re.sub(r"^(model\.)?language_model\.", "", one) for one in content.get("target_parameters") or []}
    stacks = set()
    for number, wrappers in found.items():
        # Only the config has the name of a single wrapper's parameter.
        targets = set(_STACK_PARAMETERS) if True in wrappers else _find_targets(number, family, listed)
        stacks |= {f"blocks.{number}.feed_forward.experts.{target}" for target in targets}
    return stacks


def _match_experts(name: str, family: TensorNames) -> re.Match[str] | None:
    """Returns the block and the wrapper of a tensor of an adapter of experts."""
    start = re.escape(f"{_PREFIX}{family.block_prefix}.")
    return re.fullmatch(rf"{start}(\d{{1,6}})\.{re.escape(_EXPERTS)}\.({_NESTED}\.)?lora_[AB]\.weight", name)


def _find_targets(number: str, family: TensorNames, listed: Set[str]) -> set[str]:
    found = set()
    for target in _STACK_PARAMETERS:
        parts = _name_parameter(f"blocks.{number}.experts.{target}", family).split(".")
        if not listed.isdisjoint(".".join(parts[start:]) for start in range(len(parts))):
            found.add(target)
    return found


def _drop_suffix(name: str) -> str:
    """Returns the name of the weight beside which a tensor of an adapter lies; any other name is returned unchanged."""
    found = next((suffix for suffix in _SUFFIXES.values() if name.endswith(f".{suffix}")), None)
    return name if found is None else f"{name.removesuffix(found)}weight"


@reads_directory
def read_adapters(
    directory: Path,
    config: AdapterConfig,
    family: TensorNames,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    base_fingerprint: str,
) -> dict[str, Tensor]:
    """Returns the tensors of adapters in PEFT's format as float32, under the decoder's names.

    Args:
        directory: The directory of the two files.
        config: The adapters that the recipe asks for; those in the directory must be the same.
        family: The base's family.
        shapes: The name and shape of each trained tensor.
        base_fingerprint: The fingerprint of this run's base.

    Raises:
        UserError: The files cannot be read, or contain different adapters, or adapters for another base.
    """
    if not is_adapter_export(directory):
        raise UserError(f"{directory} has no {CONFIG_NAME}: give a directory in PEFT's format for model.adapter.start")
    _compare_options(directory / CONFIG_NAME, read_json(directory / CONFIG_NAME), config)
    path = directory / WEIGHTS_NAME
    try:
        with open_tensors(path) as file:
            metadata = file.metadata() or {}
            names = _name_of_text_model(path, file.keys(), family)
            tensors = {own: file.get_tensor(name) for own, name in names.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    made_for = metadata.get(FINGERPRINT)
    if made_for is not None and made_for != base_fingerprint:
        kind = {"nf4": " (in NF4)", "plain": " (not in NF4)"}.get(metadata.get(BASE_FORMAT, ""), "")
        raise UserError(
            f"the adapters in {directory} were trained beside a base with fingerprint {made_for[:_HASH_SHOWN]}{kind}, "
            f"and this base has {base_fingerprint[:_HASH_SHOWN]}: give the base that they belong to"
        )
    theirs = {theirs: ours for ours, theirs in name_adapter_tensors_of_peft(shapes.keys(), family).items()}
    embedding, output = name_adapter_tensor(EXTRA_TENSORS["embedding"], family), name_tied_output(family)
    if embedding in theirs and output not in theirs:
        _drop_tied_copy(directory, tensors, embedding, output)
    _compare_names(directory, theirs.keys(), tensors.keys())
    found = {}
    for name, ours in theirs.items():
        tensor = tensors[name]
        wanted = tuple(to_peft(ours, torch.empty(shapes[ours], device="meta"), family).shape)
        if tuple(tensor.shape) != wanted and _is_of_experts(ours):
            raise UserError(
                f"the adapters in {directory} are for other experts: {name} is {list(tensor.shape)} there, and "
                f"{list(wanted)} for the {shapes[ours][0]} experts of this base with rank {config.rank}; give adapters "
                "for this base"
            )
        if tuple(tensor.shape) != wanted:
            raise UserError(
                f"the adapters in {directory} are for another base: {name} is {list(tensor.shape)} there, and "
                f"{list(wanted)} for this base"
            )
        if not tensor.is_floating_point():
            raise UserError(f"{path}: {name} is {tensor.dtype}, not floating point: export the adapters again")
        # The values that training gets are checked: float64 may overflow, and torch cannot check all 8-bit types.
        found[ours] = _from_peft(ours, tensor.to(torch.float32), shapes[ours], family)
        if not bool(found[ours].isfinite().all()):
            raise UserError(f"{path}: {name} has values that are no finite numbers: export the adapters again")
    return found


def _drop_tied_copy(directory: Path, tensors: dict[str, Tensor], embedding: str, output: str) -> None:
    """Removes the copy of the embedding that PEFT keeps for a tied output weight."""
    copy = tensors.pop(output, None)
    if copy is not None and embedding in tensors and not torch.equal(copy, tensors[embedding]):
        raise UserError(
            f"the adapters in {directory} are for another base: {output} differs from the embedding, to which this "
            "base ties it"
        )


def _read_options(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `AdapterConfig` other than layers, after checking that no other option changes adapters."""
    for key, allowed in _PLAIN.items():
        value = content.get(key, allowed[0])
        if value not in allowed:
            raise UserError(f"{path}: {key} is {value!r}, and the decoder's adapters have {allowed[0]!r} only")
    targets = content.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise UserError(f"{path}: target_parameters is {str(targets)[:_ALPHA_SHOWN]!r}: it must be a list of texts")
    rank, alpha = content.get("r", 8), content.get("lora_alpha", 8)  # the defaults of PEFT
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        raise UserError(f"{path}: lora_alpha is {str(alpha)[:_ALPHA_SHOWN]!r}: it must be a finite number")
    if type(rank) is not int:
        raise UserError(f"{path}: r is {str(rank)[:_ALPHA_SHOWN]!r}: it must be a whole number")
    return {
        "rank": rank,
        "alpha": float(alpha),
        "rslora": content.get("use_rslora", False),
        "dora": content.get("use_dora", False),
    }


def _compare_options(path: Path, content: Mapping[str, Any], config: AdapterConfig) -> None:
    for name, value in _read_options(path, content).items():
        wanted = getattr(config, name)
        if value != wanted and not (name == "alpha" and math.isclose(value, wanted)):
            raise UserError(
                f"model.adapter.{name} is {wanted!r}, and the adapters in {path.parent} have {value!r}: set it to that"
            )


def _compare_names(directory: Path, wanted: Collection[str], found: Collection[str]) -> None:
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unknown:
        lists = [
            f"{what} {', '.join(names[:_NUM_NAMED])}{' ...' if len(names) > _NUM_NAMED else ''}"
            for what, names in (("lack", missing), ("have also", unknown))
            if names
        ]
        raise UserError(
            f"the adapters in {directory} are on other layers than model.adapter asks for: they {' and '.join(lists)}; "
            "change include, exclude or also_train, or give adapters for this base"
        )
