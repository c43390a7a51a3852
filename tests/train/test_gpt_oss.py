"""GPT-OSS trains as a plain loop of transformers over its documents, and goes on bit for bit after it was killed."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from genesis.huggingface.gpt_oss import GPT_OSS
from genesis.huggingface.shape import read_shape
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.loss import sum_cross_entropy
from genesis.optim import AdamW, build_optimizer
from genesis.strategies.recompute import apply_recomputation
from genesis_callbacks.testing import run_ranks
from tests.mixtures import mix
from tests.model.foreign.test_decoder import DOCUMENTS, draw, run_theirs, split_by_kind
from tests.train.test_ladder import DECODER, KillAll, climb

SHAPE: dict[str, Any] = {
    **{"vocab_size": 320, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"max_position_embeddings": 64, "sliding_window": 8, "swiglu_limit": 0.3, "initializer_range": 0.1},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8},
        "truncate": False,
    },
}
SINKS: DecoderConfig = mix(replace(DECODER, dropout=0.0), "sinks")


def build_theirs(**changes: Any) -> Any:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **(SHAPE | changes))).train()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.ndim == 1 or "bias" in name:  # neither zeros nor ones, which would hide a mistake
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return theirs


def run_ours(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(ids, document_ids=DOCUMENTS, head=partial(sum_cross_entropy, labels=labels))
    return loss / labels.numel()


def compare_gradients(ours: Decoder, theirs: Any) -> None:
    for model, run in ((ours, run_ours), (theirs, run_theirs)):
        run(model, *draw(0)).backward()
    found = GPT_OSS.to_theirs({name: parameter.grad for name, parameter in ours.named_parameters()})
    for name, parameter in theirs.named_parameters():
        difference, largest = float((found[name] - parameter.grad).abs().max()), float(parameter.grad.abs().max())
        assert difference < 1e-4 * largest, name


def test_packed_documents_train_like_a_loop_of_transformers_over_each(tmp_path: Path) -> None:
    theirs = build_theirs()
    theirs.config.save_pretrained(tmp_path)
    ours = Decoder(read_shape(tmp_path)[1]).train()
    ours.load_state_dict(
        GPT_OSS.to_ours({name: one.detach().clone() for name, one in theirs.named_parameters()}, ours.config)
    )
    apply_recomputation(ours, "block")
    optimizer = build_optimizer(ours, AdamW(lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95)))
    compare_gradients(ours, theirs)
    reference = torch.optim.AdamW(split_by_kind(theirs), lr=3e-3, betas=(0.9, 0.95), eps=1e-8)

    for step in range(3):
        losses = []
        for model, run, algorithm in ((ours, run_ours, optimizer), (theirs, run_theirs, reference)):
            algorithm.zero_grad()
            loss = run(model, *draw(step))
            loss.backward()
            algorithm.step()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], abs=2e-6)


@pytest.mark.slow
@pytest.mark.repeat  # `test_ladder.py`: its parts keep nothing but parameters
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("single", 1), ("checkpointing", 2), ("compiled_shards", 2), ("experts_2", 2)],
)
def test_a_killed_run_goes_on_bit_for_bit(strategy: str, world_size: int, tmp_path: Path, tiny_corpus: Path) -> None:
    run = partial(run_ranks, partial(climb, decoder=SINKS), timeout_seconds=600)
    shared = (str(tiny_corpus), strategy)
    straight = run(world_size, str(tmp_path / "straight"), *shared, "sync")
    with pytest.raises(AssertionError, match="died without a word"):
        run(world_size, str(tmp_path / "run"), *shared, "process", KillAll())
    resumed = run(world_size, str(tmp_path / "run"), *shared, "process")
    alone = run(1, str(tmp_path / "alone"), str(tiny_corpus), "single", "sync")[0]
    for one, other in zip(straight, resumed, strict=True):
        assert other["restored"] > 0
        assert one["failed"] == other["failed"] == 0
        assert one["weights"].keys() == other["weights"].keys()
        for name, tensor in one["weights"].items():
            assert torch.equal(tensor, other["weights"][name]), name
            torch.testing.assert_close(tensor, alone["weights"][name], rtol=1e-4, atol=1e-4)
