"""What a training step asks of a GPU: where the host waits for it, and what runs there."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.fakecuda.client import FakeDevice
from tests.fakecuda.combinations import NUM_MICRO_BATCHES, Combination
from tests.fakecuda.repeatable import OTHER_FORM, REFUSED, describe, is_refused, read_torchs_list
from tests.golden.files import GOLDEN, read_golden

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("fakecuda")]


def run(device: FakeDevice, combination: Combination, **options: Any) -> dict[str, Any]:
    """Returns what a fit came to."""
    return dict(device.run("fit", combination=asdict(combination), **options))


def test_autocast_computes_in_bfloat16_on_the_device(fake_device: FakeDevice) -> None:
    assert run(fake_device, Combination())["casts"]["float32 to bfloat16"] > 0
    assert "float32 to bfloat16" not in run(fake_device, Combination(precision="32-true"))["casts"]


def test_products_of_float32_matrices_take_tf32(fake_device: FakeDevice) -> None:
    assert run(fake_device, Combination(precision="32-true"))["float32_matmul_precision"] == "high"


def test_an_offloaded_model_adds_its_validation_up_on_the_device(fake_device: FakeDevice) -> None:
    assert "refused" not in run(fake_device, Combination("full", num_ranks=2, has_offload=True))


@pytest.mark.parametrize(
    "combination", [Combination(), Combination("full", num_ranks=2), Combination(optimizer="muon")], ids=str
)
def test_offload_to_the_host_frees_the_device_and_adds_no_wait(
    fake_device: FakeDevice, combination: Combination
) -> None:
    recomputed = {"activation_checkpointing": "block"}
    offloaded = {**recomputed, "activation_offload": True, "optimizer_offload": 1.0}
    plain = run(fake_device, combination, strategy_options=recomputed)
    moved = run(fake_device, combination, strategy_options=offloaded)
    assert "refused" not in moved
    num_steps_bytes = moved["memory"].pop("optimizer state on cuda")  # the counts of steps
    assert moved["memory"]["optimizer state on cpu"] + num_steps_bytes == plain["memory"]["optimizer state on cuda"]
    # The moments of such a small model are one piece, which the step holds: more than Muon's moments are.
    if combination.optimizer == "adamw":
        assert moved["peak_bytes"] < 0.9 * plain["peak_bytes"]
    assert moved["syncs"] == plain["syncs"], moved["lines"]  # the wait for the states' return is for an event


@pytest.mark.parametrize("shard", ["full", "grad_op"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_units_on_the_host_move_is_counted(fake_device: FakeDevice, shard: str, share: float) -> None:
    combination = Combination(shard, num_ranks=2)
    result = run(fake_device, combination, strategy_options={"cpu_offload": share})
    moved, parameters = result["moved"], result["memory"]["parameters on cpu"]
    assert moved["to host"] == result["memory"]["gradients on cpu"]  # reduced once in a step
    # A micro-batch gathers each unit twice, or once where it stays gathered for the backward, as the root always does.
    root = 4 * (1024 * 256 + 256) // 2 if share == 1.0 else 0
    once = parameters if shard == "grad_op" else root
    assert moved["to device"] == NUM_MICRO_BATCHES * (once + 2 * (parameters - once))
    assert moved["idle ns"] > 0  # the host's update


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_blocks_in_the_hosts_memory_are_updated_there_and_the_others_on_the_device(
    fake_device: FakeDevice, optimizer: str
) -> None:
    combination = Combination("full", optimizer=optimizer, num_ranks=2)
    whole = run(fake_device, combination, shape={"num_layers": 4})["memory"]
    half = run(fake_device, combination, shape={"num_layers": 4}, strategy_options={"cpu_offload": 0.5})
    assert "refused" not in half
    for kind in ("parameters", "optimizer state"):
        on_host, on_device = half["memory"][f"{kind} on cpu"], half["memory"][f"{kind} on cuda"]
        assert 0 < on_host < on_device  # the embedding stays
        assert on_host + on_device == pytest.approx(whole[f"{kind} on cuda"], rel=0.01)


@pytest.mark.parametrize(
    ("combination", "num_searched"),
    [
        # Each micro-batch searches weight, input and gradient of 14 layers twice for their largest value.
        (Combination(), 14 * 6 * NUM_MICRO_BATCHES),
        # Sharded weights have had their scales before they are gathered.
        (Combination("full", num_ranks=2), 14 * 4 * NUM_MICRO_BATCHES),
    ],
    ids=str,
)
def test_float8_products_run_on_the_device_and_add_no_wait(
    fake_device: FakeDevice, combination: Combination, num_searched: int
) -> None:
    plain, float8 = run(fake_device, combination), run(fake_device, combination, has_float8=True)
    assert "refused" not in float8
    assert float8["casts"]["float32 to float8_e4m3fn"] == 14 * 4 * NUM_MICRO_BATCHES
    assert float8["casts"]["float32 to float8_e5m2"] == 14 * 2 * NUM_MICRO_BATCHES
    assert float8["syncs"] == plain["syncs"], float8["lines"]
    assert float8["memory"] == plain["memory"]
    assert float8["kernels"]["max"] == num_searched


@pytest.mark.parametrize(
    ("precision", "capability", "reason"),
    [
        ("bf16-mixed", (8, 6), "cuda:0 multiplies no float8 (CUDA devices of capability 8.9 or higher do"),
        ("32-true", (9, 0), "trainer.precision is '32-true': give bf16-mixed or bf16-true"),
        ("16-mixed", (9, 0), "trainer.precision is '16-mixed': give bf16-mixed or bf16-true"),
    ],
)
def test_float8_is_refused_where_it_does_not_apply(
    fake_device: FakeDevice, precision: str, capability: tuple[int, int], reason: str
) -> None:
    result = run(fake_device, Combination(precision=precision), has_float8=True, capability=list(capability))
    assert reason in result["refused"]


def test_ddp_is_built_on_the_current_stream(fake_device: FakeDevice) -> None:
    assert run(fake_device, Combination(num_ranks=2))["num_streams_entered"] == 0


def test_norms_of_queries_reach_the_fused_kernel_in_one_dtype(fake_device: FakeDevice) -> None:
    found = fake_device.run("norm")
    assert found["given"] == [["torch.float32", "torch.float32"]] * 3
    assert found["results"] == ["torch.float32"] * 3


@pytest.mark.parametrize(
    "combination", [Combination(), Combination("zero1", num_ranks=2), Combination("full", num_ranks=2)], ids=str
)
def test_moments_of_8_bits_are_updated_on_the_device_and_add_no_wait(
    fake_device: FakeDevice, combination: Combination
) -> None:
    exact, ours = run(fake_device, combination), run(fake_device, replace(combination, optimizer="adamw8bit"))
    assert "refused" not in ours
    assert ours["syncs"] == exact["syncs"], ours["lines"]
    states = "optimizer state on cuda"
    assert ours["memory"].keys() == exact["memory"].keys()
    if combination.strategy != "zero1":  # whose states are in an optimizer of its own
        assert ours["memory"][states] < 0.75 * exact["memory"][states]  # the embedding keeps float32


CLIPPED = [
    Combination(),
    Combination("zero1", num_ranks=2),
    Combination("full", num_ranks=2),
    Combination(optimizer="muon"),
]


@pytest.mark.parametrize("combination", CLIPPED, ids=str)
def test_the_clip_is_a_pass_of_its_own_only_over_matrices_for_muon(
    fake_device: FakeDevice, combination: Combination
) -> None:
    kernels = run(fake_device, combination)["kernels"]  # the norm is above the limit
    num_decays = int(combination.optimizer == "muon")
    assert kernels.get("_foreach_mul_", 0) == 2 * num_decays
    assert "_fused_adamw_" in kernels


@pytest.mark.parametrize("combination", [Combination(), Combination("full", num_ranks=2)], ids=str)
def test_a_log_line_with_all_telemetry_waits_as_often_as_a_step(
    fake_device: FakeDevice, combination: Combination
) -> None:
    silent, logging = run(fake_device, combination), run(fake_device, combination, log_every_n_steps=1)
    assert logging["syncs"] == silent["syncs"], logging["lines"]
    assert silent["timed_steps"] == 1  # all but the first, and nothing is logged


def count_gathers(device: FakeDevice, **options: Any) -> int:
    kernels = run(device, Combination("full", num_ranks=2), **options)["kernels"]
    return sum(count for name, count in kernels.items() if "allgather" in name)


def test_parameters_are_gathered_once_for_a_window_if_the_device_has_room(fake_device: FakeDevice) -> None:
    num_blocks = 2
    assert count_gathers(fake_device) == NUM_MICRO_BATCHES * (2 * num_blocks + 1)
    assert count_gathers(fake_device, free_bytes=1 << 30) == num_blocks + 1
    assert count_gathers(fake_device, free_bytes=1 << 20) == NUM_MICRO_BATCHES * (2 * num_blocks + 1)
    assert count_gathers(fake_device, strategy_options={"keep_gathered": True}) == num_blocks + 1


GOLDEN_STEPS = {
    "replicated": Combination(),
    "replicated-muon-2-ranks": Combination(optimizer="muon", num_ranks=2),
    "float16": Combination(precision="16-mixed"),
    "sharded-2-ranks": Combination("full", num_ranks=2),
    "offload-muon-2-ranks": Combination("full", optimizer="muon", num_ranks=2, has_offload=True),
    "lora-beside-bfloat16": Combination(adapter="lora beside bfloat16"),
    "dora-2-ranks": Combination("full", num_ranks=2, adapter="dora"),
    "dpo-lora": Combination(objective="dpo", adapter="lora"),
    "dpo-sharded-2-ranks": Combination("full", num_ranks=2, objective="dpo"),
    "gspo-lora": Combination(objective="gspo", adapter="lora"),
    "distillation": Combination(objective="distillation"),
}


def count_per_block(two: dict[str, int], four: dict[str, int]) -> dict[str, float]:
    """Returns the counts of one block in one micro-batch, from steps with two and with four blocks."""
    names = sorted({*two, *four})
    counts = {name: (four.get(name, 0) - two.get(name, 0)) / (2 * NUM_MICRO_BATCHES) for name in names}
    return {name: count for name, count in counts.items() if count}


def list_counts(title: str, counts: dict[str, float]) -> list[str]:
    return [f"  {title}", *(f"    {count:g} {name}" for name, count in counts.items())]


@pytest.mark.parametrize("name", GOLDEN_STEPS)
def test_a_step_waits_for_the_device_where_it_did_and_runs_the_kernels_that_it_ran(
    fake_device: FakeDevice, name: str
) -> None:
    """A wait that is new fails with its line; so does a cast or a kernel more in a block, or more memory of a rank."""
    combination = GOLDEN_STEPS[name]
    two, four = run(fake_device, combination), run(fake_device, combination, shape={"num_layers": 4})
    assert two["syncs"] == four["syncs"], "the host waits for each block"
    kernels, casts = (count_per_block(two[what], four[what]) for what in ("kernels", "casts"))
    lines = [str(combination), *list_counts("the host waits, in a step of 3 micro-batches", two["syncs"])]
    lines += list_counts("casts of a block and micro-batch: forward, backward and step", casts)
    lines += list_counts("kernels of a block and micro-batch", {"in all": sum(kernels.values())})
    lines += ["  bytes that a rank holds after a step, with two blocks"]
    lines += [f"    {count:,} {name}" for name, count in two["memory"].items()]
    fresh = "".join(f"{line}\n" for line in lines)
    golden = read_golden(f"fakecuda/{name}.txt", fresh)
    new = [two["lines"][key] for key, count in two["syncs"].items() if f"    {count} {key}\n" not in golden]
    assert not new, f"the host waits for the device at new places, or more often: {new}"
    assert fresh == golden


def test_torchs_list_of_operators_that_vary_is_the_one_that_was_read() -> None:
    """A new version of torch may name others; each belongs into `tests.fakecuda.repeatable`."""
    other_form, refused = read_torchs_list()
    assert other_form == set(OTHER_FORM)
    assert refused == set(REFUSED)


OPERATORS = "fakecuda/operators.txt"
TOGETHER = (
    *("replicated-muon-2-ranks", "float16", "sharded-2-ranks", "offload-muon-2-ranks", "dpo-sharded-2-ranks"),
    *("distillation", "shared", "linear", "windows"),
)
"""Of these, the other cases and `test_matrix.py` have each part with others."""
EVERY_PART = [
    *(
        pytest.param(options, marks=[pytest.mark.repeat] * (name in TOGETHER))
        for name, options in (
            *((name, {"combination": combination}) for name, combination in GOLDEN_STEPS.items()),
            *(
                (parts, {"combination": Combination(), "parts": parts})
                for parts in ("softmax", "shared", "linear", "sinks", "windows")
            ),
        )
    ),
    {"combination": Combination(optimizer="muon"), "parts": "linear"},
    {"combination": Combination(adapter="dora"), "parts": "shared"},
    {"combination": Combination(objective="distillation"), "parts": "windows"},
    {"combination": Combination(), "has_float8": True},
    {"combination": Combination("full", num_ranks=2), "has_float8": True},
]


@pytest.mark.each
@pytest.mark.parametrize("options", EVERY_PART, ids=lambda options: ", ".join(map(str, options.values())))
def test_no_operator_of_a_step_varies_on_a_gpu(fake_device: FakeDevice, options: dict[str, Any]) -> None:
    """Every part, objective and optimizer; an operator that the golden text lacks is one to look at."""
    result = run(fake_device, **options)
    assert "refused" not in result
    assert [name for name in result["operators"] if is_refused(name)] == []
    path = GOLDEN / OPERATORS
    known = path.read_text().splitlines() if path.exists() else []
    fresh = "".join(f"{line}\n" for line in sorted({*known, *map(describe, result["operators"])}))
    assert fresh == read_golden(OPERATORS, fresh)
