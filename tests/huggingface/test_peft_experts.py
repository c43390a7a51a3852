"""PEFT's adapters on the stacked experts of transformers' models: loaded with equal logits and gradients."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from genesis.base.errors import UserError
from genesis.huggingface.dots1 import DOTS1
from genesis.huggingface.family import Family
from genesis.huggingface.mixtral import MIXTRAL
from genesis.huggingface.peft import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    build_adapter_config,
    name_adapter_tensors_of_peft,
    read_adapters,
    read_peft_config,
    to_peft,
)
from genesis.huggingface.qwen3_5 import QWEN3_5_MOE
from genesis.huggingface.qwen3_moe import QWEN3_MOE
from genesis.huggingface.shape import read_shape
from genesis.huggingface.weights import read_weights
from genesis.model.adapter import (
    AdapterConfig,
    attach_adapters,
    fill_trained,
    find_linears,
    find_stacks,
    select_experts,
    select_layers,
)
from genesis.model.decoder import Decoder

# PEFT asks transformers for a property that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
SHAPE: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 20}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
LATENT = {
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "first_k_dense_replace": 0, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": EXPERTS | {"head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 3},
    "dots1": {
        "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 0, "norm_topk_prob": True, "sliding_window": None,
    },
    "glm4_moe": {
        "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 0, "use_qk_norm": True, "attention_bias": True,
    },
    "gpt_oss": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8, "swiglu_limit": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "deepseek_v3": LATENT | {"norm_topk_prob": True, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0},
    "deepseek_v2": LATENT,
    "qwen3_next": LINEAR | SHARED,
    "qwen3_5_moe_text": LINEAR | SHARED,
}  # fmt: skip
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
TARGETS: dict[str, list[str]] = {
    "both": [GATE_UP, DOWN],
    "gate_up": [GATE_UP],
    "down": [DOWN],
    "one block": [f"model.layers.1.{DOWN}", f"model.layers.0.{GATE_UP}", f"model.layers.1.{GATE_UP}"],
}
IDS = torch.randint(90, (2, 24), generator=torch.Generator().manual_seed(3))


def write_theirs(directory: Path, model_type: str, targets: list[str], **options: Any) -> Any:
    """Returns PEFT's model, whose base and adapters lie in two directories."""
    torch.manual_seed(0)
    shape: Any = AutoConfig.for_model(model_type, **(SHAPE | FAMILIES[model_type]))
    return adapt_theirs(directory, AutoModelForCausalLM.from_config(shape).eval(), targets, **options)


def adapt_theirs(directory: Path, model: Any, targets: list[str], **options: Any) -> Any:
    model.save_pretrained(directory / "base")
    given = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], **options}
    config: Any = LoraConfig(task_type="CAUSAL_LM", target_parameters=targets, **given)
    theirs: Any = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2)
    theirs.save_pretrained(directory / "adapter")
    return theirs


def load_ours(directory: Path, **changes: Any) -> tuple[Decoder, Family, AdapterConfig]:
    family, shape = read_shape(directory / "base")
    config = AdapterConfig(**{**vars(read_peft_config(directory / "adapter", family)), **changes})
    decoder = Decoder(shape)
    decoder.load_state_dict(read_weights(directory / "base", shape, family))
    attach_adapters(decoder, config)
    shapes = {name: tuple(one.shape) for name, one in decoder.named_parameters() if one.requires_grad}
    fill_trained(
        decoder, read_adapters(directory / "adapter", config, family, shapes=shapes, base_fingerprint="of this base")
    )
    return decoder.eval(), family, config


def list_cases() -> list[Any]:
    cases = [(family, "both") for family in FAMILIES] + [("qwen3_moe", targets) for targets in TARGETS]
    quick = ("mixtral", "both")
    return [pytest.param(*case, marks=[] if case == quick else [pytest.mark.slow]) for case in dict.fromkeys(cases)]


@pytest.mark.parametrize(("model_type", "targets"), list_cases())
def test_logits_and_gradients_equal_those_of_peft_for_every_target(
    model_type: str, targets: str, tmp_path: Path
) -> None:
    theirs = write_theirs(tmp_path, model_type, TARGETS[targets])
    ours, family, config = load_ours(tmp_path)
    logits, expected = ours(IDS), theirs(input_ids=IDS).logits
    largest = float(expected.detach().abs().max())
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * largest)
    with torch.no_grad(), theirs.disable_adapter():
        assert float((theirs(input_ids=IDS).logits - expected).abs().max()) > 0.01 * largest
    for out in (logits, expected):
        out.log_softmax(-1).square().mean().backward()
    wanted: dict[str, Tensor] = {
        name.replace(".default.", "."): one.grad for name, one in theirs.named_parameters() if one.requires_grad
    }
    found = {name: one for name, one in ours.named_parameters() if one.requires_grad}
    names = name_adapter_tensors_of_peft(found.keys(), family)
    assert set(names.values()) == wanted.keys()
    assert any("experts" in name for name in names.values())
    for name, parameter in found.items():
        gradient = wanted[names[name]]
        assert gradient.abs().max() > 1e-5, name
        atol = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(
            to_peft(name, parameter.grad, family), gradient, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
    _check_config(tmp_path, ours, family, config)


def _check_config(directory: Path, ours: Decoder, family: Family, config: AdapterConfig) -> None:
    """Compares our description of the adapters with PEFT's: the same targets in the same words, where it has them."""
    with torch.device("meta"):
        plain = Decoder(ours.config)
    content = build_adapter_config(
        config,
        family,
        layers=select_layers(plain, config),
        linears=find_linears(plain),
        experts=select_experts(plain, config),
        stacks=find_stacks(plain),
        is_tied=ours.config.has_tied_embeddings,
        base_name=None,
    )
    written = json.loads((directory / "adapter" / CONFIG_NAME).read_text())
    listed = set(written["target_parameters"])
    if all(f"model.layers.{block}.{GATE_UP}" in listed for block in (0, 1)):  # one word for all blocks
        listed = {GATE_UP} | {name for name in listed if DOWN in name}
    assert set(content["target_parameters"]) == listed
    for key in ("r", "lora_alpha", "use_rslora"):
        assert content[key] == written[key]


WRAPPED = "model.language_model.layers"


def build_model_that_reads_images() -> Any:
    text = SHAPE | FAMILIES["qwen3_5_moe_text"]
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_position_embeddings": 16,
        "out_hidden_size": 32,
    }  # fmt: skip
    tokens = {"image_token_id": 85, "video_token_id": 86, "vision_start_token_id": 87, "vision_end_token_id": 88}
    torch.manual_seed(0)
    shape = Qwen3_5MoeConfig(text_config=text, vision_config=vision, **tokens)
    return Qwen3_5MoeForConditionalGeneration(shape).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "targets",
    [[GATE_UP, DOWN], [f"{WRAPPED}.1.{DOWN}"], [f"language_model.layers.0.{GATE_UP}"]],
    ids=["both", "one stack by its whole name", "one stack by the end of its name"],
)
def test_adapters_of_a_model_that_reads_images_are_those_of_its_text_model(targets: list[str], tmp_path: Path) -> None:
    layers = ["q_proj", "in_proj_qkv", "in_proj_a", "gate_proj", "qkv"]  # the last one is in the vision tower
    theirs = adapt_theirs(tmp_path, build_model_that_reads_images(), targets, target_modules=layers)
    written = load_file(tmp_path / "adapter" / WEIGHTS_NAME)
    assert {name.split(".")[3] for name in written} == {"language_model", "visual"}
    ours, _, config = load_ours(tmp_path)
    assert len(config.include_experts) == (4 if len(targets) == 2 else 1)
    ids = IDS % 80  # others are those of images
    with torch.no_grad():
        logits, expected = ours(ids), theirs(input_ids=ids).logits
        with theirs.disable_adapter():
            base = theirs(input_ids=ids).logits
    largest = float(expected.abs().max())
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * largest)
    assert float((base - expected).abs().max()) > 0.01 * largest
    twice = next(name for name in written if ".language_model." in name)
    plain = twice.replace(".language_model.", ".")
    save_file(written | {plain: written[twice].clone()}, tmp_path / "adapter" / WEIGHTS_NAME)
    with pytest.raises(UserError, match="are one tensor of the text model: export them again"):
        load_ours(tmp_path)


@pytest.mark.parametrize(("family", "is_refused"), [(DOTS1, True), (QWEN3_MOE, True), (QWEN3_5_MOE, False)])
def test_adapters_that_peft_would_put_on_other_weights_are_refused(family: Family, is_refused: bool) -> None:
    layers = [f"blocks.0.feed_forward.{'' if family is QWEN3_MOE else 'shared.'}{name}" for name in ("gate", "up")]
    config = AdapterConfig(rank=3)

    def build() -> dict[str, Any]:
        return build_adapter_config(config, family, layers=layers, linears=layers, is_tied=False, base_name=None)

    if not is_refused:
        assert build()["target_modules"] == ["gate_proj", "up_proj"]
        return
    with pytest.raises(
        UserError, match=r"PEFT takes adapters on gate_proj, up_proj of a model of type .* with --merge"
    ):
        build()


def test_adapters_for_other_experts_are_refused_in_one_line(tmp_path: Path) -> None:
    write_theirs(tmp_path, "mixtral", TARGETS["both"], use_rslora=True)
    decoder, family, config = load_ours(tmp_path)
    assert config.rslora
    path = tmp_path / "adapter" / WEIGHTS_NAME
    tensors = load_file(path)
    shapes = {name: tuple(one.shape) for name, one in decoder.named_parameters() if one.requires_grad}
    fewer = {name: (2, *shape[1:]) if "experts" in name else shape for name, shape in shapes.items()}
    with pytest.raises(UserError) as caught:
        read_adapters(tmp_path / "adapter", config, family, shapes=fewer, base_fingerprint="")
    assert (
        "are for other experts: base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight is [12, 32] "
        in (str(caught.value))
    )
    assert "[6, 32] for the 2 experts of this base with rank 3; give adapters for this base" in str(caught.value)
    nested = next(name for name in tensors if "base_layer" in name)
    router = nested.replace("experts.base_layer", "gate")
    for forged, message in (
        ({router: tensors[nested]}, "is unknown in models of type mixtral"),
        ({nested.replace("base_layer.", "base_layer.base_layer."): tensors[nested]}, "is unknown in models of type"),
    ):
        save_file(tensors | {name: tensor.clone() for name, tensor in forged.items()}, path)
        with pytest.raises(UserError, match=message):
            read_peft_config(tmp_path / "adapter", family)
    save_file(tensors, path)
    written = tmp_path / "adapter" / CONFIG_NAME
    content = json.loads(written.read_text())
    written.write_text(json.dumps(content | {"target_parameters": "all"}))
    with pytest.raises(UserError, match="target_parameters is 'all': it must be a list of texts"):
        read_peft_config(tmp_path / "adapter", family)


def test_many_targets_for_many_blocks_take_no_longer_than_both_together(tmp_path: Path) -> None:
    """A comparison of each with each would take hours."""
    prefix = "base_model.model.model.layers"
    names = [f"{prefix}.{number}.mlp.experts.lora_{part}.weight" for number in range(20_000) for part in "AB"]
    save_file({name: torch.empty(0) for name in names}, tmp_path / WEIGHTS_NAME)
    targets = [*(f"layers.{number}.mlp.experts.down_proj" for number in range(0, 20_000, 2)), *map(str, range(50_000))]
    (tmp_path / CONFIG_NAME).write_text(json.dumps({"peft_type": "LORA", "target_parameters": targets}))
    found = read_peft_config(tmp_path, MIXTRAL).include_experts
    assert len(found) == 10_000
    assert found[0] == "blocks.0.feed_forward.experts.down"
