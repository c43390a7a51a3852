"""What generation, serving, evaluation and digests ask of a GPU: where the host waits for it, and what runs there."""

from typing import Any

import pytest

from tests.fakecuda.client import FakeDevice
from tests.fakecuda.repeatable import is_refused
from tests.golden.files import read_golden

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("fakecuda")]

GREEDY = {"temperature": 0.0}
SAMPLED = {"top_k": 20, "top_p": 0.9}
ROWS: dict[str, list[dict[str, float]]] = {"greedy": [GREEDY, GREEDY], "mixed": [SAMPLED, GREEDY, {}]}


def check_golden(name: str, lines: list[str], results: list[dict[str, Any]]) -> None:
    """Compares with the golden text; a wait that is new fails with its line."""
    fresh = "".join(f"{line}\n" for line in lines)
    golden = read_golden(f"fakecuda/{name}.txt", fresh)
    new = {
        result["lines"][key]
        for result in results
        for key, count in result["syncs"].items()
        if f"    {count} {key}\n" not in golden
    }
    assert not new, f"the host waits for the device at new lines, or more often: {sorted(new)}"
    assert fresh == golden


def list_waits(title: str, result: dict[str, Any]) -> list[str]:
    assert not result["has_planned_attention"], "cuDNN would plan the attention of every length"
    # Answers in training are generated under torch's deterministic mode.
    assert not any(map(is_refused, result["operators"]))
    return [f"  {title}", *(f"    {count} {key}" for key, count in result["syncs"].items())]


def test_the_device_layer_asks_cuda_and_waits_are_counted_by_line(fake_device: FakeDevice) -> None:
    result = fake_device.run("device_layer")
    assert result["name"] == "Fake"
    assert (result["num_devices"], result["has_bfloat16"], result["capability"]) == (1, True, [9, 0])
    assert result["peak"] == [0, 0]
    assert result["milliseconds"] == 0.0
    assert result["precision"] == "bf16-mixed"
    assert list(result["waits"].values()) == [1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", ROWS)
def test_a_step_of_texts_waits_once_and_runs_the_kernels_that_it_ran(
    fake_device: FakeDevice, rows: str, dtype: str
) -> None:
    two, four = (fake_device.run("batch", dtype=dtype, options=ROWS[rows], num_layers=number) for number in (2, 4))
    for name in two:
        assert two[name]["syncs"] == four[name]["syncs"], "the host waits for each block"
        assert two[name]["num_tokens"] == len(ROWS[rows])
    assert two["decode"]["kernels"] == two["decode again"]["kernels"]
    in_two, in_four = (sum(found["decode"]["kernels"].values()) for found in (two, four))
    per_block = (in_four - in_two) // 2
    lines = [f"texts that join and leave, {rows}, {dtype}"]
    for name in ("read", "decode", "leave and join"):
        lines += list_waits(f"the host waits, in a step to {name}", two[name])
    lines += [
        "  kernels of a step to decode",
        f"    {per_block} of each block",
        f"    {in_two - 2 * per_block} beside the blocks, those that draw tokens included",
    ]
    check_golden(f"decode-{rows}-{dtype}", lines, list(two.values()))


@pytest.mark.parametrize(("dtype", "has_kernel"), [("bfloat16", True), ("float32", False)])
def test_a_cache_is_read_by_lengths_where_flash_kernels_exist(
    fake_device: FakeDevice, dtype: str, has_kernel: bool
) -> None:
    kernels = fake_device.run("batch", dtype=dtype, options=[GREEDY])["decode"]["kernels"]
    assert ("torch_attn::_varlen_attn" in kernels) == has_kernel


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_text_scores_and_digests_wait_where_they_did(fake_device: FakeDevice, dtype: str) -> None:
    texts = {
        name: fake_device.run("text", dtype=dtype, sampling=one)
        for name, one in (("greedy", GREEDY), ("sampled", SAMPLED))
    }
    assert {result["num_tokens"] for result in texts.values()} == {10}
    score, held_out, digest = (fake_device.run(case, dtype=dtype) for case in ("score", "held_out", "digest"))
    assert (score["num_scores"], held_out["num_measures"]) == (6, 2)
    assert digest["num_digests"] == digest["num_weights"] > 0
    lines = [f"the host waits, {dtype}"]
    for name, result in texts.items():
        lines += list_waits(f"for 5 tokens of 2 texts, {name}", result)
    lines += list_waits("to score requests in 3 forwards", score)
    lines += list_waits("to measure held-out text in 2 forwards", held_out)
    lines += list_waits("to take the digests of all weights", digest)
    check_golden(f"inference-{dtype}", lines, [*texts.values(), score, held_out, digest])
