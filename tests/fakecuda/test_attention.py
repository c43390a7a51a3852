"""Which kernel of attention a fit runs on a GPU, what it is given, and that no step waits for what it prepares."""

from typing import Any

import pytest

from tests.fakecuda.client import FakeDevice
from tests.fakecuda.combinations import NUM_MICRO_BATCHES, Combination
from tests.fakecuda.test_fits import run

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("fakecuda")]
OPERATORS = {
    "fa4": ("genesis::fa4", "genesis::fa4_backward"),
    "flex": ("flex_attention", "flex_attention_backward"),
    "flash": ("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"),
}
NUM_LAYERS = 2


def check_runs(result: dict[str, Any], name: str) -> None:
    """Fails unless each layer attends by this kernel in each micro-batch, and by no other."""
    kernels = result["kernels"]
    for kernel, operators in OPERATORS.items():
        for operator in operators:
            assert kernels.get(operator, 0) == (NUM_LAYERS * NUM_MICRO_BATCHES if kernel == name else 0), kernels


@pytest.mark.parametrize(
    ("capability", "precision", "head_dim", "name"),
    [
        ((8, 0), "bf16-mixed", 64, "flex"),
        ((9, 0), "16-mixed", 256, "flex"),
        ((8, 0), "32-true", 64, "flex"),
        ((9, 0), "bf16-mixed", 80, "flex"),
        ((9, 0), "bf16-mixed", 8, "flash"),
        ((9, 0), "bf16-mixed", 320, "mask"),
        ((7, 5), "16-mixed", 64, "mask"),
    ],
)
def test_auto_takes_the_best_kernel_that_the_card_the_dtype_and_the_width_allow(
    fake_device: FakeDevice, capability: tuple[int, int], precision: str, head_dim: int, name: str
) -> None:
    shape = {"dim": 2 * head_dim, "num_heads": 2, "num_kv_heads": 1}
    check_runs(run(fake_device, Combination(precision=precision), capability=capability, shape=shape), name)


@pytest.mark.parametrize("name", ["fa4", "flash", "mask"])
@pytest.mark.parametrize("combination", [Combination(), Combination("full", num_ranks=2)], ids=str)
def test_a_kernel_that_is_named_runs_in_every_layer(
    fake_device: FakeDevice, name: str, combination: Combination
) -> None:
    check_runs(run(fake_device, combination, attention=name), name)


@pytest.mark.parametrize("name", ["fa4", "flex", "flash"])
def test_no_kernel_gets_repeated_keys(fake_device: FakeDevice, name: str) -> None:
    kernels = run(fake_device, Combination(), attention=name)["kernels"]
    expanded = run(fake_device, Combination(), attention="mask")["kernels"]
    assert kernels.get("clone", 0) < expanded["clone"]


@pytest.mark.parametrize("name", ["fa4", "flex", "flash", "mask"])
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_no_kernel_makes_a_step_wait(fake_device: FakeDevice, name: str, checkpointing: str) -> None:
    plain = run(fake_device, Combination(), attention=name)
    options = {"activation_checkpointing": checkpointing}
    result = run(fake_device, Combination(), attention=name, strategy_options=options, parts="windows")
    assert result["syncs"] == plain["syncs"], result["lines"]
    assert sum(result["syncs"].values()) == 1  # for the norm and the figures


def test_blocks_of_keys_are_found_once_in_a_micro_batch_for_each_kind_of_layer(fake_device: FakeDevice) -> None:
    num_kinds = 2  # with a window and without
    for num_layers in (2, 4):
        found = run(fake_device, Combination(), shape={"num_layers": num_layers}, parts="windows")
        # Lists of partial and full blocks, in both directions.
        assert found["kernels"]["sort"] == 4 * num_kinds * NUM_MICRO_BATCHES


def test_a_kernel_that_the_card_lacks_is_refused_by_name(fake_device: FakeDevice) -> None:
    refused = run(fake_device, Combination(), attention="fa4", capability=(8, 0))["refused"]
    assert refused == (
        "model.attention is fa4, but it needs a GPU of compute capability 9.0 or newer, and this one has 8.0; give "
        "--model.attention flex, or auto"
    )


@pytest.mark.parametrize("name", ["fa4", "flex"])
def test_a_compiled_block_has_one_kernel_in_its_forward_and_one_in_its_backward(
    fake_device: FakeDevice, name: str
) -> None:
    """Layers with and without windows; the compiler is torch's own up to inductor, which would need a GPU."""
    result = fake_device.run("compiled_blocks", kernel=name)
    assert result["has_gradients"]
    operators = [operator.replace("::", ".") for operator in OPERATORS[name]]
    of_graphs = [[node for node in graph if node.removesuffix(".default") in operators] for graph in result["graphs"]]
    assert all(len(kernels) == 1 for kernels in of_graphs), of_graphs
    num_kinds = 1 if name == "flex" else NUM_LAYERS  # blocks have the window of their layer in them
    assert len(of_graphs) == 2 * num_kinds
