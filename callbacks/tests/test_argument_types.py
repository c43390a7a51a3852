"""Arguments of a wrong type are refused in one line, by every public callback."""

import inspect
from typing import get_type_hints

import numpy as np
import pytest
from lightning.pytorch import Callback

import genesis_callbacks

PUBLIC = [getattr(genesis_callbacks, name) for name in genesis_callbacks.__all__]
CLASSES = [each for each in PUBLIC if inspect.isclass(each) and issubclass(each, Callback)]


@pytest.mark.parametrize("owner", CLASSES, ids=lambda owner: owner.__name__)
def test_every_argument_of_a_wrong_type_is_named_with_its_value(owner):
    names = list(inspect.signature(owner).parameters)
    others = {"run_dir": "runs/mine"} if "run_dir" in names else {}
    for name in set(get_type_hints(inspect.unwrap(owner.__init__))) - {"return"}:
        with pytest.raises(TypeError) as refused:
            owner(**{**others, name: b"?"})
        line = str(refused.value)
        assert line.startswith(f"{owner.__name__}: {name} is b'?': give "), line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"every_n_steps": "5"}, "every_n_steps is '5': give a whole number or None"),
        ({"every_n_steps": 2.5}, "every_n_steps is 2.5: give a whole number or None"),
        ({"every_n_steps": True}, "every_n_steps is True: give a whole number or None"),
        ({"save_at_end": "no"}, "save_at_end is 'no': give True or False"),
        ({"allow_changed": "trainer"}, "allow_changed is 'trainer': give a list of texts"),
        ({"every_n_minutes": "1h"}, "every_n_minutes is '1h': give a number or None"),
        ({"recipe": ["a"]}, "recipe is ['a']: give a mapping or None"),
        ({"run_dir": 3}, "run_dir is 3: give a text or a path"),
    ],
)
def test_the_line_says_what_to_give(given, wanted):
    with pytest.raises(TypeError) as refused:
        genesis_callbacks.AsyncProcessCheckpoint(**{"run_dir": "runs/mine", **given})
    assert str(refused.value) == f"AsyncProcessCheckpoint: {wanted}"


def test_numbers_of_other_packages_and_whole_numbers_for_fractions_are_taken(tmp_path):
    genesis_callbacks.AsyncProcessCheckpoint(run_dir=tmp_path, every_n_steps=np.int64(3), every_n_minutes=2)


def test_a_text_that_is_no_choice_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"verify_level must be 'quick' or .*, not 'shallow'"):
        genesis_callbacks.AsyncProcessCheckpoint(run_dir="runs/mine", verify_level="shallow")
    with pytest.raises(ValueError, match=r"shape must be 'cosine' or .*, not 'square'"):
        genesis_callbacks.SkipAwareLR(shape="square")
    genesis_callbacks.CheckpointVerification(directory_holds=None, directory="choices are no types")
