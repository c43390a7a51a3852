"""Calls of tools as families of models write them, whole and while an answer comes; what is no call stays text."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import llguidance
import pytest

from genesis.chat.tools import Call, ToolForm, ToolReader, find_form, parse_calls
from genesis.generate.batch import NewToken, Request
from genesis.generate.grammar import compile_grammar
from genesis.serve.completion import Completion
from genesis.serve.errors import ApiError
from genesis.serve.forced_calls import write_choice
from genesis.serve.prompt import EncodedPrompt, Facts
from genesis.serve.request import parse_chat
from genesis.serve.worker import Result, Ticket, Worker
from genesis.tokenizer.open import open_tokenizer
from tests.tokenizer.test_huggingface import qwen

TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object"},
}
PARIS = Call("weather", '{"city": "Paris", "days": 2}')
NOW = Call("now", "{}")
DEEPSEEK = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
JSON = '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'
FORMS = {
    "hermes": ("<tool_call>", f"<tool_call>\n{JSON}\n</tool_call>", [PARIS]),
    "hermes, two": (
        "<tool_call>",
        f'<tool_call>{JSON}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>',
        [PARIS, NOW],
    ),
    "qwen3.5": (
        "<tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        [PARIS],
    ),
    "glm": (
        "<tool_call>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call><tool_call>now\n</tool_call>",
        [PARIS, NOW],
    ),
    "mistral": ("[TOOL_CALLS]", f'[TOOL_CALLS][{JSON}, {{"name": "now", "arguments": {{}}}}]', [PARIS, NOW]),
    "mistral, newer": (
        "[TOOL_CALLS]",
        '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}',
        [PARIS, NOW],
    ),
    "llama 3": (
        "<|python_tag|>",
        '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}; {"name": "now", "parameters": {}}',
        [PARIS, NOW],
    ),
    "llama 3, tag": ("<|python_tag|>", '<|python_tag|>weather.call(city="Paris", days=2)', [PARIS]),
    "llama 3, python": ("<|python_tag|>", "[weather(city='Paris', days=2), now()]", [PARIS, NOW]),
    "phi 4": ("<|tool_call|>", f"<|tool_call|>[{JSON}]<|/tool_call|>", [PARIS]),
    "lfm2": ("<|tool_call_start|>", '<|tool_call_start|>[weather(city="Paris", days=2)]<|tool_call_end|>', [PARIS]),
    "olmo 3": (
        "<function_calls>",
        '<function_calls>weather(city="Paris", days=2)\nnow()</function_calls>',
        [PARIS, NOW],
    ),
    "deepseek": (
        DEEPSEEK[0],
        f"{DEEPSEEK[0]}function<\uff5ctool\u2581sep\uff5c>weather\n```json\n{PARIS.arguments}\n```{DEEPSEEK[1]}",
        [PARIS],
    ),
    "text of a template without signs": ("{{ messages }}", JSON, [PARIS]),
    "arguments as text": (
        "<tool_call>",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 2}"}</tool_call>',
        [PARIS],
    ),
}


def read(template: str, text: str, size: int) -> tuple[str, list[Call]]:
    """Returns what a client gets of an answer that comes in parts of a size."""
    reader = ToolReader(find_form(template), TOOLS)
    content, calls = "", []
    for start in range(0, len(text), size):
        part = reader.feed(text[start : start + size], is_last=start + size >= len(text))
        content += part.content
        calls += [Call(call["function"]["name"], call["function"]["arguments"]) for call in part.calls]
        assert all(call["type"] == "function" and len(call["id"]) == 9 and call["id"].isalnum() for call in part.calls)
    assert reader.num_calls == len(calls)
    return content, calls


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("name", FORMS)
def test_the_calls_of_a_family_are_found_however_the_answer_comes(name: str, size: int) -> None:
    template, text, calls = FORMS[name]
    assert read(template, text, size) == ("", calls)
    if not find_form(template).is_bare:
        assert read(template, f"I look.\n\n{text}", size) == ("I look.", calls)


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("<tool_call>", "No call, 2 < 3 and <tool."),
        ("<tool_call>", "<tool_call>\n{'name': weather}\n</tool_call>\n"),
        ("<tool_call>", '<tool_call>{"name": "weather", "arguments": {"city": '),
        ("<tool_call>", '<tool_call>{"name": "delete", "arguments": {}}</tool_call>'),
        ("<tool_call>", '<tool_call>{"name": "now", "arguments": [1]}</tool_call> then'),
        ("<tool_call>", '<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>'),
        ("<tool_call>", "<tool_call>" + "[" * 20_000 + "</tool_call>"),
        ("<tool_call>", "<tool_call>now(" + "(" * 5_000 + "</tool_call>"),
        ("<tool_call>", "<tool_call></tool_call>"),
        ("[TOOL_CALLS]", "A [TOOL_CALLS]wizard[ARGS]{}"),
        ("<|python_tag|>", '{"answer": 5}'),
        ("<|python_tag|>", "[1, 2, 3]\n"),
        ("<|python_tag|>", "<|python_tag|>print(__import__('os'))"),
        ("<|python_tag|>", "  \n"),
    ],
)
def test_what_is_no_call_comes_back_as_text_whole(template: str, text: str, size: int) -> None:
    content, calls = read(template, text, size if len(text) < 1000 else 10_000)
    assert calls == []
    assert content == text


def test_text_before_and_between_calls_is_sent_as_it_comes() -> None:
    reader = ToolReader(find_form("<tool_call>"), TOOLS)
    assert reader.feed("Hello <to", is_last=False).content == "Hello"
    assert reader.feed("wer", is_last=False).content == " <tower"
    assert reader.feed(" <tool_call>{", is_last=False).content == ""
    found = reader.feed('"name": "now"}</tool_call> done', is_last=True)
    assert (found.content, len(found.calls)) == ("done", 1)


def test_a_body_that_is_too_long_is_no_call() -> None:
    body = json.dumps({"name": "now", "arguments": {"a": "x" * 2**17}})
    assert parse_calls(body, find_form("<tool_call>"), TOOLS) is None


@pytest.mark.parametrize(
    ("sign", "written"),
    [
        ("<tool_call>", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "now", "arguments": {}}]'),
        ("[TOOL_CALLS][ARGS]", "[TOOL_CALLS]now[ARGS]{}"),
        ("[TOOL_CALLS][CALL_ID][ARGS]", "[TOOL_CALLS]now[CALL_ID]000000000[ARGS]{}"),
        ("<|python_tag|>", '{"name": "now", "parameters": {}}'),
        ("<|tool_call|>", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>'),
        ("no sign", '{"name": "now", "arguments": {}}'),
        ("<|im_start|>", '<|im_start|>{"name": "now", "arguments": {}}<|im_end|>'),
    ],
)
def test_the_grammar_of_a_choice_accepts_calls_of_its_tools_alone(sign: str, written: str, tmp_path: Path) -> None:
    qwen(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    form = find_form(sign)
    if sign == "<|im_start|>":  # a control symbol of this tokenizer as the sign
        form = ToolForm(sign, "<|im_end|>")
    grammar = compile_grammar(write_choice(form, TOOLS, tokenizer), tokenizer, tokenizer.vocab_size, tokenizer.stop_ids)
    for name, is_right in (("now", True), ("delete", False)):
        text = written.replace("now", name)
        reader = ToolReader(form, {name: {}})
        assert [call["function"]["name"] for call in reader.feed(text, is_last=True).calls] == [name]
        one, is_whole = grammar.copy(), False
        fits = True
        for token in tokenizer.encode_with_controls(text):
            fits = fits and bool(one.mask()[token])
            is_whole = fits and one.accept(token)
        assert (fits, is_whole) == (is_right, is_right)


AT = {"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"]}
PLANNED = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "days": {"type": "integer"},
        "kind": {"enum": ["sun", "2"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "by": {"anyOf": [{"type": "object", "properties": {"x": {"type": "boolean"}}}, {"type": "null"}]},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": AT, "w": {"type": "integer"}, "v": {"type": "integer"}},
            "required": ["y", "w"],
        },
    },
    "required": ["city", "days"],
}
CODER = "<tool_call>\n<function=plan>\n{}</function>\n</tool_call>"
GLM = "<tool_call>plan\n{}</tool_call>"
LFM2 = "<|tool_call_start|>[plan({})]<|tool_call_end|>"
OLMO3 = "<function_calls>plan({})</function_calls>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


def write_tags(before: str, behind: str, **values: str) -> str:
    return "".join(f"{before.format(key)}{value}{behind}" for key, value in values.items())


def coder(**values: str) -> str:
    return CODER.format(write_tags("<parameter={}>\n", "\n</parameter>\n", **values))


def glm(**values: str) -> str:
    return GLM.format(write_tags("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", **values))


@pytest.mark.parametrize(
    ("template", "text", "wanted"),
    [
        (
            "<tool_call> <function=",
            coder(city='A </tool_call>\n"b', days="2"),
            {"city": 'A </tool_call>\n"b', "days": 2},
        ),
        ("<tool_call> <function=", coder(city="1", days="-2", kind="2"), {"city": "1", "days": -2, "kind": "2"}),
        ("<tool_call> <function=", coder(city="A"), None),
        ("<tool_call> <function=", coder(city="A", days="two"), None),
        ("<tool_call> <function=", coder(city="A", days="2", kind="3"), None),
        (
            "<tool_call> <arg_key>",
            glm(city="A\nb", days="2", tags='["c"]', by='{"x": true}'),
            {"city": "A\nb", "days": 2, "tags": ["c"], "by": {"x": True}},
        ),
        ("<tool_call> <arg_key>", glm(days="2"), None),
        (
            "<|tool_call_start|>",
            LFM2.format('city="A \\"b\\n)]", days=2, kind="2", by={"x": true}'),
            {"city": 'A "b\n)]', "days": 2, "kind": "2", "by": {"x": True}},
        ),
        (
            "<|tool_call_start|>",
            LFM2.format('city="A", days=2, tags=["b", "c"], by=None'),
            {"city": "A", "days": 2, "tags": ["b", "c"], "by": None},
        ),
        ("<|tool_call_start|>", LFM2.format('city="A"'), None),
        ("<|tool_call_start|>", LFM2.format('city="A", days=2, by={}'), {"city": "A", "days": 2, "by": {}}),
        (
            "<|tool_call_start|>",
            LFM2.format('city="A", days=2, at={"y": {"z": 1}, "w": 2}'),
            {"city": "A", "days": 2, "at": {"y": {"z": 1}, "w": 2}},
        ),
        ("<|tool_call_start|>", LFM2.format('city="A", days=2, at={"x": 1, "w": 2}'), None),
        ("<|tool_call_start|>", LFM2.format('city="A", days=2, at={"y": {}, "w": 2}'), None),
        ("<function_calls>", OLMO3.format('city="A", days=2, tags=[]'), {"city": "A", "days": 2, "tags": []}),
        ("<function_calls>", OLMO3.format('days=2, city="A"'), None),
        (
            f"{DEEPSEEK[0]}```json",
            f'{DEEPSEEK[0]}function{SEPARATOR}plan\n```json\n{{"city": "A", "days": 2}}\n```{DEEPSEEK[1]}',
            {"city": "A", "days": 2},
        ),
        (
            DEEPSEEK[0],
            f'{DEEPSEEK[0]}plan{SEPARATOR}{{"city": "A", "days": 2}}{DEEPSEEK[1]}',
            {"city": "A", "days": 2},
        ),
        (DEEPSEEK[0], f'{DEEPSEEK[0]}plan{SEPARATOR}{{"city": "A"}}{DEEPSEEK[1]}', None),
    ],
)
def test_forced_calls_in_tags_and_python_hold_to_the_schema_and_are_read_as_json(
    template: str, text: str, wanted: dict[str, Any] | None
) -> None:
    form, tools = find_form(template), {"plan": PLANNED, "now": {}}
    of_bytes = llguidance.LLTokenizer("byte")
    grammar, tokens = (
        llguidance.LLMatcher(of_bytes, write_choice(form, tools, None)),
        of_bytes.tokenize_str(text),
    )
    assert not grammar.get_error()
    is_right = grammar.try_consume_tokens(tokens) == len(tokens) and grammar.is_accepting()
    assert is_right == (wanted is not None)
    if wanted is not None:
        (call,) = ToolReader(form, tools).feed(text, is_last=True).calls
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("plan", wanted)


@pytest.mark.parametrize("template", ["<tool_call> <function=", "<tool_call> <arg_key>", "<|tool_call_start|>"])
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, "the argument a of plan with pattern"),
        ({"properties": {"a": {"type": "string", "enum": 5}}}, "the argument a of plan with an empty list or none"),
        ({"properties": {"a": {}}, "required": ["b"]}, "b in the parameters of plan"),
        ({"$ref": "#/x"}, r"\$ref in the parameters of plan"),
        ({"properties": 5}, "parameters of plan that are no JSON schema"),
    ],
)
def test_a_schema_that_a_form_cannot_be_held_to_is_refused_by_name(
    template: str, schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(ApiError, match=words) as error:
        write_choice(find_form(template), {"plan": schema}, None)
    assert (error.value.status, error.value.param) == (400, "tools")


@pytest.mark.parametrize("template", ["<|tool_call_start|>", "<function_calls>"])
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({}, "with an object without properties"),
        ({"additionalProperties": {"type": "string"}}, "with an object without properties"),
        ({"properties": 5}, "with an object without properties"),
        ({"properties": {"x": {"type": "null"}}, "required": ["y"]}, "with required properties that it does not have"),
    ],
)
def test_an_object_that_python_cannot_be_held_to_is_refused_by_name(
    template: str, schema: dict[str, Any], words: str
) -> None:
    form, tools = find_form(template), {"plan": {"properties": {"a": {"type": "object", **schema}}}}
    with pytest.raises(ApiError, match=f"the argument a of plan {words}"):
        write_choice(form, tools, None)


STREAMED = {
    "hermes": '{"name": "weather", "arguments": {"city": "}\\"", "days": 2}}',
    "[TOOL_CALLS][ARGS]": 'weather[ARGS]{"city": "}\\"", "days": 2}',
    DEEPSEEK[0]: f'weather{SEPARATOR}{{"city": "}}\\"", "days": 2}}',
}


@pytest.mark.parametrize("sign", STREAMED)
def test_arguments_of_json_are_streamed_as_they_come(sign: str) -> None:
    form = find_form(sign if sign != "hermes" else "<tool_call>")
    reader = ToolReader(form, TOOLS, is_stream=True)
    text = f"Look. {form.begin}{STREAMED[sign]}{form.end or ''}"
    parts = [reader.feed(character, is_last=False) for character in text] + [reader.feed("", is_last=True)]
    assert "".join(part.content for part in parts) == "Look."
    first, *others = [call for part in parts for call in part.calls]
    assert (first["index"], first["function"]) == (0, {"name": "weather", "arguments": ""})
    assert all(set(one) == {"index", "function"} and one["index"] == 0 for one in others)
    assert len(others) > 10
    arguments = "".join(one["function"]["arguments"] for one in others)
    assert json.loads(arguments) == {"city": '}"', "days": 2}
    assert reader.num_calls == 1


def test_calls_of_one_stream_are_counted_whether_they_come_in_pieces_or_whole() -> None:
    reader = ToolReader(find_form("<tool_call>"), TOOLS, is_stream=True)
    text = (
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "weather", "arguments": {"city": "A"}}</tool_call>'
    )
    text += '<tool_call>{"name": "delete", "arguments": {}}</tool_call>'
    for size in (5, len(text)):
        reader = ToolReader(find_form("<tool_call>"), TOOLS, is_stream=True)
        starts = range(0, len(text), size)
        found = [reader.feed(text[start : start + size], is_last=start + size >= len(text)) for start in starts]
        calls = [call for part in found for call in part.calls]
        assert [call["index"] for call in calls if "id" in call] == [0, 1]
        assert "".join(call["function"]["arguments"] for call in calls) == '{}{"city": "A"}'
        assert "".join(part.content for part in found).startswith('<tool_call>{"name": "delete"')


@pytest.mark.parametrize("size", [1, 4, 10_000])
def test_only_white_space_directly_behind_a_call_is_left_out(size: int) -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    assert read("<tool_call>", f"First {call}\n\nI have called  the tool. ", size) == (
        "FirstI have called  the tool. ",
        [NOW],
    )
    wrong = "<tool_call>wizard</tool_call>"
    assert read("<tool_call>", f"{call} {wrong} I have called it.", size) == (f"{wrong} I have called it.", [NOW])


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(
    ("template", "before", "behind", "sign"),
    [
        ("<tool_call>", '<tool_call>{"name": "weather", "arguments": {"city": "', '"}}</tool_call>', "</tool_call>"),
        ("<tool_call>", '<tool_call>{"name": "weather", "arguments": {"city": "', '"}}', "</tool_call>"),
        (
            "<tool_call>",
            "<tool_call><function=weather><parameter=city>",
            "</parameter></function></tool_call>",
            "</tool_call>",
        ),
        (
            "<tool_call>",
            "<tool_call>weather<arg_key>city</arg_key><arg_value>",
            "</arg_value></tool_call>",
            "</tool_call>",
        ),
        ("<|tool_call_start|>", "<|tool_call_start|>[weather(city='", "')]<|tool_call_end|>", "<|tool_call_end|>"),
        ("[TOOL_CALLS]", '[TOOL_CALLS]weather[ARGS]{"city": "', '"}', "[TOOL_CALLS]"),
        ("[TOOL_CALLS]", '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city": "', '"}', "[TOOL_CALLS]"),
    ],
)
def test_a_sign_within_a_value_ends_no_call(template: str, before: str, behind: str, sign: str, size: int) -> None:
    content, calls = read(template, f"{before}a {sign} b {sign}{behind}", size)
    assert content == ""
    assert calls[-1] == Call("weather", json.dumps({"city": f"a {sign} b {sign}"}))
    assert calls[:-1] == [NOW] * before.count("now")


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_call_behind_one_whose_value_never_ends_is_found(size: int) -> None:
    wrong = '<tool_call>{"name": "now</tool_call>'
    assert read("<tool_call>", f'{wrong} then <tool_call>{{"name": "now"}}</tool_call>', size) == (
        f"{wrong} then",
        [NOW],
    )


def test_text_behind_what_is_no_call_and_has_no_open_value_is_sent_at_once() -> None:
    reader = ToolReader(find_form("<tool_call>"), TOOLS)
    assert reader.feed("<tool_call>{}</tool_call> and", is_last=False).content == "<tool_call>{}</tool_call> and"


@pytest.mark.parametrize(
    ("template", "begin", "unit", "end"),
    [
        ("<tool_call>", "<tool_call><function=weather>", "<parameter=x>", "</function></tool_call>"),
        ("<tool_call>", "<tool_call>weather", "<arg_key>", "</arg_value></tool_call>"),
        ("<tool_call>", "<tool_call>weather", "<arg_key></arg_key><arg_value>", "</tool_call>"),
        ("<tool_call>", "<tool_call>", '"\\', "</tool_call>"),
        ("<tool_call>", "", '<tool_call>"</tool_call>', ""),
        ("[TOOL_CALLS]", "", '[TOOL_CALLS]"', ""),
        ("[TOOL_CALLS]", "", "[TOOL_CALLS]now[ARGS]{}", '"'),
    ],
)
def test_the_work_of_reading_a_long_answer_is_no_square_of_its_length(
    template: str, begin: str, unit: str, end: str
) -> None:
    text = begin + unit * (2**17 // len(unit) - 10) + end
    before = time.thread_time()
    content, calls = read(template, text, len(text))
    assert time.thread_time() - before < 5.0, "a square takes 15 s and more"
    assert (content, calls) == (text, [])


@pytest.mark.parametrize("name", ["hermes, two", "mistral", "mistral, newer", "llama 3", "olmo 3"])
@pytest.mark.parametrize("size", [1, 10_000])
def test_an_answer_that_may_have_one_call_ends_behind_it(name: str, size: int) -> None:
    template, text, _ = FORMS[name]
    reader = ToolReader(find_form(template), TOOLS, has_one_call=True)
    text += " done" if find_form(template).end else ""
    parts = [
        reader.feed(text[start : start + size], is_last=start + size >= len(text))
        for start in range(0, len(text), size)
    ]
    assert "".join(part.content for part in parts) == ""
    assert [call["function"]["name"] for part in parts for call in part.calls] == ["weather"]


class ScriptedWorker:
    """A worker whose model writes the same text in each answer, a token at a time, until the text is cancelled."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.is_cancelled, self.num_sent = ids, False, 0

    def submit(self, request: Request, receive: Callable[[Result], None], *_: object) -> Ticket:
        self.sending = asyncio.ensure_future(self._send(receive))
        return Ticket(request, receive, "client")

    async def _send(self, receive: Callable[[Result], None]) -> None:
        for number, token in enumerate(self.ids, start=1):
            if self.is_cancelled:
                return
            self.num_sent = number
            receive(NewToken(0, token, 0.0, (), is_last=number == len(self.ids)))
            await asyncio.sleep(0)

    def cancel(self, ticket: Ticket) -> None:
        self.is_cancelled = True


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(("is_parallel", "num_calls"), [(None, 2), (True, 2), (False, 1)])
def test_an_answer_without_parallel_calls_ends_with_its_first_call(
    is_parallel: bool | None, num_calls: int, is_stream: bool, tmp_path: Path
) -> None:
    qwen(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    ids = tokenizer.encode(f"{call}\n{call}" + " and more" * 20)
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "now"}}],
        "parallel_tool_calls": is_parallel,
        "stream": is_stream,
    }
    asked = parse_chat(json.dumps(body).encode(), 1)
    facts = Facts(tokenizer, 1000, tokenizer.vocab_size, 0, shared_bytes=0, chat_template="<tool_call>")

    async def answer() -> tuple[list[dict[str, Any]], str]:
        prompt = EncodedPrompt((1,), "a", 500)
        with Completion(asked, "m", cast("Worker", worker), facts, [prompt], "client") as completion:
            if not is_stream:
                (choice,) = (await completion.collect())["choices"]
                return choice["message"]["tool_calls"], choice["finish_reason"]
            events = [json.loads(event[6:]) async for event in completion.events() if b"[DONE]" not in event]
            choices = [event["choices"][0] for event in events]
            found = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
            return found, choices[-1]["finish_reason"]

    worker = ScriptedWorker(ids)
    calls, reason = asyncio.run(answer())
    assert sum("id" in call for call in calls) == num_calls
    assert (worker.num_sent < len(ids) // 2) == (num_calls == 1), "the text went on behind its only call"
    assert reason == ("tool_calls" if num_calls == 1 else "length")


@pytest.mark.parametrize("template", ["<tool_call>", "[TOOL_CALLS]", DEEPSEEK[0]])
@pytest.mark.parametrize("held", [" ", "a", '{"name": "now", ', "now"])
def test_what_begins_no_call_is_read_once_however_long_it_is(template: str, held: str) -> None:
    form = find_form(template)
    reader = ToolReader(form, TOOLS, is_stream=True)
    reader.feed(form.begin, is_last=False)
    reader.feed(held, is_last=False)
    assert not reader.feed(" " * 300_000, is_last=False).calls  # two searches of each place would take hours
