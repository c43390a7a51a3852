import copy

import pytest
import torch
from torch import nn

from genesis_callbacks.base.checkpoint_errors import UnsupportedStateError
from genesis_callbacks.checkpoint.collect import name_optimizer, name_parameters
from genesis_callbacks.checkpoint.known_tensors import KnownTensors


class Project:
    """A model, its optimizer after a step, and what the saves of their run remember."""

    def __init__(self, optimizer=torch.optim.AdamW, *, is_late=False, **options):
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        self.optimizer = optimizer(self.model.parameters(), **options)
        self.known = KnownTensors(is_late=is_late)
        self.num_namings = 0
        self.num_repeated = 0
        self.step()

    def step(self):
        def closure():
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(4, 3)).square().sum()
            loss.backward()
            return loss

        self.optimizer.step(closure)

    def take(self):
        def name():
            self.num_namings += 1
            return name_parameters(self.model)

        model = self.known.find_model(self.model.state_dict(keep_vars=True))
        optimizer = self.known.find_optimizer(0, self.optimizer, name)
        return model, optimizer

    def assert_is_live(self):
        """What is found is what somebody finds who remembers nothing, element for element."""
        found = self.take()
        if self.known.has_missed_change():
            self.num_repeated += 1
            found = self.take()
            assert not self.known.has_missed_change()
        known, self.known = self.known, KnownTensors()
        fresh = self.take()
        self.known = known
        for one, other in zip(found, fresh, strict=True):
            assert [local.part for local in one.parts] == [local.part for local in other.parts]
            for local, live in zip(one.parts, other.parts, strict=True):
                assert local.data.data_ptr() == live.data.data_ptr()
                assert torch.equal(local.data, live.data)
        assert found[0].model == fresh[0].model
        assert found[0].stored == fresh[0].stored
        assert found[1].section == fresh[1].section
        assert found[1].section == name_optimizer(0, self.optimizer, name_parameters(self.model)).section


def replace_element_storage(project):
    project.model[0].weight.data = torch.ones(2, 3)


def reshape_in_place(project):
    weight = project.model[0].weight
    weight.data = weight.data.view(3, 2).t()


def replace_a_buffer(project):
    project.model[1].running_mean = torch.ones(2)


def replace_a_parameter(project):
    del project.optimizer.state[project.model[2].bias]
    project.model[2].bias = nn.Parameter(torch.ones(1))
    project.optimizer.param_groups[0]["params"][-1] = project.model[2].bias


def add_a_group(project):
    project.model.extra = nn.Linear(1, 1)
    project.optimizer.add_param_group({"params": [*project.model.extra.parameters()], "lr": 0.5})


def forget_the_state(project):
    project.optimizer.state.clear()


def load_the_state(project):
    project.optimizer.load_state_dict(copy.deepcopy(project.optimizer.state_dict()))


def swap_two_moments(project):
    for state in project.optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()


def add_a_value_to_the_state(project):
    project.optimizer.state[project.model[0].weight]["note"] = 3


def change_the_learning_rate(project):
    project.optimizer.param_groups[0]["lr"] = 0.25


def move_a_parameter_to_another_group(project):
    moved = project.optimizer.param_groups[0]["params"].pop()
    project.optimizer.add_param_group({"params": [moved]})


CHANGES = [
    replace_element_storage,
    reshape_in_place,
    replace_a_buffer,
    replace_a_parameter,
    add_a_group,
    forget_the_state,
    load_the_state,
    swap_two_moments,
    add_a_value_to_the_state,
    change_the_learning_rate,
    move_a_parameter_to_another_group,
]


@pytest.mark.parametrize("is_late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_remembered_is_what_is_live_whatever_changed(change, is_late):
    project = Project(is_late=is_late)
    project.take()
    change(project)
    project.assert_is_live()
    project.step()
    project.assert_is_live()


def test_a_late_check_repeats_one_save_and_none_after_it():
    """As with an optimizer that makes new tensors for its state in each step."""
    project = Project(is_late=True)
    project.take()
    for _ in range(3):
        project.step()
        load_the_state(project)
        project.assert_is_live()
    assert project.num_repeated == 1


def test_a_late_check_of_a_snapshot_that_was_given_up_is_not_made_for_the_next_one():
    project = Project(is_late=True)
    project.take()
    project.take()
    load_the_state(project)
    project.known.find_model(project.model.state_dict(keep_vars=True))
    assert not project.known.has_missed_change()


def test_nothing_is_named_again_where_nothing_changed():
    project = Project()
    first = project.take()
    project.step()
    again = project.take()
    assert project.num_namings == 1
    assert again[0] is first[0]
    assert again[1].parts is first[1].parts


def test_state_that_is_no_tensor_is_read_at_each_save():
    project = Project(torch.optim.LBFGS, max_iter=2)
    before = copy.deepcopy(project.take()[1].section["values"])
    project.step()
    assert project.take()[1].section["values"] != before
    project.assert_is_live()


def test_a_tensor_that_is_no_parameter_is_refused_though_others_are_known():
    project = Project()
    project.take()
    project.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(UnsupportedStateError, match="not a parameter of the model"):
        project.take()


@pytest.mark.parametrize("is_late", [False, True], ids=["at_once", "late"])
def test_what_is_remembered_does_not_depend_on_the_mode_of_autograd(is_late):
    """A save after a validation begins in inference mode, one after a step does not."""
    project = Project(is_late=is_late)
    with torch.inference_mode():
        first = project.take()
    assert project.take()[0] is first[0]
    assert not project.known.has_missed_change()
    with torch.inference_mode():
        assert project.take()[0] is first[0]
    assert not project.known.has_missed_change()


def test_a_late_check_repeats_no_save_because_training_went_on():
    """A callback at the beginning of the next step unfreezes a parameter, and another gives one its average."""
    project = Project(is_late=True)
    first = project.take()
    project.take()
    project.model[0].weight.requires_grad_(False)
    project.model[2].weight.data = project.model[2].weight.data + 1.0
    assert not project.known.has_missed_change()
    assert project.take()[0] is not first[0], "the parameter has other elements now"
