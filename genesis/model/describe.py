"""The cost of a decoder: parameters by part, FLOPs per token, memory. Nothing is allocated."""

from dataclasses import dataclass, replace

import torch

from genesis.model.adapter import AdapterConfig, BaseFormat, attach_adapters, find_linears
from genesis.model.decoder import DecoderConfig, build_model
from genesis.model.experts import Experts
from genesis.model.language_model import LanguageModel
from genesis.model.mixture import Router

BFLOAT16_BYTES, FLOAT32_BYTES = 2, 4


@dataclass(frozen=True)
class Description:
    """The figures of one shape.

    Attributes:
        parameters: Numbers of parameters by part; they add up to the whole model.
        flops_per_token: FLOPs of one forward and backward without attention's products of tokens with tokens: those of
            the parts, and six for each element of the output weight.
        attention_flops_per_token: FLOPs of these products at a context of `max_seq_len`, including the masked half, as
            usual for MFU; a sliding window bounds the context.
        kv_cache_bytes_per_token: Bytes of keys and values for a token of one sequence in bfloat16.
        weights_bytes: Bytes of the weights in float32, as trained; bfloat16 takes half of that.
        num_inactive_parameters: The number of parameters of experts that do not see a token.

    References:
        Chowdhery et al., PaLM, arXiv:2204.02311, appendix B: 6N + 12LHQT.
    """

    config: DecoderConfig
    parameters: dict[str, int]
    flops_per_token: int
    attention_flops_per_token: int
    kv_cache_bytes_per_token: int
    weights_bytes: int
    num_inactive_parameters: int = 0

    @property
    def num_parameters(self) -> int:
        """The number of all parameters; tied embeddings count once."""
        return sum(self.parameters.values())

    @property
    def num_active_parameters(self) -> int:
        """The number of parameters that a token uses."""
        return self.num_parameters - self.num_inactive_parameters


@dataclass(frozen=True)
class TrainingMemory:
    """The memory of training, without activations and the moments of the optimizer.

    Attributes:
        num_trained: Number of trained parameters.
        frozen_bytes: Bytes of the weights that are not trained.
        weights_bytes: Bytes of the trained weights in float32.
        gradients_bytes: Bytes of their gradients in float32.
    """

    num_trained: int
    frozen_bytes: int
    weights_bytes: int
    gradients_bytes: int


def build_without_memory(
    config: DecoderConfig, adapter: AdapterConfig | None = None, base: BaseFormat | None = None
) -> LanguageModel:
    """Returns the decoder, with adapters beside its base if there are any, on the meta device.

    Raises:
        UserError: The decoder cannot have the adapters.
    """
    with torch.device("meta"):
        decoder = build_model(config)
        if adapter is not None:
            attach_adapters(decoder, adapter, base)
    return decoder


def describe(config: DecoderConfig) -> Description:
    """Returns the figures of `config`, counted on a decoder on the meta device."""
    decoder = build_without_memory(config)
    parameters = dict.fromkeys(("embedding", "attention", "feed_forward", "norms", "output"), 0)
    for name, parameter in decoder.named_parameters():
        part = decoder.name_part(name)
        parameters[part] = parameters.get(part, 0) + parameter.numel()
    if not parameters["attention"]:
        del parameters["attention"]  # all layers have other mixers
    num_parameters = sum(parameters.values())
    return Description(
        config=config,
        parameters=parameters,
        flops_per_token=decoder.flops_per_token,
        attention_flops_per_token=decoder.context_flops_per_token(config.max_seq_len),
        kv_cache_bytes_per_token=config.count_cache_bytes_per_token(BFLOAT16_BYTES),
        weights_bytes=FLOAT32_BYTES * num_parameters,
        num_inactive_parameters=decoder.num_inactive_parameters,
    )


def describe_training(config: DecoderConfig, adapter: AdapterConfig | None, base: BaseFormat) -> TrainingMemory:
    """Returns the memory of weights and gradients in training: of all in float32, or of adapters on a frozen base.

    Args:
        config: The decoder.
        adapter: The adapters; None to train all weights.
        base: How the frozen weights are stored.

    Raises:
        UserError: The decoder cannot have the adapters.
    """
    decoder = build_without_memory(config, adapter, base)
    trained = sum(parameter.numel() for parameter in decoder.parameters() if parameter.requires_grad)
    frozen = [parameter for parameter in decoder.parameters() if not parameter.requires_grad]
    return TrainingMemory(
        num_trained=trained,
        frozen_bytes=sum(parameter.numel() * parameter.element_size() for parameter in frozen),
        weights_bytes=FLOAT32_BYTES * trained,
        gradients_bytes=FLOAT32_BYTES * trained,
    )


def count_flops_per_token(config: DecoderConfig, seq_len: int, adapter: AdapterConfig | None = None) -> float:
    """Returns the floating-point operations of a token's forward and backward, attention included.

    With adapters, the gradients of frozen weights are not computed, which saves a third of their FLOPs.
    """
    costs = describe(replace(config, max_seq_len=seq_len))
    total = costs.flops_per_token + costs.attention_flops_per_token
    if adapter is None:
        return total
    with torch.device("meta"):
        decoder = build_model(config)
        adapted = attach_adapters(decoder, adapter)
    frozen = sum(layer.weight.numel() for layer in find_linears(decoder).values())
    frozen += sum(part.flops_per_token // 6 for part in decoder.parts.values() if isinstance(part, Experts | Router))
    if not decoder.output_weight.requires_grad:
        frozen += decoder.output_weight.numel()
    return total - 2 * frozen + sum(layer.flops_per_token for layer in adapted.values())
