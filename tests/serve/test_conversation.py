"""A conversation becomes text whole, or is refused by the part that the model would never see."""

from pathlib import Path
from typing import Any

import pytest

from genesis.serve.conversation import write_conversation
from genesis.serve.errors import ApiError
from genesis.serve.request import ChatPrompt
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
TOOLS = "{{ tools }}" + PLAIN
CALLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}<assistant>"
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
ASKED = ({"role": "user", "content": "what time is it"},)
CALLED = (*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "noon"})


def write(tokenizer: Tokenizer, template: str, messages: Any, tools: Any = None) -> str:
    return write_conversation(ChatPrompt(tuple(messages), tools, {}), tokenizer, template)


def test_tools_that_the_template_does_not_write_are_refused(tokenizer_file: Path) -> None:
    assert "now" in write(open_tokenizer(tokenizer_file), TOOLS, ASKED, (NOW,))
    with pytest.raises(ApiError, match="the model's chat template writes no tools: remove them"):
        write(open_tokenizer(tokenizer_file), PLAIN, ASKED, (NOW,))


def test_calls_that_the_template_does_not_write_are_refused(tokenizer_file: Path) -> None:
    assert "now" in write(open_tokenizer(tokenizer_file), CALLS, CALLED)
    with pytest.raises(ApiError, match="the model's chat template writes no tool_calls: remove them"):
        write(open_tokenizer(tokenizer_file), PLAIN, CALLED)


def test_reasoning_of_earlier_turns_may_be_left_out(tokenizer_file: Path) -> None:
    answer = {"role": "assistant", "content": "noon", "reasoning_content": "the sun is high"}
    assert write(open_tokenizer(tokenizer_file), PLAIN, (*ASKED, answer, *ASKED)).count("noon") == 1
