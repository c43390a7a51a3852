"""The gated delta rule: one result in chunks, token by token and in a slow reference; its part in a cache."""

from typing import Any

import pytest
import torch
from torch import Tensor

from genesis.base.errors import UserError
from genesis.generate.sample import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from genesis.model.decoder import Decoder, DecoderConfig, KVCache
from genesis.model.delta import GatedDeltaConfig
from genesis.model.delta_rule import CHUNK_TOKENS, DeltaInputs, chunked, step, sum_to_each
from genesis.model.describe import describe

HEADS = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 12}
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "dim": 48,
    "num_layers": 4,
    "num_heads": 6,
    "num_kv_heads": 2,
    "ffn_dim": 64,
    "max_seq_len": 256,
}


def draw_inputs(seq_len: int, *, seed: int = 0) -> DeltaInputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, seq_len, *shape, generator=generator)

    return DeltaInputs(draw(2, 8), draw(2, 8), draw(4, 12), -draw(4).abs(), draw(4).sigmoid())


def apply_slowly(inputs: DeltaInputs, is_start: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, for each head and token, in float64."""
    query, key, value, decay, beta = (part.double() for part in inputs)
    outputs = torch.zeros(*value.shape, dtype=torch.float64)
    ends = []
    for row in range(value.shape[0]):
        for head in range(value.shape[2]):
            held = state[row, head].double()
            for t in range(value.shape[1]):
                k, q = (part[row, t, head // 2] for part in (key, query))
                k, q = k / (k @ k + 1e-6).sqrt(), q / (q @ q + 1e-6).sqrt() / 8**0.5
                held = torch.zeros_like(held) if is_start[row, t] else decay[row, t, head].exp() * held
                held = held + torch.outer(k, beta[row, t, head] * (value[row, t, head] - held.T @ k))
                outputs[row, t, head] = held.T @ q
            ends.append(held)
    return outputs, torch.stack(ends).view(state.shape)


def documents(seq_len: int, *starts: tuple[int, int]) -> Tensor:
    is_start = torch.zeros(2, seq_len, dtype=torch.bool)
    for row, place in starts:
        is_start[row, place] = True
    return is_start


PACKINGS = {
    "one token": documents(1),
    "one chunk": documents(CHUNK_TOKENS),
    "a token more than a chunk": documents(CHUNK_TOKENS + 1),
    "documents": documents(150, (0, 0), (0, 1), (0, 63), (0, 64), (0, 130), (1, 0), (1, 128), (1, 129)),
    "a state goes into the first document": documents(70, (0, 40), (1, 69)),
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_chunks_give_outputs_states_and_gradients_of_the_definition(packing: str) -> None:
    is_start = PACKINGS[packing]
    inputs = DeltaInputs(*(part.requires_grad_() for part in draw_inputs(is_start.shape[1])))
    state = torch.randn(2, 4, 8, 12, generator=torch.Generator().manual_seed(1), requires_grad=True)
    given = [*inputs, state]
    outputs, end = chunked(inputs, is_start, state)
    wanted, wanted_end = apply_slowly(inputs, is_start, state)
    torch.testing.assert_close(outputs.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(end.double(), wanted_end, rtol=1e-5, atol=1e-5)
    weights = torch.randn(*outputs.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((outputs * weights).sum() + end.sum(), given, materialize_grads=True)
    slow = torch.autograd.grad((wanted * weights).sum() + wanted_end.sum(), given, materialize_grads=True)
    for ours, theirs in zip(found, slow, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-4)


def test_a_state_that_all_but_vanishes_within_a_chunk_gives_no_infinity() -> None:
    inputs = draw_inputs(100)._replace(decay=torch.full((2, 100, 4), -80.0))
    outputs, _ = chunked(inputs)
    assert outputs.isfinite().all()
    torch.testing.assert_close(
        outputs.double(), apply_slowly(inputs, documents(100), torch.zeros(2, 4, 8, 12))[0], rtol=1e-5, atol=1e-5
    )


def test_sums_of_a_fixed_order_are_those_of_a_cumsum_with_its_gradients() -> None:
    decay = -torch.rand((2, 3, 4, CHUNK_TOKENS), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    same = torch.ones((CHUNK_TOKENS, CHUNK_TOKENS), dtype=torch.bool).tril()
    upstream = torch.randn(decay.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [decay.clone().requires_grad_() for _ in range(2)]
    sums = sum_to_each(leaves[0], same), leaves[1].cumsum(-1)
    torch.testing.assert_close(*sums)
    torch.testing.assert_close(
        *(torch.autograd.grad(one, leaf, upstream) for one, leaf in zip(sums, leaves, strict=True))
    )


def test_tokens_one_by_one_give_what_chunks_give() -> None:
    inputs = draw_inputs(100)
    wanted, wanted_end = chunked(inputs)
    state, found = torch.zeros(2, 4, 8, 12), []
    for t in range(100):
        out, state = step(DeltaInputs(*(part[:, t : t + 1] for part in inputs)), state)
        found.append(out)
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, wanted_end, rtol=1e-5, atol=1e-5)


def build(**options: Any) -> Decoder:
    decoder = Decoder(DecoderConfig(**SHAPE, linear_attention=GatedDeltaConfig(**HEADS, **options))).eval()
    decoder.init_weights(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim > 1 and "conv" not in name:
                parameter.mul_(5.0)
    return decoder


@torch.no_grad()
def test_rows_of_different_lengths_share_a_cache_and_padding_changes_no_state() -> None:
    decoder = build()
    ids = torch.randint(97, (3, 90), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([70, 1, 33])
    cache = KVCache(decoder.config, 3, 90, "cpu", torch.float32)
    cache.expect(lengths)
    decoder(ids[:, :70], cache=cache)
    cache.advance(lengths)
    following = torch.stack([row[length : length + 6] for row, length in zip(ids, lengths, strict=True)])
    logits = []
    for place in range(6):
        logits.append(decoder(following[:, place : place + 1], cache=cache))
        cache.advance(1)
    found = torch.cat(logits, dim=1)
    for row, length in enumerate(lengths.tolist()):
        whole = decoder(ids[row : row + 1, : length + 6])[0, length:]
        torch.testing.assert_close(found[row], whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("attention_every", [2, 4, 9])
def test_texts_that_join_and_leave_a_batch_are_those_of_each_alone(attention_every: int) -> None:
    decoder = build(attention_every=attention_every)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(97, (length,), generator=generator).tolist() for length in (3, 80, 1, 20)]
    greedy = SamplingOptions(temperature=0.0)

    def continue_all(texts: list[list[int]], *, has_cache: bool) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in texts]
        for token in generate(decoder, texts, GenerateOptions(12, greedy, has_cache=has_cache), {5, 17, 40}):
            found[token.prompt].append(token.id)
        return found

    together = continue_all(prompts, has_cache=True)
    assert together == [continue_all([prompt], has_cache=False)[0] for prompt in prompts]


def test_a_linear_layer_needs_no_cache_for_each_token() -> None:
    mixed = describe(build().config)
    plain = describe(DecoderConfig(**SHAPE))
    assert 4 * mixed.kv_cache_bytes_per_token == plain.kv_cache_bytes_per_token
    assert 4 * mixed.attention_flops_per_token == plain.attention_flops_per_token
    assert mixed.parameters["linear_attention"] == sum(
        parameter.numel()
        for name, parameter in build().named_parameters()
        if "linear_attention." in name and "norm" not in name
    )
    assert mixed.num_parameters == sum(parameter.numel() for parameter in build().parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_value_heads": 3}, "num_value_heads 3 is not a multiple of num_key_heads 2"),
        ({"attention_every": 1}, "no layer is linear"),
        ({"conv_width": 0}, "conv_width is 0"),
        ({"norm_eps": 0.0}, r"norm_eps is 0\.0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GatedDeltaConfig(**(HEADS | changes))
