"""Texts that come and go do not disturb each other."""

import math
import random
from dataclasses import replace

import pytest
import torch

from genesis.base.device import send
from genesis.base.errors import UserError
from genesis.generate.batch import Batch, Request
from genesis.generate.sampling_options import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from genesis.model.decoder import Decoder, DecoderConfig
from tests.generate.slow import NO_STOP, slow_greedy
from tests.linear_faults import CACHE_FAULTS, ROW_FAULTS
from tests.mixtures import LINEAR, MIXTURES, build_sharp, mix

GREEDY = SamplingOptions(temperature=0.0)


def build_prompts(number):
    chooser = random.Random(3)
    return [[chooser.randrange(97) for _ in range(chooser.randrange(1, 20))] for _ in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_cache", "num_shared", "read_tokens"),
    [
        pytest.param(True, 0, None, marks=pytest.mark.slow),
        (False, 0, None),
        pytest.param(True, 12, None, marks=pytest.mark.slow),
        (True, 12, 30),
    ],
)
def test_texts_that_come_and_go_at_random_are_each_what_they_are_alone(decoder, has_cache, num_shared, read_tokens):
    check_texts_that_come_and_go(decoder, 40, num_shared, has_cache=has_cache, read_tokens=read_tokens)


def build_mixture(decoder, name):
    # With tied embeddings such a model repeats its last token, whatever its layers do.
    return build_sharp(mix(replace(decoder.config, num_layers=2, has_tied_embeddings=False), name))


@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_texts_of_mixtures_and_linear_layers_come_and_go_alike(decoder, name):
    other = build_mixture(decoder, name)
    num_shared = 0 if other.config.linear_attention is not None else 12
    check_texts_that_come_and_go(other, 16, num_shared)


@pytest.mark.parametrize("fault", CACHE_FAULTS | ROW_FAULTS)
@pytest.mark.parametrize("name", LINEAR)
@torch.no_grad()
def test_a_fault_in_the_states_of_a_batch_would_be_seen(decoder, name, fault, monkeypatch):
    (CACHE_FAULTS | ROW_FAULTS)[fault](monkeypatch)
    with pytest.raises(AssertionError, match="of another text"):
        check_texts_that_come_and_go(build_mixture(decoder, name), 16, 0)


def check_texts_that_come_and_go(decoder, num_texts, num_shared, **options):
    chooser = random.Random(4)
    prefix = [chooser.randrange(97) for _ in range(num_shared)]
    waiting = [(prefix + prompt, chooser.randrange(1, 30)) for prompt in build_prompts(num_texts)]
    batch = Batch(decoder, 5, NO_STOP, prefix=prefix, **options)
    asked, texts, removed = {}, {}, set()
    while waiting or batch.num_free < 5:
        while waiting and batch.num_free and chooser.random() < 0.6:
            prompt, number = waiting.pop()
            handle = batch.add(Request(prompt, number, GREEDY))
            asked[handle], texts[handle] = (prompt, number), []
            if chooser.random() < 0.1:
                batch.remove(handle)
                removed.add(handle)
        for token in batch.step():
            texts[token.request].append(token.id)
            assert token.is_last == (len(texts[token.request]) == asked[token.request][1])
        live = [handle for handle in texts if handle not in removed and len(texts[handle]) < asked[handle][1]]
        if live and chooser.random() < 0.1:
            handle = chooser.choice(live)
            removed.add(handle)
            batch.remove(handle)
    assert len(asked) == num_texts
    assert len(removed) > num_texts // 8
    for handle, (prompt, number) in asked.items():
        wanted = slow_greedy(decoder, prompt, number)
        if handle in removed:
            wanted = wanted[: len(texts[handle])]
        assert texts[handle] == wanted, "a text of another text"
    assert batch.step() == []


def count_reads(decoder, monkeypatch):
    """Returns a list that grows by the number of tokens of each forward of more than one token per row."""
    forward, counts = Decoder.forward, []

    def count(decoder, input_ids, **keywords):
        if input_ids.shape[1] > 1:
            counts.append(input_ids.numel())
        return forward(decoder, input_ids, **keywords)

    monkeypatch.setattr(Decoder, "forward", count)
    return counts


def test_a_common_prefix_is_computed_once_and_prompts_are_read_in_parts(decoder, monkeypatch):
    prefix, counts = [5, 6, 7, 8, 9, 10], count_reads(decoder, monkeypatch)
    batch = Batch(decoder, 8, NO_STOP, prefix=prefix, read_tokens=9)
    for length in (5, 4, 4, 3, 3, 2, 2):
        batch.add(Request(prefix + [1] * length, 4, GREEDY))
    batch.step()
    assert counts == [6, 5, 8, 9, 2]  # rows of 5; 4 and 4; 3, 3 and 2, with padding; 2


def test_probabilities_are_the_models_own_whatever_is_sampled(decoder):
    (prompt,) = build_prompts(1)
    options = SamplingOptions(temperature=3.0, top_k=40)
    batch = Batch(decoder, 2, NO_STOP)
    batch.add(Request(prompt, 8, options, seed=1, num_top_logprobs=3))
    text = list(prompt)
    for _ in range(8):
        (token,) = batch.step()
        log_probs = decoder(torch.tensor([text]))[0, -1].detach().log_softmax(dim=0)
        assert token.log_prob == pytest.approx(float(log_probs[token.id]), abs=1e-4)
        assert [id for id, _ in token.top_logprobs] == log_probs.topk(3).indices.tolist()
        assert [value for _, value in token.top_logprobs] == pytest.approx(log_probs.topk(3).values.tolist(), abs=1e-4)
        text.append(token.id)
    assert token.is_last
    assert batch.num_free == 2


def build_untied():
    config = DecoderConfig(
        vocab_size=97,
        dim=48,
        num_layers=1,
        num_heads=6,
        num_kv_heads=2,
        ffn_dim=64,
        max_seq_len=64,
        has_tied_embeddings=False,
    )
    decoder = Decoder(config).eval()
    decoder.init_weights(0)
    return decoder


def test_a_text_without_numbers_ends_and_the_others_go_on():
    decoder = build_untied()
    with torch.no_grad():
        decoder.embedding.weight[96] = torch.nan
    batch = Batch(decoder, 2, NO_STOP)
    good, bad = batch.add(Request([1, 2], 5)), batch.add(Request([1, 96], 5))
    first = {token.request: token for token in batch.step()}
    assert first[bad].is_last
    assert math.isnan(first[bad].log_prob)
    assert not first[good].is_last
    assert sum(len(batch.step()) for _ in range(5)) == 4
    with pytest.raises(UserError, match="weights have diverged"):
        list(generate(decoder, [[1, 96]], GenerateOptions(5), NO_STOP))


@pytest.mark.parametrize("lengths", [(30, 1), (2, 30)], ids=["its row is taken", "another row moves there"])
def test_what_a_text_without_numbers_leaves_in_the_cache_reaches_no_other(lengths):
    decoder = build_untied()
    with torch.no_grad():
        decoder.embedding.weight[96] = torch.nan
    first, second = ([3 + number] * length for number, length in enumerate(lengths))
    batch, bad = Batch(decoder, 2, NO_STOP), Request([1, 96] * 10, 5, GREEDY)
    texts = {}
    if lengths[0] > lengths[1]:
        texts[batch.add(Request(first, 5, GREEDY))] = (first, [])
        bad_handle = batch.add(bad)
    else:
        bad_handle = batch.add(bad)
        texts[batch.add(Request(first, 5, GREEDY))] = (first, [])
    for _ in range(10):
        for token in batch.step():
            if token.request == bad_handle:
                assert token.is_last
                texts[batch.add(Request(second, 5, GREEDY))] = (second, [])
            else:
                texts[token.request][1].append(token.id)
    for prompt, text in texts.values():
        assert text == slow_greedy(decoder, prompt, 5)


@pytest.mark.parametrize("sampling", [SamplingOptions(0.9), SamplingOptions(1.2, 30, 0.9)])
def test_a_seed_gives_the_same_text_alone_and_beside_texts_with_other_options(decoder, sampling):
    def run(requests):
        batch = Batch(decoder, len(requests), NO_STOP)
        texts = {batch.add(request): [] for request in requests}
        while tokens := batch.step():
            for token in tokens:
                texts[token.request].append(token.id)
        return list(texts.values())

    prompts = build_prompts(6)
    others = [GREEDY, SamplingOptions(2.0, 5), SamplingOptions(), SamplingOptions(1.0, None, 0.5), GREEDY]
    requests = [Request(prompts[0], 30, sampling, seed=9)]
    for number, (prompt, options) in enumerate(zip(prompts[1:], others, strict=True)):
        requests.append(Request(prompt, 20 + 2 * number, options, seed=number))
    alone = [run([request])[0] for request in requests]
    assert run(requests) == alone
    assert run(requests[::-1]) == alone[::-1]
    assert run([Request(prompts[0], 30, sampling, seed=10)]) != alone[:1]


def test_a_request_that_does_not_fit_is_refused_and_takes_no_row(decoder):
    batch = Batch(decoder, 1, NO_STOP)
    with pytest.raises(UserError, match="context of 64: ask for at most 4 new tokens"):
        batch.add(Request([1] * 60, 5))
    assert batch.num_free == 1


def test_texts_that_fail_before_their_step_fails_are_no_less_ended(decoder, monkeypatch):
    def end_of_memory(*_):
        raise MemoryError

    def send_but_prompts(tensor, device):
        return end_of_memory() if tensor.shape == (1, 7) else send(tensor, device)

    batch = Batch(decoder, 2, NO_STOP, has_blocks=True)
    handles = {batch.add(Request([1, 2], 5))}
    batch.step()
    handles.add(batch.add(Request([3] * 7, 5)))
    with monkeypatch.context() as patch:
        patch.setattr("genesis.generate.batch.send", send_but_prompts)
        patch.setattr("genesis.generate.batch._gather_figures", end_of_memory)
        with pytest.raises(MemoryError):
            batch.step()
    ended = batch.fail()
    assert {token.request for token in ended if token.is_last and token.failure} == handles
    assert (batch.num_free, batch.step()) == (2, [])
