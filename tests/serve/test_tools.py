"""Calls of tools as families of models write them, whole and while an answer comes; what is no call stays text."""

import json
from pathlib import Path

import pytest

from genesis.generate.grammar import compile_grammar
from genesis.serve.tools import Call, ToolReader, find_form, parse_calls, write_choice
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


@pytest.mark.parametrize("sign", ["<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|im_start|>"])
def test_the_grammar_of_a_choice_accepts_calls_of_its_tools_alone(
    sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    form = find_form(sign)
    if sign == "<|im_start|>":  # a control symbol of this tokenizer as the sign
        form = form._replace(begin=sign, end="<|im_end|>", is_bare=False)
    grammar = compile_grammar(write_choice(form, TOOLS, tokenizer), tokenizer, tokenizer.vocab_size, tokenizer.stop_ids)
    begin, end = ("", "") if form.is_bare else (form.begin, form.end or "")
    for name, is_right in (("now", True), ("delete", False)):
        text = f'{begin}{{"name": "{name}", "{form.key}": {{}}}}{end}'
        one, is_whole = grammar.copy(), False
        fits = True
        for token in tokenizer.encode_with_controls(text):
            fits = fits and bool(one.mask()[token])
            is_whole = fits and one.accept(token)
        assert (fits, is_whole) == (is_right, is_right)
