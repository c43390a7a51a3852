"""An answer in GPT-OSS's format: reasoning, text and calls, however it comes; what is no call stays text."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from genesis.chat import training
from genesis.chat.harmony import HarmonyReader
from genesis.chat.render import ChatRenderer
from genesis.chat.template import ChatTemplate
from genesis.chat.tools import HARMONY, find_form
from genesis.cli.chat import Chat
from genesis.generate.grammar import compile_grammar
from genesis.generate.load import Loaded
from genesis.generate.stream import GenerateOptions
from genesis.serve.choice import Shown
from genesis.serve.form import ChatForm, Part
from genesis.tokenizer.addition import TokenAddition
from genesis.tokenizer.open import extend_tokenizer, open_tokenizer
from tests.tiny_runs import build_decoder
from tests.tokenizer.test_huggingface import qwen

TOOLS = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '{"city": "Paris"}'
TEMPLATE = Path(training.__file__).with_name("templates") / "gptoss.jinja"
ANALYSIS = "<|channel|>analysis<|message|>It rains.<|end|><|start|>assistant"
ANSWERS: dict[str, tuple[str, str, str, list[str]]] = {
    "text": ("<|channel|>final<|message|>Rain.", "", "Rain.", []),
    "reasoning and text": (ANALYSIS + "<|channel|>final<|message|>Rain.<|return|>", "It rains.", "Rain.", []),
    "a call": (
        f"{ANALYSIS}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{CALL}<|call|>",
        "It rains.",
        "",
        [CALL],
    ),
    "a call, its recipient first": (
        f" to=functions.weather<|channel|>commentary json<|message|>{CALL}",
        "",
        "",
        [CALL],
    ),
    "text before a call": (
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.weather<|channel|>commentary"
        f"<|message|>{CALL}",
        "",
        "I look.",
        [CALL],
    ),
    "an unknown tool": (f" to=functions.other<|channel|>commentary<|message|>{CALL}", "", CALL, []),
    "no arguments": (" to=functions.weather<|channel|>commentary<|message|>Paris", "", "Paris", []),
    "no channels": ("Rain <|and sun.", "", "Rain <|and sun.", []),
    "a header without a message": ("<|channel|>final", "", "", []),
    "a header without an end": ("<|start|>" + "a" * 600, "", "a" * 600, []),
    "a header that is too long": (f"<|channel|>{'a' * 500}<|message|>b", "", f"<|channel|>{'a' * 500}<|message|>b", []),
    "a part of a sign at the end": ("<|channel|>final<|message|>a <|en", "", "a <|en", []),
}


def read(text: str, size: int) -> tuple[str, str, list[dict[str, Any]]]:
    reader = HarmonyReader(TOOLS)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    found = [reader.feed(piece, is_last=index == len(pieces) - 1) for index, piece in enumerate(pieces)]
    calls = [call["function"] for part in found for call in part.calls]
    assert reader.num_calls == len(calls)
    return "".join(part.reasoning for part in found), "".join(part.content for part in found), calls


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_divided_into_its_messages_however_it_comes(name: str, size: int) -> None:
    text, reasoning, content, arguments = ANSWERS[name]
    found = read(text, size)
    assert found[:2] == (reasoning, content)
    assert [json.loads(call["arguments"]) for call in found[2]] == [json.loads(one) for one in arguments]
    assert all(call["name"] == "weather" for call in found[2])


@pytest.mark.parametrize("size", [1, 3, 7])
def test_an_answer_that_is_cut_ends_with_the_text_up_to_the_cut(size: int) -> None:
    signs = re.findall(r"<\|\w+\|>|.", ANALYSIS + "<|channel|>final<|message|>Rain.<|return|>")
    first, second = (index + 1 for index, sign in enumerate(signs) if sign == "<|message|>")
    for cut in range(1, len(signs) + 1):
        reasoning, content = "It rains."[: max(0, cut - first)], "Rain."[: max(0, cut - second)]
        assert read("".join(signs[:cut]), size) == (reasoning, content, [])


def test_the_end_of_an_answer_may_come_after_its_last_text() -> None:
    reader = HarmonyReader(TOOLS)
    found = [reader.feed(text, is_last=False) for text in ("<|channel|>analysis<|message|>think<|end|>", "<|start|>a")]
    assert [*found, reader.feed("", is_last=True)] == [("", [], "think"), ("", [], ""), ("", [], "")]


def test_the_form_is_that_of_the_training_template() -> None:
    assert find_form(TEMPLATE.read_text()) is HARMONY


def test_a_response_has_the_reasoning_beside_its_text() -> None:
    text = ANALYSIS + "<|channel|>final<|message|>Rain."
    part = Part(0, Shown(text, []), "stop")
    message = ChatForm(None, [HarmonyReader(TOOLS)]).whole(part, "")["message"]
    assert message == {"role": "assistant", "content": "Rain.", "refusal": None, "reasoning_content": "It rains."}
    piece = ChatForm(None, [HarmonyReader(TOOLS, is_stream=True)]).piece(part)
    assert piece is not None
    assert piece["delta"] == {"reasoning_content": "It rains.", "content": "Rain."}


def test_the_work_of_reading_a_long_call_is_no_square_of_its_length() -> None:
    reader, counted = HarmonyReader(TOOLS), 0
    reader.feed(" to=functions.weather<|channel|>commentary<|message|>", is_last=False)
    for _ in range(1000):
        reader.feed("x" * 100, is_last=False)
        counted += len(reader._held) - reader._num_searched
    assert counted < 1000 * 20


def test_a_chat_in_the_terminal_shows_reasoning_in_a_line_and_remembers_the_text_alone(tmp_path: Path) -> None:
    template = ChatTemplate(TEMPLATE.read_text(), TEMPLATE.name, date(2026, 1, 1))
    symbols = ("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
    tokenizer = extend_tokenizer(open_tokenizer(qwen(tmp_path)), TokenAddition(tokens=symbols))
    written = re.sub(r"(<\|\w+\|>)", r'" \1 "', ANALYSIS + "<|channel|>final<|message|>Rain.")
    grammar = compile_grammar(f'start: "{written}" <|return|>', tokenizer, 700, tokenizer.stop_ids)
    options = GenerateOptions(100, grammar=grammar)
    loaded = Loaded(build_decoder(5, max_seq_len=2048).eval(), tokenizer, tmp_path)
    stop_ids = frozenset({tokenizer.pieces.index("<|return|>")})
    chat = Chat(loaded, ChatRenderer(tokenizer, template), options, stop_ids)
    for _ in range(2):
        assert "".join(chat.answer("Sun?")) == "reasoning: It rains.\nRain."
    assert chat.messages == [{"role": "user", "content": "Sun?"}, {"role": "assistant", "content": "Rain."}] * 2
