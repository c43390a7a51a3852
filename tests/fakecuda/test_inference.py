"""Generation, the server's batch and scoring on a GPU: they run, and torch plans no attention for each length."""

import pytest

from tests.fakecuda.client import FakeDevice

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("fakecuda")]

GREEDY = {"temperature": 0.0}
SAMPLED = {"top_k": 20, "top_p": 0.9}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [[GREEDY], [SAMPLED, GREEDY, {}]], ids=["greedy", "mixed"])
def test_a_batch_continues_texts(fake_device: FakeDevice, dtype: str, options: list[dict[str, float]]) -> None:
    result = fake_device.run("batch", dtype=dtype, num_tokens=3, options=options)
    assert result["num_new"] == len(options)
    assert not result["has_planned_attention"], "cuDNN would plan the attention of every length"


def test_the_device_layer_asks_cuda_and_waits_are_counted_by_line(fake_device: FakeDevice) -> None:
    result = fake_device.run("device_layer")
    assert result["name"] == "Fake"
    assert (result["num_devices"], result["has_bfloat16"], result["capability"]) == (1, True, [9, 0])
    assert result["peak"] == [0, 0]
    assert result["milliseconds"] == 0.0
    assert result["precision"] == "bf16-mixed"
    assert list(result["waits"].values()) == [1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_requests_are_scored(fake_device: FakeDevice, dtype: str) -> None:
    result = fake_device.run("score", dtype=dtype)
    assert result["num_scores"] == 6
    assert not result["has_planned_attention"]
