"""Pairs of answers: every form gives the same pair, and what cannot be compared is refused by name."""

import re

import pytest

from genesis.chat.pair import load_pair, read_pair
from genesis.chat.template import ConversationError

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What is 2 + 2?"}
GOOD = {"role": "assistant", "content": "4."}
BAD = {"role": "assistant", "content": "5."}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def human(text):
    return {"from": "human", "value": text}


@pytest.mark.parametrize(
    "record",
    [
        {"input": {"messages": [ASK]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": ASK["content"], "chosen": GOOD["content"], "rejected": BAD["content"]},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": ASK["content"], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [ASK], "chosen": GOOD, "rejected": BAD},
        {
            "conversations": [human(ASK["content"])],
            "chosen": {"from": "gpt", "value": "4."},
            "rejected": {"from": "gpt", "value": "5."},
        },
        {"messages": [ASK], "chosen": [GOOD], "rejected": [BAD]},
    ],
    ids=["openai", "trl", "texts", "implicit", "text_and_whole", "single_messages", "sharegpt", "messages"],
)
def test_every_form_gives_the_same_pair(record):
    pair = read_pair(record)
    assert pair.chosen.messages == [ASK, GOOD]
    assert pair.rejected.messages == [ASK, BAD]
    assert load_pair(pair.dump()) == pair


def test_tools_and_the_system_turn_belong_to_both_conversations():
    record = {
        "input": {"messages": [SYSTEM, ASK], "tools": TOOLS},
        "preferred_output": [GOOD],
        "non_preferred_output": [BAD],
    }
    pair = read_pair(record)
    assert pair.chosen.tools == pair.rejected.tools == TOOLS
    assert pair.chosen.messages[0] == pair.rejected.messages[0] == SYSTEM


def test_no_turn_of_the_prompt_is_learned():
    record = {"chosen": [ASK, GOOD, ASK, GOOD], "rejected": [ASK, GOOD, ASK, BAD]}
    pair = read_pair(record)
    assert [message.get("weight") for message in pair.chosen.messages] == [None, 0, None, None]
    assert [message.get("weight") for message in pair.rejected.messages] == [None, 0, None, None]


def test_answers_that_begin_alike_keep_their_whole_answer():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    result = {"role": "tool", "content": "4"}
    pair = read_pair({"chosen": [ASK, call, result, GOOD], "rejected": [ASK, call, result, BAD]})
    assert [message["role"] for message in pair.chosen.messages] == ["user", "assistant", "tool", "assistant"]
    assert all("weight" not in message for message in pair.chosen.messages)


OTHER = {"role": "user", "content": "What is 3 + 3?"}


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"prompt": [ASK]}, "no pair is in the fields prompt"),
        ({"chosen": [ASK, GOOD], "rejected": [OTHER, BAD]}, "prompts of chosen and rejected differ: turn 1 of chosen"),
        ({"chosen": [ASK, GOOD, OTHER, GOOD], "rejected": [ASK, BAD]}, "chosen has a turn of the user"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "the pair has no prompt"),
        ({"chosen": "4.", "rejected": "5."}, "the pair has no prompt"),
        ({"prompt": "", "chosen": "4.", "rejected": "5."}, "the prompt of the pair is empty"),
        ({"prompt": [SYSTEM], "chosen": [GOOD], "rejected": [BAD]}, "the prompt of the pair is empty"),
        ({"prompt": [ASK, GOOD], "chosen": [GOOD], "rejected": [BAD]}, "ends with a turn of the assistant"),
        ({"prompt": [ASK], "chosen": [], "rejected": [BAD]}, "chosen is empty"),
        ({"prompt": [ASK], "chosen": "4.", "rejected": "  "}, "rejected is empty"),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [{**BAD, "content": " "}]}, "rejected is empty"),
        ({"prompt": [ASK], "chosen": [{**GOOD, "content": ""}], "rejected": [BAD]}, "chosen: turn 1 of the assistant"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK]}, "rejected is empty"),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [GOOD]}, "chosen and rejected are the same answer"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, "chosen and rejected are the same answer"),
        ({"prompt": [ASK], "chosen": [{**GOOD, "weight": 0}], "rejected": [BAD]}, "chosen has a turn with weight 0"),
        ({"prompt": [ASK], "chosen": 4, "rejected": [BAD]}, "chosen is int '4', not a list of turns"),
        (
            {"prompt": [ASK], "chosen": [{"role": "gpt"}], "rejected": [BAD]},
            "chosen: turn 1 has the unknown role 'gpt'",
        ),
        ({"prompt": {"a": 1}, "chosen": [GOOD], "rejected": [BAD]}, "prompt is dict"),
        (
            {"input": "What?", "preferred_output": [GOOD], "non_preferred_output": [BAD]},
            "input is no object with messages",
        ),
        (
            {"input": {"messages": [ASK]}, "preferred_output": [GOOD], "non_preferred_output": [GOOD]},
            "preferred_output and non_preferred_output are the same answer",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(record, line):
    with pytest.raises(ConversationError, match=re.escape(line)):
        read_pair(record)
