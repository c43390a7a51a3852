"""Adapters equal PEFT's: the same values, logits and gradients for the same tensors, and nothing else is trained."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from genesis.base.errors import UserError
from genesis.huggingface.llama import LLAMA
from genesis.model.adapter import (
    BASE_FORMATS,
    AdaptedLinear,
    AdapterConfig,
    adapters_merged,
    attach_adapters,
    init_adapters,
    is_adapter_tensor,
    merge_rows,
)
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.describe import count_flops_per_token
from genesis.model.recipe import read_adapter_config

CONFIG = DecoderConfig(
    vocab_size=61, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=16, norm_eps=1e-5
)
IDS = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(3))


def build(adapter: AdapterConfig, config: DecoderConfig = CONFIG) -> Decoder:
    """Returns a decoder whose adapters add something."""
    decoder = Decoder(config)
    attach_adapters(decoder, adapter)
    decoder.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0.0, 0.1, generator=generator)
            elif not is_adapter_tensor(name) and parameter.ndim == 2:
                parameter.mul_(3.0)  # so that every layer matters
        for layer in decoder.modules():
            if isinstance(layer, AdaptedLinear) and layer.lora_magnitude is not None:
                layer.fill_magnitude()
                layer.lora_magnitude.mul_(1.0 + 0.2 * torch.rand(layer.out_features, generator=generator))
    return decoder


def build_theirs(decoder: Decoder, **options: Any) -> Any:
    """Returns PEFT's model of transformers' with the same tensors."""
    config = decoder.config
    shape: Any = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        intermediate_size=config.ffn_dim,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        max_position_embeddings=config.max_seq_len,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(shape)
    ours = {name: tensor for name, tensor in decoder.state_dict().items() if not is_adapter_tensor(name)}
    model.load_state_dict({LLAMA.their_name(name): tensor for name, tensor in ours.items()}, strict=False)
    theirs = get_peft_model(model, LoraConfig(target_modules="all-linear", **options))
    with torch.no_grad():
        for name, (a, b, magnitude) in find_pairs(decoder, theirs).items():
            layer = decoder.get_submodule(name)
            assert isinstance(layer, AdaptedLinear)
            a.copy_(layer.lora_A)
            b.copy_(layer.lora_B)
            if magnitude is not None:
                magnitude.copy_(layer.lora_magnitude)
    return theirs


def find_pairs(decoder: Decoder, theirs: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Returns the parameters of PEFT's adapters by the names of our layers."""
    pairs = {}
    for name, layer in decoder.named_modules():
        if isinstance(layer, AdaptedLinear):
            other = theirs.base_model.model.get_submodule(LLAMA.their_name(f"{name}.weight").removesuffix(".weight"))
            vector = other.lora_magnitude_vector["default"].weight if layer.lora_magnitude is not None else None
            pairs[name] = (other.lora_A["default"].weight, other.lora_B["default"].weight, vector)
    return pairs


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"rslora": True}, {"use_rslora": True}),
        ({"dora": True}, {"use_dora": True}),
        ({"dora": True, "rslora": True}, {"use_dora": True, "use_rslora": True}),
        ({"dropout": 0.4}, {"lora_dropout": 0.4}),
        ({"dora": True, "dropout": 0.4}, {"use_dora": True, "lora_dropout": 0.4}),
    ],
    ids=["lora", "rslora", "dora", "dora-rslora", "dropout", "dora-dropout"],
)
def test_logits_and_gradients_equal_those_of_peft_for_every_layer(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    decoder = build(AdapterConfig(rank=4, alpha=6.0, **ours))
    other = build_theirs(decoder, r=4, lora_alpha=6, **theirs)
    pairs = find_pairs(decoder, other)
    assert len(pairs) == 14
    torch.manual_seed(0)  # the same masks of dropout
    logits = decoder(IDS)
    torch.manual_seed(0)
    their_logits = other(input_ids=IDS).logits
    torch.testing.assert_close(logits, their_logits, rtol=0, atol=1e-6)
    for out in (logits, their_logits):
        out.log_softmax(-1).square().mean().backward()
    for name, expected in pairs.items():
        layer = decoder.get_submodule(name)
        for tensor, wanted in zip((layer.lora_A, layer.lora_B, layer.lora_magnitude), expected, strict=True):
            if wanted is not None:
                assert tensor.grad.abs().max() > 1e-4, name
                torch.testing.assert_close(
                    tensor.grad, wanted.grad, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
    trained = {name for name, parameter in decoder.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in decoder.named_parameters() if is_adapter_tensor(name)}


@pytest.mark.parametrize("dora", [False, True])
def test_new_adapters_change_no_logit(dora: bool) -> None:
    decoder = Decoder(CONFIG)
    decoder.init_weights(0)
    with torch.no_grad():
        before = decoder(IDS)
        attach_adapters(decoder, AdapterConfig(rank=4, dora=dora))
        init_adapters(decoder, seed=5)
        torch.testing.assert_close(decoder(IDS), before, rtol=0, atol=1e-6 if dora else 0.0)


def test_the_base_keeps_its_names_and_the_adapters_lie_beside_them() -> None:
    decoder = Decoder(CONFIG)
    names = set(decoder.state_dict())
    attach_adapters(decoder, AdapterConfig(rank=4, include=("*.attention.*",), exclude=("*.output",)))
    added = set(decoder.state_dict()) - names
    assert names <= set(decoder.state_dict())
    layers = {f"blocks.{block}.attention.{part}" for block in (0, 1) for part in ("query", "key", "value")}
    assert added == {f"{layer}.{tensor}" for layer in layers for tensor in ("lora_A", "lora_B")}


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"rslora": True}])
def test_the_merged_weights_give_the_logits_of_the_adapters(options: dict[str, Any]) -> None:
    adapted = build(AdapterConfig(rank=4, **options))
    merged = Decoder(CONFIG)
    state = {name: tensor for name, tensor in adapted.state_dict().items() if not is_adapter_tensor(name)}
    for name, layer in adapted.named_modules():
        if isinstance(layer, AdaptedLinear):
            state[f"{name}.weight"] = merge_rows(dict(layer.named_parameters()), layer.scaling).float()
    merged.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS), adapted(IDS), rtol=0, atol=5e-6)


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"rslora": True}], ids=["lora", "dora", "rslora"])
def test_merged_for_a_while_gives_the_same_logits_and_leaves_no_trace(options: dict[str, Any]) -> None:
    decoder = build(AdapterConfig(rank=4, alpha=8.0, **options)).eval()
    names, ids = list(decoder.state_dict()), torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        wanted = decoder(ids)
        with adapters_merged(decoder):
            found = decoder(ids)
            assert list(decoder.state_dict()) == names
        assert not torch.equal(found, wanted)  # up to rounding
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(decoder(ids), wanted, rtol=0.0, atol=0.0)


def test_a_base_in_bfloat16_and_a_large_one_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = build(AdapterConfig(rank=4))
    monkeypatch.setattr("genesis.model.adapter._MAX_MERGED_BYTES", 100)
    with adapters_merged(decoder):
        assert all(one.merged is None for one in decoder.modules() if isinstance(one, AdaptedLinear))
    monkeypatch.undo()
    decoder.to(torch.bfloat16)
    with adapters_merged(decoder):
        assert all(one.merged is None for one in decoder.modules() if isinstance(one, AdaptedLinear))


def test_dropout_of_the_adapters_is_drawn_in_training_alone() -> None:
    decoder = build(AdapterConfig(rank=4, dropout=0.5))
    with torch.no_grad():
        decoder.train()
        torch.manual_seed(0)
        first, second = decoder(IDS), decoder(IDS)
        torch.manual_seed(0)
        assert torch.equal(decoder(IDS), first)
        assert not torch.equal(first, second)
        decoder.eval()
        assert torch.equal(decoder(IDS), decoder(IDS))


def test_the_head_is_trained_beside_adapters_where_it_is_not_the_embedding() -> None:
    untied = DecoderConfig(**{**vars(CONFIG), "has_tied_embeddings": False})
    decoder = Decoder(untied)
    attach_adapters(decoder, AdapterConfig(rank=2, also_train=("embedding", "head")))
    trained = {name for name, parameter in decoder.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if not is_adapter_tensor(name)} == {"embedding.weight", "output.weight"}
    with pytest.raises(UserError, match="the base is in bfloat16, in which small updates are lost"):
        attach_adapters(Decoder(untied), AdapterConfig(rank=2, also_train=("head",)), BASE_FORMATS["bfloat16"])


def test_the_flops_of_a_token_leave_out_the_gradients_of_frozen_weights() -> None:
    adapter = AdapterConfig(rank=2, include=("*.query",))
    blocks, output = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48), 61 * 32
    own = 2 * 6 * 2 * (32 + 32)
    full = count_flops_per_token(CONFIG, 16)
    assert count_flops_per_token(CONFIG, 16, adapter) == full - 2 * (blocks + output) + own
    head = replace(adapter, also_train=("embedding",))
    assert count_flops_per_token(CONFIG, 16, head) == full - 2 * blocks + own


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"include": 5}, "include is 5: it must be a list of texts"),
        ({"include": "*"}, r"include is '\*': it must be a list of texts"),
        ({"rank": "four"}, "rank is 'four'; it must be int"),
        ({"also_train": ["norm"]}, "also_train has 'norm': it must be 'embedding' or 'head'"),
        ({"r": 4}, "unknown key 'r'"),
    ],
)
def test_a_recipe_with_adapters_that_make_no_sense_is_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_adapter_config({"model": {"adapter": content}}, where="the recipe")
