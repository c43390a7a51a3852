"""Whatever strangers wrote: an error is one short line, and nothing that is printed can change the terminal."""

import ast
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tokenizers import Tokenizer as Library

from genesis.base.console import Console
from genesis.base.errors import RunEndedError, UserError, as_line, blaming, escape_controls
from genesis.cli.surroundings import EscapedStream, escaped_streams
from genesis.huggingface.directory import read_json
from genesis.operations.supervise.metrics import RunCollector
from genesis.operations.supervise.status import read_status
from genesis.tokenizer.limited import TextSearch
from genesis.tokenizer.open import open_tokenizer
from genesis_callbacks.base.checkpoint_errors import CorruptCheckpointError
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.safe_read import parse_json
from tests.chat.support import write_tokenizer
from tests.commands import run_genesis

REPOSITORY = Path(__file__).parents[1]
ALIEN = "a\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2066\u2028\u2029\x85\r\nb\x00\x7f"
PANICS: dict[str, dict[str, Any]] = {
    "a normaliser that cannot be parsed": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
}


@pytest.mark.parametrize("kind", [UserError, RunEndedError, CorruptCheckpointError])
def test_an_error_is_one_printable_line(kind: type[Exception]) -> None:
    text = str(kind(f"{ALIEN} and {ALIEN!r}"))
    assert text.isprintable()
    assert "\\x1b[2J" in text
    assert "\\u202e" in text


@pytest.mark.parametrize(
    "text",
    [
        f"vocab is {'x' * 5000!r}: give a number",
        f"key {'long ' * 2000!r} is unknown: remove it",
        f"{'k' * 5000} is no tensor: remove it",
        f"""{'"' * 3000!r} is no name: rename it""",
        f"{['value'] * 3000} is no number: give one",
        f"{'a b ' * 1_000_000}: remove it",
    ],
)
def test_a_quoted_value_is_cut_and_the_remedy_stays(text: str) -> None:
    shown = str(UserError(text))
    assert len(shown) <= 2100
    assert shown.endswith(text[-9:])
    assert all(len(word) <= 256 for word in re.split(r"[\s/]", shown))
    assert as_line(shown) == shown


def test_a_list_to_paste_stays_whole() -> None:
    keys = [f"recipe.schedule.key_{number}" for number in range(20)]
    text = f"the recipe has changed: give --checkpoint.allow_changed '{json.dumps(keys)}'"
    assert str(UserError(text)) == text


def test_a_path_and_a_message_of_usual_length_stay_whole() -> None:
    path = "/".join(["directory"] * 100)
    text = f"{path}: genesis's file isn't one of those models' files; it's a mistake of the users'"
    assert str(UserError(text)) == text


def test_missing_memory_is_no_fault_of_the_file_alone_and_a_mistake_of_ours_is_none() -> None:
    with (
        pytest.raises(UserError, match=r"^x/y needs more memory than there is .*: free some, or repair it$"),
        blaming("x/y", "repair it"),
    ):
        raise MemoryError("b" * 900)
    with pytest.raises(AssertionError), blaming("x/y", "repair it"):
        raise AssertionError


@pytest.mark.parametrize("error", [KeyError("a"), RecursionError(), OSError("no number")])
def test_any_error_of_a_parser_is_one_line_about_the_file(error: Exception) -> None:
    with (
        pytest.raises(UserError, match=f"^x/y cannot be read \\({type(error).__name__}.*\\): repair it$"),
        blaming("x/y", "repair it"),
    ):
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), FileNotFoundError(2, "no such file")])
def test_what_is_no_error_of_a_parser_passes(error: BaseException) -> None:
    with pytest.raises(type(error)), blaming("x/y", "repair it"):
        raise error


@pytest.mark.parametrize("case", PANICS)
def test_a_panic_of_rust_is_one_line_and_prints_nothing_itself(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path)
    fast = tmp_path / "tokenizer.json"
    fast.write_text(json.dumps({**read_json(fast), **PANICS[case]}))
    with pytest.raises(UserError, match=re.escape(str(fast))) as found:
        open_tokenizer(tmp_path)
    assert str(found.value).isprintable()
    assert capfd.readouterr() == ("", "")


def test_a_panic_on_one_text_is_an_error_about_the_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    content = {**read_json(tmp_path / "tokenizer.json"), **PANICS["pieces of no length"]}
    vars(tokenizer)["_texts"] = TextSearch(Library.from_str(json.dumps(content)), [])
    with pytest.raises(UserError, match="its library fails on a text"):
        tokenizer.encode("a")


@pytest.mark.process
def test_a_command_ends_at_a_panic_with_one_line_and_a_status(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    fast = tmp_path / "tokenizer.json"
    fast.write_text(json.dumps({**read_json(fast), **PANICS["pieces of no length"]}))
    (tmp_path / "a.txt").write_text("text")
    done = run_genesis(
        "tokenizer", "inspect", "--tokenizer", tmp_path, "--sources", f"[{{name: a, paths: [{tmp_path}/a.txt]}}]"
    )
    assert done.returncode == 2
    assert re.fullmatch(r"genesis: error: .*tokenizer\.json: its library fails on a text \(.*\n", done.stderr)


# ---- what is printed


def test_a_stream_and_a_console_escape_what_is_not_their_own() -> None:
    out = io.StringIO()
    print(f"{ALIEN} \u3000\u200d\t\u00e9", file=EscapedStream(out))
    assert out.getvalue() == f"{escape_controls(ALIEN)} \u3000\u200d\t\u00e9\n"
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", out.getvalue())
    assert load_json(escape_controls('"\x7f\u202e"')) == "\x7f\u202e"
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200, highlight=False)
    console.print(f"[bold]{ALIEN}[/bold]")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.startswith("\x1b[1m")
    assert "\\u001b[2J" in shown
    assert "\u202e" not in shown


def test_a_console_in_a_command_keeps_its_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    with escaped_streams():
        Console(force_terminal=True, color_system="truecolor").print("[bold]a[/bold]")
        print("\x1b[1mb")
    assert out.getvalue() == "\x1b[1ma\x1b[0m\n\\u001b[1mb\n"


def test_labels_of_metrics_have_no_control_characters(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    registry.register(RunCollector(tmp_path, f"runs/{ALIEN}", lambda: read_status(tmp_path), node=ALIEN))
    text = generate_latest(registry).decode()
    assert text.replace("\n", "").isprintable()
    assert "\\\\x1b[2J" in text


# ---- a key twice


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 1}', '{"b": [{"a": 1, "c": 2, "a": 3}]}', '{"": 1, "\\u0000": 2, "": 3}']
)
def test_a_key_twice_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="is twice in one object"):
        read_json(tmp_path / "config.json")
    with pytest.raises(CorruptCheckpointError, match="is twice in one object"):
        parse_json(text.encode(), "manifest.json")


# ---- nobody goes around it

OWN_WORDS = {
    "genesis/chat/conversation.py": "a conversation as `Document.text` holds it",
    "genesis/chat/pair.py": "the same of a pair",
    "genesis/chat/pool.py": "what the processes that render send",
    "genesis/cli/checkpoint/show.py": "a manifest that was read and encoded again",
    "genesis/cli/command_record.py": "a file of the package",
    "genesis/data/clean": "plans and rows that the command has just written",
    "genesis/recipe/options.py": "a file of the package",
    "genesis/data/sources/records.py": "the rules by which earlier versions read",
    "genesis/operations/demo/finetune.py": "a download whose hash is known",
    "genesis/operations/doctor": "what its own processes send",
    "genesis/evaluate/task_template.py": "what the process that renders sends",
    "genesis/export/proof.py": "what the proof's process sends, and its request",
    "genesis/base/progress.py": "what a process sends of its stages",
    "genesis/operations/supervise/forked_writer.py": "the launcher's protocol",
    "genesis/operations/supervise/launch_protocol.py": "the launcher's protocol",
    "genesis/operations/supervise/launcher.py": "the launcher's protocol",
    "genesis/operations/supervise/rendezvous.py": "what the supervisors of a run agree on",
    "genesis/tokenizer/huggingface.py": "what the library has just written",
    "callbacks/src/genesis_callbacks/checkpoint/drift.py": "a value that it has just written",
    "callbacks/src/genesis_callbacks/base/json_text.py": "the reader",
}


def test_json_of_others_is_read_at_one_place_and_so_is_a_console_made() -> None:
    files = [*REPOSITORY.glob("genesis/**/*.py"), *REPOSITORY.glob("callbacks/src/**/*.py")]
    assert len(files) > 400
    loose: list[str] = []
    for file in files:
        name = str(file.relative_to(REPOSITORY))
        for node in ast.walk(ast.parse(file.read_text())):
            is_json = isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.loads", "json.load")
            if is_json and not name.startswith(tuple(OWN_WORDS)):
                loose.append(f"{name}:{node.lineno} json: use load_json, or say whose text it is")
            is_console = isinstance(node, ast.ImportFrom) and node.module == "rich.console"
            if is_console and "Console" in [each.name for each in node.names]:
                loose.append(f"{name}:{node.lineno} Console: use that of genesis.base.console")
    assert loose == []
