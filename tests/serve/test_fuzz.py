"""Whatever is sent, the server answers the next one."""

import http.client
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.support import send_bytes

QUICK = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
PATIENCE_SECONDS = 0.2
GOOD = b'{"model":"step-00000001","prompt":"alpha","max_tokens":2,"stream":true}'
WHOLE = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(GOOD) + GOOD
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.fixed_dictionaries({"name": st.text(max_size=5)}, optional={"arguments": VALUES})
LIKELY = {
    "model": st.sampled_from(["step-00000001", "latest"]),
    "prompt": st.text(max_size=30)
    | st.lists(st.integers(-2, 800), max_size=5)
    | st.lists(st.text(max_size=5), max_size=3),
    "max_tokens": st.integers(-1, 12),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 2**70),
    "n": st.integers(0, 3),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
    "seed": st.integers(),
    "logprobs": st.integers(-1, 6),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "user": st.text(max_size=3),
}
BODIES = st.fixed_dictionaries(
    {"model": LIKELY["model"], "prompt": LIKELY["prompt"]},
    optional={
        **{name: values | VALUES for name, values in LIKELY.items() if name not in ("model", "prompt")},
        "suffix": VALUES,
        "anything": VALUES,
    },
)
CHAT_MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]) | VALUES},
    optional={
        "content": st.text(max_size=20) | st.lists(st.fixed_dictionaries({"text": st.text(max_size=5)})) | VALUES,
        "name": VALUES,
        "reasoning_content": VALUES,
        "weight": VALUES,
        "tool_calls": st.lists(st.fixed_dictionaries({"function": VALUES | CALLS}), max_size=2) | VALUES,
        "anything": VALUES,
    },
)
LIKELY_CHAT = {
    **{name: values for name, values in LIKELY.items() if name not in ("prompt", "echo", "logprobs")},
    "max_completion_tokens": st.integers(-1, 12),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(-1, 6),
    "tools": st.lists(st.dictionaries(st.sampled_from(["name", "function"]) | st.text(max_size=5), VALUES), max_size=2),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["indent", "last", "messages", "self", "raise_exception"]) | st.text(max_size=5), VALUES
    ),
    "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]),
    "metadata": VALUES,
}
CHATS = st.fixed_dictionaries(
    {"model": LIKELY["model"], "messages": st.lists(CHAT_MESSAGES, max_size=4) | VALUES},
    optional={
        **{name: values | VALUES for name, values in LIKELY_CHAT.items() if name != "model"},
        "response_format": VALUES,
        "anything": VALUES,
    },
)


@pytest.fixture(autouse=True)
def still_answers(server):
    yield
    assert server.process.poll() is None
    status, answer, _ = server.ask("/v1/completions", json.loads(GOOD) | {"stream": False})
    assert (status, len(answer["choices"])) == (200, 1)
    assert server.ask("/api/status")[1]["num_texts"] == 0


def send(server, data, patience_seconds=PATIENCE_SECONDS):
    return send_bytes(server.port, data, patience_seconds)


def test_a_request_sent_so_is_answered(server):
    assert send(server, WHOLE, 60).startswith(b"HTTP/1.1 200")
    assert send(server, WHOLE.replace(b'"alpha"', b'"\\alph"'), 60).startswith(b"HTTP/1.1 400")


@QUICK
@given(data=st.binary(max_size=400))
def test_random_bytes(server, data):
    assert send(server, data + b"\r\n\r\n").startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")) or not data.strip(b"\r\n")


@QUICK
@given(length=st.integers(0, len(WHOLE) - 1))
def test_a_request_that_breaks_off(server, length):
    assert not send(server, WHOLE[:length], 0.01).startswith(b"HTTP/1.1 5")


@QUICK
@given(at=st.integers(0, len(WHOLE) - 1), data=st.binary(min_size=1, max_size=20))
def test_a_request_with_other_bytes_in_its_middle(server, at, data):
    assert not send(server, WHOLE[:at] + data + WHOLE[at + len(data) :]).startswith(b"HTTP/1.1 5")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 10_000 + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\nzz\r\n",
        WHOLE.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n"),
        WHOLE.replace(b"\r\n\r\n", b"\r\nExpect: wonders\r\n\r\n"),
        b"GET / HTTP/9.9\r\n\r\n",
    ],
)
def test_a_head_that_is_huge_or_wrong_is_refused(server, head):
    assert send(server, head, 60).startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))


@pytest.mark.slow
@QUICK
@given(body=BODIES)
def test_json_of_right_and_wrong_types_is_answered_or_refused_by_a_field(server, body):
    check_answer(server, "/v1/completions", body)


@pytest.mark.slow
@QUICK
@given(body=CHATS)
def test_chats_of_right_and_wrong_types_are_answered_or_refused_by_a_field(server, body):
    check_answer(server, "/v1/chat/completions", body)


@pytest.mark.parametrize(
    ("field", "value"),
    [("chat_template_kwargs", {"last": "\ud800"}), ("tools", [{"name": "f", "description": "\ud800"}])],
)
def test_half_a_character_in_what_the_template_prints_is_refused(server, field, value):
    indent = {"chat_template_kwargs": {"indent": 1}} if field == "tools" else {}
    body = {"model": "latest", "messages": [{"role": "user", "content": "a"}], **indent, field: value}
    status, answer, _ = server.ask("/v1/chat/completions", body)
    assert (status, "contains a lone surrogate" in answer["error"]["message"]) == (400, True), answer


def check_answer(server, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        content = json.dumps(body).encode()
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    assert answer.status in (200, 400), data
    if answer.status == 400:
        assert json.loads(data)["error"]["message"]
    elif not body.get("stream"):
        assert json.loads(data)["choices"]
    else:
        assert data.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
@QUICK
@given(body=VALUES | st.dictionaries(st.text(max_size=8), VALUES, max_size=4))
def test_json_that_is_no_request_is_refused(server, body):
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert server.ask(path, json.dumps(body).encode())[0] == 400
