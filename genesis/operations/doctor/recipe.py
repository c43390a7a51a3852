"""A recipe as the doctor trains it: what is built of it, and what is changed for the examination.

The changes are decided by pure functions of the resolved recipe; each is printed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import lightning.pytorch as pl

from genesis.base.errors import UserError
from genesis.model.adapter import AdapterConfig, BaseFormat
from genesis.model.decoder import DecoderConfig
from genesis.model.describe import count_flops_per_token, describe_training
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint

Options = Mapping[str, Any]
"""Options of `genesis fit` by dotted key, which replace those of the recipe."""


class BuiltRecipe(NamedTuple):
    """What `genesis fit` builds of a recipe and its options, before it trains.

    Args:
        resolved: The resolved recipe, in plain types.
        start: The checkpoint that training starts from; None for a new model.
    """

    module: GenesisModule
    data: CorpusDataModule
    trainer: pl.Trainer
    checkpoint: AsyncProcessCheckpoint
    resolved: Mapping[str, Any]
    start: Path | None

    def fit(self, *callbacks: pl.Callback) -> None:
        """Trains, with further callbacks.

        Raises:
            KeyboardInterrupt: A signal stopped the fit.
        """
        self.trainer.callbacks.extend(callbacks)  # type: ignore[attr-defined]  # set by its connector
        self.trainer.fit(self.module, datamodule=self.data, ckpt_path=self.start, weights_only=False)
        # The checkpoint's callback takes the signal and ends the fit in order; `genesis fit` then ends, too.
        if self.checkpoint.stopped_by_signal:
            raise KeyboardInterrupt


Build = Callable[[Options], BuiltRecipe]


@dataclass(frozen=True)
class Change:
    """A change of the recipe for the examination.

    Args:
        key: The option.
        before: Its value in the recipe.
        now: Its value in the examination.
        reason: Why.
    """

    key: str
    before: Any
    now: Any
    reason: str


@dataclass(frozen=True)
class Capacity:
    """What the device of the examination can do.

    Args:
        memory_bytes: The memory that the model may take.
        flops_per_second: What training reaches, roughly.
    """

    memory_bytes: int
    flops_per_second: float


SINGLE: Final[Options] = {
    "fork": None,
    "trainer.devices": 1,
    "trainer.num_nodes": 1,
    "trainer.logger": False,
    "trainer.enable_progress_bar": False,
    "trainer.limit_val_batches": 0,
    "trainer.max_epochs": -1,
    "trainer.max_time": None,
    "trainer.log_every_n_steps": 1,
    "data.num_epochs": None,
    "checkpoint.mode": "thread",
    "checkpoint.every_n_minutes": None,
    "checkpoint.monitor": None,
    "checkpoint.keep_best": 1,
    "checkpoint.keep_last": None,
    "checkpoint.keep_every_n_steps": None,
    "schedule.shape": "constant",
    "schedule.by": "updates",
    "schedule.total_updates": None,
    "schedule.total_tokens": None,
    "schedule.warmup_updates": 3,
    "schedule.warmup_tokens": None,
    "schedule.warmup_share": None,
    "schedule.decay_updates": None,
    "schedule.decay_tokens": None,
    "schedule.decay_share": None,
}
"""Options of every fit of the doctor: one device, a few steps at the peak of the learning rate, no validation."""
SINGLE_NOTE: Final = (
    "one device, no validation, a constant learning rate after 3 updates of warm-up, and saves by a thread"
)

_BYTES_PER_PARAMETER: Final = 36
"""Weights, gradients and two moments in float32, and the copies of a save that is being written."""
_STEP_SECONDS: Final = 8.0
_NUM_STEPS: Final = (20, 12, 6)
_FIT_SECONDS: Final = 90.0
_MIN_SEQ_LEN: Final = 128
_MIN_LAYERS: Final = 2


def to_arguments(options: Options) -> list[str]:
    """Returns the arguments of `genesis fit` for some options.

    Example:
        >>> to_arguments({"trainer.devices": 1, "fork": None})
        ['--trainer.devices=1', '--fork=null']
    """
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()]


def refuse_prompts(resolved: Mapping[str, Any]) -> None:
    """Refuses a recipe whose model answers prompts.

    Raises:
        UserError: The recipe has prompts.
    """
    if resolved["data"].get("prompts") is not None:
        raise UserError(
            "data.prompts: the doctor does not examine models that answer prompts in training; `genesis rehearse` "
            "compares a killed run of this recipe with one that was not killed"
        )


def plan_strategy(resolved: Mapping[str, Any]) -> Change | None:
    """Returns the change of a strategy that shards over several devices; None if the strategy can stay."""
    strategy = resolved["trainer"].get("strategy")
    name = strategy.get("class_path", "") if isinstance(strategy, dict) else str(strategy)
    if name.rpartition(".")[2].lower() not in ("sharded", "fsdp", "modelparallelstrategy"):
        return None
    given = strategy.get("init_args", {}) if isinstance(strategy, dict) else {}
    options = ("activation_checkpointing", "blocks_per_recomputation", "activation_offload", "compile_blocks")
    kept = {key: given[key] for key in options if key in given}
    now = {"class_path": "genesis.strategies.Replicated", "init_args": kept}
    return Change("trainer.strategy", name, now, "one device; the check `sharded` trains on two ranks")


def plan_float8(resolved: Mapping[str, Any]) -> Change | None:
    """Returns the change of a recipe with float8 products; None without them."""
    given = resolved["model"].get("float8")
    if given is None:
        return None
    reason = "the checks compare a token beside other tokens, on which float8's rounding depends"
    return Change("model.float8", given, None, reason)


def plan_cuts(
    resolved: Mapping[str, Any],
    decoder: DecoderConfig,
    adapter: AdapterConfig | None,
    capacity: Capacity,
    *,
    is_new: bool,
) -> list[Change]:
    """Returns what must be smaller than in the recipe, so that the examination fits this device and takes minutes.

    The batch is cut first, then the sequence, then the layers. Only a new model can be cut.

    Raises:
        UserError: An imported model does not fit this device.
    """
    changes: list[Change] = []
    data = resolved["data"]
    micro, seq_len, layers = data["micro_batch_size"], data["seq_len"], decoder.num_layers
    num_micro = max(1, data["global_batch_size"] // micro)

    def seconds() -> float:
        num_tokens: int = micro * num_micro * seq_len
        of_token = count_flops_per_token(_with_layers(decoder, layers), seq_len, adapter)
        return of_token * num_tokens / capacity.flops_per_second

    def num_bytes() -> float:
        memory = describe_training(_with_layers(decoder, layers), adapter, BaseFormat())
        return memory.frozen_bytes + memory.num_trained * _BYTES_PER_PARAMETER

    num_micro = min(num_micro, 2)
    while seconds() > _STEP_SECONDS and micro > 1:
        micro = micro // 2
    is_free = data.get("packing") in (None, "chunk")  # another packing has a plan for its length alone
    while is_new and is_free and seconds() > _STEP_SECONDS and seq_len // 2 >= _MIN_SEQ_LEN:
        seq_len = seq_len // 2
    while is_new and layers > _MIN_LAYERS and (seconds() > _STEP_SECONDS or num_bytes() > capacity.memory_bytes):
        layers = max(_MIN_LAYERS, layers // 2)
    if num_bytes() > capacity.memory_bytes:
        raise UserError(
            f"the model needs about {num_bytes() / 2**30:.1f} GiB to be examined, and "
            f"{capacity.memory_bytes / 2**30:.1f} GiB are available here: run the doctor on the machine that trains it"
        )
    for key, before, now in (
        ("data.micro_batch_size", data["micro_batch_size"], micro),
        ("data.global_batch_size", data["global_batch_size"], micro * num_micro),
        ("data.seq_len", data["seq_len"], seq_len),
        ("model.decoder.num_layers", decoder.num_layers, layers),
    ):
        if before != now:
            changes.append(Change(key, before, now, "so that the examination takes minutes and fits this device"))
    return changes


def plan_num_steps(
    decoder: DecoderConfig, adapter: AdapterConfig | None, capacity: Capacity, tokens_per_step: int, seq_len: int
) -> int:
    """Returns the number of steps of the examination: 20, fewer where a step takes many seconds."""
    step_seconds = count_flops_per_token(decoder, seq_len, adapter) * tokens_per_step / capacity.flops_per_second
    return next((steps for steps in _NUM_STEPS if 1.5 * steps * step_seconds < _FIT_SECONDS), _NUM_STEPS[-1])


def _with_layers(decoder: DecoderConfig, num_layers: int) -> DecoderConfig:
    return decoder if num_layers == decoder.num_layers else replace(decoder, num_layers=num_layers)
