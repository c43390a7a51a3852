"""Penalties and biases, beside a reference that goes through the tokens one by one."""

from collections import Counter

import pytest
import torch

from genesis.base.errors import UserError
from genesis.generate.batch import Batch, Request
from genesis.generate.sampling_options import SamplingOptions
from genesis.model.decoder import Decoder
from tests.generate.slow import NO_STOP

PROMPT = [5, 9, 9, 30]
OPTIONS = [
    SamplingOptions(0.0, presence_penalty=1.5),
    SamplingOptions(0.0, frequency_penalty=0.7),
    SamplingOptions(0.0, repetition_penalty=1.4),
    SamplingOptions(0.0, repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=-0.2),
    SamplingOptions(0.0, logit_bias=((7, 4.0), (30, -100.0))),
    SamplingOptions(0.0, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=((11, 2.5),)),
]


@torch.no_grad()
def slow_text(decoder: Decoder, options: SamplingOptions, num_tokens: int) -> list[int]:
    new: list[int] = []
    for _ in range(num_tokens):
        logits = decoder(torch.tensor([[*PROMPT, *new]]))[0, -1].tolist()
        counts, biases = Counter(new), dict(options.logit_bias)
        for token, logit in enumerate(logits):
            logit += biases.get(token, 0.0)
            if token in PROMPT or token in counts:
                logit = logit / options.repetition_penalty if logit > 0 else logit * options.repetition_penalty
            logit -= options.presence_penalty * (token in counts) + options.frequency_penalty * counts[token]
            logits[token] = logit
        new.append(max(range(len(logits)), key=logits.__getitem__))
    return new


def texts(decoder: Decoder, options: list[SamplingOptions]) -> list[list[int]]:
    running = Batch(decoder, len(options), NO_STOP)
    handles = {running.add(Request(PROMPT, 20, one, seed=3)): index for index, one in enumerate(options)}
    found: list[list[int]] = [[] for _ in options]
    while tokens := running.step():
        for token in tokens:
            found[handles[token.request]].append(token.id)
    return found


def test_each_option_does_what_the_reference_does_alone_and_beside_the_others(decoder: Decoder) -> None:
    wanted = [slow_text(decoder, options, 20) for options in OPTIONS]
    plain = slow_text(decoder, SamplingOptions(0.0), 20)
    assert all(text != plain for text in wanted), "an option without an effect"
    assert texts(decoder, [SamplingOptions(0.0), *OPTIONS]) == [plain, *wanted]
    assert [texts(decoder, [options])[0] for options in OPTIONS] == wanted


def test_a_seed_gives_the_same_text_with_these_options_alone_and_beside_others(decoder: Decoder) -> None:
    sampled = [SamplingOptions(0.9, min_p=0.05, presence_penalty=0.4), SamplingOptions(1.1, 20, logit_bias=((7, 3.0),))]
    assert texts(decoder, [OPTIONS[0], *sampled])[1:] == [texts(decoder, [options])[0] for options in sampled]


def test_the_log_probabilities_are_those_of_the_model(decoder: Decoder) -> None:
    running = Batch(decoder, 1, NO_STOP)
    running.add(Request(PROMPT, 1, SamplingOptions(0.0, logit_bias=((7, 100.0),))))
    (token,) = running.step()
    with torch.no_grad():
        wanted = decoder(torch.tensor([PROMPT]))[0, -1].log_softmax(dim=0)[7]
    assert (token.id, token.log_prob) == (7, pytest.approx(float(wanted), abs=1e-5))


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", float("nan")), ("repetition_penalty", 0.0)],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{name} is"):
        SamplingOptions(**{name: value})
