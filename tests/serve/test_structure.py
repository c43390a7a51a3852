"""Answers by a schema, calls of tools, and beginnings that are computed once, from a server by OpenAI's client."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
import torch

from genesis.base.device import send as device_send
from genesis.chat import tools
from genesis.generate import batch
from genesis.generate.load import load_decoder
from genesis.generate.prefix_store import PrefixStore
from genesis.serve import worker
from genesis.serve.catalogue import Catalogue
from genesis.serve.guard import Guard
from genesis.serve.pool import Limits
from genesis.serve.server import Server, answering, bind
from tests.serve.support import Running, elsewhere
from tests.tiny_runs import build_decoder, save
from tests.tokenizer.test_huggingface import TEMPLATE, qwen

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "hotel")]
MESSAGES = [{"role": "user", "content": "All human beings?"}]
ASKED: dict[str, Any] = {"model": "latest", "messages": MESSAGES, "max_tokens": 200, "seed": 5}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
WRITES_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages if m.tool_calls %}{{ m.tool_calls | tojson }}{% endfor %}"
)
LONG = "All human beings are born free. " * 60


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("structure") / "run"
    directory.mkdir()
    qwen(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = WRITES_TOOLS + TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    save(directory / "checkpoints", 1, build_decoder(5, max_seq_len=2048), {}, max_seq_len=2048)
    return directory


def talk(
    run: Path, call: Callable[[openai.OpenAI, Running], Any], limits: Limits | None = None, *, is_public: bool = False
) -> Any:
    """Returns what `call` returns beside a server in this process."""

    async def serve() -> Any:
        guard = Guard(is_public=is_public)
        server = Server(Catalogue([run]), lambda entry: load_decoder(entry.path), guard, limits or Limits())
        with bind("127.0.0.1", 0) as sock:
            async with answering(server, sock):
                running = Running(sock.getsockname()[1])

                def ask() -> Any:
                    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
                        return call(client, running)

                return await elsewhere(ask)

    return asyncio.run(serve())


def check_trip(text: str) -> None:
    found = json.loads(text)
    assert found.keys() == {"city", "days"}
    assert found["city"] in ("Paris", "Rome")
    assert 1 <= found["days"] <= 9


@pytest.mark.slow
def test_answers_follow_what_the_request_asks_for(run: Path) -> None:
    def ask(client: openai.OpenAI, running: Running) -> None:
        whole = client.chat.completions.create(**ASKED, n=3, temperature=1.5, response_format=BY_SCHEMA)
        for choice in whole.choices:
            check_trip(choice.message.content)
            assert choice.finish_reason == "stop"
        stream = client.chat.completions.create(**ASKED, temperature=1.5, response_format=BY_SCHEMA, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert streamed == whole.choices[0].message.content, "a seed gives other text alone than beside others"
        anything = {**ASKED, "response_format": {"type": "json_object"}, "max_tokens": 9}
        assert client.chat.completions.create(**anything).choices[0].message.content.lstrip()[:1] == "{"
        for structure, expression in (
            ({"regex": "[a-c]{3}/[0-9]"}, "[a-c]{3}/[0-9]"),
            ({"choice": ["yes", 'no "never"']}, 'yes|no "never"'),
            ({"grammar": 'start: "x" y+\ny: "b" | "cc"'}, "x(b|cc)+"),
            ({"json": {"const": 5}}, r"\s*5"),
        ):
            for route in (client.completions, client.chat.completions):
                prompt = {"prompt": "a"} if route is client.completions else {"messages": MESSAGES}
                asked = {"model": "latest", "max_tokens": 30, **prompt}
                (choice,) = route.create(**asked, extra_body={"structured_outputs": structure}).choices
                text = choice.text if route is client.completions else choice.message.content
                assert re.fullmatch(expression, text) or choice.finish_reason == "length", text

    talk(run, ask)


@pytest.mark.slow
def test_calls_of_tools_come_whole_and_in_a_stream(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The symbol that this tokenizer has stands for those of Mistral.
    form = tools.ToolForm("<|im_start|>", None)
    monkeypatch.setattr(tools, "_FORMS", (form,))

    def ask(client: openai.OpenAI, running: Running) -> None:
        named = {"type": "function", "function": {"name": "hotel"}}
        for choice, names in (("required", {"weather", "hotel"}), (named, {"hotel"})):
            asked = {**ASKED, "tools": TOOLS, "tool_choice": choice}
            (answer,) = client.chat.completions.create(**asked).choices
            (call,) = answer.message.tool_calls
            assert (answer.finish_reason, answer.message.content, call.type) == ("tool_calls", None, "function")
            assert call.function.name in names
            check_trip(call.function.arguments)
            chunks = list(client.chat.completions.create(**asked, stream=True))
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices[0].delta.tool_calls]
            first, *others = [one for delta in deltas for one in delta.tool_calls]
            assert (first.index, first.type, first.function.name) == (0, "function", call.function.name)
            assert all((one.index, one.id, one.function.name) == (0, None, None) for one in others)
            arguments = "".join(one.function.arguments for one in (first, *others))
            assert json.loads(arguments) == json.loads(call.function.arguments)
            assert len(others) > 1, "the arguments came whole"
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
            turns = [*MESSAGES, answer.message.model_dump(exclude_none=True) | {"content": ""}]
            turns.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
            assert client.chat.completions.create(**{**ASKED, "messages": turns, "max_tokens": 2}).choices
        turns_alone = "<|im_start|>user\nAll human beings?<|im_end|>\n<|im_start|>assistant\n"
        tokenizer = tokenizers.Tokenizer.from_file(str(run / "tokenizer.json"))
        for choice, text in (("auto", json.dumps(TOOLS) + turns_alone), ("none", turns_alone)):
            free = client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice).choices[0].message
            asked = {key: value for key, value in ASKED.items() if key != "messages"}
            plain = client.completions.create(**asked, prompt=tokenizer.encode(text).ids).choices[0].text
            assert (free.content or "").strip() == plain.strip(), "a text that is no call was changed"
            assert not free.tool_calls

    talk(run, ask)


DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"items": DEEP}
TWO_EACH = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {"type": "string"}}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"type": "wizard"}, "response_format cannot be followed: Invalid type: wizard; change"),
    "unknown word": ({"not": {}}, 'Unimplemented keys: \\["not"\\]'),
    "missing": ({"$ref": "#/$defs/x"}, "does not exist"),
    "from the network": ({"$ref": "http://localhost/x"}, "cannot be followed"),
    "itself": ({"$ref": "#"}, "no text follows it"),
    "deep": (DEEP, "cannot be followed"),
    "large factor": ({"type": "integer", "multipleOf": 10**9 + 7}, "fuel exhausted"),
    "gigabytes": (
        {
            "allOf": [
                {"properties": {f"a{j}": {"type": "string", "pattern": f"x{i}"} for j in range(28)}} for i in range(45)
            ]
        },
        "response_format (needs|takes|crashes|cannot)",
    ),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    "options of the library": ({"x-guidance": {"lenient": True}, "not": {}}, "Unimplemented"),
}


@pytest.mark.slow
def test_a_schema_that_cannot_be_followed_is_refused_and_others_are_answered(run: Path) -> None:
    def ask(client: openai.OpenAI, running: Running) -> None:
        for schema, message in HOSTILE.values():
            body = {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
            status, answer, _ = running.ask("/v1/chat/completions", body)
            assert (status, answer["error"]["param"]) == (400, "response_format"), answer
            assert re.search(message, answer["error"]["message"]), answer
            assert "\n" not in answer["error"]["message"]
            assert len(answer["error"]["message"]) < 400
        for schema in (
            {"$defs": TWO_EACH, "$ref": "#/$defs/d0"},
            {"type": "string", "pattern": "(a|aa)+(a{1,999}){1,999}"},
        ):
            body = {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
            assert running.ask("/v1/chat/completions", {**body, "max_tokens": 5})[0] in (200, 400)
        (choice,) = client.chat.completions.create(**ASKED, response_format=BY_SCHEMA).choices
        check_trip(choice.message.content)
        assert running.num_busy() == 0

    talk(run, ask)


def test_a_beginning_is_computed_once_and_changes_no_answer(run: Path) -> None:
    turns = [
        [{"role": "system", "content": LONG}, {"role": "user", "content": text}] for text in ("All?", "And?", "All?")
    ]

    def ask(client: openai.OpenAI, running: Running) -> tuple[list[Any], list[int]]:
        asked = {"model": "latest", "max_tokens": 12, "seed": 2, "logprobs": True, "top_logprobs": 3}
        answers = [client.chat.completions.create(**asked, messages=messages) for messages in turns]
        counts = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
        status, other, _ = running.ask(
            "/v1/chat/completions", {**asked, "messages": turns[0], "max_tokens": 1}, client="127.0.0.2"
        )
        assert status == 200
        counts.append(other["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert answers[0].usage.prompt_tokens > 512
        return [answer.choices[0].model_dump() for answer in answers], counts

    kept, counts = talk(run, ask)
    computed, without = talk(run, ask, Limits(prefix_bytes=0))
    assert kept == computed, "answers of other bits"
    assert kept[0] == kept[2] != kept[1]
    assert without == [0] * 4
    most = counts[2]
    assert counts == [0, most, most, most]
    assert most >= 512
    _, counts = talk(run, ask, is_public=True)
    assert counts == [0, most, most, 0], "a client of a public server learns what another one has asked"


def test_the_models_of_a_server_share_the_memory_of_beginnings(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Store(PrefixStore):
        def __init__(self, max_bytes: int) -> None:
            sizes.append(max_bytes)
            super().__init__(max_bytes)

    monkeypatch.setattr(worker, "PrefixStore", Store)
    body = {**ASKED, "max_tokens": 1}
    limits = Limits(prefix_bytes=1000, max_models=4)
    assert talk(run, lambda _, running: running.ask("/v1/chat/completions", body)[0], limits) == 200
    assert sizes == [250]


def test_a_prompt_that_the_memory_has_no_room_for_fails_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.shape == (1, 256):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return device_send(tensor, device)

    monkeypatch.setattr(batch, "send", send)

    def ask(client: openai.OpenAI, running: Running) -> list[tuple[int, Any]]:
        turns = [MESSAGES, [{"role": "user", "content": LONG}], MESSAGES]
        bodies = [{**ASKED, "max_tokens": 2, "messages": messages} for messages in turns]
        return [running.ask("/v1/chat/completions", body)[:2] for body in bodies]

    (status, first), (failed, answer), (status_again, again) = talk(run, ask)
    assert (status, failed, status_again) == (200, 503, 200)
    assert answer["error"]["code"] == "out_of_memory"
    assert first["choices"] == again["choices"]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("genesis.generate.batch.LogitChanges", {"frequency_penalty": 1.0}),
        ("genesis.generate.batch._gather_figures", {}),
        ("genesis.serve.worker.score_prompt", {"echo": True, "logprobs": 1}),
        ("genesis.serve.server.Completion", {}),
        ("genesis.serve.server.Completion", {"stream": True}),
    ],
)
def test_a_request_that_the_memory_is_not_enough_for_gets_a_line_and_the_next_an_answer(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, asked: dict[str, Any]
) -> None:
    body = {"model": "latest", "prompt": "All", "max_tokens": 2, "seed": 5}

    def end_of_memory(*_: object, **__: object) -> None:
        raise MemoryError

    def ask(client: openai.OpenAI, running: Running) -> list[tuple[int, Any]]:
        first = running.ask("/v1/completions", body)
        with monkeypatch.context() as patch:
            patch.setattr(name, end_of_memory)
            failed = running.ask("/v1/completions", {**body, **asked})
        return [first, failed, running.ask("/v1/completions", body)]

    (status, first, _), (failed, answer, _), (status_again, again, _) = talk(run, ask)
    assert (status, failed, status_again) == (200, 503, 200)
    assert answer["error"]["code"] == "out_of_memory"
    assert "shorten the prompt" in answer["error"]["message"]
    assert first["choices"] == again["choices"]
    assert not caplog.records
