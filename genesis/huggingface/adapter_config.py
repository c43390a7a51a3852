"""The configuration of adapters in PEFT's format, for the layers of a model that have them."""

from typing import Any

import torch

from genesis.huggingface.peft import build_adapter_config
from genesis.huggingface.shape import find_names
from genesis.model.adapter import AdapterConfig, find_linears, find_stacks, select_experts, select_layers
from genesis.model.decoder import DecoderConfig, build_model


def describe_adapter(config: DecoderConfig, adapter: AdapterConfig, base_name: str | None = None) -> dict[str, Any]:
    """Returns the content of `adapter_config.json` for adapters beside a model.

    Args:
        config: The model.
        adapter: The adapters.
        base_name: Name or path under which PEFT finds the base; None for no name.

    Raises:
        UserError: No family of transformers represents the model, it has no such layers, or PEFT has no form for
            adapters on them.
    """
    family = find_names(config)
    with torch.device("meta"):
        decoder = build_model(config)
    layers, linears = select_layers(decoder, adapter), find_linears(decoder)
    if config.body is not None:  # PEFT looks for names in the whole model, routers and output weight included
        linears = dict(decoder.named_modules())
    return build_adapter_config(
        adapter,
        family,
        layers=layers.keys(),
        linears=linears.keys(),
        experts=select_experts(decoder, adapter).keys(),
        stacks=find_stacks(decoder).keys(),
        is_tied=config.has_tied_embeddings,
        base_name=base_name,
    )
