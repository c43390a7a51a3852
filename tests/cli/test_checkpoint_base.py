"""Commands on a run whose checkpoints leave tensors to a base: each reads them there, or refuses in one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from genesis.cli.main import main
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.tokenizer.open import open_tokenizer
from genesis_callbacks.checkpoint import CheckpointError, SaveScope, read_tensors
from genesis_callbacks.checkpoint.tensor_places import PLACES_VARIABLE
from tests.tiny_runs import build_decoder, save

HELD = "model.decoder.norm.weight"


@pytest.fixture
def identity(run: Path) -> dict[str, str]:
    return {"tokenizer_hash": open_tokenizer(run).hash}


@pytest.fixture
def base(tmp_path: Path, run: Path, identity: dict[str, str]) -> Path:
    for name in ("base", "run"):
        (tmp_path / name).mkdir()
        shutil.copy(run / "tokenizer.model", tmp_path / name)
    return save(tmp_path / "base" / "checkpoints", 1, build_decoder(1), identity)


@pytest.fixture
def scoped(base: Path, tmp_path: Path, identity: dict[str, str]) -> Path:
    """The second checkpoint of a run that holds one tensor of the model and leaves the others to the base."""
    decoder, directory = build_decoder(1), tmp_path / "run" / "checkpoints"
    scope = SaveScope(base, ["model.*"], not_in_base=[HELD])
    for step in (2, 3):
        with torch.no_grad():
            decoder.norm.weight += 1
        path = save(directory, step, decoder, identity, scope=scope)
    return path


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    status = main(["checkpoint", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_every_command_reads_the_tensors_of_the_base(
    base: Path, scoped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = scoped.parent.parent
    status, text = run_command(capsys, "show", scoped)
    assert status == 0
    assert f"tensorsin{base}" in "".join(text.split())
    assert run_command(capsys, "verify", run, "--level", "deep", "--finite")[0] == 0
    status, text = run_command(capsys, "diff", base, scoped, "--json")
    assert status == 0
    assert [one["name"] for one in json.loads(text)["tensors"]] == [HELD]
    assert run_command(capsys, "list", run)[0] == 0
    assert run_command(capsys, "repair", run)[0] == 0
    status, text = run_command(capsys, "to-lightning", scoped, tmp_path / "out.ckpt")
    assert status == 0, text
    loaded = torch.load(tmp_path / "out.ckpt", weights_only=True)["state_dict"]
    stored = read_tensors(scoped, prefix="model.")
    assert {f"model.{name}" for name in loaded} == stored.keys()


@pytest.mark.process
@pytest.mark.slow
def test_an_export_has_the_tensors_of_both(scoped: Path, tmp_path: Path) -> None:
    export_checkpoints([scoped], tmp_path / "out", ExportOptions(layout="safetensors"))
    exported, due = load_file(tmp_path / "out" / "model.safetensors"), build_decoder(1).state_dict()
    due["norm.weight"] += 2
    assert exported.keys() == due.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in due.items())


@pytest.mark.parametrize("command", ["verify", "diff", "to-lightning"])
def test_a_base_that_is_gone_is_one_line_with_the_remedy_and_its_new_place_is_taken(
    base: Path,
    scoped: Path,
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = shutil.copytree(base, tmp_path / "elsewhere" / base.name)
    shutil.rmtree(base)
    more = {"verify": [], "diff": [scoped.with_name("step-00000002")], "to-lightning": [tmp_path / "out.ckpt"]}[command]
    status, text = run_command(capsys, command, scoped, *more)
    assert status == 1
    assert len(text.splitlines()) == 1
    assert "there is no such directory" in text
    assert PLACES_VARIABLE in text
    assert run_command(capsys, "show", scoped)[0] == 0
    monkeypatch.setenv(PLACES_VARIABLE, str(moved))
    assert run_command(capsys, command, scoped, *more)[0] == 0


def test_repair_leaves_a_checkpoint_whose_base_is_gone(
    base: Path, scoped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(base)
    status, text = run_command(capsys, "repair", scoped.parent.parent, "--apply")
    assert status == 1
    assert "there is no such directory" in "".join(text.split("\n"))
    assert sorted(path.name for path in scoped.parent.glob("*-*")) == ["step-00000002", "step-00000003"]


def test_prune_keeps_the_base_of_a_checkpoint_of_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run" / "checkpoints"
    base = save(directory, 1, build_decoder(1), {})
    for step in (2, 3):
        save(directory, step, build_decoder(1), {}, scope=SaveScope(base, ["model.*"], not_in_base=[HELD]))
    for more in (["--dry_run"], []):
        status, text = run_command(capsys, "prune", tmp_path / "run", "--keep_last", "1", "--json", *more)
        assert status == 0
        assert json.loads(text)["removed"] == ["step-00000002"]
    assert run_command(capsys, "verify", tmp_path / "run", "--level", "deep")[0] == 0


def test_prune_refuses_to_judge_checkpoints_whose_base_is_away(
    base: Path, tmp_path: Path, identity: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, decoder = tmp_path / "run" / "checkpoints", build_decoder(1)
    save(directory, 1, decoder, identity)  # holds everything, and verifies without the base
    scope = SaveScope(base, ["model.*"], not_in_base=[HELD])
    paths = [save(directory, step, decoder, identity, scope=scope) for step in (2, 3, 4)]
    (paths[-1] / "state.json").unlink()
    away = base.rename(tmp_path / "unmounted")
    for more in (["--dry_run"], []):
        status, text = run_command(capsys, "prune", tmp_path / "run", "--keep_last", "1", *more)
        assert status == 1
        assert len(text.splitlines()) == 1
        assert f"{paths[1]} leaves" in text
        assert "there is no such directory" in text
    assert sorted(path.name for path in directory.glob("step-*")) == [f"step-{step:08d}" for step in (1, 2, 3, 4)]
    away.rename(base)
    status, text = run_command(capsys, "prune", tmp_path / "run", "--keep_last", "1", "--json")
    content = json.loads(text)
    assert (status, content["newest_verified"], content["bad"]) == (1, "step-00000003", ["step-00000004"])
    assert content["removed"] == ["step-00000001", "step-00000002"]


def test_an_export_of_safetensors_is_no_base_yet(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="safetensors have no digests to compare with"):
        save(tmp_path / "run", 2, build_decoder(1), {}, scope=SaveScope(exported, ["model.*"]))
