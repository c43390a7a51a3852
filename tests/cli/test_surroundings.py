"""Commands in other people's surroundings: another encoding, no home, a user without a name, YAML of version 1.2."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from genesis.base.cache_directory import find_cache_directory
from genesis.cli.surroundings import prepare_process
from genesis.recipe.yaml import FastRecipeLoader, dump_yaml, load_yaml
from tests.cli.conftest import Genesis

NAME = "\u00fcber"


@pytest.mark.process
@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, b"\\xfcber"),
        ({"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "latin-1"}, b"\xfcber"),
    ],
)
def test_an_output_that_is_not_utf8_shows_what_it_lacks_by_numbers(
    environment: dict[str, str], shown: bytes, tmp_path: Path
) -> None:
    """Reported as salesforce/ctrl#17 and Textualize/rich#826; names of files and arguments are UTF-8 all the same."""
    shutil.copytree(Path(__file__).parents[2] / "configs/corpora", tmp_path / NAME)
    command = [sys.executable, "-m", "genesis", "runs", NAME]
    clean = {key: os.environ[key] for key in ("PATH", "PYTHONPATH", "HOME") if key in os.environ}
    done = subprocess.run(command, cwd=tmp_path, env=clean | environment, capture_output=True, check=False)
    assert b"Traceback" not in done.stderr
    assert shown in done.stdout + done.stderr


def test_a_stream_whose_file_has_become_a_pipe_is_prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with (tmp_path / "log").open("w", encoding="ascii") as stream:
        os.dup2(writer, stream.fileno())  # as the launcher of a supervisor does whose output is a file
        monkeypatch.setattr(sys, "stdout", stream)
        prepare_process()
        print(NAME, flush=True)
    assert os.read(reader, 99) == b"\\xfcber\n"
    os.close(reader)
    os.close(writer)


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Makes this process one of a user without a name and a home; returns the place for temporary files."""

    def find(number: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", find)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME", "XDG_CACHE_HOME", "GENESIS_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_user_without_a_name_and_a_home_gets_both(nobody: Path) -> None:
    """Reported as pytorch/pytorch#140765: `docker run --user` with a number that has no account."""
    with pytest.raises(RuntimeError):
        find_cache_directory()
    prepare_process()
    home = nobody / f"genesis-home-{os.getuid()}"
    assert os.environ["USER"] == f"user-{os.getuid()}"
    assert find_cache_directory() == home / ".cache/genesis"
    assert home.stat().st_mode & 0o077 == 0


def test_a_home_that_another_user_has_prepared_is_not_taken(nobody: Path) -> None:
    (nobody / "evil").mkdir()
    (nobody / f"genesis-home-{os.getuid()}").symlink_to(nobody / "evil")
    prepare_process()
    assert Path(os.environ["HOME"]).resolve() != nobody / "evil"
    assert Path(os.environ["HOME"]).is_dir()


def test_what_the_environment_names_is_kept(monkeypatch: pytest.MonkeyPatch, nobody: Path) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("LOGNAME", "me")
    prepare_process()
    assert os.environ["HOME"] == "/nonexistent"
    assert "USER" not in os.environ


TYPES: dict[str, Any] = {
    **{
        word: word
        for word in (
            "no",
            "on",
            "Yes",
            "off",
            "y",
            "010",
            "007",
            "2024_01",
            "1_0",
            "12:30:45",
            "2024-01-01",
            "=",
            "0b11",
        )
    },
    **{"1e-4": 1e-4, "2E5": 2e5, "5.e-1": 0.5, ".5": 0.5, "-.inf": float("-inf"), "1_000": 1000, "-16_384": -16384},
    **{"0": 0, "+3": 3, "0x1F": 31, "0o17": 15, "true": True, "FALSE": False, "~": None, "null": None},
}


@pytest.mark.parametrize("word", TYPES)
def test_a_plain_word_has_one_type_in_every_reader_and_after_it_was_written(word: str) -> None:
    """Reported as hiyouga/LlamaFactory#4014, huggingface/trl#1450 and determined-ai/determined#2688 (`2e-5` as a text).

    The others are what YAML 1.1 takes for booleans, octal, sexagesimal numbers and dates.
    """
    wanted = TYPES[word]
    for found in (load_yaml(word, "x"), yaml.load(word, FastRecipeLoader)):
        assert (type(found), found) == (type(wanted), wanted)
    for value in (word, wanted):
        text = dump_yaml({"a": value})
        assert load_yaml(text, "x") == {"a": value}
        if isinstance(value, str):
            assert yaml.safe_load(text) == {"a": value}, "earlier versions read it, too"


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--trainer.max_steps", "12:30:45", "trainer.max_steps is '12:30:45': give a whole number or null"),
        ("--trainer.enable_progress_bar", "no", "trainer.enable_progress_bar is 'no': give true or false"),
        ("--data.seq_len", "1_6", "data.seq_len is '1_6': give a whole number or one of auto"),
    ],
)
def test_a_word_of_another_type_is_refused_by_the_parser_of_fit(
    option: str, value: str, said: str, genesis: Genesis, recipe: Path
) -> None:
    outcome = genesis("fit", "--config", str(recipe), option, value)
    assert outcome.status == 2
    assert said in outcome.err


@pytest.mark.parametrize("number", ["9" * 301, "0x" + "f" * 5000])
def test_a_number_of_hundreds_of_digits_is_refused(number: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"a number has [\d,]+ digits"):
        load_yaml(f"a: {number}", "x.yaml")
