"""Follows the gradient: its norm, spikes, skipped windows, and where a value that is not finite came from.

    logged                unit and meaning
    train/grad_norm       2-norm of the gradient of the last window that was read, before the clip
    gradient/spikes       windows since the start of the run whose norm was far above those before
    gradient/skips        windows since the start that changed no parameter
    gradient/nonfinite    windows since the start whose gradient was infinite or not a number

The event `nonfinite_gradient` and a warning name the first module and the rank. They are looked for in that window
alone: a healthy step costs one norm, and nothing where the module measures it already.

Does it communicate? With sharded gradients one sum of a number over gloo for each step, begun when the norms are known
and awaited a step later. In a window whose gradient is not finite, the ranks exchange their
findings.
"""

import contextlib
import math
import statistics
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ._argument_types import checking
from ._log_lines import check_version, is_log_step, log_exact
from ._trainer_state import read_rank_role
from .base.errors import UserError
from .base.events import EventLog
from .base.run_directory import read_run_dir
from .checkpoint.device import is_host, record_event
from .gradients import find_nonfinite, measure_norms, weigh_gradient
from .host_group import HostGroup, Pending
from .phases import find_callbacks
from .token_counters import TokenCounters

__all__ = ["GradientHealth", "NonfiniteGradientWarning", "SpikeDetector", "find_gradient_health"]

_STATE_VERSION = 1
_MIN_NORMS: Final = 20
_NUM_DEVIATIONS: Final = 6.0
_NORMAL_MAD: Final = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""
_MIN_RATIO: Final = 2.0
_MAX_REPORTS: Final = 5
_REPEAT_FORWARD = "repeat_forward"


class NonfiniteGradientWarning(UserWarning):
    """A gradient is infinite or not a number."""


class SpikeDetector:
    """Decides whether a norm is far above the norms before: robust against the spikes among these.

    A spike lies six deviations above the median of the logarithms, where the deviation is estimated by the median
    absolute deviation, and above twice the median. The first 20 norms are none.

    Args:
        window: How many norms are compared.
        norms: The last ones, oldest first.
    """

    def __init__(self, window: int, norms: list[float] | None = None) -> None:
        self.norms: deque[float] = deque(norms or (), maxlen=window)

    def add(self, norm: float) -> bool:
        """Returns whether a finite norm is a spike, and remembers it."""
        threshold = self.threshold
        self.norms.append(norm)
        return threshold is not None and norm > threshold

    @property
    def threshold(self) -> float | None:
        """The norm above which the next one is a spike; None before there are enough."""
        logarithms = [math.log(norm) for norm in self.norms if norm > 0.0]
        if len(logarithms) < _MIN_NORMS:
            return None
        median = statistics.median(logarithms)
        deviation = _NORMAL_MAD * statistics.median(abs(value - median) for value in logarithms)
        return math.exp(median + max(_NUM_DEVIATIONS * deviation, math.log(_MIN_RATIO)))


class GradientHealth(pl.Callback):
    """Counts spikes and skips, and names the origin of values that are not finite.

    The norms of a step are copied to the host while the device continues, and read in the next step. A module that
    measures its gradient itself calls `follow` when training starts and `observe` for each window; then nothing is
    measured here. Such a module calls `look` while a gradient that is not finite is still there.

    If the module has a method `repeat_forward(batch)`, which runs the forward of a batch again without gradients,
    `look` calls it on all ranks and names the first module whose output is not finite, and the lowest such rank. If
    all outputs are finite, the value came from a backward: then the parameter is named from which it spread, with the
    rank that holds it, if gradients are sharded or there is one rank.

    Overflows under a gradient scaler are ordinary: they count as skips alone.

    Args:
        run_dir: The run's directory, for the event; None writes no event.
        window: How many norms a new one is compared with.
    """

    @checking
    def __init__(self, run_dir: str | Path | None = None, *, window: int = 128) -> None:
        super().__init__()
        if window < _MIN_NORMS:
            raise UserError(f"window is {window}: it must be at least {_MIN_NORMS}")
        self._run_dir = None if run_dir is None else read_run_dir(run_dir)
        self._window = window
        self._group = HostGroup()
        self._counters: TokenCounters | None = None
        self._is_measured_elsewhere = False
        self._batch: Any = None
        self._pending: _PendingNorms | None = None
        self._num_reports, self._num_stage_ranks = 0, 1
        self._last_norm: float | None = None
        self._has_run = self._has_scaler = False
        self._trainer: pl.Trainer | None = None
        self._reset()

    def _reset(self) -> None:
        self.num_spikes = self.num_skips = self.num_nonfinite = 0
        self._detector = SpikeDetector(self._window)

    # ---- state

    @property
    def state_key(self) -> str:
        """The key of our state in a checkpoint."""
        return "genesis_callbacks.GradientHealth"

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts and the last norms; nothing before the first fit."""
        if not self._has_run:
            return {}
        self._read()
        return {
            "version": _STATE_VERSION,
            "num_spikes": self.num_spikes,
            "num_skips": self.num_skips,
            "num_nonfinite": self.num_nonfinite,
            "norms": list(self._detector.norms),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the counts and norms of a checkpoint."""
        if not state_dict:
            return
        check_version(state_dict, _STATE_VERSION, "the checkpoint's gradient health has")
        self.num_spikes, self.num_skips = state_dict["num_spikes"], state_dict["num_skips"]
        self.num_nonfinite, self._has_run = state_dict["num_nonfinite"], True
        self._detector = SpikeDetector(self._window, state_dict["norms"])

    # ---- for modules that measure their gradient

    def follow(self) -> None:
        """Makes the module's `observe` calls the only source of norms. Call it in a hook `on_train_start`."""
        self._is_measured_elsewhere = True

    def observe(self, norm: float, *, is_skipped: bool) -> None:
        """Counts a window; the same on every rank."""
        self._last_norm = norm
        if math.isfinite(norm):
            self.num_spikes += norm > 0.0 and self._detector.add(norm)
        elif not self._has_scaler:
            self.num_nonfinite += 1
        self.num_skips += is_skipped

    def look(self, pl_module: pl.LightningModule) -> None:
        """Names the origin of a value that is not finite, while gradients and batch are there. All ranks call it."""
        assert self._trainer is not None
        if self._num_reports >= _MAX_REPORTS:
            return
        bad = find_nonfinite(dict(pl_module.named_parameters()))
        output, weight = self._find_bad_output(pl_module), _find_bad_weight(pl_module)
        self._report(
            pl_module,
            RankFindings(
                None if output is None else (place_of(pl_module, output), output),
                max(((place_of(pl_module, name), name) for name in bad), default=None),
                None if weight is None else (place_of(pl_module, weight), weight),
            ),
        )

    # ---- hooks

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to follow the gradient."""
        if trainer.global_step == 0:
            self._reset()
        self._trainer, self._has_run, self._num_reports = trainer, True, 0
        self._pending, self._batch, self._last_norm = None, None, None
        self._has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._counters = next(iter(find_callbacks(trainer, TokenCounters)), None)
        # The ranks of other stages of a pipeline hold other parameters.
        stages = [0] * trainer.world_size
        stages[trainer.global_rank] = read_rank_role(trainer.strategy).stage
        stages = list(self._group.sum(stages).wait())
        self._num_stage_ranks = stages.count(stages[trainer.global_rank])

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remembers the batch until the step ends, for a second look at it."""
        self._batch = batch

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Reads the norms of the step before, and measures those of this one."""
        if self._is_measured_elsewhere:
            return
        self._read()
        named = {name: p for name, p in pl_module.named_parameters() if p.grad is not None}
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = {name: p for name, p in named.items() if id(p) in own}
        if not named:
            return
        gradients = [p.grad for p in named.values() if p.grad is not None]
        self._pending = _PendingNorms(gradients, self._num_stage_ranks, self._group)
        if is_host(self._pending.device):
            norm = self._read()
            if norm is not None and not math.isfinite(norm) and not self._has_scaler:
                self.look(pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Forgets the batch, and logs at the steps of the log."""
        self._batch = None
        if is_log_step(trainer):
            self._log(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reads the last step."""
        self._read()
        self._leave()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Forgets what is not read: other ranks may be gone."""
        self._pending = None
        self._leave()

    # ---- parts of the hooks

    def _read(self) -> float | None:
        """Reads what is held back, and returns the norm that was measured here."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        norm = pending.wait()
        self.observe(norm, is_skipped=not math.isfinite(norm) and self._has_scaler)
        return norm

    def _log(self, pl_module: pl.LightningModule) -> None:
        skips = self.num_skips
        if self._counters is not None:
            skips = sum(self._counters.skips.values())
        counts = {"spikes": self.num_spikes, "skips": skips, "nonfinite": self.num_nonfinite}
        values = {f"gradient/{name}": float(count) for name, count in counts.items()}
        if not self._is_measured_elsewhere and self._last_norm is not None:
            values["train/grad_norm"] = self._last_norm
        log_exact(pl_module, values)

    def _find_bad_output(self, pl_module: pl.LightningModule) -> str | None:
        """Returns the name of the first module whose output is not finite when the forward runs again."""
        repeat = getattr(pl_module, _REPEAT_FORWARD, None)
        if repeat is None or self._batch is None or self._trainer is None:
            return None
        with watching_outputs(pl_module) as flags, self._trainer.precision_plugin.forward_context(), torch.no_grad():
            devices = [] if is_host(pl_module.device) else [pl_module.device]
            with torch.random.fork_rng(devices, device_type=pl_module.device.type if devices else "cuda"):
                repeat(self._batch)
        return next((name for name, is_finite in flags if not bool(is_finite)), None)

    def _report(self, pl_module: pl.LightningModule, own: "RankFindings") -> None:
        assert self._trainer is not None
        rank = self._trainer.global_rank
        is_sharded = any(isinstance(parameter, DTensor) for parameter in pl_module.parameters())
        text = describe_origin(self._group.gather(own), is_sharded=is_sharded)
        self._num_reports += 1
        if rank:
            return
        step = self._trainer.global_step
        if self._run_dir is not None:
            EventLog(self._run_dir, rank).write("nonfinite_gradient", step=step, text=text)
        last = "; further ones are counted, not reported" if self._num_reports == _MAX_REPORTS else ""
        warnings.warn(
            f"the gradient of step {step} is not finite: {text}{last}", NonfiniteGradientWarning, stacklevel=2
        )

    def _leave(self) -> None:
        self._settle, self._trainer, self._batch = None, None, None


class _PendingNorms:
    """The norm of a step, under way to the host and over the ranks."""

    def __init__(self, gradients: list[Tensor], num_stage_ranks: int, group: HostGroup) -> None:
        self._weights = torch.tensor([weigh_gradient(gradient, num_stage_ranks) for gradient in gradients])
        has_all = num_stage_ranks == group.world_size
        self._is_divided = not has_all or any(isinstance(gradient, DTensor) for gradient in gradients)
        self._group = group
        norms = measure_norms(gradients)
        self.device = norms.device
        self._copy = norms.to("cpu", non_blocking=True)
        self._event = None if is_host(self.device) else record_event(self.device)
        self._sum: Pending[float] | None = None

    def wait(self) -> float:
        """Returns the norm; waits for this step's gradients, but not for later work of the device."""
        if self._event is not None:
            self._event.synchronize()
        squares = self._copy.double().square()
        if not self._is_divided:
            return float(squares.sum().sqrt())
        # 0 * inf is not a number, so a rank whose part does not count must not see it.
        own = torch.where(self._weights > 0, squares * self._weights, torch.zeros_like(squares)).sum()
        (total,) = self._group.sum_floats((float(own),)).wait()
        return math.sqrt(total) if total >= 0 else math.nan


@contextlib.contextmanager
def watching_outputs(module: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields a list that gets, in the order of the forward, each module's name and whether its output is finite.

    The values are tensors on the device, so that the forward does not wait.
    """
    flags: list[tuple[str, Tensor]] = []

    def note(name: str, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            flags.append((name, output.isfinite().all()))
        elif isinstance(output, (tuple, list)):
            for one in output:
                note(name, one)

    handles = [
        child.register_forward_hook(lambda _module, _inputs, output, name=name: note(name, output))
        for name, child in module.named_modules()
    ]
    try:
        # Compiled code would be compiled again, with the hooks in it.
        with torch.compiler.set_stance("force_eager"):
            yield flags
    finally:
        for handle in handles:
            handle.remove()


def _find_bad_weight(module: nn.Module) -> str | None:
    """Returns the first parameter of which this rank's part is not finite. It waits."""
    parameters = {name: one.detach() for name, one in module.named_parameters() if one.is_floating_point()}
    is_finite = measure_norms(list(parameters.values())).isfinite().tolist()
    return next((name for name, finite in zip(parameters, is_finite, strict=True) if not finite), None)


Place = tuple[int, ...]
"""Where a module or a parameter is in a model, of which a rank may hold a part; places sort in the model's order."""


def place_of(root: nn.Module, name: str) -> Place:
    """Returns the place of a module or a parameter, comparable with those of ranks that hold other parts of the model.

    A child with a number for a name, as in a list, has this number. Of the others the position counts, also where a
    child before it is None, as stages of a pipeline have them for what they do not hold.

    Args:
        root: The module of this rank.
        name: The name of the module or the parameter in it.

    Example:
        >>> place_of(nn.ModuleDict({"2": nn.Linear(1, 1)}), "2.bias")
        (2, -1)
    """
    place = []
    for part in name.split(".") if name else ():
        children, own = list(root._modules), list(root._parameters)
        if part in own:
            place.append(own.index(part) - len(own))  # before the children
        else:
            place.append(int(part) if part.isdecimal() else children.index(part))
            root = root.get_submodule(part)
    return tuple(place)


class RankFindings(NamedTuple):
    """The values that are not finite on one rank.

    Args:
        output: The first module whose output is not finite, as its place and its name.
        gradient: The last parameter whose gradient is not finite, likewise.
        weight: The first parameter that is not finite itself.
    """

    output: tuple[Place, str] | None
    gradient: tuple[Place, str] | None
    weight: tuple[Place, str] | None = None


def describe_origin(of_ranks: Sequence[RankFindings], *, is_sharded: bool) -> str:
    """Returns where a value that is not finite came from, in one line.

    Args:
        of_ranks: The values of each rank.
        is_sharded: Whether each rank holds a part of the gradients.

    Example:
        >>> describe_origin([RankFindings(None, None), RankFindings(((0,), "body"), None)], is_sharded=False)
        'the forward of body on rank 1'
    """
    weights = [(*origin.weight, rank) for rank, origin in enumerate(of_ranks) if origin.weight is not None]
    if weights:
        _, name, rank = min(weights)
        return f"the weights of {name} on rank {rank} were not finite before the step"
    outputs = [(*origin.output, rank) for rank, origin in enumerate(of_ranks) if origin.output is not None]
    if outputs:
        _, name, rank = min(outputs)
        return f"the forward of {name or 'the module'} on rank {rank}"
    # A backward runs from the last parameter to the first, and everything before a bad value is bad, too.
    gradients = [(*origin.gradient, -rank) for rank, origin in enumerate(of_ranks) if origin.gradient is not None]
    if not gradients:
        return "the norm overflows although each gradient is finite"
    _, name, negative = max(gradients)
    where = f"the gradient of {name}, from which a backward spreads it"
    if is_sharded or len(of_ranks) == 1:
        return f"{where}, on rank {-negative}"
    return f"{where}; the ranks have summed it, so that its rank is not known"


def find_gradient_health(trainer: Any) -> GradientHealth | None:
    """Returns the callback of a Trainer, if it has one."""
    return next(iter(find_callbacks(trainer, GradientHealth)), None)
