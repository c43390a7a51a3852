"""Corpora of conversations: each is a document with labels, whole in one split; bad and long ones by choice."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genesis.base.errors import UserError
from genesis.chat import pool
from genesis.chat.learned import build_prompt_form, find_recorded, find_stop_ids
from genesis.chat.options import ChatOptions
from genesis.chat.render import ChatRenderer, RenderedChat
from genesis.chat.template import ChatTemplate, write_defaults
from genesis.cli.data import inspect_main, prepare_main, verify_main
from genesis.data.corpus import Corpus, open_corpus
from genesis.data.manifest import read_manifest
from genesis.data.prepare import PrepareOptions, prepare_corpus
from genesis.data.sources import SourceOptions
from genesis.data.stream.options import StreamOptions
from genesis.data.tokenize_worker import FinishedPart, Job, Progress, Setup, tokenize
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from tests.chat.support import CHATML, SMOLLM3, write_tokenizer
from tests.data.corpus_support import read_tree

NUM_CHATS = 60


def make_chat(number: int) -> list[dict[str, Any]]:
    turns = []
    for turn in range(1 + number % 3):
        turns += [
            {"role": "user", "content": f"question {number}.{turn} " * (1 + number % 5)},
            {"role": "assistant", "content": f"answer {number}.{turn} " * (1 + number % 4) + "."},
        ]
    return turns


CHATS = [make_chat(number) for number in range(NUM_CHATS)]


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, conversations in every kind of file, and plain text."""
    directory = tmp_path_factory.mktemp("chat")
    write_tokenizer(directory / "tokenizer")
    write_lines(directory / "chat.jsonl", [{"messages": chat, "id": number} for number, chat in enumerate(CHATS)])
    write_lines(directory / "text.jsonl", [{"text": f"plain text {number} " * 9} for number in range(40)])
    table = pa.table({"messages": [[{**turn, "name": None} for turn in chat] for chat in CHATS]})
    pq.write_table(table, directory / "chat.parquet", row_group_size=7)
    with pa.OSFile(str(directory / "chat.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=11)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return open_tokenizer(directory / "tokenizer")


def options_for(directory: Path, *paths: str, name: str = "corpus", **changes: Any) -> PrepareOptions:
    source = SourceOptions("chat", tuple(str(directory / path) for path in paths or ("chat.jsonl",)), chat="auto")
    given: dict[str, Any] = {"sources": (source,), "validation_fraction": 0.2, "num_workers": 1} | changes
    return PrepareOptions(name, directory / "tokenizer", out=directory / "corpora", **given)


def run_here(jobs: Sequence[Job], setup: Setup, num_workers: int) -> Iterator[Progress | FinishedPart]:
    """Takes the place of worker processes, which take a second each to start."""
    for job in jobs:
        yield from tokenize(setup, open_tokenizer(setup.tokenizer), job)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genesis.data.prepare.run_jobs", run_here)


@pytest.fixture(scope="module")
def corpus(directory: Path) -> Corpus:
    options = options_for(directory, sources=mixed_sources(directory), shard_tokens=900)
    prepare_corpus(options)
    return open_corpus(options.corpus)


def mixed_sources(directory: Path) -> tuple[SourceOptions, ...]:
    chat = SourceOptions("chat", (str(directory / "chat.jsonl"),), chat="auto", weight=3)
    return (chat, SourceOptions("text", (str(directory / "text.jsonl"),)))


def render(tokenizer: Tokenizer, chat: list[dict[str, Any]], **options: Any) -> RenderedChat:
    return ChatRenderer(tokenizer, ChatTemplate(CHATML, "chatml")).render(chat, **options)


def key_of(rendered: RenderedChat) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    return tuple(rendered.ids.tolist()), tuple(rendered.trained.tolist())


def read_chats(corpus: Corpus, split: str, name: str = "chat") -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """The tokens and labels of each document of a split."""
    (source,) = (one for one in getattr(corpus, split) if one.name == name)
    tokens, labels = np.empty(source.num_tokens, np.int64), np.empty(source.num_tokens, np.bool_)
    source.read(0, tokens)
    source.read_labels(0, labels)
    ends = np.concatenate(list(source.document_ends())).tolist()
    pieces = zip([0, *ends], ends, strict=False)
    return [(tuple(tokens[a:b].tolist()), tuple(labels[a:b].tolist())) for a, b in pieces]


def test_each_conversation_is_a_whole_document_with_its_labels_in_one_split(
    corpus: Corpus, tokenizer: Tokenizer
) -> None:
    train, held_out = read_chats(corpus, "train"), read_chats(corpus, "validation")
    wanted = [key_of(render(tokenizer, chat)) for chat in CHATS]
    assert Counter(train + held_out) == Counter(wanted)
    assert train == [chat for chat in wanted if chat in train]
    assert 4 <= len(held_out) <= 25
    assert corpus.manifest.train[0].num_documents == len(train)
    assert len(corpus.manifest.train[0].shards) > 1
    ids = np.concatenate([chat for chat, _ in train])
    assert corpus.manifest.train[0].num_text_bytes == tokenizer.token_num_bytes[ids].sum()


@pytest.mark.usefixtures("here")
def test_a_plain_source_beside_them_is_as_it_is_alone(corpus: Corpus, directory: Path) -> None:
    (_, text) = mixed_sources(directory)
    alone = options_for(directory, name="alone", sources=(text,), shard_tokens=900)
    manifest = prepare_corpus(alone)
    assert manifest.train[0] == corpus.manifest.train[1]
    assert manifest.chat is None
    raw = json.loads((alone.corpus / "manifest.json").read_text())
    assert raw["schema_version"] == 2
    assert "chat" not in raw
    assert "chat" not in json.loads((alone.corpus / ".prepare" / "plan.json").read_text())
    assert not list(alone.corpus.rglob("*.loss"))
    files = {path: data for path, data in read_tree(alone.corpus).items() if path.startswith("train/text")}
    assert files.items() <= read_tree(corpus.path).items()


def test_the_manifest_records_how_conversations_became_tokens(corpus: Corpus, tokenizer: Tokenizer) -> None:
    chat = read_manifest(corpus.path).chat
    assert chat is not None
    template = (corpus.path / chat.template).read_text()
    assert "{%- generation -%}" in template
    assert build_prompt_form(template, tokenizer) == CHATML == tokenizer.chat_template
    assert chat.template_name == "chatml.jinja, has_tools=False (genesis.chat.templates, in place of the model's)"
    assert (chat.labels, chat.date) == ("assistant", None)
    counts = {"num_written": NUM_CHATS, "num_cut": 0, "num_long": 0, "num_unlearned": 0, "num_bad": 0}
    assert chat.sources == {"chat": counts}
    assert json.loads((corpus.path / "manifest.json").read_text())["schema_version"] == 4
    assert verify_main([str(corpus.path)]) == 0


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.usefixtures("here")
def test_tables_give_the_same_conversations(directory: Path, corpus: Corpus, kind: str) -> None:
    options = options_for(directory, f"chat.{kind}", name=kind)
    prepare_corpus(options)
    other = open_corpus(options.corpus)
    for split in ("train", "validation"):
        assert read_chats(other, split) == read_chats(corpus, split)


@pytest.mark.slow
def test_workers_and_a_worker_that_starts_again_change_nothing(directory: Path, corpus: Corpus) -> None:
    bad = ['{"messages": [', {"messages": []}, {"messages": [{"role": "user", "content": "q"}]}]
    lines: list[Any] = [{"messages": chat} for chat in CHATS]
    for place, record in zip((0, 20, 40), bad, strict=True):
        lines.insert(place, record)
    write_lines(directory / "mixed.jsonl", lines)
    trees = []
    for number, num_workers in enumerate((1, 3)):
        options = options_for(
            directory,
            "mixed.jsonl",
            name=f"workers{number}",
            num_workers=num_workers,
            shard_tokens=300,
            chat=ChatOptions(on_bad_row="skip"),
        )
        warnings: list[str] = []
        manifest = prepare_corpus(options, warn=warnings.append)
        trees.append(
            {path: data for path, data in read_tree(options.corpus).items() if not path.startswith("manifest")}
        )
        assert manifest.chat is not None
        assert manifest.chat.sources["chat"]["num_bad"] == 3
        assert manifest.chat.sources["chat"]["num_written"] == NUM_CHATS
        path = directory / "mixed.jsonl"
        assert warnings == [
            f"source chat: skipped 1: {path}, line 1 is not JSON (Expecting value: line 1 column 15 (char 14)); fix or "
            "remove it",
            f"source chat: skipped 1: {path}, line 21: the conversation is empty: it has no turns; remove it",
            f"source chat: skipped 1: {path}, line 41: the conversation has no turn of the assistant to learn; "
            "remove it",
        ]
    assert trees[0] == trees[1]
    parts = sorted((directory / "corpora" / "workers0" / ".prepare" / "parts").iterdir())
    assert len(parts) > 3
    (directory / "corpora" / "workers0" / "manifest.json").unlink()
    before = {path: path.read_bytes() for path in parts}
    for path in parts[2:]:
        path.unlink()
    prepare_corpus(
        options_for(
            directory,
            "mixed.jsonl",
            name="workers0",
            num_workers=1,
            shard_tokens=300,
            chat=ChatOptions(on_bad_row="skip"),
        )
    )
    assert {path: path.read_bytes() for path in parts} == before
    assert (
        read_manifest(directory / "corpora" / "workers0").train
        == read_manifest(directory / "corpora" / "workers1").train
    )


@pytest.mark.parametrize("labels", ["last", "all"])
@pytest.mark.usefixtures("here")
def test_other_labels_are_written(directory: Path, tokenizer: Tokenizer, labels: Any) -> None:
    options = options_for(directory, name=labels, chat=ChatOptions(labels=labels), validation_fraction=0.0)
    prepare_corpus(options)
    wanted = [key_of(render(tokenizer, chat, labels=labels)) for chat in CHATS]
    assert read_chats(open_corpus(options.corpus), "train") == wanted
    assert bool(list(options.corpus.rglob("*.loss"))) == (labels == "last")


@pytest.mark.usefixtures("here")
def test_long_conversations_are_refused_cut_or_dropped_and_counted(directory: Path, tokenizer: Tokenizer) -> None:
    rendered = [render(tokenizer, chat) for chat in CHATS]
    limit = int(np.median([len(one.ids) for one in rendered]))
    chat = ChatOptions(max_tokens=limit)
    with pytest.raises(
        UserError, match=rf"chat.jsonl, line \d+: the conversation has \d+ tokens, chat.max_tokens is {limit}"
    ):
        prepare_corpus(options_for(directory, name="refused", chat=chat))
    found = {}
    for how in ("cut", "drop"):
        options = options_for(directory, name=how, chat=replace(chat, on_long=how), validation_fraction=0.0)
        prepare_corpus(options)
        opened = open_corpus(options.corpus)
        found[how] = read_chats(opened, "train"), opened.manifest.chat
    cut = [RenderedChat(one.ids[:limit], one.trained[:limit]) for one in rendered]
    assert found["cut"][0] == [key_of(one) for one in cut if one.trained.any()]
    assert found["drop"][0] == [key_of(one) for one in rendered if len(one.ids) <= limit]
    num_long = sum(len(one.ids) > limit for one in rendered)
    num_unlearned = sum(not one.trained.any() for one in cut)
    of_cut, of_drop = (record.sources["chat"] for _, record in found.values())  # type: ignore[union-attr]
    assert (of_cut["num_cut"], of_cut["num_unlearned"]) == (num_long - num_unlearned, num_unlearned)
    assert (of_drop["num_long"], of_drop["num_written"]) == (num_long, NUM_CHATS - num_long)


BAD = {
    "json": ('{"messages": [', r"line 2 is not JSON"),
    "deep": ('{"messages": ' + "[" * 100_000, "line 2 is not JSON"),
    "digits": ('{"messages": [{"role": "user", "content": 1' + "0" * 5000 + "}]}", "line 2 is not JSON"),
    "array": ("[1]", "line 2 is a JSON list, not an object"),
    "empty": ({"messages": []}, "line 2: the conversation is empty: it has no turns"),
    "role": ({"messages": [{"role": "robot", "content": "a"}]}, "line 2: turn 1 has the unknown role 'robot'"),
    "fields": ({"text": "a"}, "line 2: no conversation is in the fields text"),
    "surrogate": ('{"messages": [{"role": "user", "content": "\\ud800"}]}', r"line 2 has a lone surrogate \\ud800"),
    "no answer": ({"messages": [{"role": "user", "content": "a"}]}, "line 2: .* no turn of the assistant"),
    "template": ({"messages": [{"role": "tool", "content": "a"}] + CHATS[0]}, "line 2: the chat template .*: no tools"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.usefixtures("here")
def test_a_bad_row_is_one_line_with_its_place_or_skipped_and_counted(directory: Path, case: str) -> None:
    record, reason = BAD[case]
    write_lines(directory / f"{case}.jsonl", [{"messages": CHATS[0]}, record, {"messages": CHATS[1]}])
    template = directory / "strict.jinja"
    template.write_text(
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}A chat:\n" + CHATML
    )
    options = options_for(
        directory, f"{case}.jsonl", name=f"bad-{case}", chat=ChatOptions(template=template), validation_fraction=0.0
    )
    with pytest.raises(UserError, match=rf"{case}.jsonl, {reason}.*; or set chat.on_bad_row: skip") as caught:
        prepare_corpus(options)
    assert "\n" not in str(caught.value)
    manifest = prepare_corpus(replace(options, chat=replace(options.chat, on_bad_row="skip")), restart=True)
    assert manifest.chat is not None
    assert manifest.chat.sources["chat"]["num_bad"] == 1
    assert manifest.train[0].num_documents == 2


@pytest.mark.usefixtures("here")
def test_a_bad_row_of_a_table_is_named(directory: Path) -> None:
    table = pa.table({"messages": [CHATS[0], CHATS[1], [{"role": "robot", "content": "a"}]]})
    pq.write_table(table, directory / "bad.parquet", row_group_size=2)
    with pytest.raises(UserError, match=r"bad.parquet, row 2: turn 1 has the unknown role 'robot'"):
        prepare_corpus(options_for(directory, "bad.parquet", name="bad-table"))


@pytest.mark.usefixtures("here")
def test_a_row_on_which_the_template_exceeds_a_limit_is_named_and_never_skipped(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SECONDS", 0.1)
    template = directory / "power.jinja"
    powers = "{% set x = 9 %}" + "{% set x = x**64 %}" * 9
    template.write_text("{% if messages[0].content == 'evil' %}" + powers + "{% endif %}A chat:\n" + CHATML)
    evil = [{"role": "user", "content": "evil"}, {"role": "assistant", "content": "so"}]
    write_lines(directory / "evil.jsonl", [{"messages": chat} for chat in (CHATS[0], evil, CHATS[1], evil)])
    chat = ChatOptions(template=template, on_bad_row="skip")
    wanted = (
        r"^source chat: \S*evil.jsonl, line 2: the chat template \S*power.jinja takes more than 0.1 s .*; simplify it$"
    )
    with pytest.raises(UserError, match=wanted):
        prepare_corpus(options_for(directory, "evil.jsonl", name="evil", chat=chat))


@pytest.mark.usefixtures("here")
def test_what_cannot_hold_or_learn_conversations_is_one_line(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    source = SourceOptions("chat", (str(tmp_path / "a.txt"),), chat="auto")
    with pytest.raises(UserError, match=r"a.txt is read as text, which cannot hold conversations"):
        prepare_corpus(options_for(directory, name="text", sources=(source,)))
    with pytest.raises(UserError, match="source chat has conversations, which text files cannot hold"):
        replace(source, format="text")
    with pytest.raises(UserError, match="which a stream does not read; make a corpus by `genesis data prepare`"):
        StreamOptions((source,))
    write_tokenizer(tmp_path / "none", template=None)
    with pytest.raises(UserError, match=r"none: the tokenizer has no chat template; give one by --chat.template"):
        prepare_corpus(replace(options_for(directory, name="none"), tokenizer=tmp_path / "none"))
    endless = tmp_path / "endless.jinja"
    for text, line in (
        (CHATML.replace("<|im_end|>", ""), "never closes the assistant's turns.*no control symbol of the tokenizer"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "endless.jinja takes more than 0.1 s of processor time",
        ),
    ):
        monkeypatch.setattr(pool, "SECONDS", 0.1)
        endless.write_text(text)
        with pytest.raises(UserError, match=line):
            prepare_corpus(options_for(directory, name="endless", chat=ChatOptions(template=endless)))
    all_bad = write_lines(directory / "all-bad.jsonl", [{"text": "a"}])
    with pytest.raises(UserError, match="no conversation of source chat is left: 1 skipped as bad"):
        prepare_corpus(options_for(directory, all_bad.name, name="all-bad", chat=ChatOptions(on_bad_row="skip")))


@pytest.mark.usefixtures("here")
def test_another_template_or_date_is_another_plan(directory: Path, tmp_path: Path) -> None:
    template = tmp_path / "a.jinja"
    template.write_text(SMOLLM3)
    options = options_for(directory, name="dated", chat=ChatOptions(template=template, date="2026-01-31"))
    manifest = prepare_corpus(options)
    assert manifest.chat is not None
    assert manifest.chat.date == "2026-01-31"
    moved = tmp_path / "b.jinja"
    moved.write_text(SMOLLM3)
    assert prepare_corpus(replace(options, chat=replace(options.chat, template=moved))) == manifest
    with pytest.raises(UserError, match=r"was started with different options: chat.template was"):
        prepare_corpus(replace(options, chat=replace(options.chat, date="2026-02-01")))
    with pytest.raises(UserError, match=r"a.jinja prints today's date"):
        prepare_corpus(replace(options, name="undated", chat=ChatOptions(template=template)))


@pytest.mark.usefixtures("here")
def test_the_commands_print_counts_labels_and_the_template(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(directory / "skip.jsonl", [{"messages": CHATS[0]}, {"messages": []}, {"messages": CHATS[1]}])
    recipe = {
        "name": "command",
        "tokenizer": str(directory / "tokenizer"),
        "out": str(directory / "corpora"),
        "validation_fraction": 0.0,
        "num_workers": 1,
        "sources": [{"name": "chat", "paths": [str(directory / "skip.jsonl")], "chat": "messages"}],
        "chat": {"on_bad_row": "skip", "date": "2026-01-31", "variables": {"enable_thinking": False}},
    }
    config = directory / "command.yaml"
    config.write_text(json.dumps(recipe))
    assert prepare_main(["--config", str(config)]) == 0
    printed = capsys.readouterr()
    line = (
        "chat template chatml.jinja, has_tools=False (genesis.chat.templates, in place of the model's), with the date "
    )
    assert line + "2026-01-31; learned: assistant\n" in printed.out
    assert "chat: 2 conversations; 1 skipped as bad" in printed.out
    assert "skip.jsonl, line 2: the conversation is empty" in printed.err
    assert inspect_main([str(directory / "corpora" / "command"), "--num_samples", "1"]) == 0
    ends = "the assistant's turns end with <|im_end|> (2)"
    shown = f"learned: assistant\n{ends}\nchat: 2 conversations; 1 skipped as bad\n"
    assert shown in capsys.readouterr().out
    # What is learned includes the variables.
    learned = find_recorded(directory / "corpora" / "command")
    assert learned is not None
    tokenizer = open_tokenizer(directory / "tokenizer")
    assert build_prompt_form(learned.read_text(), tokenizer) == write_defaults(CHATML, {"enable_thinking": False})
    assert find_stop_ids(tokenizer, learned) == {2, 4}


@pytest.mark.usefixtures("here")
def test_inspect_shows_what_is_learned_the_lengths_and_conversations_per_sequence(
    directory: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(directory, name="shown", validation_fraction=0.0)
    prepare_corpus(options)
    # The finished corpus gets a plan that cuts some conversations, which a new one of this length would refuse.
    prepare_corpus(replace(options, packing="best_fit", seq_len=256))
    with pytest.raises(UserError, match=r"has \d+ tokens, chat.max_tokens is 256; raise it, or set chat.on_long"):
        prepare_corpus(replace(options, name="whole", packing="best_fit", seq_len=256))
    with pytest.raises(UserError, match=r"chat.on_long is drop, and no length is given: give chat.max_tokens"):
        prepare_corpus(replace(options, name="long", chat=ChatOptions(on_long="drop")))
    arguments = [str(options.corpus), "--num_samples", "1", "--sample_tokens", "100000"]
    assert inspect_main(arguments) == 0
    printed = capsys.readouterr().out
    rendered = [render(tokenizer, chat) for chat in CHATS]
    lengths = sorted(len(one.ids) for one in rendered)
    num_learned = sum(int(one.trained.sum()) for one in rendered)
    assert (
        f"median {lengths[30]}, p95 {lengths[57]}, longest {lengths[-1]}; {num_learned:,} of {sum(lengths):,} tokens"
        in " ".join(printed.split())
    )
    assert "<|im_start|>assistant\n\u27e6answer " in printed
    assert "<|im_end|>\u27e7\n" in printed
    plan = json.loads((options.corpus / "packing/best_fit-256/plan.json").read_text())
    num_sequences = plan["sources"]["chat"]["figures"]["num_sequences"]
    assert f"best_fit at seq_len 256: {NUM_CHATS / num_sequences:.2f} conversations per sequence" in printed
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert inspect_main(arguments) == 0
    colored = capsys.readouterr().out
    assert "\x1b[32manswer " in colored
    assert "\u27e6" not in colored


def prepare_by_command(directory: Path, path: Path, name: str, *options: str, **source: Any) -> int:
    """`genesis data prepare` of one source, as a user types it; its status."""
    given = json.dumps([{"name": "chat", "paths": [str(path)], **({"chat": "auto"} | source)}])
    arguments = ["--name", name, "--tokenizer", str(directory / "tokenizer"), "--out", str(directory / "corpora")]
    return prepare_main([*arguments, "--sources", given, "--num_workers", "1", *options])


@pytest.mark.usefixtures("here")
def test_an_error_names_up_to_ten_rows_of_a_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, empty = {"messages": CHATS[0]}, {"messages": []}
    robot = {"messages": [{"role": "robot", "content": "a"}]}
    few = write_lines(directory / "few.jsonl", [good, empty, good, robot, "{", empty])
    with pytest.raises(UserError) as caught:
        prepare_by_command(directory, few, "few")
    assert str(caught.value).splitlines() == [
        "source chat has 4 bad rows; correct them, or set chat.on_bad_row: skip, which counts such records:",
        f"  {few}, line 2: the conversation is empty: it has no turns; remove it (also line 6)",
        f"  {few}, line 4: turn 1 has the unknown role 'robot'; the roles are system, developer, user, assistant, tool",
        f"  {few}, line 5 is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); "
        "fix or remove it",
    ]
    many = write_lines(directory / "many.jsonl", [good, empty] * 30)
    monkeypatch.setattr("genesis.data.tokenize_worker._BATCH_BYTES", 1)
    with pytest.raises(UserError) as caught:
        prepare_by_command(directory, many, "many")
    (line,) = str(caught.value).splitlines()
    assert re.findall(r"line (\d+)", line) == [str(number) for number in range(2, 22, 2)]
    lengths = write_lines(directory / "long.jsonl", [good, {"messages": CHATS[4]}, {"messages": CHATS[9]}])
    with pytest.raises(UserError, match=r"line 1: .* chat.max_tokens is 12; raise it, .* \(also line 2, line 3\)$"):
        prepare_by_command(directory, lengths, "long", "--chat.max_tokens", "12", "--chat.on_bad_row", "skip")


@pytest.mark.usefixtures("here")
def test_skipped_rows_are_listed_by_reason_with_counts_and_the_first_lines(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = {"role": "user", "content": "a"}
    silent = [{"messages": [*[turn] * number, {"role": "assistant", "content": ""}]} for number in range(1, 6)]
    path = write_lines(directory / "skipped.jsonl", [*silent, {"text": "a"}, *({"messages": chat} for chat in CHATS)])
    assert prepare_by_command(directory, path, "skipped", "--chat.on_bad_row", "skip") == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"genesis: warning: source chat: skipped 5: {path}, line 1: turn 2 of the assistant is empty; remove it, or "
        "the conversation (also line 2, line 3, ...)",
        f"genesis: warning: source chat: skipped 1: {path}, line 6: no conversation is in the fields text: it needs "
        "messages, conversations, instruction and output, or prompt; name the field of the turns by text_field",
    ]
    assert f"{NUM_CHATS} conversations; 6 skipped as bad" in out


@pytest.mark.usefixtures("here")
def test_what_nothing_uses_is_named_once_and_an_unknown_mark_stops_even_where_bad_rows_are_skipped(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [{"messages": [{**turn, "name": "Ann"} for turn in chat], "id": 1, "toxic": True} for chat in CHATS]
    path = write_lines(directory / "named.jsonl", named)
    assert prepare_by_command(directory, path, "named") == 0
    num_turns = sum(map(len, CHATS))
    assert capsys.readouterr().err.splitlines() == [
        "genesis: warning: source chat: left out, because nothing uses them: fields of records id (60), toxic (60); "
        f"keys of messages name ({num_turns})"
    ]
    marked = [{"messages": [{**turn, "toxic": False, "rank": 2} for turn in chat]} for chat in CHATS]
    path = write_lines(directory / "marked.jsonl", marked)
    message = (
        r"marked.jsonl, line 1: turn 1 has toxic false, turn 1 has rank 2, which the chat template chatml.jinja.* "
        r"does not use .*: ignored_keys: \[toxic, rank\] \(also line 2, .*, line 10\)$"
    )
    with pytest.raises(UserError, match=message):
        prepare_by_command(directory, path, "marked", "--chat.on_bad_row", "skip")
    assert prepare_by_command(directory, path, "ignored", ignored_keys=["toxic", "rank"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_null_text_stops_a_prepare_or_is_skipped_and_counted(
    directory: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["one " * 9, None, "two " * 9, "", None]
    path = directory / f"nulls.{kind}"
    if kind == "jsonl":
        write_lines(path, [{"text": text} for text in texts])
    else:
        pq.write_table(pa.table({"text": texts}), path)
    with pytest.raises(
        UserError, match=r"nulls.*\(also .*\); or set on_bad_row: skip for source chat, which counts such"
    ):
        prepare_by_command(directory, path, f"nulls-{kind}", chat=None)
    name, held_out = f"skips-{kind}", ("--validation_fraction", "0")
    assert prepare_by_command(directory, path, name, *held_out, chat=None, on_bad_row="skip") == 0
    line, blank = capsys.readouterr().err.splitlines()
    assert blank == "genesis: warning: source chat: dropped 1 document without a text, or with white space alone"
    places = ("line 2: field 'text' is null", "line 5") if kind == "jsonl" else ("row 1 has no 'text' (null)", "row 4")
    assert line.startswith(f"genesis: warning: source chat: skipped 2: {path}, {places[0]}")
    assert line.endswith(f"(also {places[1]})")
    assert read_manifest(directory / "corpora" / name).train[0].num_documents == 2
