"""Models of transformers train as a plain loop of transformers over documents one by one trains them."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from genesis.base.errors import UserError
from genesis.model.adapter import BASE_FORMATS, AdapterConfig, attach_adapters, init_adapters
from genesis.model.decoder import Decoder, build_model
from genesis.model.foreign.attention import Documents, attending_to, make_mask
from genesis.model.foreign.config import TransformersConfig
from genesis.model.foreign.decoder import find_shape, own_logits
from genesis.model.language_model import BodyShape
from genesis.model.loss import sum_cross_entropy, token_losses
from genesis.objectives.distillation import Distillation
from genesis.optim import AdamW, build_optimizer
from genesis.strategies.recompute import apply_recomputation
from genesis.strategies.wrap import apply_wrappers
from genesis.train.module import GenesisModule
from tests.model.foreign.models import FAMILIES, TOWERS, configure, describe, make_theirs, wrap

LENGTHS = (13, 1, 20, 14)
DOCUMENTS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(torch.int32)[None]


def draw(step: int) -> tuple[Tensor, Tensor]:
    """Returns ids, some of which are padding's, and labels [1, S]."""
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(320, (1, sum(LENGTHS)), generator=generator) for _ in range(2))  # type: ignore[return-value]


def run_ours(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(
        ids, document_ids=DOCUMENTS, head=partial(sum_cross_entropy, labels=labels, softcap=model.softcap)
    )
    return loss / labels.numel()


def run_theirs(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    pairs = zip(ids.split(LENGTHS, 1), labels.split(LENGTHS, 1), strict=True)
    sums = [
        cross_entropy(model(input_ids=one, use_cache=False).logits[0].float(), wanted[0], reduction="sum")
        for one, wanted in pairs
    ]
    return torch.stack(sums).sum() / labels.numel()


def split_by_kind(model: Any) -> list[dict[str, Any]]:
    table = model.get_input_embeddings().weight
    matrices = [
        one for name, one in model.named_parameters() if one.ndim > 1 and "bias" not in name and one is not table
    ]
    others = [one for one in model.parameters() if not any(one is other for other in matrices)]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def check_steps(*contenders: tuple[Any, Any, torch.optim.Optimizer]) -> None:
    """Trains both models for three steps and compares their losses."""
    for step in range(3):
        losses = []
        for model, run, algorithm in contenders:
            algorithm.zero_grad()
            loss = run(model, *draw(step))
            loss.backward()
            algorithm.step()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], abs=2e-6)


@pytest.mark.parametrize("documents", ["packed", "rows"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_documents_train_like_a_loop_of_transformers_over_each(kind: str, documents: Any) -> None:
    theirs = make_theirs(configure(kind)).train()
    ours = wrap(theirs, documents=documents).train()
    apply_recomputation(ours, "block")
    theirs.get_input_embeddings().padding_idx = None  # else its row learns nothing as an input
    optimizer = build_optimizer(ours, AdamW(lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95)))
    reference = torch.optim.AdamW(split_by_kind(theirs), lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    check_steps((ours, run_ours, optimizer), (theirs, run_theirs, reference))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3_text", "phi3", "gpt_oss"])
def test_compiled_blocks_train_like_a_loop_of_transformers(kind: str) -> None:
    theirs = make_theirs(configure(kind)).train()
    ours = wrap(theirs).train()
    apply_wrappers(ours, "block", has_compiled_blocks=True)
    theirs.get_input_embeddings().padding_idx = None
    optimizer = build_optimizer(ours, AdamW(lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95)))
    reference = torch.optim.AdamW(split_by_kind(theirs), lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    check_steps((ours, run_ours, optimizer), (theirs, run_theirs, reference))


@pytest.mark.parametrize("kind", TOWERS)
def test_a_language_model_beside_a_tower_of_images_trains_like_a_loop_of_transformers(kind: str) -> None:
    theirs = make_theirs(configure(kind)).train()
    ours = wrap(theirs).train()
    ours.prove(48)
    names = {name.removeprefix("model."): one.requires_grad for name, one in ours.named_parameters()}
    assert {name for name, is_trained in names.items() if not is_trained} == {
        name for name in names if any(part in name for part in ("vision", "visual", "projector", "connector"))
    }
    apply_recomputation(ours, "block")
    theirs.get_input_embeddings().padding_idx = None
    optimizer = build_optimizer(ours, AdamW(lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95)))
    reference = torch.optim.AdamW(split_by_kind(theirs), lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    before = {name: one.detach().clone() for name, one in ours.named_parameters() if not one.requires_grad}
    check_steps((ours, run_ours, optimizer), (theirs.eval(), run_theirs, reference))
    assert all(torch.equal(ours.get_parameter(name), tensor) for name, tensor in before.items())


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_proof_accepts_the_families(kind: str) -> None:
    model = wrap(make_theirs(configure(kind))).train()
    model.prove(48)
    assert model.training


def test_the_proof_finds_documents_that_a_model_does_not_keep_apart() -> None:
    theirs = make_theirs(configure("falcon", num_kv_heads=4, alibi=False, multi_query=False))
    with pytest.raises(UserError, match=r"documents to rows"):
        wrap(theirs).prove(48)
    wrap(theirs, documents="rows").prove(48)


def test_the_proof_finds_another_head() -> None:
    model = wrap(make_theirs(configure("granite")))
    model._scale = 1.0
    with pytest.raises(UserError, match="logits of granite"):
        model.prove(48)


def test_the_proof_finds_a_model_that_reads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(make_theirs(configure("llama")))
    block = model.numbered_blocks[0]
    inner = block.forward

    def look(x: Tensor) -> Tensor:
        """Adds the last token to the one before it alone, so that documents stay apart."""
        return torch.cat((x[:, :-2], x[:, -2:-1] + 0.1 * x[:, -1:], x[:, -1:]), 1)

    monkeypatch.setattr(block, "forward", lambda x, **options: inner(look(x), **options))
    with pytest.raises(UserError, match="reads ahead"):
        model.prove(48)


def test_the_losses_of_tokens_are_those_of_bounded_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 8, generator=generator).double() for size in (6, 11))
    labels = torch.tensor([3, 0, -100, 10, 4, 4])
    results = []
    for run in (partial(token_losses, softcap=2.0), None):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if run is None:
            logits = 2.0 * torch.tanh(x @ w.T / 2.0)
            losses = cross_entropy(logits, labels, reduction="none")
        else:
            losses = run(x, w, labels).double()
        (losses * torch.arange(6)).sum().backward()
        results.append((losses.detach(), x.grad, w.grad))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_adapters_have_transformers_names_and_start_as_the_base() -> None:
    theirs = make_theirs(configure("phi3"))
    model, base = wrap(theirs), wrap(theirs)
    adapted = attach_adapters(model, AdapterConfig(rank=4, include=("*.qkv_proj",)), BASE_FORMATS["bfloat16"])
    assert sorted(adapted) == [f"model.model.layers.{layer}.self_attn.qkv_proj" for layer in range(2)]
    init_adapters(model, 0)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert trained == {f"{name}.{tensor}" for name in adapted for tensor in ("lora_A", "lora_B")}
    assert all(one.dtype == torch.float32 for one in model.buffers())  # rotary frequencies are not rounded
    ids, _ = draw(0)
    torch.testing.assert_close(model(ids).float(), base(ids), rtol=0.1, atol=0.1)


def test_tied_weights_have_one_name_and_the_model_has_its_own_logits() -> None:
    model = wrap(make_theirs(configure("gemma3_text")))
    assert not [name for name in model.state_dict() if "lm_head" in name]
    ids, _ = draw(0)
    torch.testing.assert_close(model(ids), model(ids, head=own_logits))


def test_the_row_of_the_padding_token_learns() -> None:
    model = wrap(make_theirs(configure("llama", tie_word_embeddings=False)))
    ids, labels = torch.zeros(1, 48, dtype=torch.int64), draw(0)[1]
    run_ours(model, ids, labels).backward()
    assert float(model.get_parameter("model.model.embed_tokens.weight").grad[0].abs().max()) > 0  # type: ignore[index]


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_vl_moe"])
def test_the_auxiliary_loss_joins_the_sum_of_the_step(kind: str) -> None:
    theirs = make_theirs(configure(kind))
    ids, labels = draw(0)
    counted = labels % 2 == 0
    head = partial(sum_cross_entropy, labels=labels)
    model = wrap(theirs, router_loss=0.9)
    _, statistics = model(ids, document_ids=DOCUMENTS, head=head, has_statistics=True, counted=counted)
    rows = wrap(theirs, router_loss=0.9, documents="rows")
    _, of_rows = rows(ids, document_ids=DOCUMENTS, head=head, has_statistics=True, counted=counted)
    loss = statistics["router"].loss_sum
    assert loss is not None
    # Of evenly used experts the loss is `top_k`, of others more.
    assert 0.9 * 2 <= float(loss.detach()) / int(counted.sum()) < 0.9 * 4
    torch.testing.assert_close(of_rows["router"].loss_sum, loss)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nothing_known"}, "never run"),
        ({"model_type": "t5"}, "has an encoder and a decoder"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "gemma3n_text"}, "num_kv_shared_layers"),
        (
            {
                "model_type": "phi",
                "vocab_size": 32,
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "has a bias",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    shape = BodyShape(dim=16, num_layers=1, vocab_size=32, max_seq_len=2048, has_tied_embeddings=False)
    with pytest.raises(UserError, match=message), torch.device("meta"):
        TransformersConfig(config).build(shape)


def test_what_needs_our_own_decoder_refuses_the_model() -> None:
    with pytest.raises(UserError, match=r"exported by `genesis export`"):
        Decoder(describe(configure("llama")))


def test_an_objective_that_does_not_bound_logits_is_refused_on_a_model_that_does() -> None:
    module = GenesisModule(describe(configure("gemma2")), AdamW(), objective=Distillation(cache="cache"))
    with pytest.raises(UserError, match="bounds its logits by 3, which the losses of Distillation do not"):
        module.configure_model()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_context_ends_where_frequencies_would_follow_the_longest_document_of_a_batch(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {"factor": 4.0}
    own = {"original_max_position_embeddings": 32} if kind == "longrope" else {}
    config = configure("phi3" if kind == "longrope" else "llama", rope_parameters=rope, **own)
    assert config.max_position_embeddings == 128
    assert find_shape(config).max_seq_len == 32


def test_buffers_that_checkpoints_have_stay_in_their_own_type() -> None:
    config = configure(
        "deepseek_v3",
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
        moe_intermediate_size=16,
    )
    with torch.device("meta"):
        model = build_model(describe(config))
    (name,) = (name for name in model.state_dict() if name.endswith("e_score_correction_bias"))
    assert name in model.list_float32()
    assert model.to(torch.bfloat16).state_dict()[name].dtype == torch.float32


@pytest.mark.parametrize("window", [2, 5, 2**50])
def test_a_window_of_any_size_is_looked_at_within_the_row(window: int) -> None:
    """A configuration may claim any window; its rule is asked about no more tokens than three times the row."""
    ids, offsets = torch.zeros(1, 5, dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    with attending_to(Documents(ids, torch.arange(5)[None], offsets)):
        rules = (
            sliding_window_causal_mask_function(window),
            chunked_causal_mask_function(window, torch.zeros(1, dtype=torch.int64)),
        )
        slid, cut = (make_mask(1, 5, 5, mask_function=rule, local_size=window) for rule in rules)
    assert (slid.window, slid.dense) == (window, None)
    assert (cut.dense is None) == (window > 3 * 5)
