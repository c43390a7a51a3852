"""OpenAI's own client against the server."""

import asyncio
import contextlib
import http.client
import json
import math

import httpx
import openai
import pytest

from genesis.generate.load import load_decoder
from genesis.generate.sampling_options import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from tests.serve.conftest import DAMAGED
from tests.serve.support import DEADLINE_SECONDS, alone

MODEL = "step-00000003"
GREEDY = {"model": MODEL, "temperature": 0.0}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def loaded(served_run):
    return load_decoder(served_run / "checkpoints" / MODEL)


def text_of(loaded, tokens):
    return loaded.tokenizer.decode([token.id for token in tokens])


def test_the_models_are_the_checkpoints_and_the_newest(client):
    models = list(client.models.list())
    assert [model.id for model in models][:3] == ["step-00000001", "step-00000002", "step-00000003"]
    assert "latest" in [model.id for model in models]
    assert client.models.retrieve("step-00000001").owned_by == "genesis"
    with pytest.raises(openai.NotFoundError, match="did you mean step-0000000"):
        client.models.retrieve("step-99")


def test_a_greedy_completion_is_the_models_own_text_with_its_counts(client, loaded):
    answer = client.completions.create(**GREEDY, prompt="alpha", max_tokens=12)
    (choice,) = answer.choices
    wanted = alone(loaded, "alpha", 12)
    assert choice.text == text_of(loaded, wanted)
    assert choice.finish_reason == ("length" if len(wanted) == 12 else "stop")
    assert choice.logprobs is None
    num_prompt = 1 + len(loaded.tokenizer.encode("alpha"))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, len(wanted))
    assert answer.usage.total_tokens == num_prompt + len(wanted)
    assert (answer.object, answer.model) == ("text_completion", MODEL)


def test_what_is_not_said_is_sixteen_tokens_at_most(client):
    answer = client.completions.create(model="step-00000001", prompt="def ", seed=5)
    assert 1 <= answer.usage.completion_tokens <= 16


def test_a_stream_gives_the_same_text_piece_by_piece_and_its_counts_at_the_end(client):
    asked = {"model": MODEL, "prompt": ["alpha", "class "], "max_tokens": 20, "n": 2, "seed": 7, "logprobs": 1}
    whole = client.completions.create(**asked)
    texts, offsets, reasons, usage = {}, {}, {}, []
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
            reasons.setdefault(choice.index, []).append(choice.finish_reason)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert offsets == {choice.index: choice.logprobs.text_offset for choice in whole.choices}
    for choice in whole.choices:
        assert reasons[choice.index][-1] == choice.finish_reason
        assert not any(reasons[choice.index][:-1])
    assert usage[-1] == whole.usage
    assert not any(usage[:-1])


def test_the_asynchronous_client_streams_too(server, loaded):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.completions.create(**GREEDY, prompt="beta", max_tokens=8, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(run()) == text_of(loaded, alone(loaded, "beta", 8))


def test_a_seed_repeats_a_draw_and_each_choice_has_its_own(client, loaded):
    asked = {"model": MODEL, "prompt": "def ", "max_tokens": 20, "seed": 11, "top_p": 0.9, "n": 3}
    first = [choice.text for choice in client.completions.create(**asked, extra_body={"top_k": 50}).choices]
    again = [choice.text for choice in client.completions.create(**asked, extra_body={"top_k": 50}).choices]
    assert first == again
    assert len(set(first)) == 3
    assert first == generate_texts(loaded, "def ", num_texts=3, seed=11)


def generate_texts(loaded, prompt, num_texts, seed):
    """Returns what `genesis generate` samples for a prompt that is given several times."""
    ids = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode(prompt)]
    options = GenerateOptions(20, SamplingOptions(1.0, 50, 0.9), seed)
    texts = [[] for _ in range(num_texts)]
    for token in generate(loaded.decoder, [ids] * num_texts, options, loaded.tokenizer.stop_ids):
        texts[token.prompt].append(token)
    return [text_of(loaded, tokens) for tokens in texts]


def test_without_a_seed_each_draw_is_another(client):
    asked = {"model": MODEL, "prompt": "def ", "max_tokens": 20}
    assert len({client.completions.create(**asked).choices[0].text for _ in range(4)}) > 1


def test_probabilities_are_the_models_own(client, loaded):
    answer = client.completions.create(**GREEDY, prompt="alpha", max_tokens=10, logprobs=2)
    shown = answer.choices[0].logprobs
    wanted = alone(loaded, "alpha", 10)
    assert len(shown.tokens) == len(wanted)
    for index, token in enumerate(wanted):
        assert math.isclose(shown.token_logprobs[index], token.log_prob, abs_tol=1e-4)
        alternatives = shown.top_logprobs[index]
        assert len(alternatives) == 2
        assert shown.tokens[index] == max(alternatives, key=alternatives.get)
        assert sorted(alternatives.values(), reverse=True) == pytest.approx(
            [log_prob for _, log_prob in token.top_logprobs], abs=1e-4
        )


def test_a_prompt_of_tokens_is_taken_as_it_is(client, loaded):
    tokenizer = loaded.tokenizer
    ids = [tokenizer.bos_id, *tokenizer.encode("alpha")]
    for prompt, num_choices in ((ids, 1), ([ids, ids], 2)):
        answer = client.completions.create(**GREEDY, prompt=prompt, max_tokens=8)
        assert [choice.text for choice in answer.choices] == [text_of(loaded, alone(loaded, "alpha", 8))] * num_choices
        assert answer.usage.prompt_tokens == num_choices * len(ids)


def test_an_echo_puts_the_prompt_before_its_text(client):
    plain = client.completions.create(**GREEDY, prompt=["alpha", "\u00e9t\u00e9"], max_tokens=5).choices
    asked = {**GREEDY, "prompt": ["alpha", "\u00e9t\u00e9"], "max_tokens": 5, "echo": True}
    wanted = ["alpha" + plain[0].text, "\u00e9t\u00e9" + plain[1].text]
    assert [choice.text for choice in client.completions.create(**asked).choices] == wanted
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted


def test_a_stop_text_ends_the_text_at_once_and_is_not_shown(client):
    whole = client.completions.create(**GREEDY, prompt="alpha", max_tokens=60)
    text = whole.choices[0].text
    stop = text[20:24]
    for is_stream in (False, True):
        answer = client.completions.create(**GREEDY, prompt="alpha", max_tokens=60, stop=stop, stream=is_stream)
        chunks = list(answer) if is_stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.find(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[0].usage is None
    assert client.completions.create(**GREEDY, prompt="alpha", max_tokens=60, stop=[stop]).usage.completion_tokens < 60


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("prompt", "a " * 3000, "context of 256 tokens: shorten the prompt"),
        ("prompt", "x" * 400_000, "longer than the model.s context of 256 tokens"),
        ("prompt", [1] * 256, "has 256 tokens"),
        ("prompt", [5, 700], "token 700: token ids must be from 0 to 699"),
        ("prompt", [-1], "token -1"),
        ("max_tokens", 300, "set max_tokens to at most 25"),
        ("logit_bias", {"700": 3}, "token 700: token ids must be from 0 to 699"),
        ("best_of", 5, "best_of is 5"),
        ("suffix", "end", "not supported"),
    ],
)
def test_what_cannot_be_met_is_an_error_with_the_fields_name(client, field, value, word):
    with pytest.raises(openai.BadRequestError, match=word) as error:
        client.completions.create(**{**GREEDY, "prompt": "a", field: value})
    assert error.value.body["param"] == field
    assert error.value.body["type"] == "invalid_request_error"


def test_a_damaged_checkpoint_is_an_error_of_its_own_request_alone(client):
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="bytes have changed") as error:
            client.completions.create(model=DAMAGED, prompt="a", max_tokens=1)
        assert "\n" not in error.value.body["message"]
    assert client.completions.create(**GREEDY, prompt="a", max_tokens=1).choices


def test_other_paths_methods_types_and_sizes_are_refused_in_openais_form(server):
    with httpx.Client(base_url=server.url) as http:
        answers = {
            404: http.get("/v2/nothing"),
            405: http.get("/v1/completions"),
            413: http.post("/v1/completions", json={"prompt": "x" * 5_000_000}),
            415: http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}),
            403: http.post("/v1/completions", json={}, headers={"Origin": "http://example.org"}),
            400: http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"}),
        }
        rebound = http.get("/v1/models", headers={"Host": "example.org"})
    for status, answer in answers.items():
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["Server"] == "genesis"
    assert answers[413].json()["error"]["param"] == "prompt"
    assert rebound.status_code == 403


@pytest.mark.parametrize(("num_bytes", "kind", "status"), [(5_000_000, "json", 413), (9, "json", 400), (9, "xml", 415)])
def test_an_answer_before_the_end_of_a_body_is_the_last_one_of_its_connection(server, num_bytes, kind, status):
    """A client that sent its next request behind the rest of the body would lose it when the connection ends."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_SECONDS)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", f"application/{kind}")
        connection.putheader("Content-Length", str(num_bytes))
        connection.endheaders(b"{" * num_bytes if status == 400 else None)
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Connection"] == "close") == (status, status != 400)
        assert json.loads(answer.read())["error"]["message"]
