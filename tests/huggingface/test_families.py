"""The way to Hugging Face's Llama layout and back."""

import json
from dataclasses import fields

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from genesis.base.errors import UserError
from genesis.huggingface.gemma3 import GEMMA3
from genesis.huggingface.llama import LLAMA
from genesis.huggingface.mistral import MINISTRAL3, MISTRAL
from genesis.huggingface.peft import build_adapter_config
from genesis.huggingface.phi3 import PHI3
from genesis.huggingface.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from genesis.huggingface.shape import FAMILIES, is_exported_as_another, write_shape
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import Decoder, DecoderConfig

SHAPE = {
    "vocab_size": 61,
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 48,
    "max_seq_len": 64,
}


@pytest.mark.parametrize("is_tied", [True, False])
def test_there_and_back_is_the_same_tensors(is_tied):
    config = DecoderConfig(**SHAPE, has_tied_embeddings=is_tied)
    decoder = Decoder(config)
    decoder.init_weights(0)
    state = decoder.state_dict()
    back = LLAMA.to_ours(LLAMA.to_theirs(state), config)
    assert back.keys() == state.keys()
    assert all(back[name].data_ptr() == state[name].data_ptr() for name in state)


@pytest.mark.parametrize("is_tied", [True, False])
def test_llama_takes_every_parameter_and_misses_none(is_tied):
    config = DecoderConfig(**SHAPE, has_tied_embeddings=is_tied)
    decoder = Decoder(config)
    decoder.init_weights(0)
    llama = LlamaForCausalLM(LlamaConfig(**json.loads(json.dumps(write_shape(LLAMA, config)))))
    missing, unexpected = llama.load_state_dict(LLAMA.to_theirs(decoder.state_dict()), strict=False)
    assert missing == (["lm_head.weight"] if is_tied else [])
    assert unexpected == []
    ids = torch.arange(60).view(2, 30)
    with torch.no_grad():
        assert (llama(input_ids=ids).logits - decoder(ids)).abs().max() < 1e-5


KNOWN = {
    *(
        "rope_parameters",
        "sliding_window",
        "max_window_layers",
        "layer_types",
        "no_rope_layers",
        "full_attention_interval",
        "scoring_func",
    ),
    *("num_key_value_heads", "topk_method", "n_group", "topk_group"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
}
"""Keys that `genesis.huggingface.options`, `linear`, `latent` and `mixture` read by themselves."""
HARMLESS = {
    *("initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "output_router_logits"),
    *("router_aux_loss_coef", "router_jitter_noise", "num_nextn_predict_layers", "num_mtp_layers"),
}
"""Fields of transformers' classes that no logits in evaluation depend on, or that are checked where they do."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_every_key_of_transformers_is_in_a_table_or_harmless(family):
    common = {one.name for one in fields(PreTrainedConfig)}
    own = {one.name for one in fields(CONFIG_MAPPING[family.model_type])} - common
    tables = (family.keys, family.constants, family.defaults, family.only, family.multipliers, family.linear_keys)
    read = KNOWN.union(*tables, family.switches)
    if family.mixture is not None:
        read |= {family.mixture.ffn_dim, str(family.mixture.normalized)}
    unread = {name for name in own - read - HARMLESS if not name.startswith("mamba_")}
    assert unread == UNREAD.get(family.model_type, set())


UNREAD = {"granitemoehybrid": {"intermediate_size", "time_step_limit"}, "deepseek_v2": {"head_dim"}}
"""Keys of layers and parts that models which can be imported do not have, or that follow from others."""


def test_weights_that_files_hold_in_one_tensor_come_back_as_they_were():
    config = DecoderConfig(**SHAPE)
    decoder = Decoder(config)
    decoder.init_weights(0)
    theirs = PHI3.to_theirs(dict(sorted(decoder.state_dict().items())))
    shapes = {name: list(tensor.shape) for name, tensor in theirs.items()}
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == [64, 32]
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == [96, 32]
    back = PHI3.to_ours(theirs, config)
    assert all(torch.equal(back[name], tensor) for name, tensor in decoder.state_dict().items())
    cut = theirs | {"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(63, 32)}
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.qkv_proj\.weight is \[63, 32\]"):
        PHI3.to_ours(cut, config)


@pytest.mark.parametrize(
    ("model_type", "written", "is_other"),
    [
        ("gemma3_text", GEMMA3, False),
        ("gemma3", GEMMA3, True),  # transformers opens it with its tower
        ("mistral3", MISTRAL, True),
        ("mistral3", MINISTRAL3, True),
        ("qwen3_5", QWEN3_5, False),  # transformers has a class for its text model alone
        ("qwen3_5_moe", QWEN3_5_MOE, False),
        ("mistral", LLAMA, False),
        ("phi3", LLAMA, True),
        ("qwen3_next", QWEN3_5_MOE, True),
        ("unknown", LLAMA, True),
        (None, LLAMA, True),
    ],
)
def test_a_type_is_another_where_its_tensors_have_other_names(model_type, written, is_other):
    assert is_exported_as_another(model_type, written) == is_other


def test_an_adapter_on_one_of_several_weights_in_a_tensor_has_no_form_in_peft():
    layers = [f"blocks.0.attention.{name}" for name in ("query", "output")]
    options = {"layers": layers, "linears": layers, "is_tied": True, "base_name": None}
    with pytest.raises(UserError, match=r"phi3 hold blocks\.0\.attention\.query with others .*--merge"):
        build_adapter_config(AdapterConfig(), PHI3, **options)
    only = {**options, "layers": layers[1:], "linears": layers[1:]}
    assert build_adapter_config(AdapterConfig(), PHI3, **only)["target_modules"] == ["o_proj"]


def test_a_parameter_without_a_place_is_refused():
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias"):
        LLAMA.to_ours({"model.layers.0.self_attn.q_proj.bias": torch.zeros(1)}, DecoderConfig(**SHAPE))
