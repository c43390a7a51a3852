"""The options of attention and norms under the strategies: gradients of one process on the whole batch."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from genesis.model.attention import AttentionConfig, RopeScaling
from genesis.model.decoder import DecoderConfig
from genesis.model.delta import GatedDeltaConfig
from genesis.model.latent import LatentAttentionConfig as LatentsConfig
from genesis.model.norm import NormConfig
from genesis_callbacks.testing import run_ranks
from tests.model.latent_attention import LatentAttentionConfig
from tests.train.support import (
    COMPILE_SECONDS,
    TINY,
    KeepGradients,
    build_module,
    build_strategy,
    build_trainer,
    loader,
    reference_gradients,
)

ATTENTION = AttentionConfig(
    4,
    2,
    1e4,
    head_dim=12,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8),
    no_rope_every=2,
    sliding_window=3,
    has_qkv_bias=True,
    qk_norm="head",
)
CONFIGS = {
    "norms before": replace(TINY, num_heads=None, num_kv_heads=None, attention=ATTENTION),
    "norms after": replace(
        TINY,
        num_heads=None,
        num_kv_heads=None,
        attention=replace(ATTENTION, qk_norm="projection", window_layers=(1,)),
        norm=NormConfig(1e-5, "after"),
    ),
    "linear attention": replace(
        TINY,
        num_heads=None,
        num_kv_heads=None,
        attention=replace(ATTENTION, qk_norm_has_offset=True, rotary_dim=4, has_output_gate=True),
        norm=NormConfig(1e-5, has_offset=True),
        linear_attention=GatedDeltaConfig(1, 2, 8, 8, attention_every=2),
    ),
    "latents": replace(
        TINY, num_heads=None, num_kv_heads=None, mixers=(LatentsConfig(4, 16, 8, 4, 10, query_latent_dim=12),)
    ),
    "a mixer of an own file": replace(
        TINY, num_heads=None, num_kv_heads=None, mixers=(LatentAttentionConfig(4, 16, 8, 4, 10), ATTENTION)
    ),
}


def first_gradients(config: DecoderConfig, strategy: str) -> dict[str, Tensor]:
    rank, world_size, keep = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), KeepGradients()
    trainer = build_trainer(build_strategy(strategy), world_size, 1, [keep], gradient_clip_val=0.0)
    trainer.fit(build_module(config), loader(1, rank, world_size))
    return keep.gradients


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("norms before", "checkpointing"),
        pytest.param("norms after", "checkpointing", marks=pytest.mark.slow),
        pytest.param("norms before", "compiled_shards", marks=pytest.mark.slow),
        pytest.param("norms before", "replicated", marks=pytest.mark.slow),
        pytest.param("linear attention", "checkpointing", marks=pytest.mark.slow),
        pytest.param("a mixer of an own file", "checkpointing", marks=[pytest.mark.slow, pytest.mark.each]),
        pytest.param("a mixer of an own file", "compiled_shards", marks=pytest.mark.slow),
        pytest.param("latents", "checkpointing", marks=pytest.mark.slow),
        pytest.param("latents", "compiled_shards", marks=pytest.mark.slow),
        pytest.param("linear attention", "compiled_shards", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_process(name: str, strategy: str) -> None:
    wanted, _ = reference_gradients(CONFIGS[name], 0)
    largest: Any = max(gradient.abs().max() for gradient in wanted.values())
    for found in run_ranks(first_gradients, 2, CONFIGS[name], strategy, timeout_seconds=COMPILE_SECONDS):
        assert {*found} == wanted.keys()
        for key, gradient in found.items():
            difference = (gradient.double() - wanted[key]).abs().max()
            assert difference <= 1e-5 * torch.as_tensor(largest), key
