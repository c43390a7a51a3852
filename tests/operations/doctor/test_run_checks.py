"""The judgements of the doctor on what a fit has left: each fault by its name, and no fault passes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from genesis.base.errors import UserError
from genesis.model.adapter import AdapterConfig, BaseFormat
from genesis.model.decoder import DecoderConfig
from genesis.operations.doctor import run_checks
from genesis.operations.doctor.forked_ranks import Step
from genesis.operations.doctor.observe import (
    Feed,
    LiveTensors,
    StepPeak,
    count_tensors,
    find_slope,
    read_allocated_peak,
    record_allocations,
)
from genesis.operations.doctor.planned import PlannedFit
from genesis.operations.doctor.protocol import check_split
from genesis.operations.doctor.recipe import (
    Capacity,
    plan_axes,
    plan_cuts,
    plan_float8,
    plan_num_steps,
    plan_strategy,
    to_arguments,
)
from genesis.operations.doctor.run_checks import (
    Course,
    Peak,
    SavePlan,
    check_checkpoint,
    check_loader,
    check_memory,
    check_overfit,
    check_resume,
)
from genesis.recipe.resolved import ResolvedRecipe
from tests.tiny_runs import build_decoder, save

MIB = 2**20
STEADY = dict.fromkeys(range(1, 21), 500 * MIB)
NO_GROWTH = {step: LiveTensors(400, 9 * MIB) for step in (11, 14, 17, 20)}


# ---- data


@pytest.mark.parametrize(("headroom", "status"), [(30.0, "passed"), (0.5, "warning")])
def test_a_loader_that_is_slower_than_training_is_a_warning_and_first_steps_do_not_count(
    headroom: float, status: str
) -> None:
    cold = {step: Feed(0.01, 900.0) for step in range(1, 5)}
    check = check_loader({**cold, **{step: Feed(headroom, 2.5) for step in range(5, 10)}})
    assert check.status == status
    assert f"{headroom:.1f} times as fast" in check.found
    assert "waits 2.50 ms" in check.found
    assert check_loader(cold).status == "does not apply"


# ---- memory


def test_steady_memory_passes_with_a_jump_at_a_save() -> None:
    jumped = {step: size + (80 * MIB if step > 10 else 0) for step, size in STEADY.items()}
    assert check_memory(jumped, {}, NO_GROWTH, 10).status == "passed"


def test_a_tensor_kept_in_each_step_is_a_leak_whatever_its_size() -> None:
    growing = {step: LiveTensors(400 + step, 9 * MIB + 4 * step) for step in NO_GROWTH}
    assert check_memory(STEADY, {}, growing, 10).status == "failed"


def test_tensors_that_come_once_are_no_leak() -> None:
    counts = iter((400, 400, 415, 415))
    counted = {step: LiveTensors(next(counts), 9 * MIB) for step in NO_GROWTH}
    assert check_memory(STEADY, {}, counted, 10).status == "passed"


def test_memory_that_only_the_process_knows_is_a_leak() -> None:
    growing = {step: size + 3 * MIB * step for step, size in STEADY.items()}
    assert check_memory(growing, {}, NO_GROWTH, 10).status == "failed"
    assert check_memory(STEADY, {step: 4096 * step for step in STEADY}, NO_GROWTH, 10).status == "failed"


def test_too_few_steps_have_no_slope() -> None:
    assert check_memory({1: MIB, 2: MIB}, {}, {}, 1).status == "does not apply"


def test_the_slope_is_not_moved_by_one_step() -> None:
    assert find_slope({step: 5 * step + (1000 if step == 7 else 0) for step in range(20)}) == 5


def test_a_kept_tensor_is_counted() -> None:
    before = count_tensors()
    kept = [torch.ones(1000), torch.ones(1000)]
    after = count_tensors()
    assert after.num_tensors - before.num_tensors == len(kept)
    assert after.num_bytes - before.num_bytes >= 8000


def test_a_kept_loss_is_counted_and_a_value_of_the_log_is_not() -> None:
    before = count_tensors()
    kept = [torch.tensor(1.0), torch.tensor(2.0, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
    assert count_tensors().num_tensors - before.num_tensors == len(kept) - 1


@pytest.mark.parametrize(("num_bytes", "status"), [(100 << 20, "passed"), (200 << 20, "failed")])
@pytest.mark.parametrize("num_steps", [3, 20])
def test_a_step_that_takes_much_more_than_its_plan_is_caught(num_bytes: int, status: str, num_steps: int) -> None:
    steady = dict.fromkeys(range(1, num_steps + 1), 1 << 30)
    tensors = {step: LiveTensors(10, 1 << 20) for step in range(5, 20, 5)}
    check = check_memory(steady, {}, tensors, 10, Peak(num_bytes, 100 << 20))
    assert check.status == ("does not apply" if num_steps < 5 and status == "passed" else status)
    assert f"a step takes {num_bytes >> 20}.0 MiB in tensors at its peak, planned are 100.0 MiB" in check.found
    assert check_memory(steady, {}, tensors, 10, Peak(num_bytes, None)).status != "failed"


def test_the_peak_of_a_step_counts_what_stays_and_what_comes_and_goes_but_no_gradient_of_the_step_before() -> None:
    module = pl.LightningModule()
    module.weight = torch.nn.Parameter(torch.ones(1 << 18))
    before = count_tensors().num_bytes
    module.weight.grad = torch.ones(1 << 18)
    peak = StepPeak(module, torch.device("cpu"))
    torch.ones(1 << 20)
    torch.ones(1 << 18)
    num_bytes = peak.stop()
    assert num_bytes is not None
    assert 0 <= num_bytes - before - (4 << 20) < 1 << 16


def test_a_profile_that_recorded_no_allocation_has_no_peak() -> None:
    with record_allocations() as profiled:
        pass
    assert read_allocated_peak(profiled) is None


# ---- checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, SavePlan]:
    """Returns a checkpoint, and a plan of its weights without state of an optimizer."""
    decoder = build_decoder(1)
    shapes = {f"model.decoder.{name}": tuple(each.shape) for name, each in decoder.named_parameters()}
    num_bytes = sum(4 * each.numel() for each in decoder.parameters())
    return save(tmp_path, 3, decoder, {}), SavePlan(shapes, num_bytes, 0, 0)


def test_a_whole_checkpoint_passes(saved: tuple[Path, SavePlan]) -> None:
    assert check_checkpoint(*saved).status == "passed"


def test_a_stub_without_a_tensor_is_caught(saved: tuple[Path, SavePlan]) -> None:
    path, plan = saved
    check = check_checkpoint(path, replace(plan, shapes={**plan.shapes, "model.decoder.lost": (3,)}))
    assert check.status == "failed"
    assert "model.decoder.lost" in check.found


def test_an_empty_tensor_is_caught(saved: tuple[Path, SavePlan]) -> None:
    path, plan = saved
    name = next(iter(plan.shapes))
    check = check_checkpoint(path, replace(plan, shapes={**plan.shapes, name: (1, 2)}))
    assert check.status == "failed"
    assert "has the shape" in check.found


def test_missing_moments_are_caught(saved: tuple[Path, SavePlan]) -> None:
    path, plan = saved
    check = check_checkpoint(path, replace(plan, num_states=4, num_states_bytes=4096))
    assert check.status == "failed"
    assert "optimizers' state" in check.found


def test_a_checkpoint_with_less_than_the_recipe_plans_is_caught_whatever_the_module_has(
    saved: tuple[Path, SavePlan],
) -> None:
    path, plan = saved
    num_tensors = len(plan.shapes)
    assert check_checkpoint(path, plan, PlannedFit(0, num_tensors, plan.num_bytes)).status == "passed"
    fewer = check_checkpoint(path, plan, PlannedFit(0, num_tensors + 2, plan.num_bytes))
    assert fewer.status == "failed"
    assert f"it has {num_tensors} weights and moments, and {num_tensors + 2} are planned" in fewer.found
    assert check_checkpoint(path, plan, PlannedFit(0, num_tensors, 1 << 30)).status == "failed"


def test_a_truncated_file_and_no_checkpoint_are_caught(saved: tuple[Path, SavePlan]) -> None:
    path, plan = saved
    file = max((each for each in path.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
    file.write_bytes(file.read_bytes()[:-8])
    assert check_checkpoint(path, plan).status == "failed"
    assert check_checkpoint(None, plan).status == "failed"


# ---- resume


def test_a_skipped_batch_names_the_step_whose_window_was_trained(tmp_path: Path) -> None:
    last = save(tmp_path, 4, build_decoder(1), {})
    straight = Course({step: f"window {step}" for step in range(6)}, last, 24)
    skipped = Course({step: f"window {step + 1}" for step in range(3, 6)}, last, 28)
    assert check_resume(straight, straight, 3).status == "passed"
    check = check_resume(straight, skipped, 3)
    assert check.status == "failed"
    assert "step 4 is trained on another window: it is the window of step 5" in check.found
    assert "the data position is 28 instead of 24" in check.found


def test_another_tensor_after_a_resume_is_caught(tmp_path: Path) -> None:
    one, two = (save(tmp_path / str(seed), 4, build_decoder(seed), {}) for seed in (1, 2))
    windows = {step: str(step) for step in range(6)}
    check = check_resume(Course(windows, one, 24), Course(windows, two, 24), 3)
    assert check.status == "failed"
    assert "tensors differ, such as model.decoder" in check.found


# ---- one batch and two ranks


def test_a_batch_that_is_not_learned_is_caught() -> None:
    assert check_overfit([5.0, 1.0, 0.05], 0.1, "one sequence").status == "passed"
    assert check_overfit([5.0, 4.9, 4.8], 0.1, "one sequence").status == "failed"
    assert check_overfit([], 0.1, "one sequence").status == "failed"


@pytest.mark.parametrize(
    "sharded", [[Step(5.0, 1.0), Step(4.0, 0.5)], [Step(5.0, 2.0), Step(4.2, 1.0)], [Step(float("nan"), 1.0)] * 2]
)
def test_ranks_that_do_not_sum_are_caught(sharded: list[Step]) -> None:
    single = [Step(5.0, 2.0), Step(4.0, 1.0)]
    assert check_split(single, single, 2).status == "passed"
    assert check_split(single, sharded, 2).status == "failed"


# ---- what is cut


LARGE = DecoderConfig(
    vocab_size=49152, dim=2048, num_layers=20, num_heads=16, num_kv_heads=4, ffn_dim=5632, max_seq_len=2048
)
DATA = {"micro_batch_size": 4, "global_batch_size": 256, "seq_len": 2048}
LAPTOP = Capacity(12 << 30, 3e10)


def complete(content: dict[str, Any]) -> ResolvedRecipe:
    return ResolvedRecipe.complete(content, "the recipe")


def cut(decoder: DecoderConfig, capacity: Capacity = LAPTOP, **options: object) -> dict[str, object]:
    data = {**DATA, **options}
    is_new = bool(data.pop("is_new", True))
    changes = plan_cuts(complete({"data": data}), decoder, None, capacity, is_new=is_new, base=BaseFormat())
    return {change.key: change.now for change in changes}


def test_a_large_model_is_cut_until_it_fits_and_each_cut_is_listed() -> None:
    cuts = cut(LARGE)
    assert set(cuts) >= {"data.micro_batch_size", "data.global_batch_size", "data.seq_len", "model.decoder.num_layers"}
    assert cuts["data.global_batch_size"] == 2 * int(str(cuts["data.micro_batch_size"]))


def test_a_model_that_fits_is_left_whole() -> None:
    assert cut(LARGE, Capacity(130 << 30, 4e14)) == {"data.global_batch_size": 8}
    assert cut(replace(LARGE, dim=64, num_heads=2, num_kv_heads=2, ffn_dim=64, num_layers=2), global_batch_size=4) == {}


def test_a_packed_corpus_keeps_the_length_of_its_plan() -> None:
    assert "data.seq_len" not in cut(LARGE, packing="best_fit")


def test_an_imported_model_that_does_not_fit_is_refused_with_the_memory_that_it_needs() -> None:
    with pytest.raises(UserError, match=r"needs about 3\d\.\d GiB to be examined, and 12.0 GiB are available"):
        cut(LARGE, is_new=False)


def test_slow_steps_make_fewer_steps() -> None:
    assert plan_num_steps(LARGE, None, LAPTOP, 4096, 2048) < plan_num_steps(
        LARGE, AdapterConfig(), Capacity(1, 1e15), 1, 1
    )


PIPELINE = {"class_path": "genesis.strategies.Sharded", "init_args": {"pipeline_parallel": 4}}


def plan_named(num_layers: int, **given: object) -> list[tuple[str, int, bool]]:
    strategy = {"class_path": "genesis.strategies.Sharded", "init_args": given}
    plans = plan_axes(complete({"trainer": {"strategy": strategy}}), num_layers)
    return [(plan.name, plan.num_ranks, plan.why_not is None) for plan in plans]


def test_each_axis_is_checked_alone_and_then_all_of_them_together() -> None:
    assert plan_named(2, tensor_parallel=2) == [("tensor", 2, True)]
    both = plan_named(4, tensor_parallel=2, pipeline_parallel=2, stages_per_rank=2, shard="hybrid")
    assert both == [("tensor", 2, True), ("pipeline", 2, True), ("axes", 4, True)]
    # Experts borrow ranks of the other axes.
    assert plan_named(2, expert_parallel=4, context_parallel=2)[-1] == ("axes", 4, True)
    assert plan_named(2, shard="full") == plan_axes(complete({"trainer": {"strategy": "replicated"}}), 2) == []


def test_an_axis_that_cannot_be_checked_here_is_listed_with_the_reason() -> None:
    assert plan_named(2, tensor_parallel=16, pipeline_parallel=2) == [
        ("tensor", 16, False),
        ("pipeline", 2, True),
        ("axes", 32, False),
    ]
    (few,) = plan_axes(complete({"trainer": {"strategy": PIPELINE}}), 2)
    assert few.why_not == "has 4 stages, and the examined model only 2 layers"


def test_what_differs_is_named_by_its_axis() -> None:
    single = [Step(5.0, 2.0)]
    check = check_split(single, [Step(5.0, 2.1)], 2, name="tensor", given="tensor_parallel 2")
    assert (check.name, check.status) == ("tensor", "failed")
    assert "with tensor_parallel 2" in check.remedy


def test_a_sharded_strategy_is_replaced_and_keeps_what_one_device_can_do() -> None:
    options = {"shard": "hybrid", "activation_checkpointing": "block"}
    sharded = {"class_path": "genesis.strategies.Sharded", "init_args": options}
    change = plan_strategy(complete({"trainer": {"strategy": sharded}}))
    assert change is not None
    assert change.now["init_args"]["activation_checkpointing"] == "block"
    assert "shard" not in change.now["init_args"]
    assert plan_strategy(complete({"trainer": {"strategy": "replicated"}})) is None


def test_a_recipe_with_float8_is_examined_without() -> None:
    change = plan_float8(complete({"model": {"float8": {"include": ["*"], "exclude": []}}}))
    assert change is not None
    assert (change.key, change.now) == ("model.float8", None)
    assert plan_float8(complete({"model": {"float8": None}})) is None
    assert plan_float8(complete({})) is None


def test_options_are_written_as_fit_reads_them() -> None:
    assert to_arguments({"a.b": {"c": 1}, "d": "e", "f": True}) == ['--a.b={"c": 1}', "--d=e", "--f=true"]


def test_the_plan_counts_what_a_checkpoint_holds() -> None:
    assert run_checks.SavePlan({}, 8, 1, 4).num_bytes == 12
