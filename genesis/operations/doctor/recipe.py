"""A recipe as the doctor trains it: what is built of it, and what is changed for the examination.

The changes are decided by pure functions of the resolved recipe; each is printed.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import lightning.pytorch as pl

from genesis.base.errors import UserError, numbered
from genesis.model.adapter import AdapterConfig, BaseFormat
from genesis.model.decoder import DecoderConfig
from genesis.model.describe import count_flops_per_token, describe_training
from genesis.objectives.find import find_objective
from genesis.recipe.resolved import ResolvedRecipe
from genesis.strategies.degrees import AXIS_NAMES
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint

Options = Mapping[str, Any]
"""Options of `genesis fit` by dotted key, which replace those of the recipe."""


class BuiltRecipe(NamedTuple):
    """What `genesis fit` builds of a recipe and its options, before it trains.

    Args:
        resolved: The recipe, with what a fit completes.
        start: The checkpoint that training starts from; None for a new model.
    """

    module: GenesisModule
    data: CorpusDataModule
    trainer: pl.Trainer
    checkpoint: AsyncProcessCheckpoint
    resolved: ResolvedRecipe
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
_MOST_RANKS: Final = 8
_PLAIN_SHARDS: Final[Options] = {
    "shard": "full",
    "ranks_per_shard_group": None,
    "gather_dtype": None,
    "reduce_dtype": "float32",
    "cpu_offload": False,
    "compile_blocks": False,
    "process_group_backend": None,
}
"""In place of the recipe's: what follows from its own number of ranks and its devices, or rounds."""


def to_arguments(options: Options) -> list[str]:
    """Returns the arguments of `genesis fit` for some options.

    Example:
        >>> to_arguments({"trainer.devices": 1, "fork": None})
        ['--trainer.devices=1', '--fork=null']
    """
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()]


def plan_strategy(recipe: ResolvedRecipe) -> Change | None:
    """Returns the change of a strategy that shards over several devices; None if the strategy can stay."""
    strategy = recipe.find_choice("trainer.strategy")
    name = "" if strategy is None else strategy.path.rpartition(".")[2].lower()
    if strategy is None or name not in ("sharded", "fsdp", "modelparallelstrategy"):
        return None
    options = ("activation_checkpointing", "blocks_per_recomputation", "activation_offload", "compile_blocks")
    kept = {key: strategy.options[key] for key in options if key in strategy.options}
    now = {"class_path": "genesis.strategies.Replicated", "init_args": kept}
    return Change("trainer.strategy", strategy.path, now, "one device; the check `sharded` trains on two ranks")


class AxisPlan(NamedTuple):
    """A fit that checks axes of the recipe.

    Args:
        name: The axis, or "axes" for all of them together.
        num_ranks: The number of ranks.
        options: Those of the strategy.
        why_not: Why the doctor does not run it; None if it does.
    """

    name: str
    num_ranks: int
    options: Options
    why_not: str | None

    @property
    def degrees(self) -> dict[str, int]:
        """The options with the numbers of ranks of its axes."""
        names = [f"{name}_parallel" for name in AXIS_NAMES.values()]
        return {name: self.options[name] for name in names if self.options[name] > 1}


def plan_axes(recipe: ResolvedRecipe, num_layers: int) -> list[AxisPlan]:
    """Returns a fit for each axis of the recipe alone, then one for all of them together.

    Args:
        recipe: The recipe.
        num_layers: The layers of the model that the doctor trains.
    """
    strategy = recipe.find_choice("trainer.strategy")
    given: Options = {} if strategy is None else strategy.options
    degrees = {axis: given.get(f"{name}_parallel", 1) for axis, name in AXIS_NAMES.items()}
    used = {axis: degree for axis, degree in degrees.items() if degree > 1}
    num_rounds, divided = given.get("stages_per_rank", 1), given.get("layers_per_stage")
    plans = []
    for axes in [*({axis: degree} for axis, degree in used.items()), *([used] if len(used) > 1 else [])]:
        num_lenders = axes.get("tp", 1) * axes.get("cp", 1)
        num_ranks = math.lcm(num_lenders, axes.get("ep", 1)) * axes.get("pp", 1)
        num_stages = axes["pp"] * num_rounds if "pp" in axes else 1
        why_not = None
        if num_ranks > _MOST_RANKS:
            why_not = f"needs {numbered(num_ranks, 'ranks')}, and the doctor starts at most {_MOST_RANKS} on a CPU"
        elif num_layers < num_stages:
            why_not = (
                f"has {numbered(num_stages, 'stages')}, and the examined model only {numbered(num_layers, 'layers')}"
            )
        options = {
            **_PLAIN_SHARDS,
            **{f"{name}_parallel": axes.get(axis, 1) for axis, name in AXIS_NAMES.items()},
            "stages_per_rank": num_rounds if "pp" in axes else 1,
            "layers_per_stage": divided if "pp" in axes and divided and sum(divided) == num_layers else None,
        }
        name = AXIS_NAMES[next(iter(axes))] if len(axes) == 1 else "axes"
        plans.append(AxisPlan(name, num_ranks, options, why_not))
    return plans


def plan_float8(recipe: ResolvedRecipe) -> Change | None:
    """Returns the change of a recipe with float8 products; None without them."""
    given = recipe.get("model.float8")
    if given is None:
        return None
    reason = "the checks compare a token beside other tokens, on which float8's rounding depends"
    return Change("model.float8", given, None, reason)


def plan_cuts(
    recipe: ResolvedRecipe,
    decoder: DecoderConfig,
    adapter: AdapterConfig | None,
    capacity: Capacity,
    *,
    is_new: bool,
    base: BaseFormat,
) -> list[Change]:
    """Returns what must be smaller than in the recipe, so that the examination fits this device and takes minutes.

    The batch is cut first, then the sequence, then the layers. Only a new model can be cut.

    Raises:
        UserError: An imported model does not fit this device.
    """
    names = ("data.micro_batch_size", "data.global_batch_size", "data.seq_len")
    micro, batch, seq_len = given = tuple(map(recipe.count, names))
    least = find_objective(recipe.get("model.objective")).least_micro_batch
    num_micro, layers = max(1, batch // micro), decoder.num_layers

    def seconds() -> float:
        num_tokens: int = micro * num_micro * seq_len
        of_token = count_flops_per_token(_with_layers(decoder, layers), seq_len, adapter)
        return of_token * num_tokens / capacity.flops_per_second

    def num_bytes() -> float:
        memory = describe_training(_with_layers(decoder, layers), adapter, base)
        return memory.frozen_bytes + memory.num_trained * _BYTES_PER_PARAMETER

    num_micro = min(num_micro, 2)
    while seconds() > _STEP_SECONDS and micro > least:
        micro = max(least, micro // 2)
    is_free = recipe.get("data.packing") in (None, "chunk")  # another packing has a plan for its length alone
    while is_new and is_free and seconds() > _STEP_SECONDS and seq_len // 2 >= _MIN_SEQ_LEN:
        seq_len = seq_len // 2
    while is_new and layers > _MIN_LAYERS and (seconds() > _STEP_SECONDS or num_bytes() > capacity.memory_bytes):
        layers = max(_MIN_LAYERS, layers // 2)
    if num_bytes() > capacity.memory_bytes:
        raise UserError(
            f"the model needs about {num_bytes() / 2**30:.1f} GiB to be examined, and "
            f"{capacity.memory_bytes / 2**30:.1f} GiB are available here: run the doctor on the machine that trains it"
        )
    reason = "so that the examination takes minutes and fits this device"
    cut = zip(
        (*names, "model.decoder.num_layers"),
        (*given, decoder.num_layers),
        (micro, micro * num_micro, seq_len, layers),
        strict=True,
    )
    return [Change(key, before, now, reason) for key, before, now in cut if before != now]


def plan_num_steps(
    decoder: DecoderConfig, adapter: AdapterConfig | None, capacity: Capacity, tokens_per_step: int, seq_len: int
) -> int:
    """Returns the number of steps of the examination: 20, fewer where a step takes many seconds."""
    step_seconds = count_flops_per_token(decoder, seq_len, adapter) * tokens_per_step / capacity.flops_per_second
    return next((steps for steps in _NUM_STEPS if 1.5 * steps * step_seconds < _FIT_SECONDS), _NUM_STEPS[-1])


def _with_layers(decoder: DecoderConfig, num_layers: int) -> DecoderConfig:
    return decoder if num_layers == decoder.num_layers else replace(decoder, num_layers=num_layers)
