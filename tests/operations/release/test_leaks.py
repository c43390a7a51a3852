"""What is planted into a folder is found, by file and line; what only looks like it is not."""

import io
import json
import re
import zipfile
from pathlib import Path
from typing import NoReturn

import pytest

from genesis.base.errors import UserError
from genesis.operations.release.leaks import Machine, check_text
from genesis.operations.release.release import plan_release
from tests.operations.release.conftest import OPTIONS
from tests.operations.release.hub import TOKEN

MACHINE = Machine(
    names={"the name of this machine": "gpu-box-7", "your name on this machine": "jdoe"},
    places=("/home/jdoe", "/srv/models"),
    roots=("home", "cluster"),
    secrets={"the value of WANDB_API_KEY": "0123456789abcdef"},
)

LEAKS = [
    ("made on gpu-box-7", "'gpu-box-7' is the name of this machine"),
    ("made on GPU-BOX-7.", "'GPU-BOX-7' is the name of this machine"),
    ("by jdoe", "'jdoe' is your name on this machine"),
    ('{"path": "/home/jdoe/runs/a"}', "'/home/jdoe/runs/a' is a path of this machine"),
    ("corpus: /cluster/share/web", "'/cluster/share/web' is a local path"),
    ("see `/scratch/a/b`", "'/scratch/a/b' is a local path"),
    ("file:///x", "'file:///x' is a local path"),
    ("~/notes.txt", "'~/notes.txt' is a local path"),
    ("~bob/x", "'~bob/x' is a local path"),
    ("log:/home/bob/run", "'/home/bob/run' is a local path"),
    ("PATH=/usr/bin:/home/bob/bin", "'/home/bob/bin' is a local path"),
    ("/fsx/runs", "'/fsx/runs' is a local path"),
    ("C:/Users/jdoe", "'C:/Users/jdoe' is a local path"),
    (r"\\nas\share\bob", "is a local path"),
    (r"C:\Users\jdoe", r"is a local path"),
    ("key 0123456789abcdef", "0123... is the value of WANDB_API_KEY"),
    (f"token: {TOKEN}", "hf_a... is a token of Hugging Face"),
    ("ghp_" + "a1" * 18, "ghp_... is a token of GitHub"),
    ("AKIA" + "A1" * 8, "AKIA... is an access key of AWS"),
    ("sk-" + "a1" * 12, "sk-a... is an API key"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----", "---- is a private key"),
    ("s3 = https://me:secret@example.org/x", "http... is a password in an address"),
]

HARMLESS = [
    "OpenAI's /v1/completions, and/or more",
    "https://example.org/home/x and s3://bucket/home/x",
    "gpu-box-70 and jdoes and gpu-box",
    "#!/usr/bin/env python",
    "monitor: validation/loss",
    "sk-learn, hf_hub, AKIA",
    "a </home/x> b",
    '{"sha256": "0123456789abcde"}',
]


@pytest.mark.parametrize(("text", "message"), LEAKS)
def test_what_is_planted_is_refused_by_file_and_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        check_text("README.md", f"one\ntwo\n{text}\n".encode(), MACHINE, ())
    line = str(error.value)
    assert line.startswith("README.md, line 3: ")
    assert message.replace("---- is", "----... is") in line.replace("\\\\", "\\")
    assert "\n" not in line


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_like_it_is_taken(text: str) -> None:
    check_text("README.md", text.encode(), MACHINE, ())


def test_a_credential_is_not_shown() -> None:
    with pytest.raises(UserError) as error:
        check_text("README.md", TOKEN.encode(), MACHINE, (TOKEN,))
    assert TOKEN[:8] not in str(error.value)


def test_a_word_may_be_allowed_and_no_other_with_it() -> None:
    check_text("README.md", b"by jdoe", MACHINE, ("jdoe",))
    with pytest.raises(UserError, match="gpu-box-7"):
        check_text("README.md", b"by jdoe on gpu-box-7", MACHINE, ("jdoe",))


def test_a_vocabulary_may_hold_words_and_paths_and_no_credential() -> None:
    for name in ("tokenizer.json", "tokenizer.model"):
        check_text(name, b"jdoe /scratch/a/b \xff", MACHINE, ())
        for leak in (TOKEN, "0123456789abcdef", "/home/jdoe/text"):
            with pytest.raises(UserError, match=f"{name}, line 1"):
                check_text(name, leak.encode(), MACHINE, ())


def test_what_lies_in_a_wheel_is_looked_at() -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as wheel:
        wheel.writestr("genesis/paths.py", "# /scratch/a/b is what a path looks like")
    check_text("wheels/a.whl", data.getvalue(), MACHINE, ())
    with zipfile.ZipFile(data, "a") as wheel:
        wheel.writestr("genesis/notes.txt", f"see\n{TOKEN}")
    with pytest.raises(UserError, match=r"wheels/a\.whl/genesis/notes\.txt, line 2: hf_a"):
        check_text("wheels/a.whl", data.getvalue(), MACHINE, ())


def test_this_machine_is_known_by_names_directories_and_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-box-7")
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    monkeypatch.setenv("SOME_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("SOME_TOKEN_FILE", str(tmp_path))
    monkeypatch.setattr("genesis.operations.release.leaks.HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    machine = Machine.read(tmp_path / "out")
    assert machine.names == {"the name of this machine": "gpu-box-7"}
    assert {str(Path.cwd()), str(tmp_path)} <= set(machine.places)
    assert {"the value of SOME_API_KEY", "your token of the Hub"} <= machine.secrets.keys()
    assert not {"the value of TOKENIZERS_PARALLELISM", "the value of SOME_TOKEN_FILE"} & machine.secrets.keys()


def test_a_user_without_a_name_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NoReturn:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", fail)
    assert "your name on this machine" not in Machine.read(tmp_path).names


@pytest.mark.parametrize("name", ["README.md", "proof.json", "LICENSE"])
def test_a_folder_is_not_made_of_an_export_that_says_where_it_was(name: str, exported: Path, tmp_path: Path) -> None:
    folder = plan_release(exported, OPTIONS)
    machine = Machine.read(exported, tmp_path)
    folder.check(machine, ())
    planted = f"made in {exported.parent}"
    folder.texts[name] = (json.dumps({"note": planted}) if name == "proof.json" else planted).encode()
    with pytest.raises(UserError, match=rf"{name}, line 1: .*{re.escape(str(exported.parent))}"):
        folder.check(machine, ())


def test_a_file_that_is_taken_is_looked_into(exported: Path, tmp_path: Path) -> None:
    folder = plan_release(exported, OPTIONS)
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": "/home/jdoe/model"}))
    folder.taken["config.json"] = (tmp_path / "config.json", "")
    with pytest.raises(UserError, match=r"config\.json, line 1: '/home/jdoe/model'"):
        folder.check(MACHINE, ())
