"""A decoder whose choices are sharper than those of one that knows nothing."""

import pytest
import torch

from genesis.model.decoder import Decoder, DecoderConfig


@pytest.fixture(scope="module")
def decoder():
    config = DecoderConfig(vocab_size=97, dim=48, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=64, max_seq_len=64)
    decoder = Decoder(config).eval()
    decoder.init_weights(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(4.0)  # sharper choices than those of a model that knows nothing
    return decoder
