"""Trains the same fit twice for each of several settings, and compares the weights bit for bit."""

import gc
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import lightning.pytorch as pl
import torch
from torch import Tensor

from benchmarks.workers.options import read_fit_options
from genesis.base.device import is_host, leave_memory_unfilled
from genesis.base.errors import UserError
from genesis.model.attention import AttentionConfig
from genesis.model.decoder import DecoderConfig
from genesis.model.mixture import MixtureConfig
from genesis.operations.doctor.fits import SIZES, KeepLosses, StepTimes, build_trainer, random_windows
from genesis.operations.doctor.probe import Task
from genesis.optim import OptimizerOptions
from genesis.strategies import Replicated
from genesis.train.module import GenesisModule

_STEPS: Final = 12
_FIRST_TIMED: Final = 4
_BUDGET_SECONDS: Final = 170.0
"""No setting is begun later than this."""
_SIZES_OF_THE_DOCTOR: Final = {"tiny": "tiny", "full": "small"}
_NOT_REPEATED: Final = "trainer.deterministic=false"


@dataclass(frozen=True)
class Setting:
    """What is trained twice.

    Args:
        options: Of `genesis fit`: `model.attention=flex`.
        optimizer: The name of the optimizer.
        precision: Lightning's name; None for the device's usual one.
        is_compiled: Whether the blocks are compiled.
        has_experts: Whether the feed-forward parts are mixtures of experts.
    """

    options: tuple[str, ...] = ()
    optimizer: Any = "adamw"
    precision: str | None = None
    is_compiled: bool = False
    has_experts: bool = False

    @property
    def is_repeated(self) -> bool:
        """Whether the two fits must be equal."""
        return _NOT_REPEATED not in self.options


def plan_settings(kind: str) -> dict[str, Setting]:
    """Returns the settings by name, most important first; on the CPU those that it can train in."""
    found = {
        "as genesis fit": Setting(),
        "compiled": Setting(is_compiled=True),
        "fa4, compiled": Setting(("model.attention=fa4",), is_compiled=True),
        "flex, compiled": Setting(("model.attention=flex",), is_compiled=True),
        "flash, compiled": Setting(("model.attention=flash",), is_compiled=True),
        "muon": Setting(optimizer="muon"),
        "mixture": Setting(has_experts=True),
        "float8, compiled": Setting(("model.float8={}",), is_compiled=True),
        "32-true": Setting(precision="32-true"),
        "16-mixed": Setting(precision="16-mixed"),
        "not deterministic": Setting((_NOT_REPEATED,)),
    }
    if is_host(kind):
        return {name: found[name] for name in ("as genesis fit", "muon", "mixture")}
    return found if kind in ("cuda", "xpu") else {name: one for name, one in found.items() if not one.is_compiled}


def measure_repeats(kind: str, size: str) -> dict[str, Any]:
    """Trains each setting twice.

    Args:
        kind: Kind of device.
        size: `tiny`, or `full` for a model of 124 million parameters at 1,024 tokens.

    Returns:
        For each setting whether the weights are bit-equal, the first step whose losses differ, and seconds of a step.
        `failures` names the settings that had to be equal and are not, and those that ended in an error.
    """
    results: dict[str, Any] = {}
    failures: list[str] = []
    findings: list[str] = []
    begin_seconds = time.monotonic()
    for name, setting in plan_settings(kind).items():
        if time.monotonic() - begin_seconds > _BUDGET_SECONDS:
            results[name] = {"reason": f"the {_BUDGET_SECONDS:.0f} seconds were over"}
            findings.append(f"{name}: not run")
            continue
        try:
            found = _compare(kind, _SIZES_OF_THE_DOCTOR[size], setting)
        except UserError as reason:  # the kernel is not installed, or not for this device
            results[name] = {"reason": str(reason)}
            findings.append(f"{name}: not run")
            continue
        except Exception as error:
            results[name] = {"error": "".join(traceback.format_exception(error))[-2000:]}
            failures.append(f"{name}: {type(error).__name__}")
            continue
        results[name] = found
        equal = "bit-equal" if found["is_bit_equal"] else f"differs from step {found['first_different_step']}"
        findings.append(f"{name}: {equal}, {found['step_seconds'] * 1000:.0f} ms a step")
        if setting.is_repeated and not found["is_bit_equal"]:
            failures.append(f"{name}: {equal}")
        gc.collect()
    return {"steps": _STEPS, "settings": results, "failures": failures, "findings": findings}


def _compare(kind: str, size: str, setting: Setting) -> dict[str, Any]:
    (one, losses, seconds), (other, again, _) = (_train(kind, size, setting) for _ in range(2))
    different = [name for name in one if not torch.equal(one[name], other[name])]
    pairs = enumerate(zip(losses, again, strict=True), 1)
    return {
        "is_bit_equal": not different,
        "tensors": len(one),
        "different_tensors": len(different),
        "first_different_step": next((step for step, (a, b) in pairs if a != b), None),
        "losses": [losses[0], losses[-1]],
        "step_seconds": seconds,
    }


def _train(kind: str, size: str, setting: Setting) -> tuple[Mapping[str, Tensor], list[float], float]:
    """Returns the weights on the host, the losses, and the seconds of a step."""
    options = read_fit_options(setting.options, kind)
    if options.deterministic:
        leave_memory_unfilled()
    shape = SIZES[size]
    if setting.has_experts:
        shape = replace(shape, decoder=_with_experts(shape.decoder))
    pl.seed_everything(0, verbose=False)
    torch.compiler.reset()
    losses, clock = KeepLosses(), StepTimes(kind, _FIRST_TIMED, _STEPS - _FIRST_TIMED)
    precision = {} if setting.precision is None else {"precision": setting.precision}
    with tempfile.TemporaryDirectory() as directory:
        trainer = build_trainer(
            Task(kind, size, directory),
            Replicated(compile_blocks=setting.is_compiled),
            _STEPS,
            [losses, clock],
            deterministic=options.deterministic,
            **precision,
        )
        module = GenesisModule(shape.decoder, OptimizerOptions(name=setting.optimizer), **options.model)
        trainer.fit(module, datamodule=random_windows(shape))
    weights = {name: parameter.detach().cpu().clone() for name, parameter in module.named_parameters()}
    return weights, losses.read(), clock.seconds / (_STEPS - _FIRST_TIMED)


def _with_experts(decoder: DecoderConfig) -> DecoderConfig:
    assert decoder.num_heads is not None  # of the doctor's shapes
    return DecoderConfig(
        vocab_size=decoder.vocab_size,
        dim=decoder.dim,
        num_layers=min(4, decoder.num_layers),
        max_seq_len=decoder.max_seq_len,
        attention=AttentionConfig(num_heads=decoder.num_heads, num_kv_heads=decoder.num_heads),
        feed_forward=MixtureConfig(num_experts=8, top_k=2, ffn_dim=decoder.dim),
    )
