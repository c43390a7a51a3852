"""One training step: the arithmetic of an accumulation window, from count to log, in its order.

    gradient = sum over ranks, micro-batches and units of d(term of the unit) / N(unit)
    update   = the optimizer's, of gradient * min(1, clip / norm), unless the window is skipped

N is the number of a unit (valid tokens, pairs) in the window, over all ranks and micro-batches.

`train_window` is a generator, because Lightning runs parts of a step by itself: each `yield` is a place where it does.
`GenesisModule` resumes the function in the hook that Lightning calls next.
"""

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer

from genesis.data.window import AccumulationWindow, MicroBatch
from genesis.model.balance import split_loads, update_balance_biases
from genesis.model.language_model import LanguageModel
from genesis.model.statistics import name_figures
from genesis.objectives.objective import TOKENS, Objective
from genesis.optim import GroupedOptimizer
from genesis.strategies.layout import layout_strategy
from genesis.train.gradients import measure_gradients
from genesis.train.training_log import PART_PREFIX, WindowFigures, join_sums
from genesis_callbacks.gradient_health import find_gradient_health
from genesis_callbacks.host_group import HostGroup, Pending
from genesis_callbacks.step_parts import timing

Scales = Mapping[str, float]
"""The factor of each term before its backward, by unit."""


@dataclass
class Outcome:
    """What is known of the last window, while it is trained and after it.

    Attributes:
        counts: Number of each unit, over all ranks.
        skip_reason: The reason why the window changes no parameter, known before the update; None if it does.
        sums_of_ranks: The figures of the window, whose sum over ranks is under way while the optimizer steps.
    """

    counts: Mapping[str, int] = field(default_factory=lambda: {TOKENS: 0})
    skip_reason: str | None = None
    sums_of_ranks: Pending[float] | None = None


Step = Generator[dict[str, Tensor] | WindowFigures | None, tuple[Optimizer, float | None] | None, None]


def train_window(
    window: AccumulationWindow,
    outcome: Outcome,
    *,
    module: pl.LightningModule,
    decoder: LanguageModel,
    objective: Objective,
    seed: int,
    is_balanced: bool,
    prove: Callable[[Sequence[MicroBatch], Scales], None] | None,
) -> Step:
    """Trains one window. It yields the loss of the last backward, then None before the update, then the figures.

    After the loss it is sent the optimizer, and the norm to which gradients are clipped; None or 0 for no clip.

    Args:
        window: This rank's micro-batches; all ranks run it together.
        outcome: Gets what is known, as soon as it is.
        module: The module whose gradients are taken.
        decoder: Its model.
        objective: What the window minimises.
        seed: The seed of dropout.
        is_balanced: Whether some router of the model has a balance bias.
        prove: Called once with the first micro-batch, and with as many as a pipeline has ranks, to prove that their
            gradients repeat; None without a proof.
    """
    trainer = module.trainer
    strategy = layout_strategy(trainer.strategy)
    layout = strategy.layout

    # Count. Every rank needs the global count before its first backward, so this sum is awaited. It runs on gloo
    # between hosts: on nccl it would wait for the device's queue.
    own = objective.count(window)
    with timing(trainer, "communication"):
        totals = layout.token_group.sum(list(own.values())).wait()
    counts = outcome.counts = dict(zip(own, totals, strict=True))
    # The reduction of gradients sums over ranks, and may divide that sum (DDP does). 0 keeps an empty window's graph
    # connected: every rank runs the same forwards and backwards, even without valid tokens.
    scales = {unit: layout.gradient_divisor / count if count else 0.0 for unit, count in counts.items()}
    # First: FSDP2 may leave parameters gathered after a forward, and hides the gradients of their shards, to which the
    # next backward would add.
    remove_gradients(module.parameters())
    with torch.no_grad():
        micro_batches = objective.prepare_window(
            decoder,
            window.micro_batches,
            strategy.vocabulary.bounded(decoder.softcap),
            lambda values: layout.token_group.sum_floats(values).wait(),
        )
    if prove is not None and counts[TOKENS]:
        prove(micro_batches[: layout.degrees.pp], scales)

    # Forward and backward of each micro-batch. Lightning runs the last backward, in which gradients are reduced.
    start_gradients(module, seed_of_step(seed, trainer.global_step, *layout.seed_place))
    loss, sums, part_sums = strategy.train_micro_batches(decoder, micro_batches, objective, scales)
    given = yield {"loss": loss, "loss_sum": next(iter(sums.terms.values()))}
    assert given is not None
    optimizer, max_norm = given
    figures = join_sums(sums, part_sums)
    has_learned = bool(counts[TOKENS]) and any(counts[unit] for unit in sums.terms)
    del loss, sums, part_sums  # the update may need the memory of the graph

    # Norm of the synchronised gradient, read with all figures, so that the host waits for the device once in a step.
    norm = measure_gradients(
        (parameter for name, parameter in decoder.named_parameters() if name not in decoder.copies),
        trainer.strategy.root_device,
        num_stage_ranks=len(layout.stage_ranks),
        world_size=trainer.world_size,
    )
    grad_norm, *values = _read_together([norm, *figures.values()])
    names = name_figures(figures)
    if outcome.sums_of_ranks is not None:
        outcome.sums_of_ranks.wait()  # a repeated window: gloo needs the wait, and the first sums are dropped
    outcome.sums_of_ranks = HostGroup().sum_floats(values)  # each rank's share, while the optimizer steps

    # Decide. Norm and count are the same on all ranks, so that all of them decide alike without a further reduction.
    reason = outcome.skip_reason = _find_skip_reason(
        grad_norm, trainer, has_learned=has_learned, is_skipped=window.is_skipped
    )
    health = find_gradient_health(trainer) if reason == "nonfinite_gradient" else None
    if health is not None:
        health.look(module)
    if reason is not None:
        remove_gradients(module.parameters())
    elif max_norm and grad_norm > max_norm:
        # Under ZeRO-1 the gradients of parameters that other ranks update stay as they are: nobody reads them.
        # ZeroRedundancyOptimizer has it. Its module, which compiles ten optimizers by TorchScript, is not imported.
        local = getattr(optimizer, "optim", optimizer)
        assert isinstance(local, GroupedOptimizer)
        local.scale_gradients(max_norm / grad_norm)

    # Update: here the optimizer steps, with gradients of None for a window that is skipped.
    yield None

    # Log. The balance of experts follows the loads of the whole window, after the update.
    sums_over_ranks, outcome.sums_of_ranks = outcome.sums_of_ranks.wait(), None
    if reason is None and is_balanced:
        loads = split_loads(names, torch.tensor(sums_over_ranks, dtype=torch.float64), prefix=PART_PREFIX)
        update_balance_biases(decoder, loads)
    yield WindowFigures.of(
        names,
        sums_over_ranks,
        counts=counts,
        grad_norm=grad_norm,
        scale_factor=layout.gradient_divisor / max(counts[TOKENS], 1),
        is_skipped=reason is not None,
    )


def _find_skip_reason(grad_norm: float, trainer: pl.Trainer, *, has_learned: bool, is_skipped: bool) -> str | None:
    """Returns why a window must change no parameter; None if it may."""
    if is_skipped:
        return "skipped_data"  # which `TokenCounters` does not take for a fault
    if not has_learned:
        return "no_valid_tokens"
    if math.isfinite(grad_norm):
        return None
    plugin = trainer.precision_plugin
    has_scaler = isinstance(plugin, MixedPrecision) and plugin.scaler is not None
    return "scaler_overflow" if has_scaler else "nonfinite_gradient"


def start_gradients(module: nn.Module, seed: int) -> None:
    """Removes the gradients of the window before, and seeds dropout.

    Here and not in `optimizer_zero_grad`: Lightning calls that after `training_step`, when the window's earlier
    micro-batches have run backward. A resumed run has the same dropout masks, independent of earlier random numbers.
    """
    remove_gradients(module.parameters())
    torch.manual_seed(seed)


def remove_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sets all gradients to None, which leaves optimizer states and weights alone; zeros would decay them."""
    for parameter in parameters:
        parameter.grad = None


def seed_of_step(seed: int, step: int, *place: int) -> int:
    """Returns the 63-bit seed of one step on one rank (for dropout), a function of its arguments without state.

    `place` is the layout's `seed_place`. SplitMix64's finalizer over all of them, so that neighbouring steps and ranks
    have unrelated seeds (Steele et al., "Fast splittable pseudorandom number generators", 2014).
    """
    mask = (1 << 64) - 1
    value = 0
    for part in (seed, step, *place):
        value = (value + part + 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        value ^= value >> 31
    return value >> 1


def _read_together(tensors: Sequence[Tensor]) -> list[float]:
    """Returns all numbers of `tensors`, in order. Waits for the device once if all of them are on the same device."""
    numbers: list[float] = []
    for _, there in groupby(tensors, key=lambda tensor: tensor.device):
        # float64 holds every float32, and the counts of tokens exactly.
        numbers += torch.cat([tensor.detach().flatten().double() for tensor in there]).cpu().tolist()
    return numbers
