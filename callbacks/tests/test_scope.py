"""A save that leaves tensors to a base checkpoint: what is written, what is refused, and what a restore reads where."""

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from plain_project import PlainModel, run_training, train, wait_until
from torch import nn
from torch.utils.data import DataLoader

from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification, SaveScope, export_lightning_checkpoint
from genesis_callbacks.base.checkpoint_errors import BaseCheckpointError
from genesis_callbacks.base.hashing import hash_bytes
from genesis_callbacks.base.local_shards import LocalShard, local_shards
from genesis_callbacks.base.manifest import COMMITTED_NAME, MANIFEST_NAME
from genesis_callbacks.checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    Manifest,
    Ranks,
    Retention,
    SaveFailedError,
    SaveTarget,
    Snapshot,
    find_latest,
    read_manifest,
    read_tensors,
    save_blocking,
    verify,
)
from genesis_callbacks.checkpoint.commit import supersede
from genesis_callbacks.checkpoint.compare import compare_tensors
from genesis_callbacks.checkpoint.contents import find_non_finite, read_contents
from genesis_callbacks.checkpoint.inventory import find_problem, plan_repairs, read_inventory
from genesis_callbacks.checkpoint.restore import read_recorded_tensors
from genesis_callbacks.checkpoint.scope import BoundScope, bind_scope
from genesis_callbacks.checkpoint.tensor_places import PLACES_VARIABLE
from genesis_callbacks.testing import run_ranks

BASE_STEP, LAST_STEP = 2, 6
FROZEN = ("net.embed", "net.body.0")
IN_BASE = ("model.net.embed.weight", "model.net.body.0.*")
LEFT = {"model.net.embed.weight", "model.net.body.0.weight", "model.net.body.0.bias"}
NAMES = ("model.a", "model.b", "model.c")
FITS = pytest.mark.xdist_group("fits with a scope")


# ---- the engine alone


def snapshot(step: int, live: dict[str, torch.Tensor], section: dict | None = None) -> Snapshot:
    parts: list[LocalShard] = []
    for name, tensor in live.items():
        parts += local_shards(name, tensor, "optimizer" if name.startswith("optimizer.") else "parameter")
    return Snapshot(step, {}, parts, section or {})


def fill(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {name: torch.full((3000,), index + value) for index, name in enumerate(NAMES)}


def write_base(directory: Path, step: int = 1, live: dict[str, torch.Tensor] | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return save_blocking(SaveTarget(directory, Ranks()), lambda: snapshot(step, live or fill()))


def bind(scope: SaveScope, live: dict[str, torch.Tensor]) -> BoundScope | None:
    return bind_scope(scope, snapshot(0, live).parts, (), Ranks())


def build_target(directory: Path, scope: SaveScope, live: dict[str, torch.Tensor], **options) -> SaveTarget:
    directory.mkdir(parents=True, exist_ok=True)
    return SaveTarget(directory, Ranks(), scope=bind(scope, live), **options)


def write_scoped(root: Path, step: int = 2) -> tuple[Path, Path]:
    """Returns (base, a checkpoint that leaves a and b to it)."""
    base = write_base(root / "base" / "checkpoints")
    target = build_target(root / "run" / "checkpoints", SaveScope(base, ["model.[ab]"]), fill())
    return base, save_blocking(target, lambda: snapshot(step, fill() | {"model.c": torch.full((3000,), 9.0)}))


def reseal(path: Path, content: object) -> None:
    """Commits another manifest, as a forger would."""
    data = json.dumps(content).encode()
    (path / MANIFEST_NAME).write_bytes(data)
    (path / COMMITTED_NAME).write_text(f"blake3:{hash_bytes(data, 'blake3')}", encoding="ascii")


def read_content(path: Path) -> dict:
    return json.loads((path / MANIFEST_NAME).read_bytes())


def flip_byte(path: Path, manifest: Manifest, name: str) -> None:
    chunk = manifest.tensors[name].chunks[0]
    with (path / chunk.file).open("r+b") as file:
        file.seek(chunk.data_offset)
        (byte,) = file.read(1)
        file.seek(chunk.data_offset)
        file.write(bytes([byte ^ 1]))


def test_a_save_holds_the_tensors_of_its_scope_alone_and_reads_as_a_whole(tmp_path):
    base, path = write_scoped(tmp_path)
    manifest = verify(path, "deep")
    assert manifest.tensors.keys() == set(NAMES)
    assert manifest.own_tensors.keys() == {"model.c"}
    shard = next(record for record in manifest.files if record.name.endswith(".distcp"))
    assert 12000 <= shard.num_bytes < 15000  # one tensor of 3000 numbers of 4 bytes, and what torch.save puts around it
    tensors = read_tensors(path)
    assert [float(tensors[name][0]) for name in NAMES] == [0.0, 1.0, 9.0]
    assert read_content(path)["tensors"].keys() == {"model.c"}
    recorded = read_content(path)["base"]
    assert recorded.pop("tensors").keys() == {"model.a", "model.b"}
    assert recorded == {
        "path": str(base),
        "relative_path": "../../base/checkpoints/step-00000001",
        "manifest_hash": (base / COMMITTED_NAME).read_text(),
    }


def test_a_checkpoint_with_a_base_is_of_a_schema_that_older_versions_refuse(tmp_path):
    base, path = write_scoped(tmp_path)
    assert read_content(path)["schema_version"] == 3
    assert read_content(base)["schema_version"] == 2
    assert "base" not in read_content(base)
    forged = read_content(path) | {"schema_version": 2}
    reseal(path, forged)
    with pytest.raises(CorruptCheckpointError, match="has the unknown field 'base'"):
        read_manifest(path)


def test_contents_comparison_and_values_go_through_the_base(tmp_path, monkeypatch):
    base, path = write_scoped(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = Path("run/checkpoints") / path.name
    contents = read_contents(path)
    assert contents.model.keys() == {"a", "b", "c"}
    assert find_non_finite(contents) == {}
    compared = {one.name: one.verdict for one in compare_tensors(base, read_manifest(base), path, read_manifest(path))}
    assert compared == {"model.a": "same", "model.b": "same", "model.c": "changed"}


def test_a_value_that_is_not_finite_is_found_in_the_base(tmp_path):
    live = fill() | {"model.a": torch.full((3000,), torch.inf)}
    base = write_base(tmp_path / "base", live=live)
    target = build_target(tmp_path / "run", SaveScope(base, ["model.[ab]"]), live)
    path = save_blocking(target, lambda: snapshot(2, live))
    assert find_non_finite(read_contents(path)) == {"a": 3000}


def change_base(base: Path) -> None:
    reseal(base, read_content(base) | {"created_seconds": 1.0})


def lose_base(base: Path) -> None:
    shutil.rmtree(base)


def uncommit_base(base: Path) -> None:
    (base / COMMITTED_NAME).unlink()


def put_fifo(base: Path) -> None:
    (base / COMMITTED_NAME).unlink()
    os.mkfifo(base / COMMITTED_NAME)


def swell_base(base: Path) -> None:
    os.truncate(base / COMMITTED_NAME, 1 << 30)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (change_base, "it has changed, or is another checkpoint: its manifest is blake3:"),
        (lose_base, "there is no such directory"),
        (uncommit_base, "is not a committed checkpoint"),
        (put_fifo, "is a FIFO, but must be a file"),
        (swell_base, "COMMITTED has more than 65,536 bytes"),
    ],
)
def test_a_base_that_is_gone_or_another_is_refused_in_one_line_and_nothing_is_put_aside(tmp_path, spoil, reason):
    base, path = write_scoped(tmp_path)
    spoil(base)
    for read in (lambda: verify(path, "quick"), lambda: read_tensors(path), lambda: find_latest(path.parent)):
        with pytest.raises(BaseCheckpointError, match=reason) as refusal:
            read()
        text = str(refusal.value)
        assert str(path) in text
        assert str(base) in text
        assert PLACES_VARIABLE in text
        assert "\n" not in text
    assert find_latest(path.parent.parent / "none") is None
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    problem = find_problem(path, "full")
    (repair,) = plan_repairs(read_inventory(path.parent), {path: problem})
    assert (repair.action, repair.is_bad) == ("none", True)


@pytest.mark.parametrize("level", ["full", "deep"])
def test_damage_in_the_base_is_named_and_is_not_the_checkpoints(tmp_path, level):
    base, path = write_scoped(tmp_path)
    flip_byte(base, read_manifest(base), "model.b")
    verify(path, "quick")
    for read in (
        lambda: verify(path, level),
        lambda: read_tensors(path),
        lambda: find_latest(path.parent, level=level),
    ):
        with pytest.raises(
            BaseCheckpointError, match=r"its base at .*base/checkpoints/step-00000001, which is damaged"
        ):
            read()
    assert path.is_dir()
    assert read_tensors(path, ["model.a", "model.c"]).keys() == {"model.a", "model.c"}


def test_damage_of_the_checkpoint_itself_comes_before_a_missing_base(tmp_path):
    base, path = write_scoped(tmp_path)
    shutil.rmtree(base)
    flip_byte(path, read_manifest(path), "model.c")
    with pytest.raises(CorruptCheckpointError):
        verify(path, "full")


def test_damage_of_what_others_keep_in_the_base_is_no_matter(tmp_path):
    base, path = write_scoped(tmp_path)
    flip_byte(base, read_manifest(base), "model.c")  # the checkpoint has its own
    assert verify(path, "quick").base is not None
    assert float(read_tensors(path)["model.c"][0]) == 9.0


def test_a_new_place_of_the_base_is_found_by_the_environment_or_as_an_argument(tmp_path, monkeypatch):
    base, path = write_scoped(tmp_path)
    moved = tmp_path / "elsewhere" / base.name
    moved.parent.mkdir()
    base.rename(moved)
    with pytest.raises(BaseCheckpointError):
        verify(path)
    assert verify(path, "deep", places=[moved]).base.path == str(moved)
    assert find_latest(path.parent, places=[moved]) == path
    monkeypatch.setenv(PLACES_VARIABLE, f"/nowhere{os.pathsep}{moved}")
    assert verify(path, "deep").base.path == str(moved)
    assert read_tensors(path).keys() == set(NAMES)


def test_run_and_base_may_be_moved_together(tmp_path, monkeypatch):
    _, path = write_scoped(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there" / "run")
    moved = Path("checkpoints") / path.name
    assert Path(verify(moved, "deep").base.path) == tmp_path / "there" / "base" / "checkpoints" / "step-00000001"
    assert read_tensors(moved).keys() == set(NAMES)


def test_the_base_beside_the_run_is_taken_before_one_at_the_old_place(tmp_path):
    base, path = write_scoped(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    flip_byte(base, read_manifest(base), "model.a")
    verify(tmp_path / "there" / path.relative_to(tmp_path / "here"), "deep")


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_superseded_checkpoint_finds_the_base_of_its_run_after_both_were_moved(tmp_path, is_copied):
    directory = tmp_path / "here" / "checkpoints"
    base = write_base(directory)
    target = build_target(directory, SaveScope(base, ["model.[ab]"]), fill())
    scoped = save_blocking(target, lambda: snapshot(2, fill()))
    superseded = supersede([scoped])
    verify(superseded / scoped.name, "deep")
    if is_copied:
        shutil.copytree(tmp_path / "here", tmp_path / "there")
    else:
        (tmp_path / "here").rename(tmp_path / "there")
    moved = tmp_path / "there" / "checkpoints" / superseded.name / scoped.name
    assert verify(moved, "deep").base.path == str(tmp_path / "there" / "checkpoints" / base.name)
    assert read_tensors(moved).keys() == set(NAMES)


@pytest.mark.parametrize("level", ["quick", "full", "deep"])
def test_a_good_copy_that_is_named_takes_the_place_of_a_damaged_base(tmp_path, monkeypatch, level):
    base, path = write_scoped(tmp_path)
    copy = shutil.copytree(base, tmp_path / "copy" / base.name)
    manifest = read_manifest(base)
    if level == "quick":
        os.truncate(base / manifest.tensors["model.b"].chunks[0].file, 100)
    else:
        flip_byte(base, manifest, "model.b")
    with pytest.raises(BaseCheckpointError, match=f"its base at {base}, which is damaged"):
        verify(path, level)
    for given in (level, "quick"):  # a fit verifies quickly what it has just verified
        found = verify(path, given, places=[copy])
        assert found.base.path == str(copy)
        assert float(read_recorded_tensors(path, found, ["model.b"])["model.b"][0]) == 1.0
    assert find_latest(path.parent, level=level, places=[copy]) == path
    monkeypatch.setenv(PLACES_VARIABLE, str(copy))
    assert verify(path, level).base.path == str(copy)
    assert read_tensors(path).keys() == set(NAMES)


def test_a_damaged_copy_that_is_named_leaves_the_base_at_its_recorded_place(tmp_path):
    base, path = write_scoped(tmp_path)
    copy = shutil.copytree(base, tmp_path / "copy" / base.name)
    flip_byte(copy, read_manifest(base), "model.b")
    found = verify(path, "deep", places=[copy])
    assert found.base.path == str(base)
    assert read_recorded_tensors(path, found, ["model.b"]).keys() == {"model.b"}
    flip_byte(base, read_manifest(base), "model.a")
    with pytest.raises(BaseCheckpointError, match=f"its base at {copy}, which is damaged"):
        verify(path, "deep", places=[copy])


@pytest.mark.parametrize(
    ("scope", "live", "message"),
    [
        ({"in_base": ["model.*"]}, fill() | {"model.d": torch.zeros(2)}, r"model\.d is not in the base"),
        (
            {"in_base": ["model.a"]},
            fill() | {"model.a": torch.zeros(2)},
            r"model\.a is float32 \[3000\] in the base .* \[2\]",
        ),
        ({"in_base": ["model.a"]}, fill() | {"model.a": torch.zeros(3000).half()}, r"model\.a is float32 .* float16"),
        ({"in_base": ["model.*"]}, fill(1.0), r"model\.a, model\.b, model\.c differs between the model"),
        ({"in_base": ["model.x"]}, fill(), r"pattern 'model\.x' matches no tensor .*such as model\.a"),
        ({"in_base": ["a"]}, fill(), "pattern 'a' matches no tensor"),
        ({"in_base": ["model.a"], "not_in_base": ["model.*"]}, fill(), "leaves no tensor to its base"),
        ({"in_base": ["model.a"], "base_hash": f"blake3:{0:064x}"}, fill(), "but base_hash is blake3:000"),
    ],
)  # fmt: skip
def test_a_base_that_is_not_what_is_live_is_refused_with_names_and_remedy(tmp_path, scope, live, message):
    base = write_base(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        bind(SaveScope(base, **scope), live)


def test_what_is_no_base_is_refused_by_what_it_is(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such directory; the base of a scope must be a committed"):
        bind(SaveScope(tmp_path / "none", ["model.a"]), fill())
    export = tmp_path / "export"
    export.mkdir()
    (export / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="safetensors have no digests to compare with"):
        bind(SaveScope(export, ["model.a"]), fill())
    _, path = write_scoped(tmp_path)
    with pytest.raises(CheckpointError, match=r"it has a base itself .*chains are not supported"):
        bind(SaveScope(path, ["model.a"]), fill())


def test_a_base_with_a_flipped_byte_is_refused_at_the_start(tmp_path):
    base = write_base(tmp_path)
    flip_byte(base, read_manifest(base), "model.a")
    with pytest.raises(CorruptCheckpointError, match="does not have the hash that was saved"):
        bind(SaveScope(base, ["model.a"]), fill())


def test_a_deep_verification_names_the_tensors_that_changed_bytes_have_damaged(tmp_path):
    base = write_base(tmp_path)
    flip_byte(base, read_manifest(base), "model.a")
    with pytest.raises(
        CorruptCheckpointError, match=r"hash that was saved: its bytes have changed; changed: model\.a$"
    ):
        verify(base, "deep")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_base": ["model.*"]}, "no meaning without base"),
        ({"base": "x"}, "without in_base"),
        ({"base": "x", "in_base": "model.*"}, "must be a list of patterns"),
        ({"base": "x", "in_base": ["*"], "base_hash": "abc"}, "base_hash must be as COMMITTED has it"),
        ({"base": "x", "in_base": ["*"], "base_hash": 3}, "base_hash must be as COMMITTED has it"),
        ({"base": 3, "in_base": ["*"]}, "^base must be the path of a checkpoint, not 3$"),
        ({"base": 3}, "^base must be the path of a checkpoint, not 3$"),
        ({"base": "x", "in_base": 3}, "^in_base must be a list of patterns, which are texts, not 3$"),
        ({"base": "x", "in_base": ["*"], "not_in_base": [3]}, "^not_in_base must be a list of patterns"),
    ],
)
def test_scopes_without_meaning_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SaveScope(**arguments)


def test_everything_is_the_default():
    assert SaveScope.everything() == SaveScope()
    assert not SaveScope().leaves("model.a")
    assert bind(SaveScope(), fill()) is None


def test_a_tensor_of_the_base_that_moved_makes_the_save_fail_by_name(tmp_path):
    base = write_base(tmp_path / "base")
    target = build_target(tmp_path / "run", SaveScope(base, ["model.[ab]"]), fill())
    with pytest.raises(
        SaveFailedError, match=r"model\.b is left to the base .*/step-00000001, but differs from the base now"
    ):
        save_blocking(target, lambda: snapshot(2, fill() | {"model.b": torch.full((3000,), 7.0)}))
    with pytest.raises(SaveFailedError, match=r"model\.a is left to the base .* but the model lacks it now"):
        save_blocking(target, lambda: snapshot(2, {name: fill()[name] for name in NAMES[1:]}))
    assert list((tmp_path / "run").glob("step-*")) == []


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda base: base.rename(base.with_name("moved")), "is missing"),
        (change_base, "has changed: its manifest is blake3:"),
    ],
)
def test_a_base_that_goes_during_the_run_makes_the_save_fail_by_name(tmp_path, spoil, reason):
    base = write_base(tmp_path / "base")
    target = build_target(tmp_path / "run", SaveScope(base, ["model.[ab]"]), fill())
    assert save_blocking(target, lambda: snapshot(2, fill())).name == "step-00000002"
    spoil(base)
    with pytest.raises(
        SaveFailedError, match=f"the base {base}, which has 2 tensors of the model, {reason}"
    ) as refusal:
        save_blocking(target, lambda: snapshot(3, fill()))
    assert "\n" not in str(refusal.value)
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000002"]


@pytest.mark.parametrize(
    ("tensors", "section"),
    [
        ({"optimizer.0.b.exp_avg": torch.zeros(3000)}, {}),
        ({}, {"optimizers": [{"values": {"b": {"step": 1}}}]}),
    ],
)
def test_optimizer_state_of_a_tensor_of_the_base_is_refused_by_name(tmp_path, tensors, section):
    base = write_base(tmp_path / "base")
    target = build_target(tmp_path / "run", SaveScope(base, ["model.[ab]"]), fill())
    with pytest.raises(SaveFailedError, match=r"model\.b is left to the base .* but an optimizer has state for it"):
        save_blocking(target, lambda: snapshot(2, fill() | tensors, section))


def test_retention_keeps_a_base_that_another_checkpoint_of_the_run_names(tmp_path):
    live = fill()
    base = write_base(tmp_path)
    target = build_target(tmp_path, SaveScope(base, ["model.[ab]"]), live, retention=Retention(keep_last=1))
    target.continue_from(None, 1)
    for step in (2, 3, 4):
        live["model.c"] += 1
        save_blocking(target, lambda step=step: snapshot(step, live))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000004"]
    verify(tmp_path / "step-00000004", "deep")
    everything = SaveTarget(tmp_path, Ranks(), retention=Retention(keep_last=1))
    everything.continue_from(None, 4)
    for step in (5, 6):
        save_blocking(everything, lambda step=step: snapshot(step, live))
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000006"]  # nothing names it any more


def test_retention_keeps_a_base_that_only_superseded_checkpoints_name(tmp_path):
    live = fill()
    base = write_base(tmp_path)
    target = build_target(tmp_path, SaveScope(base, ["model.[ab]"]), live)
    target.continue_from(None, 1)
    scoped = save_blocking(target, lambda: snapshot(2, live))
    superseded = supersede([scoped]) / scoped.name
    everything = SaveTarget(tmp_path, Ranks(), retention=Retention(keep_last=1))
    everything.continue_from(None, 1)
    for step in (3, 4):
        live["model.c"] += 1
        save_blocking(everything, lambda step=step: snapshot(step, live))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [base.name, "step-00000004"]
    assert read_tensors(superseded).keys() == set(NAMES)
    shutil.rmtree(superseded)
    save_blocking(everything, lambda: snapshot(5, live))
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000005"]


# ---- forgeries


def forge(checkpoint: Path, **changes: object) -> None:
    content = read_content(checkpoint)
    content["base"] |= changes
    reseal(checkpoint, content)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "base"}, "the path of the base is"),
        ({"path": "/" + "a" * 5000}, "the path of the base is"),
        ({"path": ["/"]}, "the path of the base is"),
        ({"relative_path": "a\0b"}, "the relative path of the base is"),
        ({"manifest_hash": "md5:0"}, "the hash of the base is"),
        ({"tensors": []}, "the tensors of the base is"),
        (
            {"tensors": {"model.a": {"shape": [1 << 62, 8], "dtype": "float32", "digest": "0" * 16}}},
            "the number of elements",
        ),
        ({"tensors": {"model.a": {"shape": [-1], "dtype": "float32", "digest": "0" * 16}}}, "the shape of"),
        ({"tensors": {"model.a": {"shape": [1], "dtype": "float32"}}}, "lacks 'digest'"),
        ({"tensors": {"model.c": {"shape": [1], "dtype": "float32", "digest": "0" * 16}}}, "is here and in the base"),
        ({"more": 1}, "has the unknown field 'more'"),
    ],
)
def test_a_forged_record_of_a_base_is_refused_in_one_line(tmp_path, changes, message):
    _, path = write_scoped(tmp_path)
    forge(path, **changes)
    with pytest.raises(CorruptCheckpointError, match=message):
        verify(path)


@pytest.mark.parametrize("place", ["/etc", "/dev", "/proc/self/fd", "/", "/dev/zero"])
def test_a_path_that_leads_elsewhere_reads_nothing_but_a_commit_marker(tmp_path, place):
    base, path = write_scoped(tmp_path)
    shutil.rmtree(base)
    forge(path, path=place, relative_path="../" * 40 + place[1:])
    with pytest.raises(BaseCheckpointError, match="was not found"):
        verify(path)


def test_a_checkpoint_that_names_itself_or_a_chain_is_refused(tmp_path):
    _, path = write_scoped(tmp_path)
    own_hash = (path / COMMITTED_NAME).read_text()
    chained = shutil.copytree(path, path.with_name("step-00000003"))
    content = read_content(chained) | {"step": 3}
    content["base"] |= {"path": str(path), "relative_path": path.name, "manifest_hash": own_hash}
    reseal(chained, content)
    with pytest.raises(BaseCheckpointError, match="has a base itself: chains of bases are not supported"):
        verify(chained)
    # Its own hash cannot stand in it: whatever stands there is the hash of another.
    forge(path, path=str(path), relative_path=path.name)
    with pytest.raises(BaseCheckpointError, match="it has changed, or is another checkpoint"):
        verify(path)


def test_a_manifest_that_contradicts_its_base_is_corrupt(tmp_path):
    base, path = write_scoped(tmp_path)
    content = read_content(path)
    content["base"]["tensors"]["model.b"]["digest"] = "0" * 16
    reseal(path, content)
    for read in (verify, read_tensors):
        with pytest.raises(CorruptCheckpointError, match=r"its record of model\.b differs from that of its base at"):
            read(path)
    assert verify(base, "deep").step == 1


def test_a_base_in_a_loop_of_links_is_refused(tmp_path):
    base, path = write_scoped(tmp_path)
    shutil.rmtree(base)
    base.symlink_to(base)
    with pytest.raises(BaseCheckpointError, match="was not found"):
        verify(path)


# ---- fits


def build_base(root: Path, world_size: int = 1, strategy: str = "single", **options: object) -> Path:
    run_training(world_size, root / "base", strategy, BASE_STEP, **options)
    return find_latest(root / "base")


@pytest.fixture(scope="module")
def base_run(tmp_path_factory) -> Path:
    """The directory of a run on one device that others take as their base."""
    return build_base(tmp_path_factory.mktemp("base_run")).parent.parent


@pytest.fixture
def base(base_run, tmp_path) -> Path:
    """The checkpoint of a copy of that run."""
    return find_latest(shutil.copytree(base_run, tmp_path / "here" / "base"))


def scoped(base: Path, **options: object) -> dict[str, object]:
    return {
        "scope": SaveScope(base, IN_BASE),
        "frozen": FROZEN,
        "restore": "weights",
        "every_n_steps": 1,
        "keep_last": None,
    } | options


def assert_same(runs: list[dict], others: list[dict]) -> None:
    for run, other in zip(runs, others, strict=True):
        assert run["losses"][-1] == other["losses"][-1]
        for name, tensor in run["weights"].items():
            assert torch.equal(tensor, other["weights"][name]), name


@pytest.mark.parametrize(
    ("world_size", "strategy", "mode"),
    [
        *(pytest.param(1, "single", mode, marks=pytest.mark.slow) for mode in ("sync", "thread", "process")),
        (2, "fsdp2", "sync"),
        *(pytest.param(2, "fsdp2", mode, marks=pytest.mark.slow) for mode in ("thread", "process")),
        *(pytest.param(2, "ddp", mode, marks=pytest.mark.slow) for mode in ("sync", "thread", "process")),
    ],
)
def test_a_run_with_a_base_resumes_bit_equal_in_every_mode_and_strategy(tmp_path, world_size, strategy, mode):
    base = build_base(tmp_path, world_size, strategy)
    options = scoped(base, mode=mode)
    straight = run_training(world_size, tmp_path / "straight", strategy, LAST_STEP, ckpt_path=str(base), **options)
    run = tmp_path / "run"
    run_training(world_size, run, strategy, LAST_STEP // 2, ckpt_path=str(base), **options)
    resumed = run_training(world_size, run, strategy, LAST_STEP, ckpt_path="latest", **options)
    assert_same(resumed, straight)
    assert "3 of them in the base" in resumed[0]["report"]
    latest = find_latest(run)
    manifest = verify(latest, "deep")
    assert manifest.base.names == LEFT
    assert not any("embed" in name or "body.0" in name for name in manifest.own_tensors)
    stored = read_tensors(latest, prefix="model.")
    for name, tensor in straight[0]["weights"].items():
        if name != "net.head.weight":  # tied
            assert torch.equal(stored[f"model.{name}"], tensor), name


@FITS
@pytest.mark.slow
def test_what_one_strategy_saved_with_a_base_another_restores(tmp_path, base):
    run_training(2, tmp_path / "run", "fsdp2", 3, ckpt_path=str(base), **scoped(base))
    (resumed,) = run_training(1, tmp_path / "run", "single", 3, ckpt_path="latest", **scoped(base))
    stored = read_tensors(find_latest(tmp_path / "run"), prefix="model.")
    assert all(torch.equal(resumed["weights"][name.removeprefix("model.")], tensor) for name, tensor in stored.items())


class AdapterModel(PlainModel):
    """The plain model, frozen, with a part that trains and that no base has."""

    def __init__(self) -> None:
        super().__init__(frozen=("net.",))
        self.adapter = nn.Linear(6, 11, bias=False)
        self.strict_loading = False

    def training_step(self, batch, batch_idx):
        tokens = torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(self.global_step))
        with torch.no_grad():
            hidden = self.net.body(self.net.embed(tokens))
        loss = nn.functional.cross_entropy(self.adapter(hidden).flatten(0, 1), tokens.flatten())
        self.losses.append(loss.item())
        return loss


def train_adapter(run: Path, base: str, max_steps: int, directory: Path) -> dict[str, object]:
    """Trains the adapter in `run`, from the run's latest checkpoint or from the base, both relative to `directory`."""
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
    os.chdir(directory)
    torch.manual_seed(3)
    scope = SaveScope(base, in_base=["model.net.*"], not_in_base=["model.net.num_windows"])
    checkpoint = AsyncProcessCheckpoint(run_dir=run, scope=scope, restore="weights", every_n_steps=2, mode="sync")
    trainer = Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint],
        default_root_dir=run,
    )
    model = AdapterModel()
    trainer.fit(model, DataLoader(range(100)), ckpt_path=checkpoint.latest() or base)
    return {"losses": model.losses, "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()}}


@FITS
def test_an_adapter_on_a_frozen_base_resumes_bit_equal_after_both_were_moved(tmp_path, base):
    here, there = tmp_path / "here", tmp_path / "there"
    relative = str(base.relative_to(here))
    straight = run_ranks(train_adapter, 1, Path("straight"), relative, LAST_STEP, here)
    run_ranks(train_adapter, 1, Path("run"), relative, LAST_STEP // 2, here)
    manifest = read_manifest(find_latest(here / "run"))
    names = {name for name in manifest.own_tensors if not name.startswith("state.")}
    assert names == {
        "model.adapter.weight", "model.net.num_windows",
        *(f"optimizer.0.adapter.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")),
    }  # fmt: skip
    here.rename(there)
    assert_same(run_ranks(train_adapter, 1, Path("run"), relative, LAST_STEP, there), straight)
    elsewhere = tmp_path / "elsewhere"
    there.rename(elsewhere)
    verify(find_latest(elsewhere / "run"), "deep")


def test_a_configuration_of_lightnings_command_line_takes_a_scope(tmp_path, monkeypatch):
    config = {
        "trainer": {
            "accelerator": "cpu",
            "logger": False,
            "callbacks": [
                {
                    "class_path": "genesis_callbacks.AsyncProcessCheckpoint",
                    "init_args": {
                        "run_dir": str(tmp_path),
                        "scope": {"base": "runs/base/step-00000001", "in_base": ["model.*"], "not_in_base": ["*.a"]},
                    },
                }
            ],
        }
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(tmp_path / "config.yaml")])
    cli = LightningCLI(BoringModel, run=False, save_config_callback=None, seed_everything_default=False)
    (checkpoint,) = (one for one in cli.trainer.callbacks if isinstance(one, AsyncProcessCheckpoint))
    assert checkpoint.scope == SaveScope(Path.cwd() / "runs/base/step-00000001", ["model.*"], ["*.a"])


class KillAfter(Callback):
    """Ends the process by SIGKILL at a step's end."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            wait_until(lambda: any(Path(trainer.default_root_dir).glob("checkpoints/step-????????")))
            os.kill(os.getpid(), signal.SIGKILL)


PROGRAM = """
import os, sys
os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
from pathlib import Path
import plain_project, test_scope
plain_project._num_collectives = lambda: 0
plain_project.train(sys.argv[2], "single", test_scope.LAST_STEP, ckpt_path=sys.argv[1],
    callbacks=(test_scope.KillAfter(4),), **test_scope.scoped(Path(sys.argv[1]), mode="process"))
"""


@FITS
@pytest.mark.slow
def test_a_run_with_a_base_that_was_killed_goes_on_bit_equal(tmp_path, base, started_writers):
    run = tmp_path / "run"
    # One thread, as the ranks have: another number of threads adds in another order.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(base), str(run)]
    killed = subprocess.run(command, check=False, env=environment)
    assert killed.returncode == -signal.SIGKILL
    resumed = run_training(1, run, "single", LAST_STEP, ckpt_path="callback", **scoped(base))
    straight = run_training(1, tmp_path / "straight", "single", LAST_STEP, ckpt_path=str(base), **scoped(base))
    assert "Restored step" in resumed[0]["report"]
    assert_same(resumed, straight)
    for name, tensor in read_tensors(find_latest(tmp_path / "straight"), prefix="model.").items():
        assert torch.equal(tensor, read_tensors(find_latest(run), [name])[name]), name


@FITS
@pytest.mark.parametrize(("spoil", "reason"), [(change_base, "it has changed"), (lose_base, "no such directory")])
def test_a_resume_is_refused_where_the_base_has_changed_or_is_gone(tmp_path, base, spoil, reason):
    run_training(1, tmp_path / "run", "single", 3, ckpt_path=str(base), **scoped(base))
    spoil(base)
    with pytest.raises(AssertionError, match=reason):
        run_training(1, tmp_path / "run", "single", 4, ckpt_path="latest", **scoped(base))
    assert {path.name for path in (tmp_path / "run" / "checkpoints").glob("*-*")} == {
        "step-00000001", "step-00000002", "step-00000003",
    }  # fmt: skip


@FITS
def test_a_resume_takes_the_new_place_of_its_base_from_the_scope(tmp_path, base):
    run_training(1, tmp_path / "run", "single", 3, ckpt_path=str(base), **scoped(base))
    moved = tmp_path / "elsewhere" / base.name
    moved.parent.mkdir()
    base.rename(moved)
    run_training(1, tmp_path / "run", "single", 4, ckpt_path="callback", **scoped(moved))
    assert verify(tmp_path / "run" / "checkpoints" / "step-00000004", "deep").base.path == str(moved)


class Unfreeze(Callback):
    """Trains what the scope leaves to the base, from a step on."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            pl_module.net.body[0].requires_grad_(True)


@FITS
@pytest.mark.parametrize(
    ("world_size", "strategy", "mode"),
    [
        (1, "single", "sync"),
        pytest.param(1, "single", "process", marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", "process", marks=pytest.mark.slow),
    ],
)
def test_a_tensor_of_the_base_that_is_trained_by_mistake_makes_the_save_fail(
    tmp_path, base, world_size, strategy, mode
):
    with pytest.raises(
        AssertionError, match=r"model\.net\.body\.0\.bias, model\.net\.body\.0\.weight is left to the base"
    ):
        run_training(
            world_size, tmp_path / "run", strategy, 5, ckpt_path=str(base), callbacks=(Unfreeze(2),),
            **scoped(base, mode=mode),
        )  # fmt: skip
    assert verify(find_latest(tmp_path / "run"), "deep").step == 2


@FITS
def test_a_tensor_of_the_base_that_an_optimizer_would_train_is_refused_at_the_start(tmp_path, base):
    options = scoped(base, frozen=("net.embed",))
    with pytest.raises(
        AssertionError, match=r"model\.net\.body\.0\.bias, .* is left to the base .* would train it: freeze"
    ):
        run_training(1, tmp_path / "run", "single", 3, ckpt_path=str(base), **options)


@FITS
def test_a_base_with_optimizer_state_of_what_is_left_to_it_is_refused_at_the_start(tmp_path, base):
    with pytest.raises(AssertionError, match=r"is left to the base .* but an optimizer has state for it"):
        run_training(1, base.parent.parent, "single", 5, ckpt_path="latest", **scoped(base))


@FITS
def test_a_fit_whose_weights_are_not_those_of_the_base_is_refused_at_the_start(tmp_path, base):
    with pytest.raises(AssertionError, match="differs between the model and the base"):
        run_training(1, tmp_path / "run", "single", 3, **scoped(base))


def test_a_damaged_copy_as_the_scopes_base_is_refused_though_the_restore_reads_the_good_one(tmp_path, base):
    run_training(1, tmp_path / "run", "single", 4, ckpt_path=str(base), **scoped(base))
    copy = shutil.copytree(base, tmp_path / "copy" / base.name)
    flip_byte(copy, read_manifest(copy), "model.net.embed.weight")
    newest = str(find_latest(tmp_path / "run"))
    with pytest.raises(AssertionError, match=rf"{copy}.* bytes have changed"):
        run_training(1, tmp_path / "run", "single", LAST_STEP, ckpt_path=newest, **scoped(copy))


def test_a_base_in_the_runs_own_directory_is_kept_or_refused(tmp_path):
    base = build_base(tmp_path, frozen=FROZEN)
    run = tmp_path / "base"
    runs = run_training(1, run, "single", 5, ckpt_path="latest", **scoped(base, keep_last=1))
    assert runs[0]["failed"] == 0
    assert sorted(path.name for path in base.parent.glob("step-*")) == [base.name, "step-00000005"]
    copy = shutil.copytree(base, tmp_path / "copy" / base.name)
    with pytest.raises(AssertionError, match="lies in this run's directory, but this run does not continue from it"):
        run_training(1, run, "single", 5, ckpt_path=str(copy), **scoped(base, on_existing="start_over"))


@FITS
def test_a_portable_file_of_a_run_with_a_base_has_all_tensors(tmp_path, base):
    (run,) = run_training(1, tmp_path / "run", "single", 3, ckpt_path=str(base), **scoped(base))
    loaded = torch.load(export_lightning_checkpoint(tmp_path / "run", tmp_path / "run.ckpt"), weights_only=True)
    assert all(torch.equal(loaded["state_dict"][name], tensor) for name, tensor in run["weights"].items())


def verify_fit(root: Path, base: Path) -> tuple[int, int]:

    verification = CheckpointVerification(finite=True)
    train(root / "run", "single", 4, ckpt_path=str(base), callbacks=(verification,), **scoped(base))
    return verification.num_verified, verification.num_bad


@FITS
def test_verification_finds_the_tensors_of_a_scoped_save_in_its_base(tmp_path, base):
    assert run_ranks(verify_fit, 1, tmp_path, base) == [(4, 0)]
