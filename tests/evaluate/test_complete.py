"""Texts of a task are those of one prompt at a time, however prompts are grouped."""

import random
from pathlib import Path

import pytest
import torch

from genesis.evaluate.complete import CompleteOptions, complete, default_cache_tokens, plan_groups
from genesis.evaluate.plan import MIN_HEAD_TOKENS
from genesis.generate.sampling_options import SamplingOptions
from genesis.model.delta import GatedDeltaConfig
from genesis.tokenizer.open import open_tokenizer
from tests.linear_faults import CACHE_FAULTS, ROW_FAULTS
from tests.mixtures import MIXTURES, build_sharp, mix
from tests.tiny_runs import SHAPE, build_decoder


def draw(chooser: random.Random, length: int) -> list[int]:
    return [chooser.randrange(3, 600) for _ in range(length)]


def make_prompts() -> list[list[int]]:
    chooser = random.Random(7)
    shared, few = draw(chooser, 2 * MIN_HEAD_TOKENS), draw(chooser, MIN_HEAD_TOKENS)
    prompts = [shared + draw(chooser, 1 + number) for number in range(9)]
    prompts += [few + draw(chooser, 3) for _ in range(2)] + [draw(chooser, number) for number in (1, 50)]
    return prompts + prompts[:2]


def test_prompts_with_a_long_common_beginning_are_a_group_if_there_are_enough_of_them() -> None:
    prompts = make_prompts()
    first, rest = plan_groups(prompts, can_share=True)
    assert (len(first.prefix), sorted(first.prompts)) == (2 * MIN_HEAD_TOKENS, [*range(9), 13, 14])
    assert (rest.prefix, sorted(rest.prompts)) == ((), [9, 10, 11, 12])
    assert [len(prompts[index]) for index in rest.prompts] == [50, 35, 35, 1]
    (alone,) = plan_groups(prompts, can_share=False)
    assert alone.prefix == ()
    assert sorted(alone.prompts) == list(range(len(prompts)))


@pytest.mark.parametrize(
    ("linear", "temperature"), [(None, 0.0), (None, 1.0), (GatedDeltaConfig(1, 2, 8, 8, attention_every=2), 0.0)]
)
@pytest.mark.parametrize("cache_tokens", [1, 400, 10_000])
def test_texts_are_those_of_each_prompt_alone(
    tokenizer_file: Path, linear: GatedDeltaConfig | None, temperature: float, cache_tokens: int
) -> None:
    # With tied embeddings such a model repeats its last token, whatever its linear layers do.
    decoder = build_decoder(1, linear_attention=linear, has_tied_embeddings=linear is None)
    tokenizer = open_tokenizer(tokenizer_file)
    prompts = make_prompts()
    options = CompleteOptions(12, ("a",), SamplingOptions(temperature), 3, 60, cache_tokens)
    texts = complete(decoder, tokenizer, prompts, options)
    alone = [complete(decoder, tokenizer, [prompt], options) for prompt in prompts[:13]]
    assert texts[:13] == [text for (text,) in alone]
    assert any(texts)
    assert (texts[13:] == texts[:2]) == (temperature == 0.0)  # each sampled text is another


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("cache_tokens", [pytest.param(1, marks=pytest.mark.slow), 10_000])
def test_texts_of_mixtures_are_those_of_each_prompt_alone(tokenizer_file: Path, name: str, cache_tokens: int) -> None:
    # With tied embeddings such a model repeats its last token, whatever its experts do.
    config = mix(build_decoder(1, has_tied_embeddings=False).config, name)
    decoder, tokenizer = build_sharp(config), open_tokenizer(tokenizer_file)
    prompts = make_prompts()
    options = CompleteOptions(12, ("a",), SamplingOptions(temperature=0.0), 3, 60, cache_tokens)
    texts = complete(decoder, tokenizer, prompts, options)
    assert texts == [complete(decoder, tokenizer, [prompt], options)[0] for prompt in prompts]
    assert sum(len(set(text)) > 3 for text in texts) > len(texts) / 2, texts


@pytest.mark.parametrize("fault", [*CACHE_FAULTS, "a row begins with the state of the text before"])
def test_texts_depend_on_the_states_of_linear_layers(
    tokenizer_file: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = mix(build_decoder(1, has_tied_embeddings=False).config, "linear")
    decoder, tokenizer = build_sharp(config), open_tokenizer(tokenizer_file)
    prompts = make_prompts()[:12]
    options = CompleteOptions(12, ("a",), SamplingOptions(temperature=0.0), 3, 60, 400)
    wanted = complete(decoder, tokenizer, prompts, options)
    (CACHE_FAULTS | ROW_FAULTS)[fault](monkeypatch)
    texts = complete(decoder, tokenizer, prompts, options)
    assert sum(text != right for text, right in zip(texts, wanted, strict=True)) >= len(texts) / 3


def test_the_cache_takes_at_most_two_gib() -> None:
    config = build_decoder(1).config
    num_tokens = default_cache_tokens(config, torch.float32)
    bytes_per_token = 2 * SHAPE["num_layers"] * SHAPE["num_kv_heads"] * (SHAPE["dim"] // SHAPE["num_heads"]) * 4
    assert 2**31 - bytes_per_token < num_tokens * bytes_per_token <= 2**31
