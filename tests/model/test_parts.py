"""A part answers for its own parameters: the decoder, the optimizer, the description and recipes only ask it."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from genesis.base.errors import UserError
from genesis.huggingface.shape import find_family
from genesis.model.attention import AttentionConfig
from genesis.model.decoder import SHORT_FIELDS, Decoder, DecoderConfig, Parts
from genesis.model.describe import describe
from genesis.model.feed_forward import DenseConfig
from genesis.model.initial import INIT_STD, draw_block
from genesis.model.norm import NormConfig
from genesis.model.recipe import build_decoder_config, dump_decoder_config, unify_decoder
from genesis.optim import AdamW, Muon, build_optimizer
from tests.model.mixture_part import MixtureConfig

SHAPE = {"vocab_size": 61, "dim": 32, "num_layers": 3, "max_seq_len": 16}
SHORT = {**SHAPE, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48}
USUAL = DecoderConfig(**SHORT)
MIXED = DecoderConfig(
    **SHAPE, num_heads=4, num_kv_heads=2, feed_forward=MixtureConfig(num_experts=3, ffn_dim=8, num_dense_layers=1)
)


def test_short_fields_and_the_parts_own_configurations_describe_the_same_decoder() -> None:
    spelled = DecoderConfig(**SHAPE, attention=AttentionConfig(4, 2), feed_forward=DenseConfig(48), norm=NormConfig())
    assert spelled.parts == USUAL.parts
    states = []
    for config in (USUAL, spelled):
        decoder = Decoder(config)
        decoder.init_weights(0)
        states.append(decoder.state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_short_form_is_dumped_as_earlier_releases_read_it() -> None:
    assert dump_decoder_config(USUAL) == {
        "dim": 32,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 48,
        "max_seq_len": 16,
        "vocab_size": 61,
        "rope_theta": 500_000.0,
        "norm_eps": 1e-5,
        "dropout": 0.0,
        "has_tied_embeddings": True,
    }


@pytest.mark.parametrize(
    "config", [USUAL, MIXED, replace(MIXED, num_heads=None, num_kv_heads=None, attention=AttentionConfig(8, 8, 1e4))]
)
def test_a_recipe_gives_back_the_shape_that_was_dumped(config: DecoderConfig) -> None:
    read = build_decoder_config(dump_decoder_config(config), "recipe.yaml")
    assert read.parts == config.parts
    assert dump_decoder_config(read) == dump_decoder_config(config)
    assert [getattr(read, name) for name in SHAPE] == [getattr(config, name) for name in SHAPE]


NESTED = {
    **SHAPE,
    "attention": {"num_heads": 4, "num_kv_heads": 2},
    "feed_forward": {"class_path": "genesis.model.feed_forward.DenseConfig", "init_args": {"ffn_dim": 48}},
    "norm": {"eps": 1e-5},
}


@pytest.mark.parametrize("part", ["attention", "feed_forward", "norm", "all"])
def test_recipes_of_one_decoder_are_unified_however_they_spell_its_parts(part: str) -> None:
    owned = {name for name, (owner, _) in SHORT_FIELDS.items() if part in (owner, "all")}
    parts = {name: NESTED[name] for name in Parts._fields if part in (name, "all")}
    spelled = {**{name: value for name, value in SHORT.items() if name not in owned}, **parts}
    assert unify_decoder({"model": {"decoder": spelled, "optimizer": {}}, "data": 1}) == {
        "model": {"decoder": dump_decoder_config(USUAL), "optimizer": {}},
        "data": 1,
    }


def test_a_part_that_short_fields_cannot_describe_stays_and_what_is_no_decoder_stays_as_it_is() -> None:
    mixed = {"model": {"decoder": dump_decoder_config(MIXED)}}
    assert unify_decoder(mixed) == mixed
    for model in (None, 5, {}, {"decoder": "nano.yaml"}, {"decoder": {**SHORT, "dim": "wide"}}):
        assert unify_decoder({"model": model}) == {"model": model}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ffn_dim": None}, "ffn_dim is missing: give it, or the configuration feed_forward"),
        ({"attention": {"num_heads": 4, "num_kv_heads": 2}}, "num_heads is 4, but attention is also given"),
        ({"attention": {"num_heads": 4}, "num_heads": None}, "attention: num_kv_heads is missing"),
        ({"attention": 5}, "attention is 5: it must be a mapping of num_heads, num_kv_heads"),
        ({"norm": {"esp": 1e-6}}, "norm: unknown key 'esp'; did you mean 'eps'"),
        ({"norm": {"eps": 0.0}}, "norm: norm_eps is 0.0"),
        ({"feed_forward": {"ffn_dim": 4}}, "feed_forward is {'ffn_dim': 4}: it must be a mapping of class_path"),
        ({"feed_forward": {"class_path": ["os"]}}, r"feed_forward: class_path is \['os'\]; it must be genesis"),
        (
            {"feed_forward": {"class_path": "genesis.model.feed_forward.DenseConfig", "init_args": {"ffn_dim": 0}}},
            "feed_forward: ffn_dim is 0",
        ),
    ],
)
def test_a_configuration_of_a_part_that_cannot_be_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"^recipe.yaml: {message}") as error:
        build_decoder_config({**SHORT, **changes}, "recipe.yaml")
    assert "\n" not in str(error.value)


def test_no_code_is_imported_because_a_checkpoint_names_it() -> None:
    part = {"class_path": "antigravity.Part", "init_args": {}}
    with pytest.raises(
        UserError, match=r"manifest\.json: feed_forward names .*: antigravity\.Part; .* `--allow-imports antigravity`"
    ):
        build_decoder_config({**SHORT, "ffn_dim": None, "feed_forward": part}, "manifest.json")
    assert "antigravity" not in sys.modules


def test_code_that_a_checkpoint_names_is_imported_if_the_user_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    own = "from tests.model import mixture_part\nclass Mine(mixture_part.MixtureConfig): ...\n"
    (tmp_path / "planted_part.py").write_text(own)
    (tmp_path / "planted_fault.py").write_text("raise OSError('no disk')\n")
    fields = {**SHORT, "ffn_dim": None}
    part = {"class_path": "planted_part.Mine", "init_args": {"num_experts": 3, "ffn_dim": 8}}
    with pytest.raises(
        UserError, match=r"feed_forward names .*: planted_part\.Mine; .* `--allow-imports planted_part`"
    ):
        build_decoder_config({**fields, "feed_forward": part}, "manifest.json")
    monkeypatch.setenv("GENESIS_ALLOW_IMPORTS", "planted_part,planted_fault")
    config = build_decoder_config({**fields, "feed_forward": part}, "manifest.json")
    assert type(config.feed_forward).__module__ == "planted_part"
    with pytest.raises(
        UserError, match=r"^planted_fault\.Part is allowed, but planted_fault cannot .*OSError: no disk"
    ):
        build_decoder_config({**fields, "feed_forward": {"class_path": "planted_fault.Part"}}, "manifest.json")


def test_todays_groups_keep_their_names_and_the_order_of_their_parameters() -> None:
    decoder = Decoder(replace(USUAL, has_tied_embeddings=False))
    names = {id(parameter): name for name, parameter in decoder.named_parameters()}
    groups = build_optimizer(decoder, AdamW()).param_groups
    found = {group["name"]: [names[id(parameter)] for parameter in group["params"]] for group in groups}
    matrices = ("attention.query", "attention.key", "attention.value", "attention.output")
    matrices += ("feed_forward.gate", "feed_forward.up", "feed_forward.down")
    assert list(found) == ["matrices", "head", "embeddings", "vectors"]
    assert found["matrices"] == [f"blocks.{layer}.{name}.weight" for layer in range(3) for name in matrices]
    assert found["head"] == ["output.weight"]
    assert found["embeddings"] == ["embedding.weight"]
    assert found["vectors"] == [
        *(f"blocks.{layer}.{name}_norm.weight" for layer in range(3) for name in ("attention", "feed_forward")),
        "norm.weight",
    ]


def test_a_part_brings_groups_of_its_own_with_the_treatment_of_their_kind() -> None:
    groups = {group["name"]: group for group in build_optimizer(Decoder(MIXED), AdamW()).param_groups}
    assert list(groups) == ["matrices", "embeddings", "vectors", "routers", "experts"]
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "matrices": 0.1,
        "embeddings": 0.0,
        "vectors": 0.0,
        "routers": 0.0,
        "experts": 0.1,
    }
    assert [tuple(parameter.shape) for parameter in groups["experts"]["params"]] == [(3, 8, 32), (3, 32, 8)] * 2


def test_muon_refuses_what_is_neither_a_matrix_nor_a_stack_of_them() -> None:
    decoder = Decoder(MIXED)
    decoder.blocks[1].feed_forward.up = nn.Parameter(torch.empty(3, 2, 4, 32))
    with pytest.raises(UserError, match=r"is muon, .*blocks\.1\.feed_forward\.up has 4 dimensions: use another one"):
        build_optimizer(decoder, Muon())


def test_a_parameter_without_a_group_is_refused_by_name() -> None:
    decoder = Decoder(MIXED)
    decoder.blocks[1].feed_forward.forgotten = nn.Parameter(torch.empty(2))
    with pytest.raises(UserError, match=r"blocks\.1\.feed_forward\.forgotten is in no group of the optimizer"):
        build_optimizer(decoder, AdamW())


def test_a_part_draws_its_own_initial_values_by_canonical_name() -> None:
    decoder = Decoder(MIXED)
    decoder.init_weights(7)
    part = decoder.blocks[2].feed_forward
    assert (part.router == 0.0).all()
    assert torch.equal(part.up, draw_block((3, 8, 32), INIT_STD, "7 blocks.2.feed_forward.up", 0))
    residual_std = INIT_STD / 6**0.5
    assert torch.equal(part.down, draw_block((3, 32, 8), residual_std, "7 blocks.2.feed_forward.down", 0))


def test_a_description_counts_what_a_part_says_it_costs() -> None:
    usual, mixed = describe(USUAL), describe(MIXED)
    dense, mixture = 3 * 32 * 8, 3 * 32 + 2 * 3 * 32 * 8
    assert mixed.parameters["feed_forward"] == dense + 2 * mixture
    assert mixed.parameters["attention"] == usual.parameters["attention"]
    difference = dense + 2 * mixture - usual.parameters["feed_forward"]
    assert mixed.flops_per_token - usual.flops_per_token == 6 * difference
    assert mixed.attention_flops_per_token == usual.attention_flops_per_token


def test_statistics_come_beside_the_logits_and_only_from_parts_that_have_them() -> None:
    ids = torch.arange(20).view(2, 10)
    decoder = Decoder(MIXED)
    decoder.init_weights(0)
    logits, statistics = decoder(ids, has_statistics=True)
    assert torch.equal(logits, decoder(ids))
    assert list(statistics) == ["blocks.1.feed_forward", "blocks.2.feed_forward"]
    assert all(int(reported.counts["load_tokens"].sum()) == 20 for reported in statistics.values())
    usual = Decoder(USUAL)
    usual.init_weights(0)
    assert usual(ids, has_statistics=True)[1] == {}


def test_a_decoder_with_a_part_that_no_family_has_is_not_exported_under_a_familys_names() -> None:
    with pytest.raises(UserError, match="no family of Hugging Face's has a MixtureConfig"):
        find_family(MIXED)
