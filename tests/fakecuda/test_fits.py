"""What a training step asks of a GPU: where the host waits for it, and what runs there."""

from dataclasses import asdict
from typing import Any

import pytest

from tests.fakecuda.client import FakeDevice
from tests.fakecuda.combinations import Combination

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("fakecuda")]


def run(device: FakeDevice, combination: Combination, **options: Any) -> dict[str, Any]:
    result: dict[str, Any] = device.run("fit", combination=asdict(combination), **options)
    return result


def test_autocast_computes_in_bfloat16_on_the_device(fake_device: FakeDevice) -> None:
    assert run(fake_device, Combination())["casts"]["float32 to bfloat16"] > 0
    assert "float32 to bfloat16" not in run(fake_device, Combination(precision="32-true"))["casts"]
