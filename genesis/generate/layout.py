"""Stores weights so that a CPU multiplies few rows by them faster: transposed in memory, with the same values.

MKL multiplies a few rows by a weight of shape [out, in] faster if the outputs lie side by side in memory. Products of
many rows take the same time with both layouts.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from genesis.model.decoder import Decoder
from genesis.model.language_model import LanguageModel, project
from genesis.model.nf4 import Nf4Weight


def transpose_linears(decoder: LanguageModel) -> None:
    """Transposes the float32 weights of linear layers on a CPU in memory; their shapes and values stay the same.

    Decoders that share a weight must not be given.
    """
    for module in decoder.modules():
        if isinstance(module, nn.Linear) and not isinstance(module, Nf4Weight) and _suits(module.weight):
            module.weight.data = module.weight.data.t().contiguous().t()


def build_head(decoder: Decoder) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a head for `Decoder.forward` that computes logits; on a CPU with a transposed copy of the output weight.

    The rows of a tied weight are also embeddings, so that the weight itself keeps its layout.
    """
    weight = decoder.output_weight.detach()
    if not _suits(weight):
        return project
    transposed = weight.t().contiguous()
    return lambda hidden, _: hidden @ transposed


def _suits(weight: Tensor) -> bool:
    return type(weight.data) is Tensor and weight.device.type == "cpu" and weight.dtype == torch.float32
