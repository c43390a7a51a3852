"""The options of attention and norms: right for packed documents, in cached decoding, and in what is counted."""

import resource
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from genesis.base.errors import UserError
from genesis.model.attend import flash
from genesis.model.attention import AttentionConfig, RopeScaling, rotary_tables
from genesis.model.decoder import Decoder, DecoderConfig, Scales
from genesis.model.delta import GatedDeltaConfig
from genesis.model.describe import describe
from genesis.model.feed_forward import DenseConfig
from genesis.model.kv_cache import CacheTensor, KVCache
from genesis.model.latent import LatentAttentionConfig as LatentsConfig
from genesis.model.mixer import SequenceMixerConfig
from genesis.model.norm import NormConfig
from genesis.model.recipe import build_decoder_config, dump_decoder_config
from tests.linear_faults import CACHE_FAULTS, DOCUMENT_FAULTS
from tests.model.latent_attention import LatentAttentionConfig
from tests.tiny_runs import decides_decays

SHAPE: dict[str, Any] = {"vocab_size": 97, "dim": 48, "num_layers": 3, "ffn_dim": 64, "max_seq_len": 128}
HEADS = AttentionConfig(6, 2, 1e4)
LINEAR = GatedDeltaConfig(2, 4, 8, 12, attention_every=3)
LATENT = LatentAttentionConfig(num_heads=4, latent_dim=16, key_dim=8, rotary_dim=4, value_dim=10)
LATENTS = LatentsConfig(**asdict(LATENT))
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=32)
LONGROPE = RopeScaling(
    2.0, original_seq_len=60, kind="longrope", short_factors=(1.0, 1.1, 1.2, 1.3), long_factors=(1.5, 2.0, 3.0, 4.0)
)
YARN = {"factor": 2.0, "kind": "yarn", "original_seq_len": 9}
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"attention": replace(HEADS, sliding_window=9)},
    "window of one token": {"attention": replace(HEADS, sliding_window=1)},
    "window in one layer": {"attention": replace(HEADS, sliding_window=9, window_layers=(1,))},
    "scaled positions": {"attention": replace(HEADS, rope_scaling=SCALING)},
    "yarn": {"attention": replace(HEADS, rope_scaling=RopeScaling(4.0, original_seq_len=32, kind="yarn"))},
    "dynamic": {"attention": replace(HEADS, rope_scaling=RopeScaling(2.0, original_seq_len=60, kind="dynamic"))},
    "longrope": {"attention": replace(HEADS, rope_scaling=LONGROPE)},
    "wavelengths by layer": {
        "attention": replace(HEADS, sliding_window=9, window_layers=(1,), window_rope_theta=77.0, rope_scaling=SCALING)
    },
    "neighbouring dimensions": {"attention": replace(HEADS, has_interleaved_rope=True, head_dim=12, rotary_dim=8)},
    "scaled softmax, and queries that grow": {
        "attention": replace(HEADS, softmax_scale=0.2, query_growth=0.3, rope_scaling=SCALING)
    },
    "norms before and after, scales and GELU": {
        "attention": replace(HEADS, qk_norm="head", qk_norm_has_offset=True),
        "norm": NormConfig(1e-6, "both", has_offset=True),
        "scales": Scales(embedding=5.0, residual=0.5, logits=0.25),
        "feed_forward": DenseConfig(64, "gelu_tanh"),
        "ffn_dim": None,
    },
    "layers without positions": {"attention": replace(HEADS, no_rope_every=2)},
    "biases": {"attention": replace(HEADS, has_qkv_bias=True)},
    "norms of heads": {"attention": replace(HEADS, qk_norm="head", head_dim=12)},
    "norms of projections": {"attention": replace(HEADS, qk_norm="projection")},
    "norms after": {"attention": HEADS, "norm": NormConfig(1e-6, "after")},
    "norms with an offset": {
        "attention": replace(HEADS, qk_norm="head", qk_norm_has_offset=True),
        "norm": NormConfig(1e-6, has_offset=True),
    },
    "a part of each head rotated": {"attention": replace(HEADS, head_dim=12, rotary_dim=4)},
    "gated output": {"attention": replace(HEADS, has_output_gate=True)},
    "linear attention": {"attention": HEADS, "linear_attention": LINEAR},
    "linear attention alone": {"attention": HEADS, "linear_attention": replace(LINEAR, attention_every=9)},
    "latents": {"mixers": (LATENTS,)},
    "latents of queries, too, and yarn": {
        "mixers": (
            replace(
                LATENTS,
                query_latent_dim=20,
                has_interleaved_rope=True,
                rope_scaling=RopeScaling(4.0, original_seq_len=32, kind="yarn"),
                softmax_growth=1.0,
            ),
        )
    },
    "a mixer of an own file": {"mixers": (LATENT,)},
    "three mixers in turn": {"mixers": (LINEAR, LATENT, HEADS)},
}
TOLERANCE = 2e-4
"""Of logits, whose standard deviation is about 2."""
PACKED = torch.tensor([[0] * 40 + [1] * 1 + [2] * 55, [0] * 96, [0] * 7 + [1] * 89], dtype=torch.int32)


@pytest.fixture(params=OPTIONS)
def config(request: pytest.FixtureRequest) -> DecoderConfig:
    return DecoderConfig(**SHAPE | OPTIONS[request.param])


def build(config: DecoderConfig) -> Decoder:
    decoder = Decoder(config)
    decoder.init_weights(0)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("bias") or "_norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.5)
            elif not decides_decays(name):
                parameter.mul_(4.0)  # sharp enough that each key counts
    return decoder


def random_ids(*shape: int) -> Tensor:
    return torch.randint(97, shape, generator=torch.Generator().manual_seed(1))


def find_document_error(config: DecoderConfig) -> float:
    """Returns the largest difference between the logits of packed documents and those of each document alone."""
    decoder, ids = build(config), random_ids(*PACKED.shape)
    packed, errors = decoder(ids, document_ids=PACKED), []
    for row, start, end in ((0, 0, 40), (0, 40, 41), (0, 41, 96), (1, 0, 96), (2, 0, 7), (2, 7, 96)):
        alone = decoder(ids[row : row + 1, start:end])[0]
        errors.append((packed[row, start:end] - alone).abs().max())
    return float(torch.stack(errors).max())


def find_cache_error(config: DecoderConfig, first: int) -> float:
    """Returns the largest difference between the logits of texts that a cache continues and those of whole texts."""
    decoder, ids = build(config), random_ids(2, 60)
    cache, found = decoder.new_cache(2, 60), []
    for start, end in [(0, first), (first, first + 15), *((place, place + 1) for place in range(first + 15, 60))]:
        found.append(decoder(ids[:, start:end], cache=cache))
        cache.advance(torch.full((2,), end - start))
    return float((torch.cat(found, dim=1) - decoder(ids)).abs().max())


@pytest.mark.parametrize("path", ["document by document", "mask"])
@torch.no_grad()
def test_packed_documents_give_the_logits_of_each_alone(
    config: DecoderConfig, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "MIN_MEAN_DOCUMENT_TOKENS", 1 if path != "mask" else 10_000)
    assert find_document_error(config) < TOLERANCE


@pytest.mark.parametrize("first", [3, 20], ids=["shorter than the window", "longer than the window"])
@torch.no_grad()
def test_a_cache_gives_the_logits_of_the_whole_text(config: DecoderConfig, first: int) -> None:
    assert find_cache_error(config, first) < TOLERANCE


@pytest.mark.parametrize("fault", CACHE_FAULTS | DOCUMENT_FAULTS)
@pytest.mark.parametrize("name", ["linear attention", "linear attention alone"])
@torch.no_grad()
def test_a_fault_of_linear_layers_is_far_beyond_the_tolerance(
    name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DecoderConfig(**SHAPE, **OPTIONS[name])
    (CACHE_FAULTS | DOCUMENT_FAULTS)[fault](monkeypatch)
    error = find_document_error(config) if fault in DOCUMENT_FAULTS else find_cache_error(config, 20)
    assert error > 10_000 * TOLERANCE


def test_a_token_is_reached_from_its_window_alone() -> None:
    config = DecoderConfig(**{**SHAPE, "num_layers": 1}, **OPTIONS["window"])
    decoder, ids = build(config), random_ids(1, 60)
    changed = ids.clone()
    changed[0, 20] = (ids[0, 20] + 1) % 97
    differs = (decoder(ids) != decoder(changed))[0].any(dim=-1)
    assert differs.nonzero().flatten().tolist() == list(range(20, 29))


def test_recomputed_blocks_give_the_same_gradients(config: DecoderConfig) -> None:
    decoder, ids = build(config), random_ids(*PACKED.shape)
    decoder(ids, document_ids=PACKED).square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    decoder.zero_grad()
    for block in decoder.blocks:
        forward = block.forward
        block.forward = lambda *inputs, forward=forward: checkpoint(forward, *inputs, use_reentrant=False)
    decoder(ids, document_ids=PACKED).square().sum().backward()
    for name, parameter in decoder.named_parameters():
        assert wanted[name] is not None
        assert torch.equal(parameter.grad, wanted[name]), name


def test_every_parameter_has_its_group_and_its_initial_value(config: DecoderConfig) -> None:
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(torch.nan)
    decoder.init_weights(0)
    groups = decoder.parameter_groups()
    assert groups.keys() == dict(decoder.named_parameters()).keys()
    for name, parameter in decoder.named_parameters():
        is_vector = parameter.ndim == 1 or name.endswith("conv_weight")
        assert (groups[name].kind == "vector") == is_vector
        if name.endswith(("log_rate", "decay_bias", "conv_weight")):
            low, high = {"log_rate": (0.0, 2.8), "decay_bias": (-7.0, -2.2), "conv_weight": (-0.5, 0.5)}[
                name.rpartition(".")[2]
            ]
            assert ((parameter >= low) & (parameter <= high)).all()
        elif is_vector:
            has_offset = config.parts.norm.has_offset and "linear" not in name
            assert (parameter == (0.0 if name.endswith("bias") or has_offset else 1.0)).all()
        assert parameter.isfinite().all()


def test_a_recipe_holds_the_options_and_gives_them_back(config: DecoderConfig) -> None:
    content = dump_decoder_config(config)
    read = build_decoder_config(content, where="here")
    assert (read.parts, read.list_mixers(), read.scales) == (config.parts, config.list_mixers(), config.scales)
    assert "attention" not in dump_decoder_config(DecoderConfig(**SHAPE, attention=HEADS))
    assert "norm" not in dump_decoder_config(DecoderConfig(**SHAPE, attention=HEADS, norm=NormConfig()))


def test_a_window_bounds_the_context_that_costs() -> None:
    plain, windowed = (
        describe(DecoderConfig(**SHAPE, attention=replace(HEADS, sliding_window=window))) for window in (None, 32)
    )
    assert 4 * windowed.attention_flops_per_token == plain.attention_flops_per_token
    assert windowed.flops_per_token == plain.flops_per_token


def test_a_window_in_some_layers_counts_there() -> None:
    plain, windowed, one = (
        describe(DecoderConfig(**SHAPE, attention=replace(HEADS, **changes))).attention_flops_per_token
        for changes in ({}, {"sliding_window": 32}, {"sliding_window": 32, "window_layers": (1,)})
    )
    assert 3 * one == 2 * plain + windowed


def test_a_layer_without_the_window_reaches_every_token() -> None:
    attention = replace(HEADS, sliding_window=9, window_layers=(0,))
    decoder, ids = build(DecoderConfig(**{**SHAPE, "num_layers": 2}, attention=attention)), random_ids(1, 60)
    changed = ids.clone()
    changed[0, 20] = (ids[0, 20] + 1) % 97
    differs = (decoder(ids) != decoder(changed))[0].any(dim=-1)
    assert differs.nonzero().flatten().tolist() == list(range(20, 60))


def test_heads_of_their_own_width_count_with_it() -> None:
    plain, wide = (describe(DecoderConfig(**SHAPE, attention=replace(HEADS, head_dim=width))) for width in (None, 16))
    assert wide.attention_flops_per_token == 2 * plain.attention_flops_per_token
    assert wide.kv_cache_bytes_per_token == 2 * plain.kv_cache_bytes_per_token
    assert wide.parameters["attention"] == 2 * plain.parameters["attention"]


def test_long_wavelengths_are_stretched_and_short_ones_kept() -> None:
    positions = torch.tensor([[1]])
    plain, scaled = (rotary_tables(positions, 32, 1e4, scaling)[1][0, 0, 0, 16:].asin() for scaling in (None, SCALING))
    ratio = plain / scaled
    wavelengths = 2 * torch.pi / plain
    torch.testing.assert_close(ratio[wavelengths < 8], torch.ones_like(ratio[wavelengths < 8]))
    torch.testing.assert_close(
        ratio[wavelengths > 32], torch.full_like(ratio[wavelengths > 32], 8.0), rtol=1e-4, atol=0
    )
    assert ((ratio >= 0.999) & (ratio <= 8.001)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": {"head_dim": 7}}, "head_dim is 7: it must be even"),
        ({"attention": {"sliding_window": 0}}, "sliding_window is 0"),
        ({"attention": {"window_layers": [0]}}, r"window_layers is \[0\] and sliding_window is None: give both"),
        ({"attention": {"sliding_window": 9, "window_layers": []}}, r"window_layers is \[\] and sliding_window is 9"),
        ({"attention": {"sliding_window": 9, "window_layers": [3]}}, r"window_layers has 3, but the 3 layers"),
        ({"attention": {"sliding_window": 9, "window_layers": [-1]}}, r"window_layers is \[-1\]: it must be a list"),
        ({"attention": {"sliding_window": 9, "window_layers": "all"}}, r"window_layers is 'all': it must be a list"),
        ({"attention": {"qk_norm": "row"}}, "qk_norm is 'row'"),
        ({"attention": {"rope_scaling": 8.0}}, r"rope_scaling is 8.0: it must be a mapping of factor"),
        ({"attention": {"rope_scaling": {"factor": 8.0}}}, "rope_scaling: low_freq_factor is missing"),
        (
            {"attention": {"rope_scaling": {"factor": 2.0, "kind": "ntk"}}},
            "kind is 'ntk': it must be 'llama3', 'linear'",
        ),
        (
            {"attention": {"rope_scaling": {"factor": 2.0, "kind": "linear", "beta_fast": 32.0}}},
            "beta_fast is 32.0, which the kind 'linear' does not have",
        ),
        (
            {"attention": {"rope_scaling": {**YARN, "beta_fast": 0.5}}},
            "beta_slow 1.0 and beta_fast 0.5",
        ),
        (
            {"attention": {"rope_scaling": {**YARN, "beta_fast": 0.0, "beta_slow": 0.0}}},
            "beta_slow 0.0 and beta_fast 0.0 must be above 0",
        ),
        (
            {"attention": {"rope_scaling": asdict(replace(LONGROPE, long_factors=(2.0,)))}},
            r"rope_scaling.long_factors has 1 factor: it must have one for each of the 4 wavelengths",
        ),
        (
            {"attention": {"rope_scaling": {**asdict(LONGROPE), "short_factors": [1.0, 0.0, 1.0, 1.0]}}},
            r"short_factors is \[1.0, 0.0, 1.0, 1.0\]: it must be a list",
        ),
        ({"attention": {"window_rope_theta": 9.0}}, "window_rope_theta is 9.0, and window_layers is null"),
        ({"attention": {"query_growth": 0.1}}, "query_growth is 0.1: it needs the original_seq_len of rope_scaling"),
        ({"attention": {"softmax_scale": 0.0}}, "softmax_scale is 0.0: it must be above 0"),
        ({"norm": {"placement": "between"}}, "placement of norms is 'between'"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    content = {**SHAPE, "attention": {"num_heads": 6, "num_kv_heads": 2, **changes.get("attention", {})}}
    with pytest.raises(UserError, match=message):
        build_decoder_config({**content, **({"norm": changes["norm"]} if "norm" in changes else {})}, where="here")


@pytest.mark.parametrize(
    ("listed", "described"),
    [
        ([HEADS], {"attention": HEADS}),
        ([HEADS, HEADS], {"attention": HEADS}),
        ([LINEAR, LINEAR, HEADS], {"attention": HEADS, "linear_attention": LINEAR}),
    ],
)
def test_a_list_of_mixers_is_the_decoder_that_attention_and_linear_attention_describe(
    listed: list[SequenceMixerConfig], described: dict[str, Any]
) -> None:
    assert DecoderConfig(**SHAPE, mixers=tuple(listed)) == DecoderConfig(**SHAPE, **described)


NAMED_LATENT = {"class_path": "tests.model.latent_attention.LatentAttentionConfig", "init_args": vars(LATENT)}
NAMED = {"class_path": "genesis.model.attention.AttentionConfig", "init_args": {"num_heads": 6, "num_kv_heads": 2}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixers": NAMED}, "mixers is .*: it must be a list of class_path, init_args"),
        ({"mixers": []}, "mixers has 0 entries"),
        ({"mixers": [NAMED] * 4}, "mixers has 4 entries: it must have at least 1 and at most num_layers"),
        ({"mixers": [NAMED, {"class_path": "antigravity.Mixer"}]}, r"mixers\[1\] names .*: antigravity\.Mixer;"),
        ({"mixers": [NAMED], "attention": NAMED["init_args"]}, "mixers and attention are both given: remove attention"),
        ({"mixers": [NAMED_LATENT], "num_heads": 6}, "num_heads is 6, but mixers is also given: remove num_heads"),
    ],
)
def test_a_list_of_mixers_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^here: {message}"):
        build_decoder_config({**SHAPE, **changes}, where="here")
    assert "antigravity" not in sys.modules


def test_a_scaling_that_turns_round_is_refused() -> None:
    with pytest.raises(UserError, match=r"low_freq_factor 4.0 and high_freq_factor 1.0"):
        RopeScaling(8.0, 4.0, 1.0, 32)
    with pytest.raises(UserError, match=r"factor is 0.5"):
        RopeScaling(0.5, 1.0, 4.0, 32)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no /proc")
def test_a_cache_on_a_cpu_takes_memory_as_it_is_filled() -> None:
    pages = Path("/proc/self/statm")
    before = int(pages.read_text().split()[1])
    cache = KVCache([(CacheTensor((64,)),)], 16, 2**16, "cpu", torch.float32)
    cache.stacks[0].data[:, 0, :100] = 1.0
    assert cache.num_bytes == 2**28
    assert float(cache.stacks[0].data[0, 0, 99:101].sum()) == 64.0
    taken = (int(pages.read_text().split()[1]) - before) * resource.getpagesize()
    assert taken < 2**24
