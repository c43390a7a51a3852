"""`genesis release`: what it shows, that it contacts nobody unasked, and bad input in one line."""

import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from huggingface_hub import constants

from tests.cli.conftest import Genesis
from tests.cli.test_bad_input import check_is_one_line
from tests.operations.release.hub import TOKEN, Hub, serve_hub

WHAT = ("--repo", "some-lab/tiny", "--license", "mit")


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is logged in, whoever runs the tests."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for module in ("huggingface_hub.constants", "genesis.operations.release.leaks"):
        monkeypatch.setattr(f"{module}.HF_TOKEN_PATH", str(tmp_path / "no-token"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as hub:
        yield hub


@pytest.mark.slow
def test_a_dry_run_makes_the_folder_shows_every_file_and_contacts_nobody(
    genesis: Genesis, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("somebody was contacted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    out = tmp_path / "out"
    outcome = genesis("release", str(exported), str(out), *WHAT, "--version", "2.0.0", "--dry_run", "--upload")
    assert outcome.status == 0, outcome.err
    files = {path.name: path.stat().st_size for path in out.iterdir()}
    assert f"{out}: model some-lab/tiny, tag v2.0.0, {len(files)} files" in outcome.out
    shown = dict(reversed(line.split()) for line in outcome.out.splitlines() if line.startswith("  "))
    assert {name: int(size.replace(",", "")) for name, size in shown.items()} == files
    assert "nothing was uploaded" in outcome.out
    assert genesis("release", str(exported), str(out), *WHAT, "--version", "2.0.0", "--dry_run").out == outcome.out


@pytest.mark.slow
def test_without_token_or_network_the_folder_stays_and_the_same_command_goes_on(
    genesis: Genesis, exported: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, space = tmp_path / "out", tmp_path / "space"
    command = ("release", str(exported), str(out), *WHAT, "--space", str(space), "--private", "--upload")
    check_is_one_line(genesis(*command), "no token for the Hub", "hf auth login", str(out))
    files = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    check_is_one_line(genesis(*command), "http://127.0.0.1:9 cannot be reached", "run the same command again")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    outcome = genesis(*command)
    assert outcome.status == 0, outcome.err
    assert f"{out}: {hub.url}/some-lab/tiny" in outcome.out
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == files
    assert hub.repositories["models/some-lab/tiny"].files.keys() == files.keys()
    page = hub.repositories["spaces/some-lab/tiny"]
    assert page.files["models/tiny/config.json"] == (exported / "config.json").read_bytes()
    assert page.is_private
    hub.repositories["spaces/some-lab/tiny"].tags.clear()  # as if only the first had been through
    assert genesis(*command).out == outcome.out
    assert hub.repositories["spaces/some-lab/tiny"].tags.keys() == {"v1.0.0"}
    hub.repositories["models/some-lab/tiny"].snapshots.clear()
    hub.repositories["models/some-lab/tiny"].snapshots[f"{1:040x}"] = {}
    check_is_one_line(genesis(*command), "already has a different version 1.0.0", "--version")


@pytest.mark.slow
def test_bad_input_is_one_line(genesis: Genesis, exported: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    check_is_one_line(genesis("release", str(tmp_path / "nowhere"), out, *WHAT), "nowhere", "`genesis export`")
    check_is_one_line(
        genesis("release", str(checkpoint), out, *WHAT), "is a checkpoint, not an export", "`genesis export"
    )
    check_is_one_line(genesis("release", str(exported), str(checkpoint), *WHAT), "already exists")
    check_is_one_line(genesis("release", str(exported), out, *WHAT, "--space", str(checkpoint)), "already exists")
    check_is_one_line(genesis("release", str(exported), out, "--license", "mit"), "--repo")
    check_is_one_line(genesis("release", str(exported), out, *WHAT, "--license", "apache"), "did you mean apache-2.0")
    check_is_one_line(genesis("release", str(exported), out, *WHAT, "--license_file", out), "cannot read", out)
    check_is_one_line(genesis("release", str(exported), out, *WHAT, "--licence", "mit"), "did you mean --license")
    assert not Path(out).exists()


def test_folders_that_lie_in_each_other_are_refused(genesis: Genesis, exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for release, space in (
        (exported, out),
        (out, exported),
        (out, out),
        (out, out / "space"),
        (out / "release", out),
        (exported / "out", out),
    ):
        command = ["release", str(exported), str(release), *WHAT, "--space", str(space)]
        check_is_one_line(genesis(*command), "give directories that do not contain each other")
    assert not out.exists()


def test_a_path_in_the_card_is_refused_unless_it_may_be_public(
    genesis: Genesis, exported: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported, tmp_path / "model")
    with (tmp_path / "model/README.md").open("a") as card:
        card.write("Trained in /scratch/ours/a.\n")
    out = str(tmp_path / "out")
    outcome = genesis("release", str(tmp_path / "model"), out, *WHAT)
    check_is_one_line(outcome, "README.md, line", "'/scratch/ours/a' is a local path", "--allow")
    assert not Path(out).exists()
    assert genesis("release", str(tmp_path / "model"), out, *WHAT, "--allow", "/scratch/ours/a").status == 0


def test_without_the_extra_the_command_names_it(genesis: Genesis, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("genesis.cli.release", "genesis.operations.release.upload"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    check_is_one_line(genesis("release", "a", "b", *WHAT), "needs huggingface_hub", "genesis-lm[release]")
