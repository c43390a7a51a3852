"""Runs of a tiny model whose choices are sharp, without the seconds that Lightning takes to import."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from genesis.model.decoder import Decoder, DecoderConfig
from genesis_callbacks.checkpoint import (
    Ranks,
    RunMetadata,
    SaveScope,
    SaveTarget,
    Snapshot,
    local_shards,
    save_blocking,
)
from genesis_callbacks.checkpoint.scope import bind_scope

SHAPE = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 48,
    "max_seq_len": 256,
    "vocab_size": 700,
}


def build_decoder(seed: int, **changes: Any) -> Decoder:
    decoder = Decoder(DecoderConfig(**{**SHAPE, **changes}))
    decoder.init_weights(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(4.0)  # sharper choices than those of a model that knows nothing
    return decoder.eval()


def save(
    directory: Path,
    step: int,
    decoder: Decoder,
    identity: dict[str, Any],
    *,
    scope: SaveScope | None = None,
    **changes: Any,
) -> Path:
    """Saves on every rank of the process group, each its rows, or alone."""
    recipe = {"model": {"decoder": {**SHAPE, **changes}}}
    state = dict(decoder.state_dict())
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}
    parts = [
        part for name, tensor in state.items() for part in local_shards(f"model.decoder.{name}", tensor, "parameter")
    ]
    directory.mkdir(parents=True, exist_ok=True)
    ranks = Ranks()
    bound = bind_scope(scope or SaveScope.everything(), parts, (), ranks)
    target = SaveTarget(directory, ranks, origin=RunMetadata(identity, recipe), scope=bound)
    section = {"trainer": {"global_step": step}, "model_extras": {}, "optimizers": []}  # what a Trainer's has at least
    return save_blocking(target, lambda: Snapshot(step, {"step": step, "tokens_seen": 100 * step}, parts, section))
