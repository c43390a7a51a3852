"""The engine beside the slow obvious way: one request, one forward."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from genesis.base.errors import UserError
from genesis.evaluate import score
from genesis.evaluate.plan import MIN_HEAD_TOKENS, Request, find_heads, gather_contexts
from genesis.evaluate.score import Score, Scorer, score_targets
from genesis.model.decoder import Decoder
from genesis.model.language_model import LanguageModel
from tests.linear_faults import FORWARD_FAULTS
from tests.mixtures import LINEAR, MIXTURES, build_sharp, mix
from tests.model.foreign.models import configure, make_theirs, wrap
from tests.tiny_runs import SHAPE, build_decoder

VOCAB_SIZE = 40


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build_decoder(0, vocab_size=VOCAB_SIZE)


class CountingDecoder:
    """Counts what a decoder is fed and how many positions are turned into logits."""

    def __init__(self, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_fed = 0
        forward = Decoder.forward

        def count(decoder: Decoder, input_ids: torch.Tensor, **keywords: Any) -> Any:
            self.num_fed += input_ids.numel()
            return forward(decoder, input_ids, **keywords)

        monkeypatch.setattr(Decoder, "forward", count)


def draw(chooser: random.Random, length: int) -> tuple[int, ...]:
    return tuple(chooser.randrange(VOCAB_SIZE) for _ in range(length))


@torch.no_grad()
def score_slowly(decoder: LanguageModel, request: Request) -> Score:
    logits = decoder(torch.tensor([request.context + request.continuation[:-1]]))[0]
    logprobs = logits[len(request.context) - 1 :].log_softmax(dim=-1)
    asked = torch.tensor(request.continuation)
    is_greedy = bool((logprobs.argmax(dim=1) == asked).all())
    return Score(float(logprobs.gather(1, asked[:, None]).sum()), is_greedy)


@torch.no_grad()
def continue_greedily(decoder: LanguageModel, context: tuple[int, ...], length: int) -> tuple[int, ...]:
    ids = list(context)
    for _ in range(length):
        ids.append(int(decoder(torch.tensor([ids]))[0, -1].argmax()))
    return tuple(ids[len(context) :])


def make_requests(decoder: LanguageModel) -> list[Request]:
    """Contexts alone, with short and long common beginnings, one the beginning of another; continuations likewise."""
    chooser = random.Random(0)
    head = draw(chooser, 2 * MIN_HEAD_TOKENS)
    longer = head + draw(chooser, MIN_HEAD_TOKENS)
    requests = [Request(head, (1,)), Request(longer, (1, 2)), Request(longer[:-1], (3, 1))]
    for number in range(60):
        context = (draw(chooser, 0), head, longer, head[:3])[number % 4] + draw(chooser, chooser.randint(1, 40))
        stem = draw(chooser, chooser.randint(1, 12))
        for _ in range(chooser.randint(1, 4)):
            own = draw(chooser, chooser.randint(1, 6))
            requests.append(Request(context, stem[: chooser.randint(0, len(stem))] + own))
        if number % 10 == 0:
            requests.append(Request(context, continue_greedily(decoder, context, 4)))
    return requests + requests[:7]


def check(scores: Sequence[Score], wanted: Sequence[Score]) -> None:
    assert [score.is_greedy for score in scores] == [score.is_greedy for score in wanted]
    # The sum over a whole context is in the thousands, where float32 has steps of 1e-4.
    assert [score.log_likelihood for score in scores] == pytest.approx(
        [score.log_likelihood for score in wanted], rel=3e-7, abs=1e-4
    )


@pytest.mark.parametrize("batch_tokens", [1, 200, 5000])
def test_scores_are_those_of_one_forward_for_each_request(decoder: Decoder, batch_tokens: int) -> None:
    requests = make_requests(decoder)
    wanted = [score_slowly(decoder, request) for request in requests]
    assert any(score.is_greedy for score in wanted)
    check(Scorer(decoder, batch_tokens).score(requests), wanted)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_and_linear_layers_are_scored_like_one_forward_for_each_request(name: str, decoder: Decoder) -> None:
    """A state of a linear layer cannot go back, so that such a model computes each request by itself."""
    other = build_sharp(mix(decoder.config, name))
    requests = make_requests(other)[::2]
    check(Scorer(other, 200).score(requests), [score_slowly(other, request) for request in requests])


@pytest.mark.parametrize(("kind", "documents"), [("gemma2", "packed"), ("llama", "rows")])
def test_a_model_of_transformers_is_scored_without_a_cache(kind: str, documents: str) -> None:
    other = wrap(make_theirs(configure(kind, max_position_embeddings=256)), documents=documents).eval()
    requests = make_requests(other)[::2]
    wanted = [score_slowly(other, request) for request in requests]
    num_scored: list[int] = []
    check(Scorer(other, 200).score(requests, num_scored.append), wanted)
    assert sum(num_scored) == len(set(requests))


@pytest.mark.parametrize("fault", FORWARD_FAULTS)
@pytest.mark.parametrize("name", LINEAR)
def test_scores_depend_on_the_states_of_linear_layers(
    name: str, fault: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = build_sharp(mix(decoder.config, name))
    requests = make_requests(other)[3::8]
    wanted = [score_slowly(other, request) for request in requests]
    FORWARD_FAULTS[fault](monkeypatch)
    errors = [
        abs(score.log_likelihood - right.log_likelihood)
        for score, right in zip(Scorer(other, 200).score(requests), wanted, strict=True)
    ]
    assert sorted(errors)[len(errors) // 2] > 0.1  # 1000 times the tolerance of `check`


def test_the_whole_context_of_the_model_can_be_used(decoder: Decoder) -> None:
    chooser = random.Random(1)
    length = SHAPE["max_seq_len"]
    requests = [Request(draw(chooser, length), (1,)), Request(draw(chooser, 1), draw(chooser, length))]
    check(Scorer(decoder).score(requests), [score_slowly(decoder, request) for request in requests])


def test_a_context_runs_once_and_answers_of_one_token_cost_nothing(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = CountingDecoder(decoder, monkeypatch)
    context = draw(random.Random(2), 50)
    Scorer(decoder).score([Request(context, (token,)) for token in range(VOCAB_SIZE)])
    assert counted.num_fed == len(context)


def test_a_continuation_goes_on_where_it_differs_from_the_longest(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = CountingDecoder(decoder, monkeypatch)
    context = draw(random.Random(3), 50)
    requests = [Request(context, (1, 2, 3, 4, 5, 6)), Request(context, (1, 2, 3, 7, 8)), Request(context, (1, 2, 9))]
    Scorer(decoder).score([*requests, *requests])
    assert counted.num_fed == len(context) + 5 + 1  # the longest but its last token, and one that branches off


def test_a_long_common_beginning_of_contexts_runs_once(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = CountingDecoder(decoder, monkeypatch)
    chooser = random.Random(4)
    head = draw(chooser, 150)
    requests = [Request((*head, first, *draw(chooser, 4)), (1,)) for first in range(8)]
    Scorer(decoder).score(requests)
    assert counted.num_fed == len(head) + 8 * 5


def test_a_batch_stays_within_its_tokens(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(decoder)
    forward, sizes = Decoder.forward, []

    def measure(decoder: Decoder, input_ids: torch.Tensor, **keywords: Any) -> Any:
        cache = keywords["cache"]
        num_kept = 0 if cache is None else int(cache.lengths.max())
        sizes.append((len(input_ids), len(input_ids) * (input_ids.shape[1] + num_kept)))
        return forward(decoder, input_ids, **keywords)

    monkeypatch.setattr(Decoder, "forward", measure)
    Scorer(decoder, 300).score(requests)
    assert max(num_tokens for num_rows, num_tokens in sizes if num_rows > 1) <= 300
    assert max(num_rows for num_rows, _ in sizes) > 4


def test_heads_are_what_saves_most_and_every_context_has_one() -> None:
    chooser = random.Random(5)
    long, short = draw(chooser, 200), draw(chooser, MIN_HEAD_TOKENS)
    contexts = [(*short, token) for token in range(5)] + [(*short, *long, token) for token in range(5)]
    alone = [(token, *short) for token in range(3)]
    heads = find_heads(gather_contexts([Request(context, (0,)) for context in contexts + alone]))
    assert {head.tokens for head in heads} == {(), short, short + long}
    assert sorted(context.tokens for head in heads for context in head.contexts) == sorted(contexts + alone)
    assert all(len(context.tokens) > len(head.tokens) for head in heads for context in head.contexts)


def test_progress_counts_each_different_request_once(decoder: Decoder) -> None:
    requests = make_requests(decoder)
    counts: list[int] = []
    Scorer(decoder, 300).score(requests, counts.append)
    assert sum(counts) == len(set(requests))
    assert len(counts) > 1


def test_no_room_at_all_is_refused(decoder: Decoder) -> None:
    with pytest.raises(UserError, match="batch_tokens is 0: it must be at least 1"):
        Scorer(decoder, 0)


@pytest.mark.parametrize("block", [1, 7, 1024])
def test_logits_in_blocks_of_the_vocabulary_give_the_scores_of_all_at_once(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "_BLOCK_TOKENS", block)
    monkeypatch.setattr(score, "_LEAST_PLACES", 2)
    monkeypatch.setattr(score, "chunk_tokens", lambda *_: 1)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 8, generator=generator), torch.randn(VOCAB_SIZE, 8, generator=generator)
    hidden[0] *= 40.0  # its likely tokens leave nothing to the others
    logits = hidden @ weight.t()
    which = torch.tensor([0, 0, 1, 2, 2, 2, 4])
    tokens = torch.tensor([int(logits[0].argmax()), 3, VOCAB_SIZE - 1, 0, int(logits[2].argmax()), 0, 17])
    logprobs, is_most_likely = score_targets(hidden, weight, which, tokens)
    torch.testing.assert_close(logprobs, logits.log_softmax(dim=1)[which, tokens])
    assert is_most_likely.tolist() == [True, False, False, False, True, False, bool(logits[4].argmax() == 17)]


def test_a_large_vocabulary_has_the_scores_of_float64() -> None:
    """One float32 sum over the whole vocabulary would be off by up to 1e-5 nats for each token."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 16, generator=generator), torch.randn(50_000, 16, generator=generator)
    tokens = torch.randint(50_000, (64,), generator=generator)
    logprobs, _ = score_targets(hidden, weight, torch.arange(64), tokens)
    exact = (hidden.double() @ weight.double().t()).log_softmax(dim=1)[torch.arange(64), tokens]
    assert (logprobs - exact).abs().max() < 5e-6
    assert abs(float((logprobs - exact).mean())) < 1e-6


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_hidden_state_that_is_no_number_gives_no_score(value: float) -> None:
    hidden, weight = torch.tensor([[1.0, value], [1.0, 1.0]]), torch.eye(2) + 0.5
    logprobs, _ = score_targets(hidden, weight, torch.tensor([0, 1]), torch.tensor([1, 1]))
    assert logprobs.isnan().tolist() == [True, False]


def test_of_two_tokens_that_tie_in_bfloat16_only_the_likelier_is_greedy() -> None:
    """Logits of 16 and 16.03: the next bfloat16 after 16 is 16.125."""
    hidden = torch.tensor([[16.0, 0.03125]], dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.bfloat16)
    _, is_greedy = score_targets(hidden, weight, torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert is_greedy.tolist() == [False, True]
