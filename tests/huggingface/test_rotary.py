"""Scaled rotary positions: within and beyond the original context, logits are those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from genesis.evaluate.plan import Request
from genesis.evaluate.score import Scorer
from genesis.generate.batch import Batch
from genesis.generate.batch import Request as Prompt
from genesis.generate.sampling_options import SamplingOptions
from genesis.huggingface.directory import CONFIG_NAME
from genesis.huggingface.shape import find_family, read_shape, write_shape
from genesis.model.decoder import Decoder

SHAPE: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
ORIGINAL = 128
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [1.0 + pair for pair in range(8)],
}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn by two magnitudes": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn with all options": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.3},
    "yarn without a factor": {**YARN, "factor": None},
    "longrope": LONGROPE,
    "longrope with all options": LONGROPE | {"factor": 16.0, "attention_factor": 1.2},
}


def draw_ids(*shape: int) -> Tensor:
    return torch.randint(90, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def build_both(kind: str, directory: Path) -> tuple[LlamaForCausalLM, Decoder]:
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters={**KINDS[kind], "rope_theta": 1e4})).eval()
    theirs.config.save_pretrained(directory)
    family, config = read_shape(directory)
    decoder = Decoder(config).eval()
    decoder.load_state_dict(family.to_ours(theirs.state_dict(), config))
    return theirs, decoder


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_within_and_beyond_the_original_context_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs, ours = build_both(kind, tmp_path)
    longest = 700 if kind == "dynamic" else 400
    assert longest < ours.config.max_seq_len
    content = json.loads(json.dumps(write_shape(find_family(ours.config), ours.config)))
    (tmp_path / CONFIG_NAME).write_text(json.dumps(content))
    assert read_shape(tmp_path)[1] == ours.config
    again = LlamaForCausalLM(AutoConfig.from_pretrained(tmp_path)).eval()
    again.load_state_dict(theirs.state_dict())
    for length in (100, longest):
        ids = draw_ids(1, length)
        wanted = theirs(input_ids=ids).logits
        torch.testing.assert_close(ours(ids), wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(again(input_ids=ids).logits, wanted)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@torch.no_grad()
def test_the_length_of_a_text_alone_turns_its_positions(kind: str, tmp_path: Path) -> None:
    """A text is as it is alone, beside a longer one in a packed row and in a cache, padded."""
    _, ours = build_both(kind, tmp_path)
    long = 2 * ours.config.parts.attention.rope_scaling.original_seq_len - 24
    ids = draw_ids(1, long + 100)
    documents = torch.tensor([[0] * long + [1] * 100], dtype=torch.int32)
    alone = ours(ids[:, :long]), ours(ids[:, long:])
    torch.testing.assert_close(ours(ids, document_ids=documents), torch.cat(alone, 1), rtol=1e-4, atol=1e-4)

    rows, lengths = torch.zeros(2, long, dtype=torch.int64), torch.tensor([long, 100])
    rows[0], rows[1, :100] = ids[0, :long], ids[0, long:]
    cache = ours.new_cache(2, long)
    cache.expect(lengths)
    found = ours(rows, cache=cache)
    torch.testing.assert_close(found[0], alone[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1, :100], alone[1][0], rtol=1e-4, atol=1e-4)
    assert not ours.config.can_share_beginnings

    texts = [ids[0, :long].tolist(), ids[0, long:].tolist()]
    requests = [Request(tuple(text[:-2]), tuple(text[-2:])) for text in texts]
    together = Scorer(ours, batch_tokens=4 * long).score(requests)
    for score, request in zip(together, requests, strict=True):
        assert score.log_likelihood == pytest.approx(Scorer(ours).score([request])[0].log_likelihood, abs=1e-3)

    running = Batch(ours, 2, set(), num_slots=long + 8, has_cache=False)
    for text in texts:
        running.add(Prompt(text, 1, SamplingOptions(temperature=0.0)))
    for token, text in zip(sorted(running.step(), key=lambda token: token.request), texts, strict=True):
        wanted = ours(torch.tensor([text]))[0, -1].log_softmax(-1).max()
        assert token.log_prob == pytest.approx(float(wanted), abs=1e-3)
