"""What a plan answers beside the bill: known figures, remedies, costs, intervals, rates."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from genesis.base.errors import UserError
from genesis.data.packing import PackingFigures
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.delta import GatedDeltaConfig
from genesis.model.mixture import MixtureConfig
from genesis.model.recipe import read_decoder_config
from genesis.operations.plan.bandwidths import Bandwidth, Bandwidths, find_bandwidths, read_report
from genesis.operations.plan.checkpoints import count_checkpoints, find_interval
from genesis.operations.plan.cost import Interruptions, compare_spot, count_cost
from genesis.operations.plan.layout import Layout, Workload
from genesis.operations.plan.padding import read_packings
from genesis.operations.plan.recipe import Recipe, SaveOptions, read_recipe
from genesis.operations.plan.remedies import Budget, find_remedies, list_layouts
from genesis.operations.plan.speed import Rate, find_rate, rate_from_tokens, time_step
from genesis.operations.plan.state import TextbookBill, build_model, count_state
from genesis.operations.plan.timeline import play_step
from genesis.optim import AdamW, Muon
from genesis.optim.offload_share import read_cpu_offload, spread_units
from genesis.recipe.resolved import ResolvedRecipe

CONFIGS = Path(__file__).parents[3] / "configs"
GB = 10**9
SHAPE = DecoderConfig(dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=192, max_seq_len=64, vocab_size=512)
RATE = Rate(60e12, "a test", is_assumed=True)


def read(name: str, *overrides: tuple[str, str], num_ranks: int | None = None) -> Recipe:
    path = CONFIGS / f"{name}.yaml"
    return read_recipe(ResolvedRecipe.read([path, *overrides]), num_ranks=num_ranks)


def link(bytes_per_second: float) -> Bandwidths:
    return Bandwidths(between_devices=Bandwidth(bytes_per_second))


def test_seven_billion_parameters_take_84_gb_and_112_with_master_weights() -> None:
    bill = TextbookBill(7 * GB)
    assert (bill.without_master_weights, bill.with_master_weights) == (84 * GB, 112 * GB)


def test_a_plan_says_that_it_does_not_count_float8() -> None:
    plain, float8 = read("genesis-1b"), read("genesis-1b", ("model.float8", "{}"))
    (line,) = set(float8.assumptions) - set(plain.assumptions)
    assert line.startswith("model.float8 is not counted")
    assert float8.workload == plain.workload


def test_float32_weights_gradients_and_moments_take_sixteen_bytes_a_parameter() -> None:
    recipe = read("genesis-1b", num_ranks=1)
    model = build_model(recipe.workload)
    num_parameters = sum(parameter.num_elements for parameter in model.parameters)
    state = count_state(model, recipe.workload, Layout())
    assert state.total == pytest.approx(TextbookBill(num_parameters).with_master_weights, rel=1e-4)


def test_one_billion_sharded_over_two_cards_fits_into_what_its_authors_report() -> None:
    """They report about 21 GB on each of two cards of 24 GB; docs/how-to/plan.md explains the difference."""
    recipe = read("genesis-1b", num_ranks=2)
    whole = replace(recipe.layout, activation_checkpointing="none")
    peaks = [play_step(recipe.workload, layout).peak_bytes / GB for layout in (recipe.layout, whole)]
    assert peaks[0] == pytest.approx(11.5, abs=0.1)
    assert peaks[1] == pytest.approx(14.3, abs=0.1)
    assert max(peaks) < 21


def test_a_sharded_state_is_a_share_of_the_whole() -> None:
    workload = read("genesis-1b", num_ranks=4).workload
    model = build_model(workload)
    whole, share = (count_state(model, workload, layout) for layout in (Layout(), Layout("full", 4, 4)))
    assert share.total == pytest.approx(whole.total / 4, rel=1e-3)
    spread = count_state(model, workload, Layout("zero1", 4))
    assert spread.weights == whole.weights
    assert whole.optimizer / 4 <= spread.optimizer < whole.optimizer / 3.5


def test_the_remedies_fit_are_minimal_and_the_quickest_comes_first() -> None:
    workload, budget = read("genesis-1b", num_ranks=1).workload, Budget(24 * GB, GB, 0.05)
    remedies = find_remedies(workload, Layout(), budget, RATE, Bandwidths())
    assert remedies[0].changes == ("activation_checkpointing 2",)
    in_order = [(remedy.changes_result, remedy.slowdown) for remedy in remedies]
    assert in_order == sorted(in_order)
    for remedy in remedies:
        assert budget.needed(play_step(remedy.workload, remedy.layout).peak_bytes) == remedy.needed_bytes <= 24 * GB
        assert len(remedy.changes) == 1, "one change is enough, so that no set of two is minimal"


def test_of_two_shares_of_offload_that_fit_the_quicker_one_is_named() -> None:
    workload = read("genesis-1b", num_ranks=2).workload
    remedies = find_remedies(workload, Layout("replicated", 2), Budget(24 * GB, GB, 0.05), RATE, Bandwidths())
    changes = [remedy.changes for remedy in remedies]
    assert ("shard full, cpu_offload 0.5",) in changes
    assert ("shard full, cpu_offload 1",) not in changes


def test_adapters_come_last_because_they_learn_something_else() -> None:
    workload = read("finetune/qwen3-8b-full-8-cards", num_ranks=1).workload
    remedies = find_remedies(workload, Layout(), Budget(24 * GB, GB, 0.05), RATE, Bandwidths())
    assert remedies
    assert [remedy.changes_result for remedy in remedies] == sorted(remedy.changes_result for remedy in remedies)
    assert any("model.adapter.rank 16" in change for change in remedies[-1].changes)


def test_nothing_makes_a_model_fit_into_a_megabyte() -> None:
    workload = read("genesis-1b", num_ranks=1).workload
    assert find_remedies(workload, Layout(), Budget(10**6, 0, 0.0), RATE, Bandwidths()) == []


def test_every_strategy_is_listed_for_several_devices_and_one_for_one() -> None:
    own = Layout("full", 2, 2)
    assert [layout.name for layout in list_layouts(own, 1)] == ["one device", "full, offload"]
    names = ["replicated", "zero1", "full", "grad_op", "full, offload"]
    assert [layout.name for layout in list_layouts(own, 2)] == names
    hybrid = Layout("hybrid", 4, 2)
    assert "hybrid" in [layout.name for layout in list_layouts(hybrid, 4)]


def test_recomputation_costs_a_third_of_the_blocks_and_a_slow_link_costs_more() -> None:
    recipe = read("genesis-1b", num_ranks=2)
    plain = replace(recipe.layout, activation_checkpointing="none")
    quick, slow = (time_step(recipe.workload, layout, RATE, link(1e12)).seconds for layout in (plain, recipe.layout))
    assert 1.2 < slow / quick < 1.34
    over_wire = time_step(recipe.workload, recipe.layout, RATE, link(1e9))
    assert over_wire.exposed_seconds > 0.0
    assert over_wire.seconds > slow


def test_a_measured_rate_gives_its_own_tokens_back() -> None:
    recipe = read("genesis-1b", num_ranks=2)
    for rate_of_link in (1e15, 12e9, 4e9):
        rate = rate_from_tokens(recipe.workload, recipe.layout, 6400.0, link(rate_of_link))
        assert time_step(recipe.workload, recipe.layout, rate, link(rate_of_link)).tokens_per_second == pytest.approx(
            6400.0
        )
    slower = rate_from_tokens(recipe.workload, recipe.layout, 6400.0, link(1e6))
    assert time_step(recipe.workload, recipe.layout, slower, link(1e15)).tokens_per_second == pytest.approx(6400.0)


def test_rates_are_read_from_the_doctor_and_from_bench_step(tmp_path: Path) -> None:
    record = CONFIGS.parent / "benchmarks" / "records" / "step-9m-cpu.json"
    content = json.loads(record.read_text(encoding="utf-8"))
    tokens = content["contenders"]["genesis"]["tokens_per_second"]
    rate = find_rate(read_report(record), str(record))
    assert rate is not None
    assert rate.flops_per_second == pytest.approx(tokens * content["workload"]["flops_per_token"])
    parts = [
        {"name": "devices", "figures": [{"name": "cuda 0: dense peak in bfloat16", "value": "989.5 TFLOP/s"}]},
        {"name": "speed", "figures": [{"name": "MFU", "value": 0.5, "unit": ""}]},
    ]
    rate = find_rate({"parts": parts}, "doctor.json")
    assert rate is not None
    assert rate.flops_per_second == pytest.approx(0.5 * 989.5e12)
    for other in ({}, {"parts": 3}, {"contenders": {"genesis": {}}}, {"parts": parts[:1]}):
        assert find_rate(other, "") is None


def figure(name: str, value: float | str) -> dict[str, float | str]:
    return {"name": name, "value": value, "unit": "GB/s"}


def test_bandwidths_are_the_slowest_that_the_doctor_measured_by_pinned_memory() -> None:
    copies = [
        figure("host to cuda 0, pinned", 55.0),
        figure("host to cuda 0, pageable", 9.0),
        figure("cuda 0 to host, pageable", 8.0),
        figure("cuda 0 to cuda 1", 380.0),
        figure("cuda 1 to cuda 0", 360.0),
        figure("copy within cuda 0", 2000.0),
    ]
    disk = [figure("write, with fsync", 1.5), figure("read", 3.0)]
    found = find_bandwidths({"parts": [{"name": "copies", "figures": copies}, {"name": "disk", "figures": disk}]}, "x")
    assert [one.bytes_per_second for one in found.named().values() if one.is_measured] == [360e9, 55e9, 8e9, 1.5e9]
    assert [name for name, one in found.named().items() if not one.is_measured] == ["between nodes"]
    broken = find_bandwidths({"parts": [{"figures": [figure("cuda 0 to cuda 1", "nan")]}]}, "x")
    assert broken == Bandwidths() == find_bandwidths({"parts": 3}, "x")
    assert not any(one.is_measured for one in broken.named().values())


def test_measured_bandwidths_change_the_time_of_offload_and_of_communication() -> None:
    recipe = read("genesis-1b", ("trainer.strategy.init_args.cpu_offload", "true"), num_ranks=2)
    slow, quick = (
        time_step(recipe.workload, recipe.layout, RATE, Bandwidths(to_device=Bandwidth(rate))) for rate in (1e9, 1e12)
    )
    assert slow.offload_seconds > 10 * quick.offload_seconds


def test_a_teacher_is_counted_with_weights_forward_and_operations() -> None:
    recipe = read("finetune/smollm2-360m-to-135m-distill")
    assert recipe.workload.teacher is None
    assert any("--teacher FILE" in line for line in recipe.assumptions)
    workload = replace(recipe.workload, teacher=replace(recipe.workload.decoder, num_layers=32))
    alone, taught = (play_step(one, recipe.layout) for one in (recipe.workload, workload))
    teacher = taught.peaks["rest"]["teacher"]
    assert teacher == 4 * sum(
        one.num_elements for one in build_model(Workload(replace(workload.decoder, num_layers=32))).parameters
    )
    assert taught.peak_bytes > alone.peak_bytes + teacher
    narrow = play_step(replace(workload, teacher_bytes=2), recipe.layout)
    assert narrow.peaks["rest"]["teacher"] == teacher // 2
    times = [time_step(one, recipe.layout, RATE, Bandwidths()).seconds for one in (recipe.workload, workload)]
    assert 1.3 < times[1] / times[0] < 1.5


def test_answers_are_counted_with_their_cache_and_a_whole_model_where_ranks_share_it() -> None:
    recipe = read("finetune/gspo-tiny")
    config = recipe.workload.decoder
    (alone,) = [play_step(recipe.workload, Layout()).peaks["answers"]]
    rows = recipe.workload.num_answer_rows
    assert rows == 64
    cache = Decoder(config).new_cache(rows, recipe.workload.seq_len)
    assert alone["keys and values of answers"] == cache.num_bytes
    shared = play_step(replace(recipe.workload, micro_batch_size=1), Layout("full", 2, 2)).peaks["answers"]
    num_parameters = sum(one.num_elements for one in build_model(recipe.workload).parameters)
    assert shared["whole model that answers"] == 4 * num_parameters


def test_answers_are_counted_with_the_copies_of_weights_that_autocast_keeps() -> None:
    """Autocast itself makes the copies, in the first of two forwards."""
    recipe = read("finetune/gspo-tiny")
    mixed = replace(recipe.workload, precision="bf16-mixed")
    decoder = Decoder(mixed.decoder)
    decoder.init_weights(0)
    copied: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            result = function(*arguments, **(options or {}))
            if function is torch.ops.aten._to_copy.default and isinstance(arguments[0], torch.nn.Parameter):
                copied.append(result.nbytes)
            return result

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), Watch():
        for _ in range(2):
            decoder(torch.zeros((1, 2), dtype=torch.int64))
    assert copied
    assert play_step(mixed, Layout()).peaks["answers"]["weights cast for products"] == sum(copied)
    # Nothing is kept for recomputed blocks, under sharding, or where nothing is cast.
    for workload, layout in (
        (recipe.workload, Layout()),
        (mixed, Layout(activation_checkpointing="block")),
        (replace(mixed, micro_batch_size=1), Layout("full", 2, 2)),
    ):
        assert "weights cast for products" not in play_step(workload, layout).peaks["answers"]


def test_only_statistics_of_a_forward_are_left_after_its_backward() -> None:
    linear = GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, attention_every=2)
    decoder = replace(read("mixture-tiny").workload.decoder, linear_attention=linear)
    layouts = (Layout(), Layout(activation_checkpointing="block"), Layout("full", 4, 4, expert_parallel=4))
    for layout in layouts:
        peaks = play_step(Workload(decoder, seq_len=128, global_batch_size=4, is_cpu=True), layout).peaks
        assert peaks["save"].get("activations", 0) < 1024  # of routers, which the step reads at its end


def test_experts_of_other_ranks_are_not_held_and_rows_cost_time() -> None:
    recipe = read("mixture-tiny", ("trainer.strategy", "genesis.strategies.Sharded"), num_ranks=4)
    workload = replace(recipe.workload, micro_batch_size=2)
    whole, spread = recipe.layout, replace(recipe.layout, expert_parallel=4)
    gathered = [play_step(workload, layout).gathered_whole_bytes for layout in (whole, spread)]
    mixture = workload.decoder.feed_forward
    assert isinstance(mixture, MixtureConfig)
    experts = 3 * 3 * mixture.num_experts * mixture.ffn_dim * workload.decoder.dim * 4
    assert gathered[0] - gathered[1] == experts * 3 // 4
    assert play_step(workload, whole).state.total == play_step(workload, spread).state.total
    slow = time_step(workload, spread, RATE, link(1e6))
    assert slow.exposed_seconds > 0.0
    for ranks, message in ((3, "does not divide the 4 ranks"), (8, "does not divide the 4 ranks")):
        with pytest.raises(UserError, match=message):
            play_step(workload, replace(whole, expert_parallel=ranks))
    with pytest.raises(UserError, match="does not divide num_experts 8"):
        play_step(replace(workload, micro_batch_size=1), Layout("full", 48, 48, expert_parallel=3))
    with pytest.raises(UserError, match="the model has no experts"):
        play_step(read("genesis-1b", num_ranks=4).workload, spread)


def test_spot_is_cheaper_until_interruptions_eat_the_difference() -> None:
    def compare(per_day: float) -> bool:
        interruptions = Interruptions(per_day, interval_seconds=1200, mirror_lag_seconds=60, restart_seconds=240)
        assert interruptions.lost_seconds == 900
        return compare_spot(10 * 86_400, 2, 0.7, 1.0, interruptions).is_spot_cheaper

    assert compare(0)
    assert compare(28)
    assert not compare(29)
    never = compare_spot(86_400, 1, 0.1, 1.0, Interruptions(200, 1200, 60, 240))
    assert (never.hours, never.spot_money, never.is_spot_cheaper) == (None, None, False)


def test_energy_and_money_are_those_of_all_devices() -> None:
    cost = count_cost(7200.0, 4, watts=500.0, price_per_hour=2.0)
    assert (cost.hours, cost.kilowatt_hours, cost.money) == (2.0, 4.0, 16.0)


def test_the_best_interval_loses_less_than_shorter_and_longer_ones() -> None:
    save, failure = 30.0, 4 * 3600.0
    found = find_interval(save, failure)
    assert found.young_seconds == pytest.approx((2 * save * failure) ** 0.5)
    assert found.daly_seconds == pytest.approx(found.young_seconds - save, rel=0.05)

    def lose(interval: float) -> float:
        return save / (interval + save) + (interval + save) / (2 * failure)

    assert lose(found.daly_seconds) < min(lose(found.daly_seconds / 2), lose(found.daly_seconds * 2))
    assert find_interval(100.0, 10.0).daly_seconds == 10.0


def test_a_checkpoint_has_weights_and_moments_once_and_retention_bounds_the_disk() -> None:
    recipe = read("genesis-1b", num_ranks=2)
    model = build_model(recipe.workload)
    bill = count_checkpoints(model, recipe.workload, recipe.saves, recipe.num_steps)
    state = count_state(model, recipe.workload, Layout(), rounded_to=1)
    assert bill.checkpoint_bytes == pytest.approx(state.weights + state.optimizer, rel=1e-6)
    assert (bill.num_kept, bill.disk_bytes) == (4, 4 * bill.checkpoint_bytes)
    kept = replace(recipe.saves, keep_every_n_steps=5000)
    assert count_checkpoints(model, recipe.workload, kept, 20_000).num_kept == 3 + 4 + 1
    every = SaveOptions(every_n_steps=100, keep_last=None, keep_every_n_steps=None, has_optimizer=False)
    unknown = count_checkpoints(model, recipe.workload, every, None)
    assert (unknown.num_kept, unknown.disk_bytes) == (None, None)
    assert unknown.checkpoint_bytes == pytest.approx(state.weights, rel=1e-6)


def test_adapters_are_saved_without_their_base() -> None:
    recipe = read("finetune/qwen3-8b-lora")
    bill = count_checkpoints(build_model(recipe.workload), recipe.workload, recipe.saves, recipe.num_steps)
    assert bill.checkpoint_bytes < GB < bill.base_bytes == pytest.approx(16.4 * GB, rel=0.01)


def test_what_is_frozen_without_adapters_is_in_every_checkpoint() -> None:
    recipe = read("mixture-tiny")
    model = build_model(recipe.workload)
    bill = count_checkpoints(model, recipe.workload, recipe.saves, recipe.num_steps)
    assert len(model.trained) < len(model.parameters)
    assert bill.base_bytes == 0


def test_the_learning_rate_grows_by_the_root_of_the_batch() -> None:
    found = AdamW().propose_rate(4.0)
    assert found.lr == pytest.approx(6e-4)
    assert found.betas == pytest.approx((0.6, 0.8))
    assert found.eps == pytest.approx(5e-9)
    assert AdamW().propose_rate(64.0).betas is None


def test_the_packings_of_a_corpus_give_the_share_of_padding(tmp_path: Path) -> None:
    figures = PackingFigures(num_sequences=10, num_valid_tokens=800)
    folder = tmp_path / "packing" / "pad-100"
    folder.mkdir(parents=True)
    plan = {"packing": "pad", "seq_len": 100, "sources": {"a": {"figures": figures.__dict__}}}
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    (tmp_path / "packing" / "broken").mkdir()
    (tmp_path / "packing" / "broken" / "plan.json").write_text("{", encoding="utf-8")
    (share,) = read_packings(tmp_path)
    assert (share.packing, share.num_sequences, share.valid_share) == ("pad", 10, 0.8)
    assert read_packings(tmp_path / "none") == []


def test_options_of_fit_change_the_recipe() -> None:
    changes = (
        ("data.micro_batch_size", "4"),
        ("trainer.strategy.init_args.shard", "grad_op"),
        ("model.decoder.num_layers", "10"),
        ("trainer.precision", "32"),
    )
    found = read("genesis-1b", *changes, num_ranks=2)
    assert (found.workload.micro_batch_size, found.layout.strategy) == (4, "grad_op")
    assert (found.workload.decoder.num_layers, found.workload.precision) == (10, "32-true")
    other = read("genesis-1b", ("trainer.strategy", "genesis.strategies.Replicated"), num_ranks=2)
    assert other.layout.strategy == "replicated"


def test_a_later_file_replaces_a_strategy_and_the_options_that_it_alone_has() -> None:
    paths = [CONFIGS / "genesis-1b.yaml", CONFIGS / "strategies" / "zero1.yaml"]
    recipe = read_recipe(ResolvedRecipe.read(paths), num_ranks=2)
    assert (recipe.layout.strategy, recipe.layout.activation_checkpointing) == ("zero1", "block")


def test_an_option_of_a_strategy_that_no_layout_has_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genesis.recipe.resolved.is_declared", lambda name, path: True)
    found = read("genesis-1b", ("trainer.strategy.fresh", "4"), ("trainer.strategy.desync_seconds", "9"))
    assert [line for line in found.assumptions if "strategy" in line] == ["trainer.strategy.fresh 4 is not counted"]


def test_a_file_of_a_decoder_alone_is_a_recipe() -> None:
    recipe = read("model/qwen3-8b")
    assert recipe.workload == Workload(
        read_decoder_config(CONFIGS / "model" / "qwen3-8b.yaml"), seq_len=40_960, precision="bf16-mixed"
    )


def test_states_and_inputs_in_host_memory_leave_the_device() -> None:
    workload, layout = Workload(SHAPE, seq_len=64), Layout(activation_checkpointing="block")
    plain = play_step(workload, layout)
    moved = play_step(workload, replace(layout, activation_offload=True, optimizer_offload=1.0))
    half = play_step(workload, replace(layout, optimizer_offload=0.5))
    moments = sum(2 * parameter.num_elements * 4 for parameter in build_model(workload).trained)
    assert moved.state.moved == pytest.approx(moments, rel=0.05)
    assert 0.5 * moved.state.moved <= half.state.moved < moved.state.moved
    assert moved.peaks["rest"]["optimizer states"] == plain.state.optimizer - moved.state.moved
    assert moved.moved_inputs_bytes == SHAPE.num_layers * 64 * SHAPE.dim * 4
    assert sum(moved.peaks["forward"].values()) < sum(plain.peaks["forward"].values()) - moved.state.moved


def test_half_of_the_blocks_in_the_hosts_memory_are_half_of_their_bytes() -> None:
    workload = Workload(SHAPE, global_batch_size=2)
    whole = play_step(workload, Layout("full", 2, 2, cpu_offload=1.0))
    half = play_step(workload, Layout("full", 2, 2, cpu_offload=0.5))
    none = play_step(workload, Layout("full", 2, 2))
    assert none.on_host.total == 0
    assert whole.on_host.total == whole.state.total == half.state.total
    root = sum(one.num_elements for one in build_model(workload).parameters if one.block is None)
    blocks = whole.on_host.weights - root * 4 // 2
    assert half.on_host.weights == pytest.approx(blocks / 2, rel=0.01)
    assert whole.peak_bytes < half.peak_bytes < none.peak_bytes


@pytest.mark.parametrize("num_units", [1, 3, 30, 61])
def test_units_are_chosen_at_even_distances_and_at_least_the_share(num_units: int) -> None:
    assert not any(spread_units(num_units, 0.0))
    assert all(spread_units(num_units, 1.0))
    for count in range(num_units + 1):
        chosen = [index for index, is_chosen in enumerate(spread_units(num_units, count / num_units)) if is_chosen]
        assert len(chosen) == count
        gaps = [after - before for before, after in pairwise(chosen)]
        assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("value", [-0.5, 2, "half", None])
def test_a_share_of_blocks_beyond_its_range_is_refused_by_plan_and_strategy(value: Any) -> None:
    with pytest.raises(UserError, match=f"cpu_offload is {value!r}; it must be a share from 0 to 1"):
        read_cpu_offload(value)


def test_an_option_of_a_class_may_leave_out_init_args_as_in_fit() -> None:
    place = "trainer.strategy"
    long = read("genesis-1b", (f"{place}.init_args.optimizer_offload", "0.5"), (f"{place}.init_args.shard", "grad_op"))
    short = read("genesis-1b", (f"{place}.optimizer_offload", "0.5"), (f"{place}.shard", "grad_op"))
    assert short.layout == long.layout
    assert (short.layout.optimizer_offload, short.layout.strategy) == (0.5, "grad_op")
    assert read("genesis-1b").layout != long.layout


def test_muons_states_in_host_memory_leave_the_device() -> None:
    workload, layout = Workload(SHAPE, seq_len=64, optimizer=Muon()), Layout()
    plain, moved = play_step(workload, layout), play_step(workload, replace(layout, optimizer_offload=1.0))
    moments = sum(
        (1 if one.group.kind == "matrix" else 2) * one.num_elements * 4 for one in build_model(workload).trained
    )
    assert moved.state.moved == pytest.approx(moments, rel=0.05)
    assert moved.peaks["rest"]["optimizer states"] == plain.state.optimizer - moved.state.moved


def test_the_teacher_of_answers_is_counted_with_its_hidden_states() -> None:
    recipe = read("finetune/on-policy-arithmetic")
    assert recipe.workload.teacher is None
    teacher = replace(recipe.workload.decoder, num_layers=6, dim=128)
    alone, taught = (
        play_step(one, recipe.layout) for one in (recipe.workload, replace(recipe.workload, teacher=teacher))
    )
    weights = 4 * sum(one.num_elements for one in build_model(Workload(teacher)).parameters)
    assert taught.peaks["rest"]["teacher"] == weights
    assert taught.peaks["backward"]["teacher"] == weights + 4 * 128 * 64 * teacher.dim
    assert taught.peaks["forward"].total() > alone.peaks["forward"].total() + weights
    assert alone.peaks["backward"]["logits and loss"] > 0


def test_reward_models_are_counted_once_each_with_the_forward_of_one() -> None:
    recipe = read("finetune/grpo-arithmetic")
    scorer = replace(recipe.workload.decoder, num_scores=1, num_layers=6, dim=512, ffn_dim=2048)
    alone = play_step(recipe.workload, recipe.layout)
    one, two = (play_step(replace(recipe.workload, reward_models=(scorer,) * n), recipe.layout) for n in (1, 2))
    weights = 4 * sum(found.num_elements for found in build_model(Workload(scorer)).parameters)
    for phase in ("rest", "answers", "forward", "backward", "step"):
        assert one.peaks[phase]["reward models"] == weights
        assert two.peaks[phase]["reward models"] == 2 * weights
    assert one.peaks["answers"].total() >= alone.peaks["answers"].total() + weights
    large = replace(scorer, ffn_dim=200_000)
    forward = play_step(replace(recipe.workload, reward_models=(large,)), recipe.layout).peaks["answers"]
    assert forward["activations"] > 64 * 200_000 * 4  # the scores of an answer need more than its cache


def test_a_plan_finds_the_reward_models_of_a_recipe(tmp_path: Path) -> None:
    shape = {"vocab_size": 300, "dim": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 64}
    content = {"model": {"decoder": {**shape, "max_seq_len": 64, "num_scores": 1}}}
    (tmp_path / "scorer").mkdir()
    (tmp_path / "scorer/config.yaml").write_text(yaml.safe_dump(content))
    models = [str(tmp_path / "scorer"), str(tmp_path / "scorer"), str(tmp_path / "gone")]
    rewards = [{"function": "reward_model", "name": f"r{n}", "model": path} for n, path in enumerate(models)]
    found = read("finetune/grpo-arithmetic", ("data.prompts.rewards", json.dumps(rewards)))
    assert [one.num_scores for one in found.workload.reward_models] == [1]
    assert any(
        line == f"the reward model {models[2]} is not here, so that it is not counted" for line in found.assumptions
    )
