"""State dicts that are read quickly are those of torch and Lightning, whatever classes, hooks and changes there are."""

import copy

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.progress import _BaseProgress
from torch import nn
from torchmetrics import MeanMetric

from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks._state_dicts import LiveStateDict, read_loop_state
from genesis_callbacks.checkpoint import read_manifest, read_tensors


class HasExtraState(nn.Module):
    def get_extra_state(self):
        return {"count": 3}

    def set_extra_state(self, state):
        pass


class LeavesOut(nn.Linear):
    def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
        destination[f"{prefix}own"] = self.weight if keep_vars else self.weight.detach()
        return destination


class SavesMore(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}more"] = self.bias


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 2))
        self.tied = nn.Linear(3, 2)
        self.tied.weight = self.first[0].weight
        self.shared = nn.ModuleList([self.first[2], self.first[2]])
        self.metric = MeanMetric()
        self.metric.persistent(True)
        self.nothing = None
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.extra, self.leaves_out, self.more = HasExtraState(), LeavesOut(2, 2), SavesMore(2, 2)
        self.compiled = torch.compile(nn.Linear(2, 2), backend="eager")
        self.last = nn.Linear(2, 1)


def add_a_parameter(model):
    model.last.extra = nn.Parameter(torch.ones(1))


def remove_a_bias(model):
    model.last.bias = None


def replace_a_parameter(model):
    model.last.weight = nn.Parameter(torch.ones(1, 2))


def move_a_parameter(model):
    weight = model.first[2].weight
    del model.first[2].weight
    model.first[1].register_parameter("weight", weight)


def replace_a_module(model):
    model.last = nn.Linear(2, 5)


def rename_a_module(model):
    model.end = model.last
    del model.last


def remove_a_module(model):
    del model.tied


def give_a_plain_module_a_buffer(model):
    model.last.register_buffer("late", torch.ones(1))


def replace_a_buffer(model):
    model.first[1].running_mean = torch.ones(2)


def make_a_buffer_pass(model):
    model.register_buffer("kept", model.kept, persistent=False)


def add_a_hook(model):
    model.last.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}late": 1}))


def add_a_pre_hook(model):
    model.last.register_state_dict_pre_hook(lambda module, prefix, keep_vars: module.bias.data.fill_(7))


def add_a_hook_of_the_root(model):
    model._register_state_dict_hook(lambda module, state, prefix, _: {"one": state["scale"]})


def replace_a_method(model):
    model.last.state_dict = lambda destination, prefix, keep_vars: destination.update({f"{prefix}x": model.scale})


def replace_a_class(model):
    model.last.__class__ = SavesMore


CHANGES = [
    add_a_parameter,
    remove_a_bias,
    replace_a_parameter,
    move_a_parameter,
    replace_a_module,
    rename_a_module,
    remove_a_module,
    give_a_plain_module_a_buffer,
    replace_a_buffer,
    make_a_buffer_pass,
    add_a_hook,
    add_a_pre_hook,
    add_a_hook_of_the_root,
    replace_a_method,
    replace_a_class,
]


def assert_is_torchs(reader, model):
    found, expected = reader.read(model), model.state_dict(keep_vars=True)
    assert list(found) == list(expected)
    for name, value in expected.items():
        is_copy = name.startswith("metric.") or name.endswith("_extra_state")
        assert value is found[name] or (is_copy and value == found[name])


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_state_dict_is_torchs_before_and_after_a_change(change):
    model, reader = Model(), LiveStateDict()
    for _ in range(2):
        assert_is_torchs(reader, model)
        assert not reader.has_missed_change()
    change(model)
    for _ in range(2):
        assert_is_torchs(reader, model)
        assert not reader.has_missed_change()


def test_a_method_that_the_module_itself_has_is_called():
    class Own(Model):
        def state_dict(self, *args, **options):
            return {"only": self.scale}

    assert LiveStateDict().read(Own()).keys() == {"only"}


def test_another_module_is_not_taken_for_the_first():
    reader = LiveStateDict()
    for model in (Model(), nn.Linear(1, 1), Model()):
        assert_is_torchs(reader, model)


def rebind_the_parameters(model):
    model.last._parameters = {name: nn.Parameter(value + 1) for name, value in model.last._parameters.items()}


def rebind_all(model):
    model.last.__dict__ = copy.deepcopy(model.last).__dict__


@pytest.mark.parametrize("change", [rebind_the_parameters, rebind_all], ids=lambda change: change.__name__)
def test_dicts_in_the_place_of_a_modules_own_are_noticed_later_and_then_always_at_once(change):
    model, reader = Model(), LiveStateDict()
    reader.read(model)
    change(model)
    reader.read(model)
    assert reader.has_missed_change()
    for _ in range(2):
        assert_is_torchs(reader, model)
        assert not reader.has_missed_change()
        change(model)


def test_a_class_that_gets_a_method_is_noticed_later():
    class Late(nn.Linear):
        pass

    model, reader = nn.Sequential(Late(2, 2)), LiveStateDict()
    reader.read(model)
    Late.get_extra_state = lambda self: 5
    reader.read(model)
    assert reader.has_missed_change()
    assert reader.read(model)["0._extra_state"] == 5


class Learner(LightningModule):
    """Trains a weight by 1 a step, and after the second batch in another dict than before."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch, batch_idx):
        return -self.layer.weight.sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            weight = nn.Parameter(self.layer.weight.detach() + 100)
            self.layer._parameters = {"weight": weight}
            self.optimizers().param_groups[0]["params"] = [weight]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(4))


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_a_save_that_missed_a_change_is_made_again_with_what_is_live(tmp_path, mode):
    checkpoint = AsyncProcessCheckpoint(run_dir=tmp_path, every_n_steps=1, keep_last=None, mode=mode)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint],
        default_root_dir=tmp_path,
    )
    trainer.fit(Learner())
    saved = {}
    for path in sorted(checkpoint.directory.glob("step-*")):
        ((_, weight),) = read_tensors(path, ["model.layer.weight"]).items()
        saved[read_manifest(path).step] = weight.item()
    assert checkpoint.statistics.num_failed == 0
    assert saved[1] == 1
    assert saved[4] == 104
    assert all(weight == (step if step <= 2 else step + 100) for step, weight in saved.items()), saved


# ---- loops


def counts(loop, number=5):
    """Gives every count of a loop and its children another number."""
    for value in vars(loop).values():
        if isinstance(value, _BaseProgress):
            for record in [value, *(one for one in vars(value).values() if isinstance(one, _BaseProgress))]:
                for name, one in vars(record).items():
                    if type(one) is int:
                        number += 1
                        setattr(record, name, number)
        elif hasattr(value, "state_dict") and hasattr(value, "trainer"):
            counts(value, number + 100)


def test_a_loops_state_is_lightnings():
    loop = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop
    counts(loop)
    expected = loop.state_dict()
    assert read_loop_state(loop) == expected
    assert list(read_loop_state(loop)) == list(expected)
    assert len(expected) > 10
    progress = read_loop_state(loop)["epoch_loop.batch_progress"]
    progress["current"]["ready"] = -1
    assert loop.state_dict() == expected, "the state is a copy"


def test_a_count_of_another_kind_and_a_loop_with_its_own_state_are_left_to_lightning():
    loop = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop
    loop.epoch_progress.current.ready = [torch.ones(1)]
    state = read_loop_state(loop)["epoch_progress"]
    assert state == loop.epoch_progress.state_dict()
    assert state["current"]["ready"][0] is not loop.epoch_progress.current.ready[0]
    loop.epoch_progress.current.ready = 1
    loop.epoch_loop.state_dict = lambda found, prefix: found.update({f"{prefix}own": 3})
    assert read_loop_state(loop) == loop.state_dict()
