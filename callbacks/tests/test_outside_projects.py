"""Other people's Lightning projects: killed and started again at once, they equal the run that was never killed."""

import pytest
import torch
from outside.projects import NUM_EPOCHS, PROJECTS, read_batches, run_project

from genesis_callbacks.testing import run_ranks


def run(name, run_dir, attempt=0, kill=None, **options):
    return run_ranks(_call, PROJECTS[name].num_ranks, (name, run_dir, attempt, kill), options)


def _call(arguments, options):
    return run_project(*arguments, **options)


def assert_same(value, other, path="") -> None:
    assert type(value) is type(other), path
    if isinstance(value, torch.Tensor):
        assert torch.equal(value, other), path
    elif isinstance(value, dict):
        assert value.keys() == other.keys(), path
        for key in value:
            assert_same(value[key], other[key], f"{path}.{key}")
    elif isinstance(value, list):
        assert len(value) == len(other), path
        for index, (item, counterpart) in enumerate(zip(value, other, strict=True)):
            assert_same(item, counterpart, f"{path}.{index}")
    else:
        assert value == other, path


QUICK = ("counting", "ddp")


@pytest.mark.process
@pytest.mark.each
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROJECTS]
)
def test_killed_at_an_epochs_end_and_within_one_a_project_equals_the_run_that_was_not(tmp_path, name):
    """The first kill is after an epoch's last save, the second within the next epoch, the restarts come at once."""
    project = PROJECTS[name]
    in_epoch, every = project.steps_in_epoch, project.every_n_steps
    straight = run(name, tmp_path / "straight", every_n_steps=None, save_at_end=False)
    kills = [(in_epoch + 1, in_epoch), (in_epoch + 2, (in_epoch + 1) // every * every)]
    for attempt, kill in enumerate(kills):
        with pytest.raises(AssertionError, match="died without a word"):
            run(name, tmp_path / "run", attempt, kill)
    resumed = run(name, tmp_path / "run", len(kills))
    for rank in range(project.num_ranks):
        batches = read_batches(tmp_path / "straight", 0, rank)
        assert len(batches) == NUM_EPOCHS * in_epoch
        for attempt in range(len(kills) + 1):
            seen = read_batches(tmp_path / "run", attempt, rank)
            begin = batches.index(seen[0])
            assert seen == batches[begin : begin + len(seen)], f"attempt {attempt} on rank {rank}"
        assert seen[-1] == batches[-1]
    for outcome, other in zip(straight, resumed, strict=True):
        assert other.report is not None
        assert_same(outcome.weights, other.weights)
        assert_same(outcome.optimizers, other.optimizers)
        assert_same(outcome.averages, other.averages)
