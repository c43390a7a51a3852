"""The checks of words and phrases find every entry of the house style's table."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[1]
WORDS = REPOSITORY / ".ci/words.txt"
ENTRIES = [line.partition("->")[0] for line in WORDS.read_text(encoding="utf-8").splitlines() if line[0] != "#"]
PHRASES = [
    ("genesis/train/a.py", "the skew watchdog ends the run"),
    ("docs/a.md", "a bad checkpoint is put aside"),
    ("tests/a.py", "find_latest(put_aside=False)"),
    ("docs/a.md", "a bad checkpoint: put it aside"),
    ("genesis/tokenizer/a.py", "`decode` takes it away"),
    ("genesis/train/a.py", "a method that communicates says so"),
    ("tests/a.py", "the dtype, whatever it was"),
    ("docs/a.md", "where it was saved it is read"),
    ("docs/a.md", "by the way of a mapped file"),
    ("genesis/train/a.py", "an event is lost; training goes on"),
    ("genesis/data/a.py", "what a run that goes on reads"),
    ("genesis/huggingface/a.py", "        family: Whose names the files have."),
    ("genesis/generate/a.py", "        max_new_tokens: At most so many."),
    ("genesis/generate/a.py", "        decoder: In evaluation mode."),
    ("genesis/data/a.py", "the corpus was begun differently"),
    ("genesis/data/a.py", "the run ends without a word of it"),
    ("docs/a.md", "its card has the tokens of each source"),
    ("genesis/serve/a.py", 'raise UserError("the port is none")'),
    ("genesis/train/a.py", "rank 0 tells the others"),
    ("genesis/train/a.py", "the others are told"),
    ("genesis/cli/a.py", "the manifest says 3 tokens"),
    ("genesis/export/a.py", "as the card said"),
    ("genesis/data/order.py", "sequences that were drawn"),
    ("genesis/model/decoder.py", "def forward(self, ids, places):"),
    ("genesis/serve/a.py", '    """What a client asks for."""'),
    ("genesis/serve/a.py", '    """Who may ask."""'),
    ("callbacks/src/genesis_callbacks/a.py", "class Part:"),
    ("callbacks/src/genesis_callbacks/a.py", f"class {'Local'}Part(Part):"),
    ("callbacks/src/genesis_callbacks/a.py", "class Heading:"),
    ("callbacks/src/genesis_callbacks/a.py", "class Origin:"),
    ("callbacks/src/genesis_callbacks/a.py", "class Kept(NamedTuple):"),
    ("genesis/model/attention.py", "class Layout:"),
    ("genesis/data/window.py", "class Window:"),
]
ALLOWED = [
    ("genesis/data/inspect.py", "samples are drawn evenly over documents"),
    ("genesis/generate/sample.py", "a token is drawn"),
    ("genesis/cli/a.py", "returns None if there is none"),
    ("genesis/data/a.py", "the family whose names the files have"),
    ("tests/a.py", "it says so whenever there is no process group"),
    ("genesis/data/a.py", "which is none of its choices"),
    ("genesis/cli/release.py", "this places the folder"),
    ("tests/a.py", "told = outcome.err"),
    ("docs/a.md", "a bad checkpoint is put aside  # phrases: ignore"),
]


@pytest.fixture(scope="module")
def phrases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("phrases", REPOSITORY / ".ci/phrases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["phrases"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_codespell_finds_every_word_of_the_dictionary(tmp_path: Path) -> None:
    text = tmp_path / "a.md"
    text.write_text("".join(f"a {word} here\n" for word in ENTRIES), encoding="utf-8")
    command = [sys.executable, "-m", "codespell_lib", "--config", str(tmp_path / "none"), "-D", str(WORDS), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = {line.split()[1] for line in done.stdout.splitlines()}
    assert found == set(ENTRIES), done.stderr


@pytest.mark.parametrize(("name", "line"), PHRASES)
def test_every_phrase_is_found_with_its_file_and_line(phrases: ModuleType, name: str, line: str) -> None:
    (found,) = phrases.find_phrases(name, f"\n{line}\n")
    assert found.startswith(f"{name}:2: ")


def test_every_rule_is_tested(phrases: ModuleType) -> None:
    lines = [line for name, text in PHRASES for line in phrases.find_phrases(name, text)]
    assert {line.partition(": write ")[2] for line in lines} == {rule.instead for rule in phrases.RULES}


@pytest.mark.parametrize(("name", "line"), ALLOWED)
def test_a_word_in_another_meaning_is_allowed(phrases: ModuleType, name: str, line: str) -> None:
    assert list(phrases.find_phrases(name, line)) == []


def test_the_tree_has_no_such_phrase(phrases: ModuleType) -> None:
    assert phrases.main() == 0
