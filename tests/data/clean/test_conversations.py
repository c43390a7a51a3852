"""Conversations are kept or dropped whole: duplicates, decontamination, scores; the result is read as it was."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import zstandard

from genesis.base.errors import UserError
from genesis.chat.options import ChatOptions
from genesis.data.clean.clean import clean_corpus
from genesis.data.clean.decontaminate import Decontamination
from genesis.data.clean.dedup import ExactDuplicates, NearDuplicates
from genesis.data.clean.execute import LocalOptions
from genesis.data.clean.filters import C4Quality, Length, Score
from genesis.data.clean.plan import CleanOptions
from genesis.data.clean.report import CleanReport
from genesis.data.prepare import PrepareOptions, prepare_corpus
from genesis.data.sources import SourceOptions
from tests.chat.support import write_tokenizer

WORDS = [
    "the",
    "river",
    "ran",
    "past",
    "old",
    "mills",
    "and",
    "slow",
    "boats",
    "while",
    "children",
    "counted",
    "herons",
    "near",
    "stone",
    "bridges",
]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def say(number: int, turn: int) -> str:
    return f"{number} " + " ".join(random.Random(100 * number + turn).choices(WORDS, k=30))


def make_chat(number: int) -> dict[str, Any]:
    turns = [{"role": role, "content": say(number, turn)} for turn, role in enumerate(("user", "assistant") * 2)]
    return {"messages": turns, "quality": 0.9, **({"tools": [TOOL]} if number % 2 else {})}


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    chats = [make_chat(number) for number in range(12)]
    shared = [{"from": turn["role"], "value": turn["content"]} for turn in chats[0]["messages"]]
    same = {"conversations": shared, "quality": 1}
    near = json.loads(json.dumps(chats[3]))
    near["messages"][1]["content"] += " today"
    short = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "quality": 1}
    low = {**make_chat(20), "quality": 0.1}
    test = {**make_chat(21), "quality": 1}
    write(directory / "chat.jsonl", [*chats, same, near, short, low, test])
    write(directory / "exam.jsonl", [{"messages": test["messages"][2:]}])
    return directory


def options_for(directory: Path, out: Path, **changes: Any) -> CleanOptions:
    exam = SourceOptions("exam", (str(directory / "exam.jsonl"),), chat="messages")
    given: dict[str, Any] = {
        "sources": (SourceOptions("chat", (str(directory / "chat.jsonl"),), chat="auto"),),
        "out": out,
        "stages": (
            Length(min_words=10),
            Score(field="quality", min_score=0.5),
            Decontamination(evaluation=(exam,)),
            ExactDuplicates(),
            NearDuplicates(),
        ),
        "tasks": 1,
        "local": LocalOptions(workers=1),
    }
    return CleanOptions(**given | changes)


def read_result(out: Path) -> list[dict[str, Any]]:
    records = []
    for path in sorted((out / "text").rglob("*.jsonl.zst")):
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            records += [json.loads(line) for line in io.BufferedReader(stream)]
    return records


def test_conversations_are_kept_or_dropped_whole(inputs: Path, tmp_path: Path) -> None:
    report = clean_corpus(options_for(inputs, tmp_path / "clean"))
    assert isinstance(report, CleanReport)
    records = read_result(tmp_path / "clean")
    wanted = [make_chat(number) for number in range(12)]
    near = [record for record in records if record["messages"][1]["content"].endswith(" today")]
    kept = [record for record in records if record not in near]
    assert len(records) == 12
    assert [record["messages"] for record in kept] == [
        chat["messages"] for number, chat in enumerate(wanted) if not (near and number == 3)
    ]
    assert [record.get("tools") for record in kept[:2]] == [None, [TOOL]]
    assert all(record["quality"] == 0.9 and record["source"] == "chat" and "text" not in record for record in records)
    write_tokenizer(tmp_path / "tokenizer")
    source = SourceOptions("chat", (str(tmp_path / "clean" / "text"),), suffixes=(".jsonl",), chat="auto")
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = ChatOptions(template=template)
    options = PrepareOptions("corpus", tmp_path / "tokenizer", (source,), tmp_path, validation_fraction=0.0, chat=chat)
    assert prepare_corpus(options).train[0].num_documents == 12


def test_a_filter_that_changes_texts_is_refused_for_conversations(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"source chat has conversations .*whole; list other sources for stage 1"):
        options_for(inputs, tmp_path, stages=(C4Quality(),))
