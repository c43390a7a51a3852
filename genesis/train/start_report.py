"""The lines at the start of a fit: its length, the end of its rate, and what its packing does to conversations."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from genesis.base.errors import numbered
from genesis.data.corpus import TokenSource
from genesis.data.corpus_data import CorpusData
from genesis.data.manifest import FEW_HELD_OUT
from genesis.data.packing import KEPT_WHOLE, Packing
from genesis.data.plans import count_lost_documents
from genesis.data.stream_data import StreamData
from genesis.data.training_data import TrainingData
from genesis.optim.algorithm import NO_DECAY, Algorithm
from genesis_callbacks import SkipAwareLR
from genesis_callbacks.schedule import lr_factor

_CLOSE_SHARE: Final = 0.1
"""By how much a length in tokens may differ from the run's before it is worth a line: documents have no first label."""
_MANY_SOURCES: Final = 6
_WARMUP_SHARE: Final = 0.05


class StartReport(pl.Callback):
    """Logs the lines on rank 0, after the position of the data is known. Does not communicate."""

    _has_started = False

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs that a run which was complete before this fit has not been trained."""
        if not self._has_started:  # Lightning begins no training then
            steps = numbered(trainer.global_step, "steps")
            rank_zero_info(f"nothing to do: the run has its {steps}; to go on, make the run longer (trainer.max_steps)")
        self._has_started = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the lines."""
        self._has_started = True
        module: Any = vars(trainer).get("datamodule")
        data = getattr(module, "training", None)
        if not trainer.is_global_zero or data is None:
            return
        lines = [describe_length(data, trainer.global_step, trainer.max_steps), *describe_limits(vars(trainer))]
        schedule = next((one for one in vars(trainer)["callbacks"] if isinstance(one, SkipAwareLR)), None)
        if schedule is not None:
            lines += describe_schedule(schedule, data, trainer.max_steps)
        algorithm = getattr(pl_module, "algorithm", None)
        if algorithm is not None and getattr(pl_module, "adapter_config", None) is not None:
            lines.append(describe_adapter_rate(algorithm))
        if isinstance(data, CorpusData) and data.kind == "text":
            lines += describe_conversations(data.corpus.train, data.options.seq_len, data.packing)
            if module.why_no_validation is None:
                lines += describe_held_out(data.validation, data.options.seq_len)
        if module.why_no_validation is not None:
            lines.append(f"no held-out loss and no best checkpoint: {module.why_no_validation}")
        for line in lines:
            rank_zero_info(line)


def describe_length(data: TrainingData, step: int, max_steps: int) -> str:
    """Returns a line about the number of steps, and what they are in epochs.

    Args:
        data: The data, at their position.
        step: The step of this position.
        max_steps: The last step; -1 if none is known.
    """
    options = data.options
    size = options.global_batch_size
    what = "sequences" if data.kind == "text" else data.kind
    if max_steps < 0:
        return f"length: no number of steps; a step has {numbered(size, what)}"
    length = f"length: {numbered(max_steps, 'steps')} of {numbered(size, what)}"
    if isinstance(data, StreamData):
        return f"{length}, {numbered(max_steps * size * options.seq_len, 'tokens')} with padding"
    epochs = count_epochs(data, data.cursor.position + max(0, max_steps - step) * size)
    if len(epochs) == 1 or len(epochs) > _MANY_SOURCES:
        least, most = min(epochs.values()), max(epochs.values())
        noun = "epoch" if most == 1 else "epochs"
        return f"{length}, {least:.3g} {noun}" if least == most else f"{length}, {least:.3g} to {most:.3g} epochs"
    return f"{length}, epochs: {', '.join(f'{name} {count:.3g}' for name, count in epochs.items())}"


def describe_limits(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line about each of Lightning's limits on batches that the Trainer's attributes have."""
    overfit, limit = settings["overfit_batches"], settings["limit_train_batches"]
    name, value = ("overfit_batches", overfit) if overfit else ("limit_train_batches", limit)
    if overfit or isinstance(limit, int) or limit != 1.0:  # 1 is a number of steps, 1.0 is all
        amount = numbered(value, "steps") if isinstance(value, int) else f"{value:.3g} of the data"
        yield (
            f"trainer.{name} is {value}: an epoch ends after {amount}, and the next one goes on with the data that "
            "follow; for a shorter run give trainer.max_steps"
        )
    if overfit:
        yield f"trainer.overfit_batches is {overfit}: validations end early, too, so that their loss is of other data"


def count_epochs(data: TrainingData, position: int) -> dict[str, float]:
    """Returns how often each source has been trained on at a position, without sources that never are."""
    order = data.cursor.order
    end = position if order.end is None else min(position, order.end)
    counted = zip(order.names, order.sequences_consumed(end), order.num_sequences, strict=True)
    epochs = {name: count / max(1, length) for name, count, length in counted}
    return {name: count for name, count in epochs.items() if count} or dict.fromkeys(order.names, 0.0)


def describe_schedule(callback: SkipAwareLR, data: TrainingData, max_steps: int) -> list[str]:
    """Returns a line about a schedule that does not end with the run; none if it does, or has no end."""
    schedule = callback.schedule
    if schedule is None or schedule.shape == "constant" or max_steps < 1:
        return []
    clock = "updates" if callback.clock == "updates" else "tokens"
    end = max_steps
    if clock == "tokens":
        end = max_steps * data.options.global_batch_size * data.options.seq_len
        if data.kind != "text":
            return []
        if isinstance(data, CorpusData):
            end = round(end * measure_learned_share(data))
    if schedule.total == end or (clock == "tokens" and abs(schedule.total / end - 1.0) <= _CLOSE_SHARE):
        return []
    last = lr_factor(end - 1, schedule)
    about = "about " if clock == "tokens" else ""
    # A warm-up that was meant for a longer run would not fit into the shorter schedule.
    warmup = f" and --schedule.warmup_share {_WARMUP_SHARE}" if 2 * schedule.warmup > end else ""
    return [
        f"the schedule does not end with the run: it has {schedule.total:,} {clock}, the run {about}{end:,}; its last "
        f"learning rate is {last:.0%} of the peak; to end both together, give --schedule.total_{clock} "
        f"{'null' if clock == 'updates' else end}{warmup}"
    ]


def measure_learned_share(data: CorpusData) -> float:
    """Returns the share of the positions of an epoch that have a label."""
    if data.plans is not None:
        figures = [plan.figures for plan in data.plans]
        positions = sum(one.num_sequences for one in figures) * data.options.seq_len
        return sum(one.num_valid_tokens for one in figures) / max(1, positions)
    shards = [source.num_labels for source in data.corpus.manifest.train]
    return sum(shards) / max(1, sum(source.num_tokens for source in data.corpus.train))


def describe_adapter_rate(algorithm: Algorithm) -> str:
    """Returns a line about the rate and the weight decay of adapters."""
    key = "lr" if algorithm.adapter_lr is None else "adapter_lr"
    decay = algorithm.adapter_weight_decay or NO_DECAY
    return f"adapters: learning rate {getattr(algorithm, key):g} (model.optimizer.{key}), weight decay {decay:g}"


def describe_conversations(sources: Sequence[TokenSource], seq_len: int, packing: Packing) -> Iterator[str]:
    """Yields a line about each source of conversations: how many the packing cuts, drops or leaves unlearned."""
    for source in sources:
        if not source.has_conversations:
            continue
        lost = count_lost_documents(source, seq_len, packing)
        yield f"{source.name}: {lost.describe(packing, seq_len)}"


def describe_held_out(sources: Sequence[TokenSource], seq_len: int) -> Iterator[str]:
    """Yields a line about the held-out documents of a corpus, if there are few of them, or some are cut."""
    num_documents = sum(source.num_documents for source in sources)
    if not num_documents:
        return
    lost = [count_lost_documents(one, seq_len, KEPT_WHOLE) for one in sources if one.has_conversations]
    num_cut = sum(one.num_cut for one in lost)
    what = "conversations" if len(lost) == len(sources) else "documents"
    line = f"held out for validation: {numbered(num_documents, what)}"
    line += f", {num_cut:,} of them longer than data.seq_len and cut" if num_cut else ""
    if num_documents < FEW_HELD_OUT:
        line += "; the loss of so few is little evidence: prepare more of them"
    yield line
