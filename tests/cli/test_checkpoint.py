"""`genesis checkpoint ...` on small real checkpoints: whole, flipped, truncated, half written, quarantined."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from genesis.cli.main import main
from genesis.train.recipe_policy import RECIPE_POLICY
from genesis_callbacks.base.hashing import hash_bytes
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import (
    Ranks,
    RunMetadata,
    SaveTarget,
    Snapshot,
    read_manifest,
    save_blocking,
    verify,
)
from genesis_callbacks.checkpoint.best import Measured, mark_best, rank
from genesis_callbacks.checkpoint.compare import max_abs_difference
from genesis_callbacks.checkpoint.drift import find_drift
from genesis_callbacks.checkpoint.lineage import DirectoryLock
from tests.cli.conftest import Genesis
from tests.planted import Payload, plant_pickles

RECIPE = {"model": {"decoder": {"dim": 4}, "optimizer": {"lr": 0.1}}, "trainer": {"max_steps": 6, "devices": 1}}


def tensors_of(step: int, norm: float) -> dict[str, Tensor]:
    weight = torch.arange(12.0).view(3, 4)
    return {
        "model.decoder.blocks.0.weight": weight + step,
        "model.decoder.norm.weight": torch.full((4,), norm),
        "optimizer.0.decoder.blocks.0.weight.exp_avg": weight * 2,
        "state.0.rng.torch": torch.tensor([step, 255], dtype=torch.uint8),
    }


def save_run(
    run: Path, steps: tuple[int, ...] = (2, 4, 6), recipe: dict[str, Any] | None = None, norm: float = 1.0
) -> list[Path]:
    """Saves tensors that depend on the step, one checkpoint after another."""
    directory = run / "checkpoints"
    directory.mkdir(parents=True)
    target = SaveTarget(directory, Ranks(), origin=RunMetadata({"tokenizer_hash": "abc"}, recipe or RECIPE))

    def save(step: int) -> Path:
        tensors = tensors_of(step, norm)
        parts = [part for name, tensor in tensors.items() for part in local_shards(name, tensor, "parameter")]
        return save_blocking(target, lambda: Snapshot(step, {"tokens_seen": 1000 * step}, parts, {"step": step}))

    return [save(step) for step in steps]


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    status = main(["checkpoint", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, Any]:
    status = main(["checkpoint", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the lock, with its bytes."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# ---- list


def test_list_tells_step_tokens_age_size_state_and_whether_it_verifies(tmp_path, capsys):
    paths = save_run(tmp_path)
    status, out = run_command(capsys, "list", tmp_path)
    assert status == 0
    assert all(word in out for word in ("step-00000006", "6,000", "committed", "quick", "kB"))
    status, content = run_json(capsys, "list", tmp_path, "--level", "deep")
    assert status == 0
    rows = content["checkpoints"]
    assert [(row["name"], row["step"], row["tokens_seen"], row["verified"]) for row in rows] == [
        (path.name, step, 1000 * step, "deep") for path, step in zip(paths, (2, 4, 6), strict=True)
    ]
    assert [row["num_bytes"] for row in rows] == [sum(f.stat().st_size for f in path.iterdir()) for path in paths]


def test_list_has_what_is_in_flight_put_aside_superseded_and_in_the_trash_but_nothing_foreign(tmp_path, capsys):
    paths = save_run(tmp_path)
    directory = tmp_path / "checkpoints"
    shutil.copytree(paths[0], directory / "step-00000008.staging-1a2b3c4d")
    (directory / "step-00000008.staging-1a2b3c4d" / "COMMITTED").unlink()
    shutil.copytree(paths[1], directory / "quarantined-step-00000004")
    shutil.copytree(paths[1], directory / "superseded-1" / "step-00000004")
    shutil.copytree(paths[0], directory / ".trash" / "step-00000002")
    (directory / "notes").mkdir()
    (directory / "step-notes").mkdir()
    status, content = run_json(capsys, "list", tmp_path)
    assert status == 0
    assert [(row["name"], row["state"]) for row in content["checkpoints"]] == [
        ("step-00000002", "committed"),
        ("step-00000004", "committed"),
        ("step-00000006", "committed"),
        ("step-00000008.staging-1a2b3c4d", "staging"),
        ("quarantined-step-00000004", "quarantined"),
        ("superseded-1/step-00000004", "superseded"),
        (".trash/step-00000002", "trash"),
    ]
    assert [row["verified"] for row in content["checkpoints"]] == ["quick"] * 3 + [None] * 4


def test_list_shows_the_metric_of_every_marked_checkpoint(tmp_path, capsys):
    paths = save_run(tmp_path)
    measured = rank([Measured(2, 2.35), Measured(6, 2.3125)], "min")
    mark_best(tmp_path / "checkpoints", measured, "validation/loss", "min", count=2)
    shutil.copytree(paths[2], tmp_path / "checkpoints/superseded-1/step-00000006")  # another one of that name
    _, content = run_json(capsys, "list", tmp_path)
    assert [(row["is_best"], row["metric"]) for row in content["checkpoints"]] == [
        (False, {"name": "validation/loss", "value": 2.35, "rank": 2}),
        (False, None),
        (True, {"name": "validation/loss", "value": 2.3125, "rank": 1}),
        (False, None),
    ]
    lines = run_command(capsys, "list", tmp_path)[1].splitlines()
    shown = [line for line in lines if "validation/loss" in line]
    assert len(shown) == 2
    assert "step-00000002" in shown[0]
    assert shown[0].rstrip(" │").endswith("validation/loss 2.35")
    assert "step-00000006" in shown[1]
    assert shown[1].rstrip(" │").endswith("validation/loss 2.3125 (best)")
    _, content = run_json(capsys, "prune", tmp_path, "--keep_last", "1", "--dry_run")
    assert content["removed"] == ["step-00000004"]


def test_list_of_a_run_with_a_missing_file_says_which_and_is_bad(tmp_path, capsys):
    paths = save_run(tmp_path)
    (paths[1] / "__0_0.distcp").unlink()
    status, out = run_command(capsys, "list", tmp_path)
    assert status == 1
    assert "__0_0.distcp is missing" in " ".join(out.split())


def test_reading_takes_no_lock_and_changes_nothing(tmp_path, capsys):
    paths = save_run(tmp_path)
    flip_byte(paths[1] / "state.json")
    lock = DirectoryLock(tmp_path / "checkpoints")
    before = contents(tmp_path)
    for arguments in (("list", tmp_path), ("verify", tmp_path), ("repair", tmp_path)):
        run_command(capsys, *arguments)
    for arguments in (
        ("show", tmp_path),
        ("diff", paths[0], paths[2]),
        ("prune", tmp_path, "--keep_last", "1", "--dry_run"),
    ):
        assert run_command(capsys, *arguments)[0] == 0
    assert contents(tmp_path) == before
    lock.release()


# ---- show


def test_show_is_the_manifest_with_parts_and_lineage(tmp_path, capsys):
    paths = save_run(tmp_path)
    status, content = run_json(capsys, "show", tmp_path)
    assert status == 0
    assert content["path"] == str(paths[-1])
    assert content["manifest"] == json.loads((paths[-1] / "manifest.json").read_bytes())
    assert [(part["part"], part["num_tensors"], part["num_elements"]) for part in content["parts"]] == [
        ("model.decoder.blocks", 1, 12),
        ("model.decoder.norm", 1, 4),
        ("optimizer.0 exp_avg", 1, 12),
        ("state.0", 1, 2),
    ]
    assert [(row["name"], row["state"]) for row in content["lineage"]] == [
        ("step-00000004", "there"),
        ("step-00000002", "there"),
    ]
    status, out = run_command(capsys, "show", paths[1])
    assert status == 0
    assert all(word in out for word in ("max_steps: 6", "abc", "version of torch", "__0_0.distcp", "exp_avg", "4,000"))


def test_show_has_its_tables_before_files_and_recipe_and_no_empty_column(tmp_path, capsys):
    save_run(tmp_path)
    out = run_command(capsys, "show", tmp_path)[1]
    places = [
        out.index(words) for words in ("number in its lineage", "exp_avg", "descends from", "__0_0.distcp", "max_steps")
    ]
    assert places == sorted(places)
    listed = run_command(capsys, "list", tmp_path)[1]
    assert "verified" in listed
    assert "best" not in listed  # none is marked


def test_show_says_where_the_lineage_ends(tmp_path, capsys):
    paths = save_run(tmp_path)
    shutil.rmtree(paths[0])
    _, content = run_json(capsys, "show", paths[2])
    assert [row["state"] for row in content["lineage"]] == ["there", "gone"]
    save_run(tmp_path / "other", (4,))
    shutil.rmtree(paths[1])
    shutil.copytree(tmp_path / "other/checkpoints/step-00000004", paths[1])
    _, content = run_json(capsys, "show", paths[2])
    assert [row["state"] for row in content["lineage"]] == ["replaced"]


def test_show_and_diff_of_a_damaged_checkpoint_are_bad_in_one_line(tmp_path, capsys):
    paths = save_run(tmp_path)
    flip_byte(paths[1] / "manifest.json")
    for arguments in (("show", paths[1]), ("diff", paths[0], paths[1])):
        status, out = run_command(capsys, *arguments)
        assert status == 1
        assert len(out.splitlines()) == 1
        assert "manifest.json does not have the hash in COMMITTED" in out


# ---- verify


@pytest.mark.parametrize("level", ["quick", "full", "deep"])
def test_verify_of_a_whole_run_is_good(tmp_path, capsys, level):
    paths = save_run(tmp_path)
    status, out = run_command(capsys, "verify", tmp_path, "--level", level)
    assert status == 0
    assert out.splitlines() == [f"{path}: verified ({level})" for path in paths]


def test_verify_finds_a_flipped_byte_that_quick_cannot_see(tmp_path, capsys):
    paths = save_run(tmp_path)
    flip_byte(paths[1] / "__0_0.distcp")
    assert run_command(capsys, "verify", tmp_path, "--level", "quick")[0] == 0
    status, content = run_json(capsys, "verify", tmp_path)
    assert status == 1
    assert [row["is_verified"] for row in content["checkpoints"]] == [True, False, True]
    assert "__0_0.distcp does not have the hash that was saved" in content["checkpoints"][1]["problem"]
    assert run_command(capsys, "verify", paths[1])[0] == 1
    assert run_command(capsys, "verify", paths[2])[0] == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_may_not_be_read_is_bad_but_not_called_corrupt(tmp_path, capsys):
    paths = save_run(tmp_path)
    (paths[1] / "__0_0.distcp").chmod(0)
    status, content = run_json(capsys, "repair", tmp_path)
    assert status == 1
    assert [(row["action"], row["is_bad"]) for row in content["repairs"]] == [("none", True)]


def test_a_newer_schema_is_bad_but_never_put_aside(tmp_path, capsys):
    paths = save_run(tmp_path)
    content = json.loads((paths[2] / "manifest.json").read_bytes())
    data = json.dumps({**content, "schema_version": 99}).encode()
    (paths[2] / "manifest.json").write_bytes(data)
    (paths[2] / "COMMITTED").write_bytes(b"blake3:" + hash_bytes(data, "blake3").encode())
    status, out = run_command(capsys, "verify", tmp_path)
    assert status == 1
    assert "schema 99" in out
    status, content = run_json(capsys, "repair", tmp_path, "--apply")
    assert status == 1
    assert [row["action"] for row in content["repairs"]] == ["none"]
    assert paths[2].exists()


# ---- verify, of others


def write_torch_file(directory: Path, content: dict[str, Any]) -> Path:
    path = directory / "model.ckpt"
    torch.save(content, path)
    return path


def lightning_content(weight: Tensor) -> dict[str, Any]:
    state = {0: {"step": torch.tensor(3.0), "exp_avg": weight * 2, "exp_avg_sq": weight * 3}}
    return {"state_dict": {"net.weight": weight}, "optimizer_states": [{"state": state}], "global_step": 3}


def test_verify_tells_what_a_file_of_torch_save_holds(tmp_path, capsys):
    path = write_torch_file(tmp_path, lightning_content(torch.ones(8, 4)))
    status, out = run_command(capsys, "verify", path, "--finite")
    assert status == 0
    words = ("looks complete", "step 3", "1 tensor, 128 bytes", "number 0: 3 tensors for 1 parameter, 260 bytes")
    assert all(word in out for word in (*words, "all values", "this format has no digests to compare with"))
    status, content = run_json(capsys, "verify", path)
    assert status == 0
    (row,) = content["checkpoints"]
    assert (row["format"], row["step"], row["is_verified"], row["problem"]) == ("torch", 3, True, None)


def test_verify_tells_what_a_directory_of_dcp_holds_and_what_it_has_lost(tmp_path, capsys):
    path = tmp_path / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is used to ranks
        dcp.save({"state_dict": {"weight": torch.ones(8, 4)}}, checkpoint_id=path)
    status, out = run_command(capsys, "verify", path, "--finite")
    assert status == 0
    assert all(word in out for word in ("1 tensor, 128 bytes", "no state, only weights"))
    (path / "__0_0.distcp").unlink()
    status, out = run_command(capsys, "verify", path)
    assert status == 1
    assert "BAD: __0_0.distcp is missing, with parts of 1 tensor, such as state_dict.weight" in out


def test_verify_tells_what_safetensors_hold_and_where_they_are_cut(tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(8, 4)}, path)
    for place in (path, tmp_path):
        status, content = run_json(capsys, "verify", place)
        assert status == 0
        assert content["checkpoints"][0]["model"] == {"num_tensors": 1, "num_bytes": 128}
    os.truncate(path, path.stat().st_size - 1)
    status, out = run_command(capsys, "verify", path)
    assert status == 1
    assert "model.safetensors is truncated" in out


def test_verify_of_an_empty_one_is_bad(tmp_path, capsys):
    path = write_torch_file(tmp_path, {**lightning_content(torch.ones(2)), "state_dict": {}})
    status, out = run_command(capsys, "verify", path)
    assert status == 1
    assert "BAD: contains no tensor of a model" in out


def test_verify_names_planted_code_and_does_not_run_it(tmp_path, capsys):
    path = write_torch_file(tmp_path, {"state_dict": {}, "hyper_parameters": Payload(tmp_path / "it-ran")})
    status, out = run_command(capsys, "verify", path, "--finite")
    assert status == 1
    assert len(out.splitlines()) == 1
    assert "holds a posix.mkdir, which is not plain data" in out
    assert not (tmp_path / "it-ran").exists()


def test_verify_finds_values_that_are_not_finite_only_when_asked(tmp_path, capsys):
    weight = torch.ones(8, 4)
    weight[1, 2] = torch.nan
    path = write_torch_file(tmp_path, lightning_content(weight))
    assert run_command(capsys, "verify", path)[0] == 0
    status, out = run_command(capsys, "verify", path, "--finite")
    assert status == 1
    assert "values that are not finite in 3 tensors, such as net.weight (1 value)" in out


def test_verify_finds_values_that_are_not_finite_in_our_own(tmp_path, capsys):
    save_run(tmp_path / "good", (2,))
    status, out = run_command(capsys, "verify", tmp_path / "good", "--finite")
    assert status == 0
    assert "verified (full, finite)" in out
    (path,) = save_run(tmp_path / "bad", (2,), norm=torch.inf)
    assert run_command(capsys, "verify", path, "--level", "deep")[0] == 0
    status, out = run_command(capsys, "verify", path, "--finite")
    assert status == 1
    assert "BAD: values that are not finite in 1 tensor, such as decoder.norm.weight (4 values)" in out


def test_an_export_in_a_runs_directory_does_not_hide_its_checkpoints(tmp_path, capsys):
    save_run(tmp_path, (2,))
    save_file({"weight": torch.ones(2)}, tmp_path / "export.safetensors")
    status, out = run_command(capsys, "verify", tmp_path)
    assert status == 0
    assert out.endswith("step-00000002: verified (full)\n")


@pytest.mark.filterwarnings("ignore:Training failed .BadCheckpointError.")
def test_a_stub_that_other_code_writes_ends_a_fit_with_status_1(genesis: Genesis, recipe: Path, tmp_path: Path):
    exports = tmp_path / "exports"
    exports.mkdir()

    def write_stub() -> None:
        deadline_seconds = time.monotonic() + 120
        while not (tmp_path / "run/checkpoints/step-00000002").exists() and time.monotonic() < deadline_seconds:
            time.sleep(0.01)
        save_file({"nothing": torch.ones(1)}, exports / "model.safetensors")

    writer = threading.Thread(target=write_stub)
    writer.start()
    options = {"--verification.directory": exports, "--verification.poll_seconds": 0.05, "--trainer.max_steps": 50_000}
    outcome = genesis("fit", "--config", str(recipe), *(f"{name}={value}" for name, value in options.items()))
    writer.join()
    assert outcome.status == 1
    assert outcome.err.count("genesis: error: ") == 1
    assert "exports/model.safetensors is incomplete or wrong: holds 0 of " in outcome.err


def test_a_file_that_is_no_checkpoint_is_misuse(tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    for command in ("verify", "show"):
        status, out = run_command(capsys, command, path)
        assert status == 2
        assert "notes.txt is a file: give a run's directory" in out


# ---- diff


def test_diff_has_settings_counters_and_tensors(tmp_path, capsys):
    paths = save_run(tmp_path / "a")
    recipe = {"model": {"decoder": {"dim": 4}, "optimizer": {"lr": 0.2}}, "trainer": {"max_steps": 6, "devices": 2}}
    others = save_run(tmp_path / "b", recipe=recipe)
    status, content = run_json(capsys, "diff", paths[0], others[2])
    assert status == 0
    assert content["counters"]["tokens_seen"] == {"a": 2000, "b": 6000}
    assert [(row["key"], row["area"], row["before"], row["now"], row["verdict"]) for row in content["settings"]] == [
        ("model.optimizer.lr", "optimizer", 0.1, 0.2, "refused"),
        ("trainer.devices", "trainer", 1, 2, "free"),
    ]
    assert content["num_same_tensors"] == 2
    assert [(row["name"], row["max_abs_difference"]) for row in content["tensors"]] == [
        ("model.decoder.blocks.0.weight", 4.0),
        ("state.0.rng.torch", 4.0),
    ]
    digest = read_manifest(paths[0]).tensors["model.decoder.blocks.0.weight"].digest
    assert content["tensors"][0]["a"]["digest"] == f"{digest:016x}"
    status, out = run_command(capsys, "diff", paths[0], others[2])
    assert status == 0
    assert all(word in out for word in ("must be allowed", "4.000e+00", "equal: 2 tensors; different: 2"))


def test_diff_of_a_checkpoint_with_itself_finds_nothing(tmp_path, capsys):
    paths = save_run(tmp_path)
    status, content = run_json(capsys, "diff", paths[0], paths[0])
    assert (status, content["settings"], content["tensors"], content["num_same_tensors"]) == (0, [], [], 4)


def test_diff_that_meets_a_damaged_tensor_is_bad(tmp_path, capsys):
    paths = save_run(tmp_path)
    shard = paths[1] / "__0_0.distcp"
    chunk = read_manifest(paths[1]).tensors["model.decoder.blocks.0.weight"].chunks[0]
    data = bytearray(shard.read_bytes())
    data[chunk.data_offset] ^= 1
    shard.write_bytes(data)
    status, out = run_command(capsys, "diff", paths[0], paths[1])
    assert status == 1
    assert "__0_0.distcp does not have the hash that was saved" in out


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.tensor([1.0, torch.nan, torch.inf]), torch.tensor([1.5, torch.nan, torch.inf]), 0.5),
        (torch.tensor([1.0]), torch.tensor([torch.nan]), torch.inf),
        (torch.tensor([2**53 + 1]), torch.tensor([2**53]), 1.0),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([255, 255], dtype=torch.uint8), 255.0),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 1j]), 3.0),
        (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.5, dtype=torch.bfloat16), 0.5),
    ],
)
def test_max_abs_difference_of_every_kind_of_number(one, other, expected):
    assert max_abs_difference(one, other) == expected


def forge_digest(path: Path) -> None:
    """Changes a digest in the manifest, and the marker with it: every hash is right, and a tensor is not."""
    content = json.loads((path / "manifest.json").read_bytes())
    content["tensors"]["model.decoder.norm.weight"]["digest"] = "0" * 16
    data = json.dumps(content).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "COMMITTED").write_bytes(b"blake3:" + hash_bytes(data, "blake3").encode())


@pytest.mark.parametrize("damaged", [0, 1])
def test_diff_of_a_flipped_bit_is_bad_although_the_manifests_agree(tmp_path, capsys, damaged):
    paths = [save_run(tmp_path / name, (2,))[0] for name in ("a", "b")]
    assert run_command(capsys, "diff", *paths)[0] == 0
    flip_byte(paths[damaged] / "__0_0.distcp")
    status, out = run_command(capsys, "diff", *paths)
    assert status == 1
    assert len(out.splitlines()) == 1
    assert f"{paths[damaged]}: __0_0.distcp does not have the hash that was saved" in out


def test_diff_of_a_wrong_digest_is_bad(tmp_path, capsys):
    older, newer, _ = save_run(tmp_path)
    forge_digest(newer)
    status, out = run_command(capsys, "diff", older, newer)
    assert status == 1
    assert "model.decoder.norm.weight has digest" in out


# ---- prune


def test_prune_keeps_what_it_is_told_to_keep(tmp_path, capsys):
    save_run(tmp_path, (1, 2, 3, 4, 5, 6))
    arguments = ("prune", tmp_path, "--keep_last", "2", "--keep_every_n_steps", "3")
    before = contents(tmp_path)
    status, dry = run_json(capsys, *arguments, "--dry_run")
    assert status == 0
    assert contents(tmp_path) == before
    status, content = run_json(capsys, *arguments)
    assert status == 0
    assert content == {**dry, "is_dry_run": False}
    assert content["removed"] == ["step-00000001", "step-00000002", "step-00000004"]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("step-"))
    assert names == content["kept"] == ["step-00000003", "step-00000005", "step-00000006"]
    assert content["num_bytes"] > 0


def test_prune_never_removes_the_newest_that_verifies(tmp_path, capsys):
    paths = save_run(tmp_path)
    for path in paths[1:]:
        flip_byte(path / "__0_0.distcp")
    status, content = run_json(capsys, "prune", tmp_path, "--keep_last", "1")
    assert status == 1
    assert content["newest_verified"] == "step-00000002"
    assert content["bad"] == ["step-00000006", "step-00000004"]
    assert verify(paths[0], "deep").step == 2


def test_prune_removes_nothing_where_nothing_verifies(tmp_path, capsys):
    paths = save_run(tmp_path)
    for path in paths:
        flip_byte(path / "__0_0.distcp")
    status, content = run_json(capsys, "prune", tmp_path, "--keep_last", "1")
    assert (status, content["removed"], content["newest_verified"]) == (1, [], None)
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("arguments", [("prune", "--keep_last", "1"), ("repair", "--apply")])
def test_what_changes_a_directory_is_refused_while_a_run_holds_it(tmp_path, capsys, arguments):
    paths = save_run(tmp_path)
    lock = DirectoryLock(tmp_path / "checkpoints")
    status, out = run_command(capsys, *arguments, tmp_path)
    assert status == 2
    assert f"in use by another run (process {os.getpid()})" in out
    assert all(path.exists() for path in paths)
    lock.release()
    assert run_command(capsys, *arguments, tmp_path)[0] == 0


# ---- repair


def test_repair_says_what_to_do_and_does_it_when_asked(tmp_path, capsys):
    paths = save_run(tmp_path)
    directory = tmp_path / "checkpoints"
    flip_byte(paths[2] / "__0_0.distcp")
    (paths[1] / "COMMITTED").unlink()
    staging = directory / "step-00000008.staging-1a2b3c4d"
    staging.mkdir()
    (staging / "__0_0.distcp").write_bytes(b"half a sha")
    left = directory / ".trash" / "step-00000001"
    left.mkdir(parents=True)
    before = contents(tmp_path)

    status, content = run_json(capsys, "repair", tmp_path)
    assert status == 1
    assert contents(tmp_path) == before
    assert [(Path(row["path"]).name, row["action"], row["is_bad"]) for row in content["repairs"]] == [
        ("step-00000006", "quarantine", True),
        ("step-00000004", "quarantine", True),  # without a manifest nobody knows its place: it comes as the newest
        ("step-00000008.staging-1a2b3c4d", "discard", False),
        (".trash", "empty_trash", False),
    ]
    assert content["latest"] == "step-00000002"

    status, out = run_command(capsys, "repair", tmp_path, "--apply")
    assert status == 0
    assert "quarantined as quarantined-step-00000006" in out
    names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
    assert names == ["quarantined-step-00000004", "quarantined-step-00000006", "step-00000002"]
    assert not (directory / ".trash").exists()
    status, out = run_command(capsys, "repair", tmp_path)
    assert status == 0
    assert "resumes from step-00000002" in out


def test_repair_reports_a_wrong_digest_under_right_hashes_and_prune_keeps_the_one_before(tmp_path, capsys):
    _, good, bad = save_run(tmp_path)
    forge_digest(bad)
    status, content = run_json(capsys, "prune", tmp_path, "--keep_last", "1")
    assert (status, content["newest_verified"], content["bad"]) == (1, good.name, [bad.name])
    assert good.exists()
    status, content = run_json(capsys, "repair", tmp_path)
    assert status == 1
    assert [(Path(row["path"]), row["action"]) for row in content["repairs"]] == [(bad, "quarantine")]
    assert "model.decoder.norm.weight has digest" in content["repairs"][0]["reason"]
    assert content["latest"] == good.name


def test_a_copy_under_another_steps_name_is_named_by_every_command(tmp_path, capsys):
    paths = save_run(tmp_path)
    copy = tmp_path / "checkpoints" / "step-00000008"
    shutil.copytree(paths[0], copy)
    words = "holds the checkpoint of step 2, not of the step in its name"
    for arguments in (("list", tmp_path), ("show", copy), ("verify", copy), ("diff", paths[0], copy)):
        status, out = run_command(capsys, *arguments)
        assert status == 1
        assert words in " ".join(out.split())
    status, content = run_json(capsys, "repair", tmp_path)
    assert (status, content["latest"]) == (1, "step-00000006")
    assert words in content["repairs"][0]["reason"]


def test_repair_of_a_run_without_anything_whole_says_so(tmp_path, capsys):
    (path,) = save_run(tmp_path, (2,))
    (path / "state.json").unlink()
    status, out = run_command(capsys, "repair", tmp_path, "--apply")
    assert status == 1
    assert "no checkpoint verifies" in out
    assert not path.exists()


def test_repair_of_a_good_run_has_nothing_to_do(tmp_path, capsys):
    save_run(tmp_path)
    assert run_json(capsys, "repair", tmp_path) == (
        0,
        {
            "directory": str(tmp_path / "checkpoints"),
            "repairs": [],
            "is_applied": False,
            "latest": "step-00000006",
        },
    )


# ---- misuse


@pytest.mark.parametrize("command", ["list", "show", "verify", "repair", "prune --keep_last 1"])
def test_a_place_without_checkpoints_is_misuse_in_one_line_and_stays_as_it_was(tmp_path, capsys, command):
    status, out = run_command(capsys, *command.split(), tmp_path / "nowhere")
    assert status == 2
    assert len(out.splitlines()) == 1
    assert "no such directory" in out
    assert not (tmp_path / "nowhere").exists()


def test_misuse_names_the_value(tmp_path, capsys):
    save_run(tmp_path)
    for arguments, words in (
        (("prune", tmp_path, "--keep_last", "0"), "'0' is not a whole number of at least 1"),
        (("prune", tmp_path), "--keep_last"),
        (("verify", tmp_path, "--level", "slow"), "slow"),
        (("list", tmp_path, "--levle", "deep"), "did you mean --level?"),
    ):
        status, out = run_command(capsys, *arguments)
        assert status == 2
        assert words in out


@pytest.mark.slow
def test_nothing_of_it_imports_lightning_or_unpickles(tmp_path):
    (path,) = save_run(tmp_path, (2,))
    code = (
        "import sys\n"
        "import genesis.cli.checkpoint\n"
        "from genesis.cli.main import main\n"
        "sys.addaudithook(lambda event, _: event == 'pickle.find_class' and sys.exit('unpickled'))\n"
        f"for words in (['list'], ['show'], ['verify', '--level', 'deep'], ['diff', {str(path)!r}]):\n"
        f"    assert main(['checkpoint', *words, {str(tmp_path)!r}]) == 0, words\n"
        "sys.exit('lightning' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---- the policy of genesis's own recipe


def policy_verdicts(tmp_path: Path, before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    (path,) = save_run(tmp_path, (2,), recipe=before)
    manifest = read_manifest(path)
    found = find_drift(manifest, identity={}, recipe=now, versions=manifest.versions, policy=RECIPE_POLICY)
    return {difference.key: difference.verdict for difference in found}


def test_genesis_tells_free_from_what_must_be_allowed_and_what_never_changes(tmp_path):
    before = {
        "run_dir": "a",
        "model": {"decoder": {"dim": 4, "dropout": 0.0}, "optimizer": {"lr": 0.1}},
        "data": {"corpus": "here", "seq_len": 8, "seed": 0, "global_batch_size": 8, "micro_batch_size": 2},
        "schedule": {"shape": "cosine"},
        "checkpoint": {"every_n_steps": 5},
        "trainer": {"max_steps": 6, "devices": 1, "strategy": "replicated", "logger": None, "precision": None},
    }
    now = {
        "run_dir": "b",
        "model": {"decoder": {"dim": 5, "dropout": 0.1}, "optimizer": {"lr": 0.2}},
        "data": {"corpus": "there", "seq_len": 9, "seed": 1, "global_batch_size": 16, "micro_batch_size": 4},
        "schedule": {"shape": "linear"},
        "checkpoint": {"every_n_steps": 7},
        "trainer": {"max_steps": 9, "devices": 2, "strategy": {"a": 1}, "logger": True, "precision": "bf16-mixed"},
    }
    verdicts = policy_verdicts(tmp_path, before, now)
    assert {key for key, verdict in verdicts.items() if verdict == "never"} == {
        "model.decoder.dim",
        "data.seq_len",
        "data.seed",
    }
    assert {key for key, verdict in verdicts.items() if verdict == "refused"} == {
        "model.decoder.dropout",
        "model.optimizer.lr",
        "data.global_batch_size",
        "schedule.shape",
        "trainer.max_steps",
        "trainer.precision",
    }
    assert {key for key, verdict in verdicts.items() if verdict == "free"} == {
        "run_dir",
        "data.corpus",
        "data.micro_batch_size",
        "checkpoint.every_n_steps",
        "trainer.devices",
        "trainer.strategy.class_path",
        "trainer.strategy.a",
        "trainer.logger",
    }


# ---- a stranger's checkpoint


def test_looking_into_a_strangers_checkpoint_runs_nothing_of_it(tmp_path, capsys):
    older, newer = save_run(tmp_path / "run", steps=(2, 4))
    proof = tmp_path / "proof"
    for path in (older, newer):
        plant_pickles(path, proof)
    for expected, arguments in (
        (0, ("list", tmp_path / "run")),
        (0, ("show", newer)),
        (0, ("verify", tmp_path / "run", "--finite")),
        # What other tools would unpickle is looked at, and refused, where everything is.
        (1, ("list", tmp_path / "run", "--level", "deep")),
        (1, ("verify", tmp_path / "run", "--level", "deep", "--finite")),
        (1, ("diff", older, newer)),
        (1, ("prune", tmp_path / "run", "--keep_last", "1", "--dry_run")),
        (1, ("repair", tmp_path / "run", "--apply")),
    ):
        status, out = run_command(capsys, *arguments)
        assert status == expected, out
    assert not proof.exists()
    newer = newer.with_name(f"quarantined-{newer.name}")
    pickle.loads((newer / ".metadata").read_bytes())  # the payload does work, where somebody unpickles
    assert proof.exists()
