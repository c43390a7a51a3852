"""The way to Hugging Face's Llama layout and back."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from genesis.base.errors import UserError
from genesis.huggingface.llama import LLAMA
from genesis.huggingface.shape import write_shape
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


def test_a_parameter_without_a_place_is_refused():
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias"):
        LLAMA.to_ours({"model.layers.0.self_attn.q_proj.bias": torch.zeros(1)}, DecoderConfig(**SHAPE))
