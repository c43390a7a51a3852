"""On a real GPU with float8 products: they are what the CPU emulates, losses are those of bfloat16, and runs repeat."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from genesis.base.device import has_float8
from genesis.model.float8 import Float8Options, list_float8_proofs
from genesis.operations.doctor.fits import SIZES, KeepLosses, build_trainer, random_windows
from genesis.operations.doctor.probe import Task
from genesis.optim import AdamW
from genesis.strategies import Replicated, Sharded
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.checkpoint.device_proof import prove_device
from genesis_callbacks.testing import run_ranks

pytestmark = [pytest.mark.cuda, pytest.mark.process]
STEPS, SAVED = 20, 10
BAND_NATS = 0.05
STRATEGIES = {
    "eager": (Replicated, {}),
    "compiled": (Replicated, {"compile_blocks": True}),
    "sharded": (Sharded, {}),
    "compiled shards": (Sharded, {"compile_blocks": True, "activation_checkpointing": "block"}),
}


@pytest.fixture(autouse=True)
def require_float8(kind: str) -> None:
    if not has_float8(torch.device(kind, 0)):
        pytest.skip("the device multiplies no float8")


class Stop(pl.Callback):
    """Ends the fit after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self.step


def fit(
    directory: str, kind: str, strategy: str, has_float8: bool, stop: int = STEPS, saves: bool = False
) -> dict[str, Any]:
    """Trains in deterministic mode, from the newest checkpoint in `directory` if it saves.

    It runs in a process of its own, whose gloo group gives way to the device's own backend.
    """
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before the device starts
    keep = KeepLosses()
    checkpoint = AsyncProcessCheckpoint(run_dir=directory, every_n_steps=SAVED, mode="sync")
    make, options = STRATEGIES[strategy]
    trainer = build_trainer(
        Task(kind, "tiny", directory),
        make(**options),
        STEPS,
        [keep, Stop(stop), *([checkpoint] if saves else [])],
        deterministic=True,
        enable_checkpointing=saves,
    )
    module = GenesisModule(SIZES["tiny"].decoder, AdamW(), float8=Float8Options() if has_float8 else None)
    trainer.fit(module, random_windows(SIZES["tiny"]), ckpt_path=checkpoint.latest() if saves else None)
    weights = {name: _take(parameter) for name, parameter in module.named_parameters()}
    return {"losses": keep.read(), "weights": weights}


def _take(parameter: Any) -> Tensor:
    whole: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().cpu()


def test_products_are_those_that_the_cpu_emulates(kind: str) -> None:
    report = prove_device(torch.device(kind, 0), list_float8_proofs(Float8Options()))
    assert report.failures == ()
    assert report.environment["device.float8"].startswith("torchao ")


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_losses_stay_in_a_band_of_bfloat16(tmp_path: Path, kind: str, strategy: str) -> None:
    plain, float8 = (run_ranks(fit, 1, str(tmp_path), kind, strategy, given)[0] for given in (False, True))
    distances = [abs(one - other) for one, other in zip(plain["losses"], float8["losses"], strict=True)]
    assert 0.0 < max(distances) < BAND_NATS


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_run_that_is_stopped_goes_on_bit_for_bit(tmp_path: Path, kind: str, strategy: str) -> None:
    straight = run_ranks(fit, 1, str(tmp_path / "straight"), kind, strategy, True)[0]
    run_ranks(fit, 1, str(tmp_path / "run"), kind, strategy, True, SAVED, True)
    resumed = run_ranks(fit, 1, str(tmp_path / "run"), kind, strategy, True, STEPS, True)[0]
    assert straight["losses"][SAVED:] == resumed["losses"]
    assert all(torch.equal(value, resumed["weights"][name]) for name, value in straight["weights"].items())
