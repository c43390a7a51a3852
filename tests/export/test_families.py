"""Models of every family: imported, trained on for some steps and exported, they stay equal to transformers'."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.importing import import_directory, save_weights
from genesis.generate.load import load_decoder
from genesis.model.loss import sum_cross_entropy

SHAPE: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 40, "head_dim": 12}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen2, window in the last layers": (
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "qwen3, window in listed layers": (
        "qwen3",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "smollm3, window": (
        "smollm3",
        {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 40},
    ),
    "qwen3.5": ("qwen3_5_text", LINEAR),
    "qwen3.5, half of each head rotated": (
        "qwen3_5_text",
        LINEAR | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    ),
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 20}
GLM = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
FAMILIES |= {
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 40}),
    "qwen3 with experts": ("qwen3_moe", EXPERTS | {"head_dim": 16}),
    "qwen3, some layers with experts": (
        "qwen3_moe",
        EXPERTS | {"head_dim": 16, "num_hidden_layers": 4, "mlp_only_layers": [0, 1], "decoder_sparse_step": 2},
    ),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 3}),
    "dots1": (
        "dots1",
        {
            "num_hidden_layers": 3,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "sliding_window": None,
        },
    ),
    "dots1, window in the last layer": (
        "dots1",
        {
            "num_hidden_layers": 3,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "sliding_window": 40,
            "max_window_layers": 2,
        },
    ),
    "glm-4.5": ("glm4_moe", GLM),
    "glm-4.5 with all options": (
        "glm4_moe",
        GLM
        | {
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": 16,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3-next": ("qwen3_next", LINEAR | SHARED),
    "qwen3.5 with experts": ("qwen3_5_moe_text", LINEAR | SHARED),
}
WRITTEN_AS = {"qwen3_next": "qwen3_5_moe_text"}
SLOW = set(FAMILIES) - {"mistral"}
NUM_STEPS = 3
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 32,
    "patch_size": 4,
}


def train(forward: Any, parameters: list[Tensor], ids: Tensor) -> list[float]:
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for _ in range(NUM_STEPS):
        loss = forward(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAMILIES]
)
def test_a_model_is_imported_trained_and_exported_as_transformers_has_it(name: str, tmp_path: Path) -> None:
    model_type, changes = FAMILIES[name]
    has_linear = "linear_attention" in changes.get("layer_types", ())
    torch.manual_seed(0)
    shape: Any = AutoConfig.for_model(model_type, **(SHAPE | changes))
    theirs = AutoModelForCausalLM.from_config(shape)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if parameter.ndim == 1:  # neither zeros nor ones, which would hide a mistake
                parameter.add_(torch.randn_like(parameter) * 0.3)
            assert parameter.isfinite().all(), key
        for key, buffer in theirs.named_buffers():
            if key.endswith("e_score_correction_bias"):  # zeros in a new model
                buffer.normal_(0.0, 0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    proof = import_directory(tmp_path / "theirs", tmp_path / "run", has_tokenizer=False)
    beyond = 64 if name == "llama 3.1" else changes.get("sliding_window") or 0
    assert proof["logits"]["longest_context"] == 128 + beyond
    ours = load_decoder(tmp_path / "run").decoder.train()
    biases = [parameter for key, parameter in ours.named_parameters() if key.endswith("balance_bias")]
    assert bool(biases) == (model_type in ("dots1", "glm4_moe"))
    assert len(biases) == sum(key.endswith("e_score_correction_bias") for key, _ in theirs.named_buffers())
    assert all(float(bias.abs().min()) > 0.0 for bias in biases)
    ids = torch.randint(90, (2, 300))

    def our_loss(inputs: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = ours(inputs, head=lambda hidden, weight: sum_cross_entropy(hidden, weight, labels=labels))
        return loss / labels.numel()

    def their_loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(theirs(input_ids=inputs).logits.flatten(0, 1), labels.flatten())

    losses = train(our_loss, list(ours.parameters()), ids)
    # See below for why two programs drift apart here.
    tolerance = 1e-4 if has_linear else 1e-5
    assert losses == pytest.approx(train(their_loss, list(theirs.parameters()), ids), rel=tolerance)
    assert losses[-1] < losses[0]
    (tmp_path / "trained").mkdir()
    checkpoint = save_weights(ours.state_dict(), ours.config, None, tmp_path / "trained/checkpoints")
    proof = export_checkpoints([checkpoint], tmp_path / "back", ExportOptions())
    assert proof["logits"]["num_same_choice"] == proof["logits"]["num_tokens"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    for key in ("layer_types", "sliding_window"):
        assert getattr(again.config, key, None) == getattr(shape, key, None), key
    assert again.config.model_type == WRITTEN_AS.get(model_type, model_type)
    with torch.no_grad():
        # The norm after a linear layer turns rounding into another direction where a head reads almost nothing. Two
        # programs that train such a model drift apart, so that its export is compared with our model alone.
        found = again(input_ids=ids).logits
        wanted = ours.eval()(ids) if has_linear else theirs.eval()(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "changes"), [("qwen3_5", LINEAR), ("qwen3_5_moe", LINEAR | SHARED)])
def test_a_model_with_a_vision_tower_is_imported_as_its_text_model(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    shape: Any = AutoConfig.for_model(model_type, text_config=SHAPE | changes, vision_config=VISION)
    theirs = AutoModelForImageTextToText.from_config(shape).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    with safe_open(tmp_path / "theirs/model.safetensors", "pt") as file:
        assert any("visual" in key for key in file.keys())  # noqa: SIM118  # no mapping
    import_directory(tmp_path / "theirs", tmp_path / "run", has_tokenizer=False)
    ours = load_decoder(tmp_path / "run").decoder
    ids = torch.randint(90, (2, 100))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
