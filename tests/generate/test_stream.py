"""Text does not depend on how it is computed: with a cache or without, alone or beside others."""

import pytest

from genesis.base.errors import UserError
from genesis.generate import batch, prefix_store
from genesis.generate.batch import plan_budgets
from genesis.generate.sampling_options import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from tests.generate.slow import NO_STOP, slow_greedy

PROMPTS = [[5], list(range(1, 30)), [7, 7, 7, 2], [90, 3]]


def collect(decoder, prompts, stop_ids=NO_STOP, **options):
    texts = [[] for _ in prompts]
    for token in generate(decoder, prompts, GenerateOptions(**options), stop_ids):
        texts[token.prompt].append(token.id)
    return texts


GREEDY = SamplingOptions(temperature=0.0)


@pytest.mark.parametrize("has_cache", [True, False])
def test_greedy_text_equals_the_slow_one_for_prompts_of_uneven_length(decoder, has_cache):
    wanted = [slow_greedy(decoder, prompt, 35) for prompt in PROMPTS]
    assert collect(decoder, PROMPTS, max_new_tokens=35, sampling=GREEDY, has_cache=has_cache) == wanted
    assert len({tuple(text) for text in wanted}) == len(PROMPTS)


def test_text_up_to_the_last_place_of_the_context_equals_the_slow_one(decoder):
    room = decoder.config.max_seq_len - len(PROMPTS[1])
    wanted = [slow_greedy(decoder, PROMPTS[1], room)]
    assert collect(decoder, [PROMPTS[1]], max_new_tokens=room, sampling=GREEDY) == wanted


@pytest.mark.slow
def test_each_prompt_may_use_its_own_room(decoder):
    texts = collect(decoder, PROMPTS, sampling=GREEDY)
    assert [len(text) + len(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)] == [64] * 4
    assert texts == [slow_greedy(decoder, prompt, 64 - len(prompt)) for prompt in PROMPTS]


@pytest.mark.parametrize("has_cache", [True, False])
def test_drawn_text_is_the_same_alone_and_beside_others(decoder, has_cache):
    options = {"max_new_tokens": 20, "seed": 3, "sampling": SamplingOptions(0.9, top_k=20), "has_cache": has_cache}
    together = collect(decoder, PROMPTS, **options)
    assert together == [collect(decoder, [prompt], **options)[0] for prompt in PROMPTS]
    assert together == collect(decoder, PROMPTS[::-1], **options)[::-1]
    assert together != collect(decoder, PROMPTS, **{**options, "seed": 4})


def test_a_prompt_given_twice_is_drawn_twice(decoder):
    first, second = collect(decoder, [PROMPTS[0]] * 2, max_new_tokens=20)
    assert first != second


def test_a_text_ends_with_eos_while_the_others_go_on(decoder):
    texts = collect(decoder, PROMPTS, max_new_tokens=20, sampling=GREEDY)
    eos_id = texts[1][4]
    tokens = list(generate(decoder, PROMPTS, GenerateOptions(20, GREEDY), {eos_id}))
    for index, text in enumerate(texts):
        wanted = text[: text.index(eos_id) + 1] if eos_id in text else text
        assert [token.id for token in tokens if token.prompt == index] == wanted
        assert [token.is_last for token in tokens if token.prompt == index] == [False] * (len(wanted) - 1) + [True]


def test_a_text_ends_with_the_first_of_several_stop_ids(decoder):
    texts = collect(decoder, PROMPTS, max_new_tokens=20, sampling=GREEDY)
    stop_ids = {texts[0][7], texts[1][4], texts[2][9]}
    for text, stopped in zip(
        texts, collect(decoder, PROMPTS, stop_ids, max_new_tokens=20, sampling=GREEDY), strict=True
    ):
        place = next((number for number, token in enumerate(text) if token in stop_ids), len(text))
        assert stopped == text[: place + 1]


def test_prompts_are_read_together_however_long_they_are(decoder, monkeypatch):
    monkeypatch.setattr(batch, "BLOCK_TOKENS", 8)
    monkeypatch.setattr(prefix_store, "BLOCK_TOKENS", 8)
    shapes = []
    hook = decoder.register_forward_pre_hook(lambda _, arguments: shapes.append(tuple(arguments[0].shape)))
    next(generate(decoder, [list(range(length)) for length in (30, 20, 30)], GenerateOptions(5), NO_STOP))
    hook.remove()
    assert shapes == [(3, 30)]


def test_tokens_come_as_they_are_made(decoder):
    stream = generate(decoder, PROMPTS, GenerateOptions(5), NO_STOP)
    assert [next(stream).prompt for _ in range(6)] == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("lengths", "max_new_tokens", "message"),
    [
        ([3, 60], 10, "prompt 2 has 60 tokens, and 10 more .* context of 64: ask for at most 4 new tokens"),
        ([64], None, "prompt 1 has 64 tokens.*shorten the prompt"),
        ([900], 1, "shorten the prompt"),
        ([0], 1, "prompt 1 has no token"),
        ([], 1, "no prompt"),
    ],
)
def test_what_does_not_fit_is_refused_up_front(lengths, max_new_tokens, message):
    with pytest.raises(UserError, match=message):
        plan_budgets(lengths, max_new_tokens, max_seq_len=64)


def test_it_is_refused_before_the_first_token_is_asked_for(decoder):
    with pytest.raises(UserError, match="context of 64"):
        generate(decoder, [[1]], GenerateOptions(64), NO_STOP)
