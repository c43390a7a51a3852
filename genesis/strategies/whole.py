"""A decoder whose parameters may be sharded, as a whole one that each rank can run alone."""

import torch
from torch.distributed.tensor import DTensor

from genesis.model.adapter import AdapterConfig, BaseFormat, attach_adapters, has_nf4
from genesis.model.decoder import Decoder


@torch.no_grad()
def gather_decoder(decoder: Decoder, adapter: AdapterConfig | None) -> Decoder:
    """Returns the decoder itself if no parameter is sharded, else a copy of it with all parameters on this rank.

    All ranks call it, because it gathers. A rank may run the copy as often as it wants, without the other ranks. The
    copy takes the memory of the whole model and has neither compiled blocks nor activation checkpointing.

    Args:
        decoder: The decoder, whose parameters lie on the device that computes.
        adapter: The options of its adapters; None without adapters.
    """
    state = decoder.state_dict()
    if not any(isinstance(tensor, DTensor) for tensor in state.values()):
        return decoder
    whole = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}
    with torch.device("meta"):
        copy = Decoder(decoder.config)
        if adapter is not None:
            attach_adapters(copy, adapter, BaseFormat(is_nf4=has_nf4(decoder)))
    copy.load_state_dict(whole, assign=True)
    return copy.train(decoder.training)
