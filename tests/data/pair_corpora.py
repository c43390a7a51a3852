"""Pairs of answers and single answers as files, and corpora of them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genesis.chat.options import ChatOptions
from genesis.data.prepare import PrepareOptions, prepare_corpus
from genesis.data.sources import SourceOptions
from tests.chat.support import CHATML, write_tokenizer
from tests.data.test_conversations import run_here, write_lines

NUM_PAIRS = 40
SEQ_LEN = 128


def make_pair(number: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"question {number} " * (1 + number % 4)}]
    if number % 3 == 0:
        prompt = [*prompt, {"role": "assistant", "content": "before"}, {"role": "user", "content": "again"}]
    chosen = [{"role": "assistant", "content": f"good {number} " * (1 + number % 5)}]
    rejected = [{"role": "assistant", "content": f"bad {number} " * (1 + number % 3)}]
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


RECORDS = [make_pair(number) for number in range(NUM_PAIRS)]


def write_files(directory: Path) -> None:
    """Writes a tokenizer, a template, and the pairs in every kind of file and in both forms."""
    write_tokenizer(directory / "tokenizer")
    write_lines(directory / "pairs.jsonl", RECORDS)
    table = pa.Table.from_pylist(RECORDS)
    pq.write_table(table, directory / "pairs.parquet", row_group_size=7)
    with pa.OSFile(str(directory / "pairs.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=11)
    openai = [
        {
            "input": {"messages": record["prompt"], "tools": [], "parallel_tool_calls": True},
            "preferred_output": record["chosen"],
            "non_preferred_output": record["rejected"],
        }
        for record in RECORDS
    ]
    write_lines(directory / "openai.jsonl", openai)
    (directory / "chatml.jinja").write_text(CHATML)


def options_for(directory: Path, path: str = "pairs.jsonl", name: str = "corpus", **changes: Any) -> PrepareOptions:
    source = SourceOptions("pairs", (str(directory / path),), chat="pairs")
    chat = ChatOptions(template=directory / "chatml.jinja")
    given: dict[str, Any] = {"sources": (source,), "validation_fraction": 0.25, "num_workers": 1, "chat": chat}
    return PrepareOptions(name, directory / "tokenizer", **{"out": directory / "corpora"} | given | changes)


def write_pair_corpus(directory: Path, **changes: Any) -> Path:
    """Returns a corpus of the pairs, made in this process."""
    write_files(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("genesis.data.prepare.run_jobs", run_here)
        options = options_for(directory, **changes)
        prepare_corpus(options)
    return options.corpus


def write_answer_corpus(directory: Path) -> Path:
    """Returns a corpus of single answers, two of them to each prompt, in TRL's columns, made in this process."""
    write_files(directory)
    answers = [
        {"prompt": one["prompt"], "completion": one[side], "label": side == "chosen"}
        for one in RECORDS
        for side in ("chosen", "rejected")
    ]
    write_lines(directory / "answers.jsonl", answers)
    source = SourceOptions("answers", (str(directory / "answers.jsonl"),), chat="auto", value_field="label")
    options = options_for(directory, sources=(source,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("genesis.data.prepare.run_jobs", run_here)
        prepare_corpus(options)
    return options.corpus
