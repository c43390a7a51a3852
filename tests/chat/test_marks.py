"""Marks on turns decide what is learned, whatever a data set calls them; what cannot be honoured is refused by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from genesis.chat.conversation import leave_out_keys, load_conversation, read_conversation
from genesis.chat.options import Labels
from genesis.chat.pair import read_pair
from genesis.chat.render import ChatRenderer
from genesis.chat.template import ChatTemplate, ConversationError
from genesis.tokenizer.open import open_tokenizer
from tests.chat.support import CHATML, write_tokenizer

ASK, SAY, GO_ON, END = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path_factory.mktemp("chat")))
    return ChatRenderer(tokenizer, ChatTemplate(CHATML, "chatml"))


def learned(renderer: ChatRenderer, record: Mapping[str, Any], labels: Labels = "assistant") -> list[str]:
    """The contents of the turns that are learned, of a record that is written and read again."""
    conversation = load_conversation(read_conversation(record).dump())
    rendered = renderer.render_conversation(conversation, labels)
    edges = np.flatnonzero(np.diff(rendered.trained, prepend=False, append=False)).tolist()
    runs = zip(edges[::2], edges[1::2], strict=True)
    texts = [renderer.tokenizer.spell(rendered.ids[start:end].tolist(), has_controls=True) for start, end in runs]
    return [text.removesuffix("<|im_end|>") for text in texts]


@pytest.mark.parametrize(
    "mark",
    [
        {"train": False},  # Reported as allenai/open-instruct#283; axolotl has the same key.
        {"training": False},
        {"trainable": False},  # Reported as verl-project/verl#5316.
        {"loss_mask": 0},  # As verl-project/verl#5472 was asked to call it.
        {"loss_mask": False},
        {"mask": True},
        {"masked": True},  # Of torchtune's messages: meta-pytorch/torchtune#2261.
        {"weight": 0},  # Of OpenAI and Mistral; reported as axolotl-ai-cloud/axolotl#1702.
        {"weight": 0.0},
        {"weight": False},
        {"loss": False},  # Of ms-swift.
        {"loss_weight": 0},
        {"loss_scale": 0.0},
        {"train": False, "weight": 0},
    ],
)
def test_a_turn_that_is_marked_is_not_learned_in_any_form(renderer: ChatRenderer, mark: dict[str, Any]) -> None:
    shared = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two", **mark}]
    rest = [{"from": "human", "value": "three"}, {"from": "gpt", "value": "four"}]
    assert learned(renderer, {"messages": [ASK, {**SAY, **mark}, GO_ON, END]}) == ["four"]
    assert learned(renderer, {"conversations": [*shared, *rest]}) == ["four"]
    assert learned(renderer, {"prompt": [ASK], "completion": [{**SAY, **mark}, GO_ON, END]}) == ["four"]
    assert learned(renderer, {"messages": [{**ASK, **mark}, SAY, {**GO_ON, **mark}, END]}) == ["two", "four"]
    with pytest.raises(ConversationError, match="chosen has a turn with weight 0, and an answer is learned whole"):
        read_pair({"prompt": "one", "chosen": [{**SAY, **mark}], "rejected": [END]})


@pytest.mark.parametrize(
    "mark", [{"train": True}, {"trainable": True}, {"loss_mask": 1}, {"mask": False}, {"weight": 1}, {"loss": None}]
)
def test_a_turn_that_is_marked_as_learned_is_learned(renderer: ChatRenderer, mark: dict[str, Any]) -> None:
    assert learned(renderer, {"messages": [ASK, {**SAY, **mark}, GO_ON, END]}) == ["two", "four"]
    if mark in ({"weight": 1}, {"loss": None}):  # which say nothing about another turn
        assert learned(renderer, {"messages": [{**ASK, **mark}, SAY]}) == ["two"]
        return
    asked = {"messages": [{**ASK, **mark}, SAY]}
    with pytest.raises(ConversationError, match=r"turn 1 \(user\) is marked as one to learn, and with chat.labels ass"):
        learned(renderer, asked)
    (whole,) = learned(renderer, asked, "all")
    assert "one" in whole


@pytest.mark.parametrize(
    ("marks", "contents"),
    [
        ({"loss_mask": [0, 0, 0, 1]}, ["four"]),  # Reported as hiyouga/LlamaFactory#9630.
        ({"loss_mask": [1, 0, 1, 1]}, ["four"]),  # Its entries for turns of others have no meaning.
        ({"train": [False, True, False, False]}, ["two"]),
        ({"weight": 0}, []),
        ({"weight": 1}, ["two", "four"]),
        ({"train": False}, []),
        ({"mask": "User"}, ["two", "four"]),  # NeMo's name of the role that is not learned.
    ],
)
def test_the_marks_of_a_record_are_those_of_its_turns(
    renderer: ChatRenderer, marks: dict[str, Any], contents: list[str]
) -> None:
    assert learned(renderer, {"messages": [ASK, SAY, GO_ON, END], **marks}) == contents
    assert learned(renderer, {"messages": [ASK, SAY, GO_ON, END], "system": "Be.", **marks}) == contents
    if not contents:
        assert learned(renderer, {"messages": [ASK, SAY], **marks}, "all") == []
        assert read_pair({"prompt": "a", "chosen": "b", "rejected": "c", **marks}).chosen.messages[1]["weight"] == 0


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": [ASK, {**SAY, "weight": 0.5}]}, "turn 2 has weight 0.5; a weight is 0 or false"),
        ({"messages": [ASK, {**SAY, "train": "no"}]}, "turn 2 has train 'no'; a train is 0 or false"),
        ({"messages": [ASK, {**SAY, "mask": 1}]}, r"turn 2 has mask 1; write true \(not learned\) or false"),
        ({"messages": [ASK, {**SAY, "loss_mask": [0, 1]}]}, r"turn 2 has loss_mask \[0, 1\]; a loss_mask is 0"),
        (
            {"messages": [ASK, {**SAY, "train": True, "weight": 0}]},
            "turn 2 has weight 0 and train true, which contradict",
        ),
        ({"messages": [ASK, {**SAY, "train_detail": [{"train": False}]}]}, "turn 2 has train_detail, a mark on parts"),
        (
            {"messages": [ASK, {**SAY, "content": [{"type": "text", "text": "a", "train": False}]}]},
            "content of turn 2 has a part with train false",
        ),
        ({"messages": [ASK, SAY], "weight": 0.5}, "the record has weight 0.5; .* or list it in `ignored_keys`"),
        ({"messages": [ASK, SAY], "loss_mask": [1]}, "the record has loss_mask with 1 value for 2 turns"),
        ({"messages": [ASK, {**SAY, "weight": 1}], "loss_mask": [0, 0]}, "turn 2 has weight 1 and loss_mask 0"),
        ({"messages": [ASK, SAY], "mask": "Assistant"}, "the record has mask 'Assistant'"),
        ({"messages": [ASK, SAY], "assistant_masks": [0, 1]}, "has assistant_masks, a mask for the tokens of one tok"),
        ({"messages": [ASK, SAY], "train_on_input": True}, "train_on_input true: only chat.labels all learns what is"),
        ({"instruction": "a", "output": "b", "weight": 2}, "the record has weight 2"),
    ],
)
def test_a_mark_that_cannot_be_honoured_is_refused_unless_it_is_ignored(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConversationError, match=reason) as caught:
        read_conversation(record)
    assert "\n" not in str(caught.value)
    keys = ("weight", "train", "mask", "loss_mask", "train_detail", "assistant_masks", "train_on_input")
    plain = read_conversation(leave_out_keys(record, keys))
    assert [message["content"] for message in plain.messages][1] in ("two", "a", "b")
    assert not any("weight" in message for message in plain.messages)


def test_ignored_keys_are_left_out_of_turns_in_json_text_and_never_of_tools() -> None:
    tool = {"name": "f", "parameters": {"properties": {"weight": {"type": "number"}}}}
    text = '[{"role": "user", "content": "one", "weight": 3}, {"role": "assistant", "content": "two"}]'
    found = read_conversation(leave_out_keys({"messages": text, "tools": [tool]}, ["weight"]))
    assert list(found.messages) == [ASK, SAY]
    assert found.tools == [{"type": "function", "function": tool}]
