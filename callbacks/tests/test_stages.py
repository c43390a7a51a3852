"""Ranks that hold different parts of a model: what they save is the whole, and any other split goes on from it."""

import shutil

import pytest
import torch
from staged_project import LAST_STEP, run_staged

from genesis_callbacks import export_lightning_checkpoint
from genesis_callbacks.checkpoint import CheckpointError, find_latest, read_tensors, verify

SPLITS = ("in place", "by dict")


def read_end(run_dir):
    """Returns all tensors of the model and its optimizer at the last step."""
    path = run_dir / f"checkpoints/step-{LAST_STEP:08d}"
    verify(path, "deep")
    return read_tensors(path, prefix="model.") | read_tensors(path, prefix="optimizer.")


def assert_same_end(run_dir, straight):
    expected, found = read_end(straight), read_end(run_dir)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def assert_same_groups(runs, others):
    """Each parameter has the options of its group, wherever it lies."""
    of_all, of_others = ({name: one for run in each for name, one in run.groups.items()} for each in (runs, others))
    assert of_all == of_others
    windows, other_windows = (
        {name: count for run in each for name, count in run.num_windows.items()} for each in (runs, others)
    )
    assert windows == other_windows


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The whole model, trained on one rank without a stop, and its run's directory."""
    run_dir = tmp_path_factory.mktemp("straight")
    return run_staged(run_dir, None), run_dir


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """The directory of a run of four steps by each split, and by the whole model."""
    root = tmp_path_factory.mktemp("halves")
    for split in SPLITS:
        run_staged(root / split, split, 4)
    run_staged(root / "whole", None, 4)
    return root


@pytest.mark.parametrize(
    ("saver", "restorer"),
    [
        ("in place", "in place"),
        ("in place", None),
        ("whole", "in place"),
        ("whole", "by dict"),
        pytest.param("by dict", None, marks=pytest.mark.slow),
        pytest.param("by dict", "by dict", marks=pytest.mark.slow),
        pytest.param("in place", "by dict", marks=pytest.mark.slow),
    ],
)
def test_any_split_goes_on_from_any_other_bit_for_bit(tmp_path, straight, halves, saver, restorer):
    shutil.copytree(halves / saver, tmp_path / "run")
    resumed = run_staged(tmp_path / "run", restorer)
    runs, run_dir = straight
    assert_same_end(tmp_path / "run", run_dir)
    assert_same_groups(resumed, runs)
    is_same = (saver == "whole") == (restorer is None)
    assert ("random number generators of each rank" in resumed[0].report) == is_same


@pytest.mark.parametrize(
    "mode", [pytest.param("sync", marks=pytest.mark.slow), pytest.param("thread", marks=pytest.mark.slow), "process"]
)
def test_stages_that_are_killed_go_on_bit_for_bit_in_every_mode(tmp_path, straight, mode):
    with pytest.raises(AssertionError, match="died without a word"):
        run_staged(tmp_path, "in place", mode=mode, kill_at=5)
    assert find_latest(tmp_path) is not None
    resumed = run_staged(tmp_path, "in place", mode=mode)
    runs, run_dir = straight
    assert_same_end(tmp_path, run_dir)
    assert_same_groups(resumed, runs)


def test_stages_that_have_changed_places_take_the_state_of_their_stage(tmp_path, straight, halves):
    """Rank 0 holds the second stage now: tensors are found by name, and other state by the role in its section."""
    shutil.copytree(halves / "in place", tmp_path / "run")
    resumed = run_staged(tmp_path / "run", "in place", stages=(1, 0))
    assert [run.restored_stage for run in resumed] == [1, 0]
    assert "random number generators of each rank" in resumed[0].report
    runs, run_dir = straight
    assert_same_end(tmp_path / "run", run_dir)
    assert_same_groups(resumed, runs)


@pytest.mark.parametrize("restorer", SPLITS)
def test_a_tensor_that_no_rank_saved_is_refused_by_name_on_every_rank(tmp_path, halves, restorer):
    shutil.copytree(halves / "in place", tmp_path / "run")
    with pytest.raises(AssertionError) as failure:
        run_staged(tmp_path / "run", restorer, num_blocks=5)
    text = str(failure.value)
    assert text.count(r"different tensors: model.blocks.4.linear.bias") >= 2
    assert "rank 0" in text
    assert "rank 1" in text


@pytest.mark.parametrize("restorer", ["in place", pytest.param("by dict", marks=pytest.mark.slow)])
def test_a_tensor_that_no_rank_holds_any_more_is_refused_by_name(tmp_path, halves, restorer):
    shutil.copytree(halves / "whole", tmp_path / "run")
    with pytest.raises(AssertionError, match=r"none not saved, model\.blocks\.3\.linear\.bias.* not in the model"):
        run_staged(tmp_path / "run", restorer, num_blocks=3)


def test_other_optimizer_groups_are_refused(tmp_path, halves):
    shutil.copytree(halves / "in place", tmp_path / "run")
    with pytest.raises(AssertionError, match=r"optimizer 0 updates other parameters .*in their order or grouping"):
        run_staged(tmp_path / "run", "in place", has_embedding_group=False)


def test_verification_takes_the_stages_for_one_model(tmp_path):
    runs = run_staged(tmp_path, "in place", 4, verifies=True)
    assert runs[0].num_verified == 2


def test_verification_refuses_a_checkpoint_without_a_tensor_of_one_stage(tmp_path):
    with pytest.raises(AssertionError, match=r"missing: blocks\.3\.linear\.weight"):
        run_staged(tmp_path, "in place", 4, verifies=True, forgets="blocks.3.linear.weight")


def test_stages_are_not_converted_to_a_format_that_numbers_parameters(tmp_path, halves):
    with pytest.raises(CheckpointError, match="different parts of the model"):
        export_lightning_checkpoint(halves / "in place", tmp_path / "one.ckpt")
