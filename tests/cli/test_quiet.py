"""Lightning's messages that a user of `genesis fit` cannot act on are not printed."""

import logging

import pytest
import torch
from lightning.fabric.accelerators.cuda import _check_cuda_matmul_precision

from genesis.cli.quiet import quiet_lightning


def advise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls Lightning's check of the precision of matmuls as for a GPU of the Hopper generation."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    _check_cuda_matmul_precision.__wrapped__(torch.device("cuda"))


def test_the_advice_to_set_a_precision_that_the_recipe_sets_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        with quiet_lightning():
            advise(monkeypatch)
        assert not caplog.messages
        advise(monkeypatch)
    assert "torch.set_float32_matmul_precision" in caplog.text
