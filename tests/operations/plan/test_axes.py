"""What a plan knows of axes beside data parallelism: memory of stages, time by link, the choice among layouts."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from genesis.base.errors import UserError
from genesis.cli.plan import main
from genesis.model.adapter import BASE_FORMATS, AdapterConfig
from genesis.model.decoder import DecoderConfig
from genesis.objectives.find import find_objective
from genesis.objectives.preference import DPO
from genesis.operations.plan.axes import is_in_node, list_places, time_axes
from genesis.operations.plan.bandwidths import Bandwidth, Bandwidths
from genesis.operations.plan.bill import GATHERED, RECEIVED
from genesis.operations.plan.choose import Recommendation, recommend
from genesis.operations.plan.layout import Layout, Workload
from genesis.operations.plan.remedies import Budget
from genesis.operations.plan.speed import Rate, flops_per_token, time_step
from genesis.operations.plan.state import build_model
from genesis.operations.plan.timeline import play_step

GB = 10**9
SHARDED = "genesis.strategies.Sharded"
CONFIG = Path(__file__).parents[3] / "configs" / "genesis-1b.yaml"
RATE = Rate(400e12, "a test", is_assumed=True)
SMALL = DecoderConfig(dim=256, num_layers=8, num_heads=4, num_kv_heads=2, ffn_dim=768, max_seq_len=512, vocab_size=1024)
SEVEN_BILLION = DecoderConfig(
    dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336, max_seq_len=4096, vocab_size=128256,
    has_tied_embeddings=False,
)  # fmt: skip
SEVENTY_BILLION = replace(SEVEN_BILLION, dim=8192, num_layers=80, num_heads=64, ffn_dim=28672)
SERVERS = Bandwidths(between_devices=Bandwidth(300e9), between_nodes=Bandwidth(40e9))


def workload(decoder: DecoderConfig, **options: object) -> Workload:
    given = {"seq_len": decoder.max_seq_len, "global_batch_size": 64, **options}
    return replace(Workload(decoder), **given)


def choose(work: Workload, num_ranks: int, gigabytes: float, bandwidths: Bandwidths = SERVERS) -> Recommendation:
    return recommend(work, Layout(), num_ranks, Budget(int(gigabytes * GB), GB, 0.05), RATE, bandwidths)


PCI = Bandwidths(between_devices=Bandwidth(20e9), between_nodes=Bandwidth(10e9))
ETHERNET = Bandwidths(between_devices=Bandwidth(12e9), between_nodes=Bandwidth(1.2e9), devices_per_node=1)
SLOW_NETWORK = Bandwidths(between_devices=Bandwidth(300e9), between_nodes=Bandwidth(2.5e9))
NARROW_LORA = workload(SEVEN_BILLION, adapter=AdapterConfig(rank=16), base=BASE_FORMATS["bfloat16"])


# ---- the choice, as books on training systems give it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "given", "strategy", "recomputed", "words"),
    [
        # Five situations.
        (NARROW_LORA, (1, 24), "one device", "block", "recomputed blocks"),
        (workload(SEVEN_BILLION), (4, 80, PCI), "full", "block", "sharded parameters: without, a device needs at"),
        (
            workload(SEVENTY_BILLION, global_batch_size=1024),
            (64, 80),
            "full, tensor 4, pipeline 8",
            "none",
            "tensor parallelism: without, a device needs at least",
        ),
        (
            workload(replace(SEVEN_BILLION, max_seq_len=131072), global_batch_size=8),
            (8, 80),
            "full, context 4",
            "block",
            "recomputed blocks: without, a device needs at least",
        ),
        (
            workload(replace(SEVEN_BILLION, dim=2048, num_heads=16, ffn_dim=5632, num_layers=20, vocab_size=32768)),
            (8, 48, ETHERNET),
            "full, pipeline 4",
            "none",
            "independent runs on the 8 devices, such as a sweep or several models, train",
        ),
        # Five rules: what to do if a model fits; if its states do not; if a layer is too large; if there are too many
        # layers; if activations are too many, which the long rows above are.
        (
            workload(replace(SEVEN_BILLION, dim=768, num_heads=12, num_kv_heads=4, num_layers=12, ffn_dim=2048)),
            (8, 80),
            "replicated",
            "none",
            "the model fits whole on each device",
        ),
        (workload(SEVEN_BILLION), (8, 80), "full", "none", "sharded parameters: without, a device needs at least 19"),
        (
            workload(replace(SEVEN_BILLION, dim=16384, num_layers=4, num_heads=128, ffn_dim=53248)),
            (8, 80),
            "full, tensor 4",
            "none",
            "tensor parallelism: without, a device needs at least",
        ),
        (
            workload(replace(SEVEN_BILLION, dim=2048, num_heads=16, num_layers=96, ffn_dim=8192)),
            (32, 40, SLOW_NETWORK),
            "full, tensor 2, pipeline 4",
            "none",
            "a pipeline: a step takes 2",
        ),
    ],
    ids=[
        "one device", "several devices", "a large model", "long rows", "devices far apart",
        "it fits", "states", "wide layers", "many layers",
    ],
)  # fmt: skip
def test_the_recommended_layout_and_its_reason(
    work: Workload, given: tuple[Any, ...], strategy: str, recomputed: str, words: str
) -> None:
    found = choose(work, *given)
    best = found.choices[0]
    assert (best.layout.name, best.layout.activation_checkpointing) == (strategy, recomputed)
    assert any(words in line for line in (*found.reasons, *found.warnings))
    assert all(one.step.seconds >= best.step.seconds / 1.03 for one in found.choices)


def test_where_nothing_fits_the_least_memory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--memory", "1GB", "--tokens_per_second", "1e4", "--choose"]
    assert main(["--config", str(CONFIG), "--gpus", "1", *words]) == 1
    assert "on 1 device fits: a device needs at least" in " ".join(capsys.readouterr().out.split())


# ---- memory of stages


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_stages_together_hold_every_parameter_and_a_tied_embedding_twice(rounds: int, is_tied: bool) -> None:
    work = workload(replace(SMALL, has_tied_embeddings=is_tied))
    layout = Layout("full", 4, 1, pipeline_parallel=4, stages_per_rank=rounds)
    places = list_places(work, layout)
    held = [parameter.name for place in places for parameter in build_model(work).parameters if place.has(parameter)]
    again = ["embedding.weight"] if is_tied else []
    assert sorted(held) == sorted([*(parameter.name for parameter in build_model(work).parameters), *again])
    assert [place.num_inputs for place in places] == [rounds - 1, rounds, rounds, rounds]
    assert [place.num_outputs for place in places] == [rounds, rounds, rounds, rounds - 1]


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages_and_the_last_one_one() -> None:
    places = list_places(workload(SMALL), Layout("full", 4, 1, pipeline_parallel=4))
    assert [place.count_forwards(16) for place in places] == [4, 3, 2, 1]
    assert [place.count_forwards(2) for place in places] == [2, 2, 2, 1]
    places = list_places(workload(SMALL), Layout("full", 2, 1, pipeline_parallel=2, stages_per_rank=2))
    assert [place.count_forwards(4) for place in places] == [5, 3]
    assert [place.count_in_flight(4) for place in places] == [3, 2]


def test_a_pipeline_keeps_its_stage_gathered_and_buffers_for_every_micro_batch() -> None:
    work = workload(SMALL, global_batch_size=16)
    timeline = play_step(work, Layout("full", 8, 4, pipeline_parallel=2))
    fewer = play_step(replace(work, global_batch_size=8), Layout("full", 8, 4, pipeline_parallel=2))
    stage = list_places(work, Layout("full", 8, 4, pipeline_parallel=2))[timeline.stage]
    whole = sum(2 * one.num_elements for one in build_model(work).parameters if stage.has(one))
    peak = timeline.peaks["backward"]
    assert peak[GATHERED] == pytest.approx(whole, rel=0.01), "bf16 weights of the whole stage"
    stream = SMALL.dim * work.seq_len * 2
    assert peak[RECEIVED] - fewer.peaks["backward"][RECEIVED] == 2 * stream
    assert len(timeline.stage_peaks) == 2
    assert max(timeline.stage_peaks) == timeline.peak_bytes


# ---- time


def test_the_bubble_is_the_formula_s_share_of_a_window() -> None:
    work = workload(replace(SMALL, vocab_size=1), global_batch_size=8)
    times = time_axes(work, Layout("full", 8, 1, pipeline_parallel=8), SERVERS, compute=4.0, passes=2.0)
    assert times.bubble / (4.0 + times.bubble) == pytest.approx(7 / 15, rel=1e-3)
    twice = time_axes(
        replace(work, global_batch_size=8),
        Layout("full", 4, 1, pipeline_parallel=4, stages_per_rank=2),
        SERVERS,
        compute=4.0,
        passes=2.0,
    )
    assert twice.bubble == pytest.approx(4.0 * 3 / 16, rel=1e-3)


def test_ranks_that_read_the_same_data_share_its_products() -> None:
    work = workload(SMALL)
    alone = time_step(work, Layout("full", 2, 2), RATE, SERVERS)
    staged = time_step(work, Layout("full", 4, 2, pipeline_parallel=2), RATE, SERVERS)
    assert staged.compute_seconds == pytest.approx(alone.compute_seconds / 2)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_forwards_without_adapters_wait_for_every_stage_of_a_pipeline(stages: int) -> None:
    work = workload(SMALL, adapter=AdapterConfig(rank=4), objective=DPO, global_batch_size=16)
    layout = Layout("full", 4, 4 // stages, pipeline_parallel=stages)
    without, times = (
        time_step(replace(work, scores_without_adapters=scores), layout, RATE, SERVERS) for scores in (False, True)
    )
    of_rank = work.tokens_per_step / 4 * flops_per_token(replace(work, adapter=None)) / 3 / RATE.flops_per_second
    assert times.compute_seconds - without.compute_seconds == pytest.approx(of_rank)
    assert times.axes.bubble - without.axes.bubble == pytest.approx((stages - 1) * of_rank)
    assert times.seconds - without.seconds == pytest.approx(stages * of_rank)


def test_forwards_without_adapters_wait_for_the_gathers_of_every_stage() -> None:
    work = workload(SMALL, adapter=AdapterConfig(rank=4), objective=DPO, global_batch_size=16)
    work = replace(work, scores_without_adapters=True)
    layout = Layout("full", 4, 2, pipeline_parallel=2)
    quick, slow = (
        time_step(work, layout, RATE, replace(SERVERS, between_devices=Bandwidth(rate))) for rate in (1e18, 1e3)
    )
    one = play_step(work, layout).sent.gathered / 1e3
    # A gather of the stage in the window, and one of each stage in each of its 8 forwards; their products are short.
    reduced = play_step(work, layout).sent.reduced / 1e3
    transfers = slow.axes.pipeline - quick.axes.pipeline
    assert slow.seconds - quick.seconds == pytest.approx((1 + 2 * 8) * one + reduced + transfers, rel=1e-3)


@pytest.mark.parametrize(
    ("objective", "scores"),
    [
        ({"class_path": "genesis.objectives.DPO"}, True),
        ({"class_path": "genesis.objectives.DPO", "init_args": {"reference": "runs/base"}}, False),
        ({"class_path": "genesis.objectives.GSPO", "init_args": {"kl": 0.1}}, True),
        ({"class_path": "genesis.objectives.GSPO", "init_args": {"kl": 0.0}}, False),
    ],
)
def test_an_objective_knows_from_a_recipe_whether_it_scores_without_adapters(
    objective: dict[str, Any], scores: bool
) -> None:
    found = find_objective(objective)
    assert found.scores_without_adapters(objective.get("init_args", {})) is scores


@pytest.mark.parametrize(
    ("layout", "axis", "is_within"),
    [
        (Layout("full", 16, 16, tensor_parallel=8), "tensor", True),
        (Layout("full", 16, 16, tensor_parallel=16), "tensor", False),
        (Layout("full", 16, 16, tensor_parallel=4, context_parallel=4), "context", False),
        (Layout("full", 16, 8, tensor_parallel=8, pipeline_parallel=2), "shards", True),
        (Layout("full", 16, 8, tensor_parallel=8, pipeline_parallel=2), "pipeline", False),
        (Layout("full", 6, 6), "shards", True),
    ],
)
def test_an_axis_uses_the_network_if_its_ranks_are_in_several_nodes(layout: Layout, axis: str, is_within: bool) -> None:
    assert is_in_node(axis, layout, SERVERS) is is_within


# ---- the command


def test_a_recipe_s_degrees_are_planned_and_not_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--trainer.strategy.init_args.pipeline_parallel", "2", "--memory", "80GB"]
    assert main(["--config", str(CONFIG), "--gpus", "8", *options]) == 0
    out = capsys.readouterr().out
    assert "memory of a rank: full, pipeline 2 on 8" in out
    assert "busy for 97% of the time at most; GB of its ranks: " in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trainer.strategy.init_args.pipeline_parallel", "3"], "pipeline_parallel 3 does not divide 8 ranks"),
        (["--trainer.strategy.init_args.pipeline_parallel", "8", "--data.global_batch_size", "4"], "at least 8"),
        (["--choose"], "needs --device_name, --rates or --tokens_per_second"),
        (["--choose", "--tokens_per_second", "1e5"], "needs --memory"),
        (["--network", "pigeons"], "--network is 'pigeons': it must be ethernet, roce, infiniband, or GB/s"),
    ],
)
def test_a_plan_refuses_in_words(options: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        main(["--config", str(CONFIG), "--gpus", "8", *options])


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        ("finetune/smollm2-135m-lora", {"context_parallel": 2}, "does not divide the 9 heads"),
        ("finetune/smollm2-135m-dpo", {"tensor_parallel": 2}, "cannot share num_kv_heads 3"),
        ("genesis-1b", {"pipeline_parallel": 2, "gradient_reduction": "micro_batch"}, "gradient_reduction is micro_b"),
        ("genesis-1b", {"tensor_parallel": 3}, "cannot share num_"),
        ("genesis-1b", {"stages_per_rank": 2}, "stages_per_rank is given, and pipeline_parallel is 1"),
        ("genesis-1b", {"pipeline_parallel": 2, "layers_per_stage": 3}, "layers_per_stage"),
    ],
)
def test_a_plan_refuses_the_layouts_that_a_fit_refuses(recipe: str, options: dict[str, Any], words: str) -> None:
    given = [f"--trainer.strategy.{name}={value}" for name, value in options.items()]
    with pytest.raises(UserError, match=words):
        main(["--config", str(CONFIG.parent / f"{recipe}.yaml"), "--gpus", "6", "--trainer.strategy", SHARDED, *given])


@pytest.mark.parametrize("option", ["tensor_paralel", "tensor_parallel"])
def test_an_option_of_a_strategy_that_is_no_class_is_not_ignored(option: str) -> None:
    with pytest.raises(UserError, match=f"trainer.strategy.{option} is an option of a class, and trainer.strategy has"):
        main(["--config", str(CONFIG.parent / "genesis-10m.yaml"), f"--trainer.strategy.{option}=2"])


def test_a_choice_never_has_what_the_objective_cannot(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DPO, "trains_under", frozenset())
    config = CONFIG.parent / "finetune" / "smollm2-135m-dpo.yaml"
    words = ["--gpus", "4", "--memory", "24GB", "--tokens_per_second", "1e5", "--choose", "--json"]
    assert main(["--config", str(config), *words]) == 0
    (found,) = json.loads(capsys.readouterr().out)["recommendations"]
    assert {one["strategy"] for one in found["choices"]} <= {"replicated", "full"}


@pytest.mark.parametrize(
    ("gpus", "degrees", "words"),
    [
        ("6", {"tensor_parallel": 4}, "the recipe's layout is left out: .* tensor_parallel 4 does not divide 6 ranks"),
        ("6", {"tensor_parallel": 3}, "is replaced by the recommended one: tensor_parallel is 3, and so many ranks"),
    ],
)
def test_a_layout_is_chosen_also_if_the_recipe_s_own_cannot_run(
    capsys: pytest.CaptureFixture[str], gpus: str, degrees: dict[str, int], words: str
) -> None:
    small = CONFIG.parent / "genesis-10m.yaml"
    given = ["--config", str(small), "--gpus", gpus, "--memory", "80GB", "--device_name", "NVIDIA H200", "--choose"]
    given += ["--trainer.strategy", SHARDED, *(f"--trainer.strategy.{name}={value}" for name, value in degrees.items())]
    given += ["--data.global_batch_size", "96", "--data.micro_batch_size", "1"]
    assert main(given) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(words, out)
    assert "take it by: --data.micro_batch_size" in out


def test_a_plan_prints_the_layouts_that_fit_and_the_options_of_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--config", str(CONFIG), "--gpus", "16", "--memory", "24GB", "--tokens_per_second", "5e5", "--choose"]
    given += ["--link", "nvswitch", "--network", "roce"]
    assert main([*given, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["recommendations"]
    best = found["choices"][0]
    assert best["strategy"] == "hybrid"
    assert best["options"]["trainer.strategy.ranks_per_shard_group"] == 8
    assert any("groups of shards" in reason for reason in found["reasons"])
    assert main(given) == 0
    out = " ".join(capsys.readouterr().out.split())
    options = "--trainer.strategy genesis.strategies.Sharded --trainer.strategy.shard hybrid"
    assert re.search(
        rf"take it by: --data.micro_batch_size \d --trainer.num_nodes 2 --trainer.devices 8 {options}", out
    )
