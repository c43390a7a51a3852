"""Beginnings of prompts that are computed once: the same bits as without, in memory that has a limit."""

from dataclasses import replace

import pytest
import torch

from genesis.generate import batch, prefix_store
from genesis.generate.batch import Batch, NewToken, Request
from genesis.generate.prefix_store import PrefixStore, name_blocks
from genesis.generate.sampling_options import SamplingOptions
from genesis.model.decoder import Decoder
from genesis.model.rotary import RopeScaling
from tests.generate.slow import NO_STOP, slow_greedy
from tests.mixtures import build_sharp, mix

BLOCK = 8
GREEDY = SamplingOptions(temperature=0.0)
SHARED = list(range(3, 3 + 2 * BLOCK))
PROMPTS = [[*SHARED, 40, 41], [*SHARED, 50], SHARED, [*SHARED[:BLOCK], 60, 61], [1, 2], [*SHARED, *range(30, 50)]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(batch, "BLOCK_TOKENS", BLOCK)


def run(
    decoder: Decoder, store: PrefixStore | None, *, num_rows: int, scopes: tuple[str, ...] = ()
) -> list[list[NewToken]]:
    """Returns the tokens of each prompt, of which so many run at a time."""
    running = Batch(decoder, num_rows, NO_STOP, has_blocks=True, store=store)
    texts: list[list[NewToken]] = [[] for _ in PROMPTS]
    waiting = list(enumerate(PROMPTS))
    handles: dict[int, int] = {}
    while waiting or handles:
        while waiting and running.num_free:
            index, prompt = waiting.pop(0)
            scope = scopes[index] if scopes else ""
            handles[running.add(Request(prompt, 6, GREEDY, num_top_logprobs=3, scope=scope))] = index
        for token in running.step():
            texts[handles[token.request]].append(token)
            if token.is_last:
                del handles[token.request]
    return texts


def bits(texts: list[list[NewToken]]) -> list[list[object]]:
    return [[(token.id, token.log_prob.hex(), token.top_logprobs) for token in text] for text in texts]


def num_stored(texts: list[list[NewToken]]) -> list[int]:
    assert not any(token.num_stored for text in texts for token in text[1:])
    return [text[0].num_stored for text in texts]


@pytest.mark.parametrize("kind", ["softmax", "linear"])
@torch.no_grad()
def test_a_stored_beginning_gives_the_bits_of_a_computed_one(decoder: Decoder, kind: str) -> None:
    if kind == "linear":
        config = replace(decoder.config, num_layers=2, has_tied_embeddings=False)
        decoder = build_sharp(mix(config, "linear"))
    without = run(decoder, None, num_rows=1)
    assert [[token.id for token in text] for text in without] == [slow_greedy(decoder, prompt, 6) for prompt in PROMPTS]
    store = PrefixStore(10**9)
    first, again = run(decoder, store, num_rows=1), run(decoder, store, num_rows=1)
    assert bits(without) == bits(first) == bits(again)
    assert num_stored(without) == [0] * len(PROMPTS)
    assert num_stored(first) == [0, 2 * BLOCK, BLOCK, BLOCK, 0, 2 * BLOCK]
    assert num_stored(again) == [2 * BLOCK, 2 * BLOCK, BLOCK, BLOCK, 0, 4 * BLOCK]
    together = run(decoder, store, num_rows=4)
    assert bits(together) == bits(run(decoder, None, num_rows=4))
    assert num_stored(together) == num_stored(again)


@torch.no_grad()
def test_a_wrong_block_would_be_seen(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PrefixStore(10**9)
    without = run(decoder, store, num_rows=1)
    for block in store._blocks.values():
        block[0][:] = 0.0
    assert bits(run(decoder, store, num_rows=1)) != bits(without)


def test_other_scopes_share_nothing(decoder: Decoder) -> None:
    texts = run(decoder, PrefixStore(10**9), num_rows=1, scopes=tuple("abacab"))
    assert num_stored(texts) == [0, 0, BLOCK, 0, 0, 2 * BLOCK]


def fill(store: PrefixStore, names: list[bytes], size: int = 25) -> list[bool]:
    return [store.add(names[:number], [torch.zeros(size)]) for number in range(1, len(names) + 1)]


def name(first: int, num_blocks: int) -> list[bytes]:
    return name_blocks(list(range(first, first + num_blocks * BLOCK + 1)))


def test_the_blocks_that_were_not_used_for_the_longest_time_give_way_the_last_of_a_prompt_first() -> None:
    store = PrefixStore(300)
    a, b = name(0, 2), name(50, 3)
    assert fill(store, a) == [True] * 2
    assert fill(store, b[:2]) == [True] * 2
    assert (len(store.find(b)), len(store.find(a)), store.num_bytes) == (2, 1, 300)
    assert fill(store, a) == [True] * 2
    assert (len(store.find(b)), len(store.find(a)), store.num_bytes) == (1, 2, 300)
    assert fill(store, name(90, 1), size=100) == [False]
    assert (len(store.find(a)), len(store.find(b)), store.num_bytes) == (2, 1, 300)
    store.clear()
    assert (store.find(a), store.num_bytes) == ([], 0)


def test_of_a_prompt_that_is_larger_than_the_store_the_beginning_is_kept() -> None:
    store = PrefixStore(300)
    long = name(0, 6)
    for _ in range(2):
        assert fill(store, long) == [True] * 3 + [False] * 3
        assert len(store.find(long)) == 3
    assert fill(store, name(90, 1)) == [True]
    assert len(store.find(long)) == 2, "the head went before the tail"


def test_a_beginning_that_other_prompts_need_outlives_what_follows_it() -> None:
    store = PrefixStore(400)
    shared = list(range(BLOCK))
    chains = [name_blocks([*shared, *range(first, first + BLOCK + 1)]) for first in (20, 40, 60, 80)]
    for chain in chains:
        assert fill(store, chain) == [True] * 2
    assert [len(store.find(chain)) for chain in chains] == [1, 2, 2, 2]


@pytest.mark.parametrize("kind", ["softmax", "linear"])
@pytest.mark.parametrize(("num_failures", "stops"), [(1, False), (2, True)])
@torch.no_grad()
def test_where_memory_ends_the_store_is_dropped_or_the_text_alone_fails(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, kind: str, num_failures: int, stops: bool
) -> None:
    if kind == "linear":
        decoder = build_sharp(mix(replace(decoder.config, num_layers=2, has_tied_embeddings=False), "linear"))
    store = PrefixStore(10**9)
    running = Batch(decoder, 3, NO_STOP, has_blocks=True, store=store)
    first = running.add(Request(PROMPTS[0], 6, GREEDY))
    texts = {first: [token.id for token in running.step()]}
    assert store.num_bytes
    # The last layer has no room for a block, once those before it have written theirs.
    failures = iter([None] + [True] * num_failures)

    def end_of_memory(*_: object) -> None:
        if next(failures, None):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    hook = decoder.blocks[-1].register_forward_pre_hook(end_of_memory)
    second = running.add(Request(PROMPTS[5], 6, GREEDY))
    found = running.step()
    hook.remove()
    assert [token.request for token in found if isinstance(token.failure, batch.OutOfMemoryError)] == [second] * stops
    assert not store.num_bytes
    third = running.add(Request(PROMPTS[3], 6, GREEDY))
    while found:
        for token in found:
            if token.failure is None:
                texts.setdefault(token.request, []).append(token.id)
        found = running.step()
    wanted = {first: PROMPTS[0], third: PROMPTS[3]} | ({} if stops else {second: PROMPTS[5]})
    assert texts == {handle: slow_greedy(decoder, prompt, 6) for handle, prompt in wanted.items()}


@pytest.mark.parametrize("kind", ["softmax", "linear"])
@pytest.mark.parametrize("where", ["_read", "_continue", "_draw"])
@torch.no_grad()
def test_where_memory_ends_behind_the_blocks_texts_fail_and_the_batch_goes_on(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, kind: str, where: str
) -> None:
    if kind == "linear":
        decoder = build_sharp(mix(replace(decoder.config, num_layers=2, has_tied_embeddings=False), "linear"))
    store = PrefixStore(10**9)
    running = Batch(decoder, 3, NO_STOP, has_blocks=True, store=store)
    first = running.add(Request(PROMPTS[0], 6, GREEDY))
    texts = {first: [token.id for token in running.step()]}
    act = getattr(running, where)

    def end_of_memory(*arguments: object) -> None:
        act(*arguments)  # the rows are written
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    second = running.add(Request(PROMPTS[5], 6, GREEDY))
    with monkeypatch.context() as patch:
        patch.setattr(running, where, end_of_memory)
        if where == "_read":
            found = running.step()
        else:
            with pytest.raises(torch.OutOfMemoryError):
                running.step()
            found = running.fail()
            texts.clear()
    failed = {token.request for token in found if isinstance(token.failure, batch.OutOfMemoryError)}
    assert failed == ({second} if where == "_read" else {first, second})
    assert not store.num_bytes
    third = running.add(Request(PROMPTS[3], 6, GREEDY))
    while found:
        for token in found:
            if token.failure is None:
                texts.setdefault(token.request, []).append(token.id)
        found = running.step()
    wanted = {third: PROMPTS[3]} | ({first: PROMPTS[0]} if where == "_read" else {})
    assert texts == {handle: slow_greedy(decoder, prompt, 6) for handle, prompt in wanted.items()}


def test_a_name_says_what_is_in_a_block_and_before_it() -> None:
    text = list(range(3 * BLOCK))
    assert len(name_blocks(text)) == 2, "the last token must be read, for its logits"
    assert name_blocks([*text, 9])[:2] == name_blocks(text)
    assert not set(name_blocks([9, *text[1:]])) & set(name_blocks(text))
    assert not set(name_blocks(text, "other")) & set(name_blocks(text))


@torch.no_grad()
def test_a_model_whose_keys_depend_on_the_length_reads_prompts_whole(decoder: Decoder) -> None:
    attention = replace(
        decoder.config.parts.attention, rope_scaling=RopeScaling(4.0, original_seq_len=2 * BLOCK, kind="dynamic")
    )
    scaled = build_sharp(
        replace(decoder.config, attention=attention, num_heads=None, num_kv_heads=None, rope_theta=500_000.0)
    )
    found = run(scaled, PrefixStore(10**9), num_rows=1)
    assert num_stored(found) == [0] * len(PROMPTS)
    assert [[token.id for token in text] for text in found][-1] == slow_greedy(scaled, PROMPTS[-1], 6)
