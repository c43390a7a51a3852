"""The body of a completion: what is good, and every kind of what is not, refused by its name."""

import json

import pytest

from genesis.generate.sampling_options import SamplingOptions
from genesis.serve.errors import ApiError
from genesis.serve.request import CompletionRequest, parse_completion


def parse(**fields):
    return parse_completion(json.dumps({"model": "m", "prompt": "a", **fields}).encode(), max_texts=8)


def refused(**fields):
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)
    return caught.value


def test_what_is_not_given_is_as_openai_has_it():
    asked = CompletionRequest("m", False, 1, ("a",), None, SamplingOptions(), 1, (), None, None, False, False, False)
    assert parse() == asked
    assert parse(**dict.fromkeys(("max_tokens", "n", "stop", "seed", "logprobs", "echo", "stream_options"))) == asked


def test_everything_that_is_given_arrives():
    asked = parse(
        prompt=["a", [1, 2]],
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=3,
        n=2,
        best_of=2,
        stop=["x", "yz"],
        seed=-1,
        logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
        user="me",
        suffix=None,
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0.0,
    )
    assert asked == CompletionRequest(
        "m", False, 2, ("a", (1, 2)), 5, SamplingOptions(0.0, 3, 0.5), 2, ("x", "yz"), -1, 0, False, True, True
    )
    assert asked.num_texts == 4


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("", ("",)), ("a", ("a",)), (["a", ""], ("a", "")), ([3, 4], ((3, 4),)), ([[3], [4]], ((3,), (4,)))],
)
def test_a_prompt_is_text_or_tokens_one_or_many(prompt, prompts):
    assert parse(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 3),
        ("model", None),
        ("prompt", None),
        ("prompt", 3),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [True]),
        ("prompt", [1, "a"]),
        ("prompt", {"a": 1}),
        ("prompt", "\ud800"),
        ("prompt", ["a"] * 9),
        ("max_tokens", 0),
        ("max_tokens", 2**40),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", 1e-9),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", False),
        ("top_k", 0),
        ("n", 0),
        ("n", 9),
        ("best_of", 2),
        ("stop", 3),
        ("stop", [""]),
        ("stop", ["a"] * 5),
        ("stop", [3]),
        ("stop", "a" * 2000),
        ("seed", 2**63),
        ("seed", 0.5),
        ("logprobs", 6),
        ("logprobs", True),
        ("echo", 1),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("suffix", "z"),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("logit_bias", [5]),
        ("presence_penalty", 2.1),
        ("frequency_penalty", False),
        ("repetition_penalty", 0),
        ("min_p", 1.5),
        ("response_format", "json"),
        ("response_format", {"type": "yaml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": [1]}}),
        ("response_format", {"type": "json_object", "schema": {}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"enum": ["v" * 70_000]}}}),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"choice": ["a", ""]}),
        ("structured_outputs", {"grammar": "start: \ud800"}),
        ("structured_outputs", {"wizard": 1}),
    ],
)
def test_a_value_that_cannot_be_met_is_refused_by_its_field(field, value):
    error = refused(**{field: value})
    assert error.param == field
    assert field in str(error)
    assert len(str(error)) < 300


def test_the_options_of_a_stream_are_read_strictly():
    for options in (3, {"usage": True}, {"include_usage": 1}):
        assert refused(stream=True, stream_options=options).param == "stream_options"
    assert not parse(stream=True, stream_options={}).has_usage


def test_no_new_tokens_are_asked_for_only_with_the_probabilities_of_the_prompt():
    asked = parse(echo=True, logprobs=1, max_tokens=0)
    assert (asked.has_echo, asked.max_new_tokens, asked.num_top_logprobs) == (True, 0, 1)
    for fields in ({}, {"echo": True}, {"logprobs": 1}):
        assert refused(max_tokens=0, **fields).param == "max_tokens"


def test_an_unknown_field_is_refused_with_the_nearest():
    error = refused(max_token=1)
    assert (error.param, error.code) == ("max_token", "unknown_field")
    assert "did you mean max_tokens?" in str(error)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"temperature": NaN}', "contains NaN"),
        (b'{"temperature": -Infinity}', "contains -Infinity"),
        (b'{"n": 1, "n": 2}', 'has the field "n" twice'),
        (b'{"n": ' + b"1" * 5000 + b"}", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_is_told_so(body, message):
    with pytest.raises(ApiError, match=message) as caught:
        parse_completion(body, max_texts=8)
    assert caught.value.status == 400


def test_a_large_body_of_many_fields_is_read_in_one_pass():
    """Were each name compared with all, this would take hours."""
    many = ",".join(f'"{number}":0' for number in range(400_000))
    with pytest.raises(ApiError, match='has the field "a" twice'):
        parse_completion(f'{{{many},"a":0,"a":1}}'.encode(), 1)
