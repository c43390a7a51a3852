"""MFU: of the published peak of the device and the type that is multiplied, or not at all."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from genesis.model.describe import count_flops_per_token
from genesis.train import mfu
from genesis.train.mfu import MFUMeter, choose_peak_type
from tests.train.support import TINY


def meter(monkeypatch: pytest.MonkeyPatch, name: str, device: str = "cuda") -> MFUMeter:
    monkeypatch.setattr(mfu, "name_device", lambda kind, index: name)
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(strategy=strategy, precision="bf16-mixed")
    return MFUMeter(trainer, TINY)


def test_mfu_is_the_models_arithmetic_over_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    flops = count_flops_per_token(TINY, 16)
    measured = meter(monkeypatch, "NVIDIA A100-SXM4-80GB").measure(312e12 / flops / 2, 16)
    assert measured == {"train/mfu": pytest.approx(0.5)}


def test_an_unknown_device_has_no_mfu_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(mfu, "rank_zero_info", lines.append)
    assert meter(monkeypatch, "NVIDIA Z1").measure(1e9, 16) == {}
    assert lines == ["the peak of 'NVIDIA Z1' for products of bfloat16 is not known: train/mfu is not logged"]


def test_a_cpu_has_no_mfu_and_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mfu, "rank_zero_info", pytest.fail)
    assert meter(monkeypatch, "cpu", "cpu").measure(1e9, 16) == {}


@pytest.mark.parametrize(
    ("precision", "multiplied", "wanted"),
    [
        ("bf16-mixed", "highest", "bfloat16"),
        ("bf16-true", "high", "bfloat16"),
        ("16-mixed", "high", "float16"),
        ("32-true", "high", "tfloat32"),
        ("32-true", "highest", "float32"),
    ],
)
def test_the_peak_is_that_of_the_type_that_is_multiplied(
    monkeypatch: pytest.MonkeyPatch, precision: str, multiplied: str, wanted: str
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: multiplied)
    assert choose_peak_type(precision) == wanted
