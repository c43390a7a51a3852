"""Runs of a tiny model whose choices are sharp, without the seconds that Lightning takes to import."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from genesis.model.adapter import AdapterConfig, attach_adapters, init_adapters
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.language_model import LanguageModel
from genesis.train.adapter_base import build_scope, find_adapter_base
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import Ranks, RunMetadata, SaveScope, SaveTarget, Snapshot, save_blocking
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
        for name, parameter in decoder.named_parameters():
            if not decides_decays(name):
                parameter.mul_(4.0)  # sharper choices than those of a model that knows nothing
    return decoder.eval()


def decides_decays(name: str) -> bool:
    """Whether a parameter decides how fast the states of a linear layer decay.

    Scaling `log_rate` takes rates to a power. States then vanish from one token to the next, and a test of a model with
    linear layers holds even if their states are lost.
    """
    return name.endswith(("linear_attention.log_rate", "linear_attention.decay_bias", "linear_attention.decay.weight"))


def save(
    directory: Path,
    step: int,
    decoder: LanguageModel,
    identity: dict[str, Any],
    *,
    scope: SaveScope | None = None,
    adapter: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Saves on every rank of the process group, each its rows, or alone."""
    recipe = {"model": {"decoder": {**SHAPE, **changes}, "adapter": adapter}}
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


def save_adapted(
    directory: Path,
    base: Path,
    decoder: LanguageModel,
    identity: dict[str, Any],
    *,
    shape: dict[str, Any] | None = None,
    **adapter: Any,
) -> Path:
    """Saves a decoder with adapters that add something, beside the base that it is.

    Args:
        directory: For the checkpoint.
        base: The checkpoint of the decoder.
        decoder: Gets the adapters.
        identity: For the manifest.
        shape: What the decoder's shape in the recipe has beside the usual.
        adapter: Fields of `AdapterConfig`.
    """
    config = AdapterConfig(**adapter)
    attach_adapters(decoder, config)
    init_adapters(decoder, seed=0)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    found = find_adapter_base(str(base), None)
    scope = build_scope(found, has_magnitudes=config.dora, also_train=config.also_train)
    is_untied = isinstance(decoder, Decoder) and not decoder.config.has_tied_embeddings
    changes = {"has_tied_embeddings": False} if is_untied else {}
    changes |= shape or {}
    return save(directory, 5, decoder, identity, scope=scope, adapter=json.loads(json.dumps(adapter)), **changes)
