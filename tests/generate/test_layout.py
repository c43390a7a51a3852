"""Weights that are stored for products of few rows are the same weights."""

import pytest
import torch

from genesis.generate.layout import build_head, transpose_linears
from genesis.model.decoder import project
from tests.tiny_runs import build_decoder


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_decoder_with_transposed_weights_has_the_same_values_and_logits(is_tied: bool) -> None:
    decoder, ids = build_decoder(0, has_tied_embeddings=is_tied), torch.arange(20).view(2, 10)
    wanted, values = decoder(ids), {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    for _ in range(2):  # once more changes nothing
        transpose_linears(decoder)
    weights = [module.weight for module in decoder.modules() if isinstance(module, torch.nn.Linear)]
    assert len(weights) == 2 * 7 + (not is_tied)
    assert all(weight.t().is_contiguous() for weight in weights)
    assert decoder.embedding.weight.is_contiguous()
    assert all(torch.equal(tensor, values[name]) for name, tensor in decoder.state_dict().items())
    torch.testing.assert_close(decoder(ids), wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(decoder(ids, head=build_head(decoder)), wanted, rtol=1e-5, atol=1e-4)


def test_a_decoder_in_bfloat16_stays_as_it_is() -> None:
    decoder = build_decoder(0).bfloat16()
    transpose_linears(decoder)
    assert all(parameter.is_contiguous() for parameter in decoder.parameters())
    assert build_head(decoder) is project
