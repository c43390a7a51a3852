"""Spikes, skips, and the module and rank that a value comes from that is not finite."""

import math
import os
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from clock_runs import LIGHTNING_WARNINGS, Module, half_precision, loader, trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from genesis_callbacks import GradientHealth, TokenCounters
from genesis_callbacks._compat import compute_norms
from genesis_callbacks.base.errors import UserError
from genesis_callbacks.base.event_reader import read_events
from genesis_callbacks.gradient_health import (
    NonfiniteGradientWarning,
    RankFindings,
    SpikeDetector,
    _PendingNorms,
    describe_origin,
    place_of,
)
from genesis_callbacks.host_group import HostGroup
from genesis_callbacks.testing import run_ranks

pytestmark = LIGHTNING_WARNINGS


class Faulty(nn.Module):
    """Gives a value that is not finite in the forward or in the backward of one step, on one rank."""

    def __init__(self, where: str, step: int, rank: int) -> None:
        super().__init__()
        self.where, self.step, self.rank, self.calls = where, step, rank, 0

    def forward(self, x):
        is_bad = self.calls == self.step and int(os.environ.get("LOCAL_RANK", "0")) == self.rank
        if is_bad and self.where == "forward":
            return x / 0.0
        if is_bad and self.where == "backward" and x.requires_grad:
            x.register_hook(lambda gradient: gradient * math.inf)
        return x


class Net(pl.LightningModule):
    def __init__(self, where: str = "nowhere", step: int = 2, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Faulty(where, step, rank), nn.Linear(3, 1))

    def training_step(self, batch, batch_idx):
        self.body[2].calls = batch_idx
        return self.body(batch["x"]).square().mean()

    def repeat_forward(self, batch) -> None:
        self.body(batch["x"])

    def on_before_optimizer_step(self, optimizer) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        if not norm.isfinite():
            for parameter in self.parameters():
                parameter.grad = None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(directory: Path, module, health: GradientHealth, *others, **options):
    run = trainer(directory, [health, *others], **options)
    run.fit(module, loader([1] * 5))
    return run


def test_a_bad_forward_names_its_module(tmp_path: Path) -> None:
    health = GradientHealth(tmp_path / "run")
    text = r"the gradient of step 2 is not finite: the forward of body\.2 on rank 0"
    with pytest.warns(NonfiniteGradientWarning, match=text):
        run = fit(tmp_path, Net("forward"), health, TokenCounters())
    assert health.num_nonfinite == 1
    assert run.callback_metrics["gradient/nonfinite"] == 1
    assert run.callback_metrics["gradient/skips"] == 1
    (event,) = read_events(tmp_path / "run")
    assert (event.kind, event.step, event.text) == ("nonfinite_gradient", 2, "the forward of body.2 on rank 0")


def test_a_bad_backward_names_the_parameter_from_which_it_spreads(tmp_path: Path) -> None:
    with pytest.warns(NonfiniteGradientWarning, match=r"the gradient of body\.1\.bias, .*, on rank 0"):
        fit(tmp_path, Net("backward"), GradientHealth())


def test_weights_that_an_update_has_spoilt_are_named_instead_of_the_forward_that_reads_them(tmp_path: Path) -> None:
    class Spoils(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 3:
                with torch.no_grad():
                    pl_module.body[1].weight.fill_(math.nan)

    text = r"step 4 is not finite: the weights of body\.1\.weight on rank 0 were not finite before the step"
    with pytest.warns(NonfiniteGradientWarning, match=text):
        fit(tmp_path, Net(), GradientHealth(), Spoils())


def run_on_ranks(directory: Path, where: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(directory, Net(where, rank=1), GradientHealth(), devices=2, strategy="ddp")
    return [str(one.message) for one in caught if one.category is NonfiniteGradientWarning]


@pytest.mark.process
def test_the_rank_of_a_bad_forward_is_named_although_gradients_are_summed(tmp_path: Path) -> None:
    of_ranks = run_ranks(run_on_ranks, 2, tmp_path, "forward")
    assert of_ranks == [["the gradient of step 2 is not finite: the forward of body.2 on rank 1"], []]


def test_a_healthy_fit_logs_norms_and_zeros(tmp_path: Path) -> None:
    module, health = Net(), GradientHealth()
    norms = []
    module.on_before_optimizer_step = lambda optimizer: norms.append(
        float(torch.stack([p.grad.norm() for p in module.parameters()]).norm())
    )
    run = fit(tmp_path, module, health)
    assert list(health._detector.norms) == pytest.approx(norms)
    logged = {key: float(value) for key, value in run.callback_metrics.items()}
    assert logged == {
        "train/grad_norm": pytest.approx(norms[-1]),
        "gradient/spikes": 0.0,
        "gradient/skips": 0.0,
        "gradient/nonfinite": 0.0,
    }


def test_an_overflow_of_the_scaler_is_a_skip(tmp_path: Path) -> None:
    health = GradientHealth()
    fit(tmp_path, Module({1: "overflow"}), health, plugins=[half_precision()])
    assert (health.num_nonfinite, health.num_skips) == (0, 1)


def test_a_spike_is_far_above_the_norms_before_and_does_not_hide_the_next() -> None:
    detector = SpikeDetector(64)
    generator = torch.Generator().manual_seed(1)
    noise = (0.1 * torch.randn(300, generator=generator)).exp().tolist()
    spikes = {50: 5.0, 51: 5.0, 200: 3.0}
    found = [index for index, norm in enumerate(noise) if detector.add(norm * spikes.get(index, 1.0))]
    assert found == [50, 51, 200]


def test_equal_norms_have_a_threshold_and_zeros_are_no_norms() -> None:
    detector = SpikeDetector(32, [1.0] * 20 + [0.0] * 5)
    assert detector.threshold == pytest.approx(2.0)
    assert SpikeDetector(32, [1.0] * 19).threshold is None


def test_the_state_continues_counts_and_threshold() -> None:
    health = GradientHealth()
    assert health.state_dict() == {}
    state = {"version": 1, "num_spikes": 2, "num_skips": 3, "num_nonfinite": 1, "norms": [1.0] * 30}
    health.load_state_dict(state)
    assert health.state_dict() == state
    health.observe(9.0, is_skipped=True)
    assert (health.num_spikes, health.num_skips) == (3, 4)
    with pytest.raises(UserError, match="version 7"):
        health.load_state_dict({"version": 7})


def measure_sharded() -> float:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole, plain = torch.arange(6.0).reshape(3, 2), torch.ones(2)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert isinstance(sharded, DTensor)
    norm = _PendingNorms([sharded, plain], 2, HostGroup()).wait()
    assert norm == pytest.approx(float(torch.cat([whole.flatten(), plain]).norm()))
    return norm


@pytest.mark.process
def test_shards_and_copies_count_once() -> None:
    first, second = run_ranks(measure_sharded, 2)
    assert first == second


def test_origins_are_told_apart() -> None:
    nothing, last = RankFindings(None, None), RankFindings(None, ((1,), "b.weight"))
    text = describe_origin([last, RankFindings(None, ((0,), "a.weight"))], is_sharded=True)
    assert text.endswith("b.weight, from which a backward spreads it, on rank 0")
    assert "its rank is not known" in describe_origin([last, last], is_sharded=False)
    assert describe_origin([nothing, nothing], is_sharded=True).startswith("the norm overflows")


class Half(torch.nn.Module):
    """Every second block of a model, without what lies before or behind the blocks."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(2, 2)
        self.blocks = torch.nn.ModuleDict({str(number): torch.nn.Linear(2, 2) for number in range(first, 12, 2)})
        self.norm = torch.nn.LayerNorm(2)
        self.register_module("norm" if first == 0 else "embedding", None)


def test_the_first_module_is_found_among_those_of_several_stages() -> None:
    halves = Half(0), Half(1)

    def look(output: tuple[int, str], gradient: tuple[int, str]) -> RankFindings:
        places = [(place_of(halves[rank], name), name) for rank, name in (output, gradient)]
        return RankFindings(*places)

    origins = [look((0, "blocks.10"), (0, "embedding.weight")), look((1, "blocks.9"), (1, "blocks.11.bias"))]
    assert describe_origin(origins, is_sharded=True) == "the forward of blocks.9 on rank 1"
    without_outputs = [origin._replace(output=None) for origin in origins]
    assert "blocks.11.bias" in describe_origin(without_outputs, is_sharded=True)
    assert place_of(halves[0], "embedding") < place_of(halves[1], "blocks.1") < place_of(halves[1], "norm")


def test_norms_of_many_types_are_those_of_each() -> None:
    tensors = [torch.full((2,), 3e4, dtype=torch.float16), torch.ones(3), torch.ones(4, dtype=torch.float64)]
    norms = compute_norms(tensors)
    assert [norm.dtype for norm in norms] == [torch.float32, torch.float32, torch.float64]
    assert norms[0] == pytest.approx(float(tensors[0].double().norm()))


def test_a_short_window_is_refused() -> None:
    with pytest.raises(UserError, match="window is 3"):
        GradientHealth(window=3)
