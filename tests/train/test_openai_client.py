"""The client of servers that write answers: what it sends, what it takes, and one line for all else."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genesis.base.errors import RunEndedError, UserError
from genesis.data.rollout_options import RolloutOptions
from genesis.generate.batch import Request
from genesis.train import openai_client
from genesis.train.answer_journal import AnswerJournal, Completion
from genesis.train.openai_client import OpenAIClient
from genesis.train.served_weights import Weights
from tests.loopback import serving

WEIGHTS = Weights("0000000003-abc", "abc0")
STOP = 2
FULL = b'{"error": {"message": "the server is full"}}'
Reply = Callable[[str, dict[str, Any]], tuple[int, bytes]]


class Handler(BaseHTTPRequestHandler):
    reply: Reply
    asked: list[tuple[str, dict[str, Any], str | None]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body, self.headers["Authorization"]))
        status, content = type(self).reply(self.path, body)
        self.send_response(status)
        if status in (429, 503) and content == FULL:
            self.send_header("Retry-After", "3")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


def answer_with(**changes: Any) -> dict[str, Any]:
    """Returns a right response of `genesis serve` and vLLM, with these changes of its choice, or of `model`."""
    choice = {
        "index": 0,
        "token_ids": [5, 6, STOP],
        "logprobs": {"token_logprobs": [-0.5, -1.25, -0.125]},
        "finish_reason": "stop",
    }
    model = changes.pop("model", WEIGHTS.name)
    return {"model": model, "choices": [choice | changes]}


def reply_with(content: Any) -> Reply:
    def reply(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/v1/load_weights":
            return 200, json.dumps({"id": body["path"], "digest": body["digest"]}).encode()
        return 200, content if isinstance(content, bytes) else json.dumps(content).encode()

    return reply


def ask(
    reply: Reply, *, num: int = 1, headers: dict[str, str] | None = None, weights: Weights = WEIGHTS, **options: Any
) -> tuple[list[Completion], list[tuple[str, dict[str, Any], str | None]]]:
    asked: list[Any] = []
    answers: dict[int, Completion] = {}
    limits = {"request_seconds": 20.0, "retry_seconds": 0.1} | options
    with serving(Handler, reply=staticmethod(reply), asked=asked) as url:
        client = OpenAIClient(
            RolloutOptions("openai", url, **limits), headers or {}, Path("/weights"), 10, frozenset({STOP})
        )
        requests = [Request((1, 3), 4, seed=index) for index in range(num)]
        asyncio.run(client.ask(weights, requests, answers.__setitem__))
    return [answers[index] for index in range(num)], asked


def test_requests_have_ids_seeds_and_the_name_of_the_weights_which_are_loaded_once() -> None:
    answers, asked = ask(reply_with(answer_with()), num=3, headers={"Authorization": "Bearer secret"})
    assert [answer.ids.tolist() for answer in answers] == [[5, 6, STOP]] * 3
    assert answers[0].log_probs is not None
    assert answers[0].log_probs.tolist() == [-0.5, -1.25, -0.125]
    assert [path for path, *_ in asked] == ["/v1/load_weights", *["/v1/completions"] * 3]
    assert {key for *_, key in asked} == {"Bearer secret"}
    assert asked[0][1] == {"path": WEIGHTS.name, "digest": WEIGHTS.digest}
    assert sorted(body["seed"] for _, body, _ in asked[1:]) == [0, 1, 2]
    body = asked[1][1]
    assert (body["model"], body["prompt"], body["max_tokens"]) == (WEIGHTS.name, [1, 3], 4)
    assert (body["temperature"], body["top_p"], body["min_p"]) == (1.0, 1.0, 0.0)


def test_vllm_gets_adapters_by_its_own_call_and_the_tokens_that_end_an_answer() -> None:
    _, asked = ask(reply_with(answer_with()), reload="vllm")
    assert asked[0][:2] == (
        "/v1/load_lora_adapter",
        {"lora_name": WEIGHTS.name, "lora_path": f"/weights/{WEIGHTS.name}"},
    )
    assert asked[1][1]["stop_token_ids"] == [STOP]
    assert asked[1][1]["return_token_ids"] is True


def test_the_form_of_llama_cpp_is_read_and_its_weights_stay() -> None:
    content = [{"id": 5, "logprob": -0.5}, {"id": STOP, "logprob": -1.0}]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": "stop"}
    fixed = {"reload": "none", "model": "gguf"}
    answers, asked = ask(reply_with({"model": "file.gguf", "choices": [choice]}), weights=Weights("gguf"), **fixed)
    assert answers[0].ids.tolist() == [5, STOP]
    assert [path for path, *_ in asked] == ["/v1/completions"]


def test_a_server_that_has_started_again_loads_the_weights_again() -> None:
    right, missing = reply_with(answer_with()), [2]

    def reply(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/v1/completions" and missing[0]:
            missing[0] -= 1
            return 404, b'{"error": {"message": "no such model"}}'
        return right(path, body)

    answers, asked = ask(reply)
    assert len(answers) == 1
    assert [path for path, *_ in asked] == ["/v1/load_weights", "/v1/completions"] * 3


def test_a_busy_or_failing_server_is_asked_again() -> None:
    right, statuses = reply_with(answer_with()), [429, 503, 500]

    def reply(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        return (statuses.pop(), b"{}") if statuses else right(path, body)

    answers, _ = ask(reply, retry_seconds=30.0)
    assert len(answers) == 1


class Clock:
    """The time of the client, which passes by its pauses alone, and by what a test adds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.rate, self.pauses, self._sleep = 0.0, 1.0, list[float](), asyncio.sleep
        monkeypatch.setattr(openai_client, "time", SimpleNamespace(monotonic=lambda: self.seconds))
        monkeypatch.setattr(asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.seconds += self.rate * seconds
        await self._sleep(0.01)


@pytest.mark.parametrize("status", [429, 503])
def test_a_full_server_is_waited_for_beyond_the_limit_of_one_that_is_gone(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, statuses, clock = reply_with(answer_with()), [status] * 4, Clock(monkeypatch)

    def reply(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        is_full = path == "/v1/completions" and statuses
        return (statuses.pop(), FULL) if is_full else right(path, body)

    answers, _ = ask(reply, retry_seconds=0.01)
    assert len(answers) == 1
    assert clock.pauses == [3.0, 3.0, 3.0, 3.0]  # what the server asks for
    with pytest.raises(RunEndedError, match=r"the server is full, for 20 s .*request_seconds\); lower num_concurrent"):
        ask(lambda path, body: (status, FULL), retry_seconds=0.01)
    assert clock.seconds > 12 + 20


def test_a_request_that_fails_is_repeated_while_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    right, num_answered, clock = reply_with(answer_with()), [0], Clock(monkeypatch)
    clock.rate = 0.0

    def reply(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if body.get("seed") == 0 and num_answered[0] < 8:
            return 500, b"{}"
        num_answered[0] += 1
        clock.seconds += 1
        return right(path, body)

    answers, _ = ask(reply, num=10, num_concurrent=2, retry_seconds=3.0)
    assert len(answers) == 10


def test_the_places_are_those_of_all_calls_together() -> None:
    right, running, most = reply_with(answer_with()), [0], [0]
    lock = threading.Lock()

    def reply(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.05)
        with lock:
            running[0] -= 1
        return right(path, body)

    async def ask_twice(client: OpenAIClient) -> None:
        requests = [Request((1, 3), 4, seed=index) for index in range(4)]
        await asyncio.gather(*(client.ask(WEIGHTS, requests, lambda index, answer: None) for _ in range(2)))

    with serving(Handler, reply=staticmethod(reply), asked=[]) as url:
        options = RolloutOptions("openai", url, num_concurrent=2)
        asyncio.run(ask_twice(OpenAIClient(options, {}, Path("/weights"), 10, frozenset({STOP}))))
    assert most == [2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "answers /v1/completions with what is not JSON: <html>; correct it"),
        (b"[" * 60_000, "what is not JSON"),
        (b'{"model": 1, "model": 2}', "what is not JSON"),
        (b" " * 200_000, "answers with more than 73,728 bytes"),
        ([], "gives no ids of tokens with log-probabilities"),
        ({"model": WEIGHTS.name, "choices": []}, "gives no ids of tokens"),
        (answer_with(logprobs=None), "gives no ids of tokens"),
        (answer_with(model="0000000000-old"), "answers by the model 0000000000-old, and 0000000003-abc was asked"),
        (answer_with() | {"usage": {"completion_tokens": 4}}, "has written 4 tokens and gives 3 of them; llama.cpp"),
        (answer_with(token_ids=[5, STOP]), "does not give one log-probability for each token"),
        (answer_with(token_ids=[], logprobs={"token_logprobs": []}), "gives 0 tokens, and 1 to 4 were asked for"),
        (
            answer_with(token_ids=[5] * 5, logprobs={"token_logprobs": [-1.0] * 5}, finish_reason="length"),
            "gives 5 tokens, and 1 to 4 were asked for",
        ),
        (answer_with(token_ids=[5, 99, STOP]), "gives the token 99, and ids are from 0 to 9"),
        (answer_with(token_ids=[5, True, STOP]), "gives the token True"),
        (answer_with(token_ids=[5, None, STOP]), "gives the token None"),
        (answer_with(logprobs={"token_logprobs": [-1.0, float("nan"), -1.0]}), "gives the log-probability nan"),
        (answer_with(logprobs={"token_logprobs": [-1.0, None, -1.0]}), "gives the log-probability None"),
        (answer_with(logprobs={"token_logprobs": [-1.0, 0.5, -1.0]}), "gives the log-probability 0.5"),
        (answer_with(logprobs={"token_logprobs": [-1.0, True, -1.0]}), "gives the log-probability True"),
        (answer_with(logprobs={"token_logprobs": [-1.0, -1e300, -1.0]}), "gives the log-probability -1e+300"),
        (answer_with(logprobs={"token_logprobs": [-1.0, -(10**400), -1.0]}), "gives the log-probability -1000"),
        (answer_with(token_ids=[STOP, 5, STOP]), "ends an answer by stop at the token 2, and the tokens that end"),
        (answer_with(token_ids=[5, 6, 7]), "start it with the tokenizer and the template of the run"),
        (answer_with(token_ids=[5, 6, 7], finish_reason="length"), "ends an answer by length at the token 7"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_answer_ends_the_run_in_one_line(content: Any, message: str) -> None:
    with pytest.raises(RunEndedError, match=re.escape(message)) as found:
        ask(reply_with(content))
    text = str(found.value)
    assert text.startswith("the server http://127.0.0.1:")
    assert text.endswith("a resume goes on from the last checkpoint, and asks for no answer again that it has")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (
            401,
            b'{"error": {"message": "the token is missing"}}',
            "status 401: the token is missing (GENESIS_ROLLOUTS_KEY is not set)",
        ),
        (400, b'{"message": "no return_token_ids"}', "status 400: no return_token_ids; correct it"),
        (404, b'{"error": {"message": "no such model"}}', "status 404: no such model"),
        (
            503,
            b"\x1b[2Jbusy",
            "status 503: \\x1b[2Jbusy, for 0.1 s (data.prompts.rollouts.retry_seconds); start it again",
        ),
    ],
)
def test_a_refusal_ends_the_run_with_the_reason_of_the_server(status: int, content: bytes, message: str) -> None:
    with pytest.raises(RunEndedError, match=re.escape(message)):
        ask(lambda path, body: (status, content))


def test_a_server_that_is_gone_or_hangs_ends_the_run_at_its_limit() -> None:
    options = RolloutOptions("openai", "http://127.0.0.1:9", retry_seconds=0.1)
    client = OpenAIClient(options, {}, Path("/weights"), 10, frozenset({STOP}))
    with pytest.raises(
        RunEndedError, match=r"http://127.0.0.1:9 cannot be reached \(ClientConnectorError\), for 0.1 s"
    ):
        asyncio.run(client.ask(WEIGHTS, [Request((1,), 4)], lambda index, answer: None))

    def hang(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        time.sleep(0.5)
        return 200, b"{}"

    with pytest.raises(RunEndedError, match=r"has not answered in 0.2 s, for 0.1 s"):
        ask(hang, request_seconds=0.2)


# ---- the answers on the disk


def test_answers_are_read_as_they_were_written_and_half_a_line_is_none(tmp_path: Path) -> None:
    answers, _ = ask(reply_with(answer_with()))
    journal = AnswerJournal(tmp_path, 0)
    journal.append(3, "first", answers[0])
    journal.append(3, "second", answers[0])
    journal.sync()
    journal.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    again = AnswerJournal(tmp_path, 0)
    assert list(again.read(3)) == ["first"]
    again.append(3, "third", answers[0])
    again.close()
    found = AnswerJournal(tmp_path, 1).read(3)
    assert list(found) == ["first", "third"]
    assert found["third"].ids.tolist() == [5, 6, STOP]
    assert found["third"].log_probs is not None
    assert found["third"].log_probs.tolist() == [-0.5, -1.25, -0.125]
    again.remove(before=3)
    assert path.exists()
    again.remove(before=4)
    assert not path.exists()


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "openai"}, "url is None; by: openai needs the server's address"),
        ({"url": "http://a"}, "and local has none"),
        ({"by": "openai", "url": "ftp://a"}, "url is no address such as http://127.0.0.1:8000"),
        (
            {"by": "openai", "url": "http://name:secret@a"},
            "the key is in the environment variable GENESIS_ROLLOUTS_KEY",
        ),
        ({"by": "openai", "url": "http://a", "reload": "none"}, "model is None; reload: none needs the name"),
        ({"by": "openai", "url": "http://a", "num_concurrent": 0}, "num_concurrent is 0; it must be at least 1"),
        (
            {"by": "openai", "url": "http://a", "retry_seconds": 0.0},
            "retry_seconds is 0.0; it must be a number above 0",
        ),
        ({"by": "openai", "url": "http://a", "max_ratio": 0.5}, "max_ratio is 0.5; it must be a number of at least 1"),
    ],
)
def test_options_that_fit_no_server_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        RolloutOptions(**options)


def test_the_lag_bounds_how_far_a_rollout_is_asked_for_ahead() -> None:
    for steps in (1, 3, 4):
        for every in (1, 2, 3):
            for lag in range(steps * every - 1, 30):
                options = RolloutOptions("openai", "http://a", max_lag=lag, reload_every=every)
                options.check(steps, 1.0)
                updates = [options.plan_update(rollout, steps) for rollout in range(20)]
                lags = [(rollout + 1) * steps - 1 - update for rollout, update in enumerate(updates)]
                assert max(lags) <= lag
                # The weights exist when their rollout is asked for, and are those of few updates.
                ahead = options.count_ahead(steps)
                assert all(update <= max(0, rollout - ahead) * steps for rollout, update in enumerate(updates))
                assert len({*updates}) >= (20 - ahead) // every
    with pytest.raises(UserError, match=r"max_lag is 2; it must be at least 3"):
        RolloutOptions("openai", "http://a", max_lag=2).check(4, 1.0)
    with pytest.raises(UserError, match=r"temperature is 0.7, and servers give log-probabilities without it"):
        RolloutOptions("openai", "http://a").check(4, 0.7)
