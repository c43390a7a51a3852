"""Every form of a record gives the same messages; what is no conversation is one line."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from genesis.chat.conversation import (
    Conversation,
    find_form,
    find_unused_fields,
    load_conversation,
    read_conversation,
)
from genesis.chat.template import ConversationError

QUESTION, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "it", "n": 1}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def test_records_of_every_form_are_detected_and_give_the_same_messages() -> None:
    records: list[tuple[str, dict[str, Any]]] = [
        ("messages", {"messages": [QUESTION, ANSWER]}),
        ("messages", {"conversations": [QUESTION, ANSWER], "id": 3}),
        ("messages", {"messages": [QUESTION, {**ANSWER, "content": [{"type": "text", "text": "So."}], "name": None}]}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]}),
        ("sharegpt", {"conversation": [{"from": "user", "value": "Why?"}, {"from": "assistant", "value": "So."}]}),
        ("alpaca", {"instruction": "Why?", "input": "", "output": "So."}),
        ("prompt_completion", {"prompt": "Why?", "completion": "So."}),
        ("prompt_completion", {"prompt": [QUESTION], "completion": [ANSWER]}),
    ]
    for form, record in records:
        assert find_form(record) == form
        assert list(read_conversation(record).messages) == [QUESTION, ANSWER]
    assert list(read_conversation({"turns": [QUESTION, ANSWER]}, "messages", "turns").messages) == [QUESTION, ANSWER]


def test_system_history_tools_and_weights_are_read() -> None:
    alpaca = read_conversation(
        {"instruction": "Why", "input": "now?", "output": "So.", "system": "Be.", "history": [["a", "b"]]}
    )
    assert [(message["role"], message["content"]) for message in alpaca.messages] == [
        ("system", "Be."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "Why\nnow?"),
        ("assistant", "So."),
    ]
    shared = read_conversation(
        {
            "system": "Be.",
            "tools": json.dumps([TOOL["function"]]),
            "conversations": [
                {"from": "human", "value": "Why?"},
                {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "seen"},
                {"from": "gpt", "value": "So.", "weight": 0},
            ],
        }
    )
    assert shared.tools == [TOOL]
    assert [message["role"] for message in shared.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert shared.messages[2]["tool_calls"] == [CALL]
    assert shared.messages[4]["weight"] == 0
    prompt = read_conversation({"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]})
    assert [message.get("weight") for message in prompt.messages] == [None, 0, None, None]


def test_other_layouts_of_the_same_conversation_are_read_alike() -> None:
    # The older form of OpenAI: MicrosoftDocs/azure-docs#120001. Its call has no content, and its answer another role.
    older = read_conversation(
        {
            "messages": [
                QUESTION,
                {"role": "assistant", "function_call": {"name": "look", "arguments": '{"at": "it", "n": 1}'}},
                {"role": "function", "name": "look", "content": "21.0"},
                ANSWER,
            ],
            "functions": [TOOL["function"]],
        }
    )
    assert older.tools == [TOOL]
    assert older.messages[1] == {"role": "assistant", "tool_calls": [CALL], "content": ""}
    assert older.messages[2] == {"role": "tool", "name": "look", "content": "21.0"}
    columns = {"role": ["user", "assistant"], "content": ["Why?", "So."]}  # of `datasets`, for a sequence of objects
    assert list(read_conversation({"messages": columns}).messages) == [QUESTION, ANSWER]
    system = {"role": "system", "content": "Be."}  # In a field of its own: axolotl-ai-cloud/axolotl#2397.
    for messages in ([QUESTION, ANSWER], [system, QUESTION, ANSWER]):
        assert list(read_conversation({"system": "Be.", "messages": messages}).messages) == [system, QUESTION, ANSWER]


def test_fields_that_no_form_reads_are_found() -> None:
    read = {"tools": [TOOL], "system": "Be.", "weight": 1, "functions": None}
    assert find_unused_fields(
        {"messages": [QUESTION, ANSWER], "id": 3, "source": "a", "score": None, **read}, "auto"
    ) == [
        "id",
        "source",
    ]
    assert find_unused_fields({"instruction": "a", "output": "b", "text": "ab"}, "auto") == ["text"]
    assert find_unused_fields({"messages": [QUESTION], "prompt": "Why?"}, "messages") == ["prompt"]
    assert find_unused_fields({"turns": [QUESTION], "topic": "x"}, "messages", "turns") == ["topic"]
    assert find_unused_fields({"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 2}, "pairs") == [
        "score_chosen"
    ]


@pytest.mark.parametrize("write", [json.dumps, lambda calls: f" {json.dumps(calls, indent=1)}\n"])
def test_calls_that_a_table_holds_as_json_text_are_read(write: Callable[[object], str]) -> None:
    """Tables have one type for each column: NovaSky-AI/SkyRL#1675, agentscope-ai/Trinity-RFT#252."""
    turns = [QUESTION, {"role": "assistant", "content": "", "tool_calls": write([CALL])}]
    answered = [{"role": "tool", "content": "y"}, {**ANSWER, "tool_calls": write([])}, {**QUESTION, "tool_calls": ""}]
    found = read_conversation({"messages": [*turns, *answered]}).messages
    assert [message.get("tool_calls") for message in found] == [None, [CALL], None, None, None]


def test_calls_as_openai_writes_them_and_names_of_reasoning_become_what_templates_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it", "n": 1}'}}
    record = {
        "messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    conversation = read_conversation(record)
    assert conversation.messages[1]["tool_calls"] == [{**CALL, "id": "c1"}]
    assert conversation.messages[1]["reasoning_content"] == "Hm."
    assert conversation.messages[1]["content"] == ""  # templates join it with other text
    assert conversation.variables == {"enable_thinking": False}
    assert load_conversation(conversation.dump()) == conversation
    assert (
        conversation.plain_text() == 'user: Why?\n\nassistant: Hm.\n{"name": "look", "arguments": {"at": "it", "n": 1}}'
    )
    assert Conversation([QUESTION]).dump() == '{"messages": [{"role": "user", "content": "Why?"}]}'


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "a", "id": 1}, r"no conversation is in the fields text, id: .* name the field .* by text_field"),
        ({}, "no conversation is in the fields of an empty record"),
        ({"messages": []}, "the conversation is empty: it has no turns"),
        ({"messages": [{"role": "user", "content": " "}]}, "the conversation is empty: no turn says anything"),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            "turn 1 has the unknown role 'robot'; the roles are system,",
        ),
        ({"messages": [{"content": "a"}]}, "turn 1 has no role; the roles are"),
        ({"messages": ["a"]}, "turn 1 is str 'a', not an object with role and content"),
        ({"messages": {"role": "user"}}, "messages is dict .*, not a list of turns"),
        ({"messages": [QUESTION, {"role": "assistant", "content": ""}]}, "turn 2 of the assistant is empty"),
        ({"messages": [{"role": "user", "content": 3}]}, "content of turn 1 is int '3', not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content of turn 1 is list .*, not text"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}, "turn 2 has weight 0.5; a weight is 0"),
        ({"messages": [{"role": "user", "content": None}, ANSWER]}, r"turn 1 \(user\) has no content"),
        ({"messages": [QUESTION, ANSWER], "tools": [TOOL], "functions": [TOOL]}, "both tools and functions"),
        (
            {"messages": [QUESTION, {**ANSWER, "tool_calls": [CALL], "function_call": CALL["function"]}]},
            "turn 2 has both",
        ),
        ({"messages": [QUESTION, {**ANSWER, "function_call": "look"}]}, "function_call of turn 2 is not JSON: 'look'"),
        (
            {"messages": [{"role": "system", "content": "a"}, QUESTION, ANSWER], "system": "b"},
            "has the field system and a",
        ),
        (
            {"messages": '[{"role": "user", "role": "system"}]'},
            "messages is not JSON: .*the key 'role' is twice in one",
        ),
        ({"messages": {"role": ["user"], "content": []}}, "messages is dict .*, not a list of turns"),
        ({"messages": [QUESTION, ANSWER], "tools": "{"}, "tools is not JSON: '{'"),
        ({"messages": [QUESTION, ANSWER], "tools": ["a"]}, "tools is not a list of definitions"),
        ({"messages": [QUESTION, {**ANSWER, "tool_calls": ["a"]}]}, "tool_calls of turn 2 is not a list of calls"),
        ({"messages": [QUESTION, {**ANSWER, "tool_calls": "look()"}]}, "tool_calls of turn 2 is not JSON: 'look"),
        ({"messages": [QUESTION, {**ANSWER, "tool_calls": [{}]}]}, "a tool call of turn 2 names no function"),
        (
            {"messages": [QUESTION, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "the arguments of f in turn 2 is not JSON",
        ),
        (
            {"messages": [QUESTION, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            "the arguments of f in turn 2 are list",
        ),
        (
            {"conversations": [{"from": "bot", "value": "a"}]},
            "turn 1 has the unknown role 'bot'; the roles are system, h",
        ),
        ({"conversations": [{"from": "gpt", "value": "a"}, {"value": "a"}]}, "turn 2 has no `from`"),
        ({"conversations": [{"from": "function_call", "value": "look"}]}, "the function call of turn 1 is not JSON"),
        ({"instruction": "a", "output": None}, "turn 2 of the assistant is empty"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, "history is not a list of pairs"),
        ({"instruction": "a", "output": "b", "history": ["ab"]}, "history is not a list of pairs"),
        ({"instruction": "a", "output": "b", "history": 5}, "history is not a list of pairs"),
        # A field that is an object in some rows only, as in hiyouga/LlamaFactory#3665, and a number.
        ({"instruction": {"a": 1}, "output": "b"}, r"instruction is dict \"\{'a': 1\}\", not a text; correct it"),
        ({"instruction": "a", "input": 0, "output": "b"}, "input is 0, not a text; correct it"),
        ({"instruction": "a", "output": ["b", "c"]}, r"output is list \"\['b', 'c'\]\", not a text; correct it"),
        ({"messages": [QUESTION, ANSWER], "images": ["a.png"]}, "the record has images, and only text can be learned"),
        ({"prompt": "a", "completion": "b", "label": False}, "label is false: the record rates its answer"),
        ({"prompt": [QUESTION], "completion": [ANSWER], "label": True}, "keep the records whose label is true"),
        ({"messages": [QUESTION, ANSWER], "kto_tag": False}, "kto_tag is false: the record rates its answer"),
        ({"messages": [QUESTION, ANSWER], "chat_template_kwargs": 3}, "chat_template_kwargs is not an object"),
    ],
)
def test_what_is_no_conversation_is_one_line(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConversationError, match=reason) as caught:
        read_conversation(record)
    assert "\n" not in str(caught.value)


def test_a_form_that_is_named_is_not_detected() -> None:
    with pytest.raises(ConversationError, match="no field messages or conversations or conversation is among prompt"):
        read_conversation({"prompt": "a", "completion": "b"}, "messages")
    with pytest.raises(ConversationError, match="turn 1 has no `from`"):
        read_conversation({"messages": [QUESTION]}, "sharegpt")


def test_a_conversation_of_too_many_turns_is_refused_by_their_number() -> None:
    with pytest.raises(ConversationError, match=r"has 65,538 turns: at most 65,536 are read; divide it"):
        read_conversation({"messages": [QUESTION, ANSWER] * 32_769})
