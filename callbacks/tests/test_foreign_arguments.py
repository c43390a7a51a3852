"""Arguments of Lightning's ModelCheckpoint: what to write instead, in a line that works."""

import inspect
from datetime import timedelta

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

import genesis_callbacks
from genesis_callbacks import AsyncProcessCheckpoint


def refuse(**arguments) -> str:
    with pytest.raises(TypeError) as caught:
        AsyncProcessCheckpoint(**arguments)
    return str(caught.value)


def written(**arguments) -> AsyncProcessCheckpoint:
    """Returns the callback of the line that the message says to write."""
    *_, line = refuse(**arguments).splitlines()
    assert line.startswith("write: AsyncProcessCheckpoint(")
    return eval(line.removeprefix("write: "), {"AsyncProcessCheckpoint": AsyncProcessCheckpoint})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"dirpath": "ckpts", "every_n_train_steps": 500}, {"every_n_steps": 500}),
        (
            {"dirpath": "ckpts", "save_top_k": 3, "monitor": "acc", "mode": "max"},
            {"keep_best": 3, "monitor_mode": "max"},
        ),
        ({"dirpath": "ckpts", "save_top_k": 3}, {"keep_last": 3}),
        ({"dirpath": "ckpts", "save_top_k": -1, "every_n_epochs": 2}, {"keep_last": None, "every_n_epochs": 2}),
        ({"dirpath": "ckpts", "save_last": True, "filename": "{epoch}"}, {}),
        ({"dirpath": "ckpts", "train_time_interval": timedelta(hours=1)}, {"every_n_minutes": 60.0}),
        ({"dirpath": "ckpts", "save_weights_only": True, "verbose": True}, {"save_optimizer": False}),
    ],
)
def test_the_line_to_write_means_the_same(arguments, expected):
    callback = written(**arguments)
    options = callback._options
    assert callback.directory.parent.name == "ckpts"
    for name, value in expected.items():
        assert (options.retention.keep_last if name == "keep_last" else getattr(options, name)) == value, name
    message = refuse(**arguments)
    for name in arguments.keys() - {"monitor", "every_n_epochs"}:
        assert f"\n  {name}=" in message


def test_every_argument_of_model_checkpoint_is_ours_or_explained():
    known = inspect.signature(AsyncProcessCheckpoint).parameters
    for name in inspect.signature(ModelCheckpoint).parameters:
        if name not in known or name == "mode":
            assert "arguments of Lightning's ModelCheckpoint" in refuse(**{name: "min"}), name


def test_our_own_mode_is_not_taken_for_theirs(tmp_path):
    assert AsyncProcessCheckpoint(run_dir=tmp_path, mode="sync")._options.mode == "sync"
    with pytest.raises(ValueError, match="mode must be 'sync' or"):
        AsyncProcessCheckpoint(run_dir=tmp_path, mode="fast")


def test_other_mistakes_are_named_with_the_argument_that_is_near():
    assert refuse(run_dir="x", every_n_step=5) == (
        "AsyncProcessCheckpoint has no argument 'every_n_step': did you mean every_n_steps?"
    )
    assert "'color': its arguments are run_dir, every_n_steps" in refuse(run_dir="x", color=1)
    with pytest.raises(TypeError, match=r"by name: AsyncProcessCheckpoint\(run_dir='ckpts', \.\.\.\)"):
        AsyncProcessCheckpoint("ckpts")
    assert "saves nothing" in refuse(dirpath="x", save_top_k=0)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'run_dir'"):
        AsyncProcessCheckpoint()


def test_the_arguments_are_visible_to_help_and_to_parsers_of_signatures():
    assert list(inspect.signature(AsyncProcessCheckpoint).parameters)[:2] == ["run_dir", "every_n_steps"]


def test_dir_of_the_package_lists_its_public_names():
    assert set(genesis_callbacks.__all__) <= set(dir(genesis_callbacks))
    assert all(hasattr(genesis_callbacks, name) for name in dir(genesis_callbacks))
