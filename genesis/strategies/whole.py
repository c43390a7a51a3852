"""A decoder whose parameters may be sharded, as a whole one that each rank can run alone."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from genesis.model.adapter import AdapterConfig, BaseFormat, attach_adapters, has_nf4
from genesis.model.decoder import Decoder


@torch.no_grad()
def gather_decoder(
    decoder: Decoder, adapter: AdapterConfig | None, pipeline: dist.ProcessGroup | None = None
) -> Decoder:
    """Returns the decoder itself if this rank has all of it, else a copy of it with all parameters on this rank.

    All ranks call it, because it gathers. A rank may run the copy as often as it wants, without the other ranks. The
    copy takes the memory of the whole model and has neither compiled blocks nor activation checkpointing.

    Args:
        decoder: The decoder, whose parameters lie on the device that computes.
        adapter: The options of its adapters; None without adapters.
        pipeline: The ranks among which its layers are divided; None for all layers on this rank.
    """
    state = decoder.state_dict()
    if pipeline is None and not any(isinstance(tensor, DTensor) for tensor in state.values()):
        return decoder
    whole = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}
    if pipeline is not None:
        whole = _gather_stages(whole, pipeline)
    with torch.device("meta"):
        copy = Decoder(decoder.config)
        if adapter is not None:
            attach_adapters(copy, adapter, BaseFormat(is_nf4=has_nf4(decoder)))
    copy.load_state_dict(whole, assign=True)
    return copy.train(decoder.training)


def _gather_stages(own: Mapping[str, Tensor], pipeline: dist.ProcessGroup) -> dict[str, Tensor]:
    """Returns the tensors of all ranks of a pipeline; of a tied embedding, that of the first rank."""
    device = next(iter(own.values())).device
    of_ranks: list[Any] = [None] * pipeline.size()
    dist.all_gather_object(of_ranks, {name: (one.shape, one.dtype) for name, one in own.items()}, group=pipeline)
    found: dict[str, Tensor] = {}
    for source, described in enumerate(of_ranks):
        for name, (shape, dtype) in described.items():
            if name not in found:
                is_own = source == pipeline.rank()
                found[name] = own[name].contiguous() if is_own else torch.empty(shape, dtype=dtype, device=device)
                dist.broadcast(found[name], group=pipeline, group_src=source)
    return found
