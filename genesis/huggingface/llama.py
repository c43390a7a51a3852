"""Llama: the family of a decoder with default options."""

from typing import Final

from genesis.huggingface.family import Family
from genesis.model.feed_forward import DenseConfig

LLAMA: Final = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    feed_forward=DenseConfig,
    tensors={
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    },
    block_prefix="model.layers",
    block_tensors={
        "attention_norm.weight": "input_layernorm.weight",
        "attention.query.weight": "self_attn.q_proj.weight",
        "attention.key.weight": "self_attn.k_proj.weight",
        "attention.value.weight": "self_attn.v_proj.weight",
        "attention.output.weight": "self_attn.o_proj.weight",
        "feed_forward_norm.weight": "post_attention_layernorm.weight",
        "feed_forward.gate.weight": "mlp.gate_proj.weight",
        "feed_forward.up.weight": "mlp.up_proj.weight",
        "feed_forward.down.weight": "mlp.down_proj.weight",
    },
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "ffn_dim",
        "max_position_embeddings": "max_seq_len",
        "rms_norm_eps": "norm_eps",
        "rope_theta": "rope_theta",
        "tie_word_embeddings": "has_tied_embeddings",
    },
    constants={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,  # defaults to the number of query heads
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
    only={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "hidden_act": ("silu",),
        "partial_rotary_factor": (1.0,),
        "original_max_position_embeddings": (),
        "attention_dropout": (0.0,),
        "logit_scale": (),
        "pretraining_tp": (1,),
    },
)
