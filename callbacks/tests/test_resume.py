"""A plain Lightning project, saved and restored: real processes, across strategies and world sizes."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from plain_project import run_training

from genesis_callbacks.checkpoint import find_latest, read_manifest, read_tensors, verify

WORLD_SIZES = {"single": 1, "ddp": 2, "fsdp2": 2, "zero": 2}
MODES = ("sync", "thread", "process")
STRATEGIES = ("single", "ddp", "fsdp2")
QUICK_MODES = (("single", "thread"), ("fsdp2", "process"))
QUICK_PAIRS = (("single", "fsdp2"), ("fsdp2", "single"))


def assert_equal_weights(runs, others):
    for run, other in zip(runs, others, strict=True):
        assert run["weights"].keys() == other["weights"].keys()
        for name, tensor in run["weights"].items():
            assert torch.equal(tensor, other["weights"][name]), name


def global_losses(runs):
    return torch.tensor([run["losses"] for run in runs]).mean(dim=0)


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        pair if pair in QUICK_MODES else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in itertools.product(WORLD_SIZES, MODES)
    ],
)
def test_four_steps_a_save_and_four_in_a_new_process_equal_eight(tmp_path, strategy, mode):
    """The first run saves nothing, the others at every step: saving changes no bit of the training."""
    world_size = WORLD_SIZES[strategy]
    options = {"dropout": 0.3, "mode": mode, "every_n_steps": 1}
    straight = run_training(world_size, tmp_path / "straight", strategy, 8, dropout=0.3, save_at_end=False)
    run_training(world_size, tmp_path / "run", strategy, 4, **options)
    resumed = run_training(world_size, tmp_path / "run", strategy, 8, ckpt_path="callback", **options)
    assert verify(find_latest(tmp_path / "run"), "deep").step == 8
    assert names_in(tmp_path / "run") == ["step-00000006", "step-00000007", "step-00000008"]
    assert_equal_weights(straight, resumed)
    for run, other in zip(straight, resumed, strict=True):
        assert run["losses"][4:] == other["losses"]
        assert run["lr"] == other["lr"]
        assert run["seen"] == other["seen"]
        assert "random number generators of each rank" in other["report"]


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory):
    """A run of four steps by each strategy, with the losses of eight on one device."""
    root = tmp_path_factory.mktemp("saved")
    for strategy in STRATEGIES:
        run_training(WORLD_SIZES[strategy], root / strategy, strategy, 4)
    return root, global_losses(run_training(1, root / "straight", "single", 8, save_at_end=False))


@pytest.mark.parametrize(
    ("saver", "restorer"),
    [
        pair if pair in QUICK_PAIRS else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in itertools.permutations(STRATEGIES, 2)
    ],
)
def test_any_strategy_restores_any_other(tmp_path, saved_by, saver, restorer):
    root, expected = saved_by
    shutil.copytree(root / saver, tmp_path / "run")
    resumed = run_training(WORLD_SIZES[restorer], tmp_path / "run", restorer, 8, ckpt_path="latest")
    torch.testing.assert_close(global_losses(resumed), expected[4:], atol=1e-6, rtol=0)
    assert verify(tmp_path / "run/checkpoints/step-00000008", "deep").world_size == WORLD_SIZES[restorer]
    if WORLD_SIZES[saver] != WORLD_SIZES[restorer]:
        assert "random number generators" in resumed[0]["report"].partition("  reset ")[2]


@pytest.mark.parametrize(
    ("saver", "restorer"),
    [
        ("zero", "single"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("single", "zero"), ("zero", "fsdp2"))),
    ],
)
def test_partitioned_optimizer_state_goes_anywhere(tmp_path, saver, restorer):
    straight = run_training(1, tmp_path / "straight", "single", 8, num_groups=1, save_at_end=False)
    run_training(WORLD_SIZES[saver], tmp_path / "run", saver, 4, num_groups=1)
    resumed = run_training(WORLD_SIZES[restorer], tmp_path / "run", restorer, 8, num_groups=1, ckpt_path="latest")
    torch.testing.assert_close(global_losses(resumed), global_losses(straight)[4:], atol=1e-6, rtol=0)


def test_directory_is_readable_by_stock_dcp_and_by_name(tmp_path, saved_by):
    root, _ = saved_by
    path = find_latest(root / "fsdp2")
    tensors = read_tensors(path, prefix="model.")
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, checkpoint_id=path, no_dist=True)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, target[name])
    manifest = read_manifest(path)
    assert "model.net.head.weight" not in manifest.tensors  # tied to the embedding, stored once
    assert manifest.counters == {"step": 4, "tokens_seen": 160}
    assert manifest.mesh == {"data_parallel": 2}
    assert {record.rank for record in manifest.files if record.name.endswith(".distcp")} == {0, 1}
    assert len(manifest.tensors["model.net.embed.weight"].chunks) == 2


@pytest.mark.parametrize(
    "mode", [pytest.param("sync", marks=pytest.mark.slow), "thread", pytest.param("process", marks=pytest.mark.slow)]
)
def test_saves_run_nothing_on_the_training_group(tmp_path, mode):
    for strategy in ("ddp", "fsdp2"):
        for run in run_training(2, tmp_path / strategy, strategy, 4, every_n_steps=1, keep_last=2, mode=mode):
            assert run["training_collectives"] == (0, True, 4)


def test_retention_keeps_the_last_and_every_mth(tmp_path):
    run_training(1, tmp_path, "single", 7, every_n_steps=1, keep_last=2, keep_every_n_steps=3)
    assert names_in(tmp_path) == ["step-00000003", "step-00000006", "step-00000007"]


def test_going_on_from_an_older_one_supersedes_the_newer(tmp_path):
    run_training(1, tmp_path, "single", 6, every_n_steps=2, keep_last=None)
    older = tmp_path / "checkpoints/step-00000002"
    (resumed,) = run_training(1, tmp_path, "single", 3, ckpt_path=str(older))
    assert len(resumed["losses"]) == 1
    assert names_in(tmp_path) == ["step-00000002", "step-00000003", "superseded-1"]
    assert [path.name for path in sorted((tmp_path / "checkpoints/superseded-1").iterdir())] == [
        "step-00000004",
        "step-00000006",
    ]
    latest = find_latest(tmp_path)
    assert latest.name == "step-00000003"
    assert read_manifest(latest).previous.name == "step-00000002"


def test_a_run_goes_on_from_a_copy_with_another_name_and_its_saves_verify(tmp_path):
    run_training(1, tmp_path / "first", "single", 2)
    copy = tmp_path / "kept/good"
    shutil.copytree(find_latest(tmp_path / "first"), copy)
    run_training(1, tmp_path / "second", "single", 4, every_n_steps=1, ckpt_path=str(copy))
    assert names_in(tmp_path / "second") == ["step-00000003", "step-00000004"]
    for name in names_in(tmp_path / "second"):
        verify(tmp_path / "second/checkpoints" / name, "deep")
    previous = read_manifest(tmp_path / "second/checkpoints/step-00000003").previous
    assert (previous.name, previous.directory) == ("step-00000002", "../../kept")


@pytest.mark.parametrize("name", ["step-00000002", "moved"])
def test_a_checkpoint_behind_a_link_to_another_disk_stays_the_runs_own(tmp_path, name):
    run_training(1, tmp_path / "run", "single", 2, every_n_steps=1)
    path, target = tmp_path / "run/checkpoints/step-00000002", tmp_path / "disk" / name
    target.parent.mkdir()
    path.rename(target)
    path.symlink_to(target)
    run_training(1, tmp_path / "run", "single", 3, every_n_steps=1, ckpt_path=str(path))
    assert names_in(tmp_path / "run") == ["step-00000001", "step-00000002", "step-00000003"]
    previous = read_manifest(find_latest(tmp_path / "run")).previous
    assert (previous.name, previous.directory) == ("step-00000002", None)
    run_training(1, tmp_path / "run", "single", 5, every_n_steps=1, keep_last=1, ckpt_path="latest")
    assert names_in(tmp_path / "run") == ["step-00000005"]
    assert not list((tmp_path / "run/checkpoints").glob(".trash/*"))
    assert (target / "COMMITTED").exists()


def test_latest_on_an_empty_directory_starts_from_nothing(tmp_path):
    for strategy in ("single", "fsdp2"):
        runs = run_training(WORLD_SIZES[strategy], tmp_path / strategy, strategy, 2, ckpt_path="latest")
        assert len(runs[0]["losses"]) == 2
        assert runs[0]["report"] is None


def test_an_explicit_path_that_fails_is_refused_with_the_reason(tmp_path):
    run_training(1, tmp_path, "single", 4, every_n_steps=2)
    path = tmp_path / "checkpoints/step-00000004"
    shard = path / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(AssertionError, match=r"__0_0\.distcp has \d+ bytes, but \d+ were saved"):
        run_training(1, tmp_path, "single", 6, ckpt_path=str(path))
    (resumed,) = run_training(1, tmp_path, "single", 6, ckpt_path="callback")
    assert len(resumed["losses"]) == 4  # from step 2
    assert "quarantined-step-00000004" in names_in(tmp_path)


def test_drift_of_identity_is_refused_unless_allowed(tmp_path):
    run_training(1, tmp_path, "single", 2, identity={"tokenizer_hash": "one"})
    with pytest.raises(AssertionError, match="tokenizer_hash is 'two' and was 'one'"):
        run_training(1, tmp_path, "single", 4, ckpt_path="latest", identity={"tokenizer_hash": "two"})
    other = {"identity": {"tokenizer_hash": "two"}, "allow_changed": ["tokenizer_hash"]}
    run_training(1, tmp_path, "single", 4, ckpt_path="latest", **other)
    assert read_manifest(find_latest(tmp_path)).identity == {"tokenizer_hash": "two"}


def test_an_optimizer_over_other_groups_is_refused(tmp_path):
    run_training(2, tmp_path, "fsdp2", 2)
    with pytest.raises(AssertionError, match=r"optimizer 0 updates other parameters .*in their order or grouping"):
        run_training(2, tmp_path, "fsdp2", 4, ckpt_path="latest", num_groups=1)


def test_recipe_that_is_not_json_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(AssertionError, match="the recipe for the manifest must be plain JSON"):
        run_training(1, tmp_path, "single", 2, recipe={"path": tmp_path})


def test_state_is_plain_json(tmp_path):
    run_training(1, tmp_path, "single", 4, recipe={"model": {"dim": 6}})
    path = find_latest(tmp_path)
    assert read_manifest(path).recipe == {"model": {"dim": 6}}
    (section,) = json.loads((path / "state.json").read_bytes())["sections"]
    assert section["trainer"]["lr_schedulers"][0]["milestones"] == {"!": "Counter", "items": [[3, 2], [6, 1]]}


def names_in(run_dir: Path) -> list[str]:
    """Names in the checkpoint directory, without the hidden ones."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if not path.name.startswith("."))
