"""Logs the training windows, and keeps the sums between two log lines in checkpoints.

    logged                     unit and meaning
    train/loss                 nats per valid token since the last log line, over all ranks; absent if every window
                               since then was skipped. An objective other than cross-entropy has its own loss and values
    train/perplexity           exp of train/loss, if that is a cross-entropy
    train/bits_per_byte        bits per byte of text, likewise
    train/valid_tokens         valid tokens of this window, over all ranks
    train/grad_norm            2-norm of the synchronised gradient before the clip
    train/scale_factor         the factor of a rank's summed loss: 1 / valid tokens if gradients are summed
                               over ranks (sharded), number of ranks / valid tokens if they are averaged (replicated)
    train/loss_scale           the gradient scaler's scale, if there is a scaler
    train/auxiliary_loss       auxiliary losses of the model's parts in this window, per valid token, over all ranks
    parts/NAME                 statistics of a part, summed over the tokens of this window on all ranks, for each part
                               that has any: parts/blocks.3.feed_forward.load_tokens.0; not the loads of more experts
                               than 64
    parts/NAME.imbalance       the largest load of a mixture's experts relative to the mean, in this window
    parts/NAME.router_entropy  mean entropy of the router's scores of a token in nats, in this window
    train/expert_imbalance     the largest imbalance of all layers

Does it communicate? No: the figures of a window are already those of all ranks.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import lightning.pytorch as pl
from torch import Tensor

from genesis.base.errors import UserError
from genesis.model.balance import LayerBalance, measure_balance
from genesis.model.language_model import LanguageModel
from genesis.model.mixture import ENTROPY, list_figures
from genesis.model.statistics import LOSS_SUM
from genesis.objectives.objective import BYTES, TOKENS, HeadResult, ObjectiveSums
from genesis.train.csv_log import CSVLog
from genesis.train.logged_values import align_log_steps, forget_logged, is_log_step, log_exactly, read_logged
from genesis_callbacks.gradient_health import GradientHealth, find_gradient_health

_STATE_VERSION = 1
_MAX_LISTED_EXPERTS: Final = 64


@dataclass(frozen=True)
class WindowFigures:
    """The figures of one window over all ranks.

    Args:
        sums: The objective's terms, figures and counts.
        grad_norm: The norm of the gradient before the clip.
        scale_factor: The factor of a rank's sum over tokens.
        is_skipped: Whether the window changed no parameter.
        part_figures: The statistics of the parts, by the names of part and figure.
    """

    sums: ObjectiveSums
    grad_norm: float
    scale_factor: float
    is_skipped: bool
    part_figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_valid_tokens(self) -> int:
        """The number of tokens in the loss."""
        return self.sums.counts[TOKENS]

    @classmethod
    def of(cls, names: Sequence[str], values: Sequence[float], *, counts: Mapping[str, int], **others: Any) -> Self:
        """Returns the figures of the values of `join_sums`, summed over ranks, with `others` in their fields."""
        kinds: dict[str, dict[str, float]] = {_TERM: {}, _FIGURE: {}, _PART: {}}
        for name, value in zip(names, values, strict=True):
            kind, _, rest = name.partition(".")
            kinds[kind][rest] = value
        return cls(ObjectiveSums(kinds[_TERM], kinds[_FIGURE], counts), part_figures=kinds[_PART], **others)


_TERM, _FIGURE, _PART = "term", "figure", "part"
PART_PREFIX: Final = f"{_PART}."
"""What `join_sums` puts before the names of the parts' figures."""


def join_sums(sums: HeadResult, part_sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns all sums of a window on this rank under the names that `WindowFigures.of` reads."""
    return {
        **{f"{_TERM}.{unit}": value for unit, value in sums.terms.items()},
        **{f"{_FIGURE}.{name}": value for name, value in sums.figures.items()},
        **{f"{_PART}.{name}": value for name, value in part_sums.items()},
    }


class TrainingLog(pl.Callback):
    """Adds up the windows that were not skipped and logs their means, every `log_every_n_steps`.

    It is a callback that runs before the checkpoint callback at the end of a batch, so that a save at some step
    includes that step. Its state is the sums since the last log line, exact and the same on every rank, so that a
    resumed run, on any number of ranks, logs the same values as an uninterrupted run.

    Args:
        end_window: Returns the figures of the window that has just ended.
        measure: The objective's values of a log line.

    Attributes:
        last_loss: The loss of the last log line; None before.
    """

    def __init__(
        self,
        end_window: Callable[[], WindowFigures],
        measure: Callable[[ObjectiveSums], dict[str, float]],
    ) -> None:
        self._end_window = end_window
        self._measure = measure
        self._health: GradientHealth | None = None
        self.last_loss: float | None = None
        self._collapsed: set[str] = set()
        self._reset()

    def _reset(self) -> None:
        self._sums = ObjectiveSums()

    # ---- state

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint."""
        return "genesis.TrainingLog"

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums since the last log line, over all ranks; a float keeps all of its digits in a checkpoint."""
        terms, figures, counts = dict(self._sums.terms), dict(self._sums.figures), dict(self._sums.counts)
        # The sums of the cross-entropy have the keys of releases without other objectives, which read them.
        state: dict[str, Any] = {
            "version": _STATE_VERSION,
            "loss_sum": terms.pop(TOKENS, 0.0),
            "num_tokens": counts.pop(TOKENS, 0),
            "num_bytes": counts.pop(BYTES, 0),
        }
        others = {"terms": terms, "figures": figures, "counts": counts}
        return {**state, "objective": others} if any(others.values()) else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the sums of a checkpoint."""
        if state_dict["version"] != _STATE_VERSION:
            raise UserError(
                f"the checkpoint's training log has version {state_dict['version']}, this release reads "
                f"{_STATE_VERSION}: resume with the release of Genesis that wrote it"
            )
        others = state_dict.get("objective", {})
        self._sums = ObjectiveSums(
            {TOKENS: state_dict["loss_sum"], **others.get("terms", {})},
            others.get("figures", {}),
            {TOKENS: state_dict["num_tokens"], BYTES: state_dict["num_bytes"], **others.get("counts", {})},
        )

    # ---- hooks

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the sums if no checkpoint was restored."""
        if trainer.global_step == 0:
            self._reset()
        self._health = find_gradient_health(trainer)
        if self._health is not None:
            self._health.follow()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Makes Lightning log in the same steps as this callback, without values of earlier steps."""
        align_log_steps(trainer)
        forget_logged(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds the window to the sums and logs every `log_every_n_steps`."""
        window = self._end_window()
        if self._health is not None:
            self._health.observe(window.grad_norm, is_skipped=window.is_skipped)
        if not window.is_skipped:
            self._sums += window.sums
        is_due = is_log_step(trainer)
        if is_due or trainer.should_stop:  # Lightning logs in both cases
            values = self._take(trainer, pl_module, window) if is_due else {}
            log_exactly(pl_module, values)
            _write_row(trainer)

    # ---- parts of the hooks

    def _take(self, trainer: pl.Trainer, pl_module: pl.LightningModule, window: WindowFigures) -> dict[str, float]:
        """Returns the metrics of a log line, and resets the sums for the next line."""
        values = {
            "train/valid_tokens": float(window.num_valid_tokens),
            "train/grad_norm": window.grad_norm,
            "train/scale_factor": window.scale_factor,
            **_describe_parts(window, self._measure_experts(pl_module, window)),
            **self._read_means(),
        }
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            values["train/loss_scale"] = float(scaler.get_scale())
        self._reset()
        return values

    def _measure_experts(self, pl_module: pl.LightningModule, window: WindowFigures) -> dict[str, LayerBalance]:
        """Returns the balance of each mixture, and warns once of each router that has collapsed."""
        decoder = getattr(pl_module, "decoder", None)
        measured = measure_balance(decoder, window.part_figures) if isinstance(decoder, LanguageModel) else {}
        for name, balance in measured.items():
            if balance.is_collapsed and name not in self._collapsed:
                self._collapsed.add(name)
                if pl_module.global_rank == 0:
                    warnings.warn(balance.describe_collapse(name, pl_module.global_step), stacklevel=2)
        return measured

    def _read_means(self) -> dict[str, float]:
        if not self._sums.counts.get(TOKENS):  # every window since the last log line was skipped
            return {}
        measured = self._measure(self._sums)
        self.last_loss = measured["loss"]
        return {f"train/{name}": value for name, value in measured.items()}


def _write_row(trainer: pl.Trainer) -> None:
    """Writes a log line into the run's own log before a save of its step can begin.

    Lightning writes the line after all callbacks, among them the one that saves; that adds what this one logs. A kill
    between the two would leave a checkpoint that has taken the line's sums, and a log without the line.
    """
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        if isinstance(logger, CSVLog):
            logger.log_metrics(read_logged(trainer), trainer.global_step)


def _describe_parts(window: WindowFigures, experts: Mapping[str, LayerBalance]) -> dict[str, float]:
    losses = [value for name, value in window.part_figures.items() if name.endswith(f".{LOSS_SUM}")]
    values = {"train/auxiliary_loss": sum(losses) / max(window.num_valid_tokens, 1)} if losses else {}
    measured = {name: balance for name, balance in experts.items() if any(balance.loads)}
    if measured:  # a window without valid tokens has neither
        values["train/expert_imbalance"] = max(balance.imbalance for balance in measured.values())
    for name, balance in measured.items():
        values[f"parts/{name}.imbalance"] = balance.imbalance
        values[f"parts/{name}.router_entropy"] = balance.entropy_nats
    unlisted = {f"{name}.{ENTROPY}" for name in experts}
    for name, balance in experts.items():
        if len(balance.loads) > _MAX_LISTED_EXPERTS:
            unlisted.update(list_figures(name, len(balance.loads)))
    return values | {f"parts/{name}": value for name, value in window.part_figures.items() if name not in unlisted}
