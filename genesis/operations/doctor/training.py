"""Parts of the doctor that train: waits by line, speed and memory, and all devices."""

import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor

import genesis
import genesis_callbacks
from genesis.base.device import (
    count_devices,
    find_missing_compiler,
    is_host,
    name_collectives,
    name_device,
    read_peak_memory,
    reset_peak_memory,
    select_device,
    warning_of_waits,
)
from genesis.base.errors import numbered
from genesis.base.processes import run_together
from genesis.model.describe import count_flops_per_token, describe
from genesis.operations.doctor.fits import (
    SIZES,
    KeepLosses,
    StepTimes,
    build_module,
    build_strategy,
    build_trainer,
    random_windows,
)
from genesis.operations.doctor.probe import Probe, SkippedError, Task
from genesis.strategies import Replicated, Sharded
from genesis_callbacks.device_peaks import choose_peak_type, compute_mfu, read_peak_flops

_WARMUP_STEPS: Final = 5
_STEPS: Final = 20
_RANK_STEPS: Final = 4
_WAIT_MESSAGE: Final = "synchroniz"
_ROOTS: Final = {
    module.__name__: str(Path(module.__file__ or "").parent) + os.sep for module in (genesis, genesis_callbacks, pl)
}


# ---- steps, their waits, their speed


@contextmanager
def counting_waits(kind: str) -> Iterator[Counter[str] | None]:
    """Counts the waits of the host for the device by the line of ours or Lightning's; None where torch cannot."""
    waits: Counter[str] = Counter()

    def show(message: Warning | str, *_: Any) -> None:
        if _WAIT_MESSAGE in str(message):
            waits[_find_line()] += 1

    with warnings.catch_warnings(), warning_of_waits(kind) as can_warn:
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]  # has the same arguments
        yield waits if can_warn else None


def _find_line() -> str:
    """Returns the innermost line of the stack in a package of `_ROOTS`, without the path of the installation."""
    for frame in reversed(traceback.extract_stack()):
        for name, root in _ROOTS.items():
            if frame.filename.startswith(root) and frame.filename != __file__:
                return f"{name.replace('.', '/')}/{frame.filename.removeprefix(root)}:{frame.lineno}"
    return "elsewhere"


def watch_waits(probe: Probe) -> None:
    """Trains five, then twenty steps, and lists the lines at which the host waited for the device."""
    task = probe.task
    for num_steps in (_WARMUP_STEPS, _STEPS):
        losses = KeepLosses()
        trainer = build_trainer(task, build_strategy(), num_steps, [losses])
        with counting_waits(task.kind) as waits:
            trainer.fit(build_module(task), datamodule=random_windows(SIZES[task.size]))
        found = losses.read()
        is_whole = len(found) == num_steps and all(0 < loss < 50 for loss in found)
        probe.check(
            f"{numbered(num_steps, 'steps')} have finite losses", is_whole, f"{found[0]:.4f} to {found[-1]:.4f}"
        )
        if waits is None:
            continue
        probe.figure(f"waits in {numbered(num_steps, 'steps')}", waits.total())
        for line, count in waits.most_common(12):
            probe.figure(f"waits in {numbered(num_steps, 'steps')} at {line}", count)
    if waits is None:
        probe.note(f"torch cannot watch waits on {task.kind}")


def measure_training(probe: Probe, is_compiled: bool) -> None:
    """Measures tokens per second and peak memory of training on one device."""
    task = probe.task
    missing = find_missing_compiler(task.kind) if is_compiled else None
    if missing is not None:
        raise SkippedError(missing)
    size = SIZES[task.size]
    times = StepTimes(task.kind, _WARMUP_STEPS, _STEPS)
    trainer = build_trainer(task, build_strategy(is_compiled), _WARMUP_STEPS + _STEPS, [times])
    reset_peak_memory(task.kind)
    trainer.fit(build_module(task), datamodule=random_windows(size))
    tokens_per_second = times.tokens / times.seconds
    probe.figure("speed", tokens_per_second, "tokens/s")
    probe.figure("step", times.seconds / _STEPS, "s")
    probe.figure("first steps, compilation included" if is_compiled else "first steps", times.seconds_of_first, "s")
    peak_flops = None
    if not is_host(task.kind):
        peak_flops = read_peak_flops(
            name_device(task.kind), choose_peak_type(str(trainer.precision), torch.get_float32_matmul_precision())
        )
    if peak_flops is None:
        probe.note("the device's peak is not known: no MFU")
    else:
        flops = count_flops_per_token(size.decoder, size.decoder.max_seq_len)
        probe.figure("MFU", compute_mfu(tokens_per_second, flops, peak_flops))
    costs = describe(size.decoder)
    estimate = 4 * costs.weights_bytes  # weights, gradients and the two moments of AdamW
    probe.figure("estimate of memory, without activations", estimate / 2**20, "MiB")
    peak = read_peak_memory(task.kind)
    if peak is None:
        probe.note("torch does not count the memory of this device")
        return
    probe.figure("peak memory of tensors", peak.allocated_bytes / 2**20, "MiB")
    probe.figure("peak memory of the allocator", peak.reserved_bytes / 2**20, "MiB")
    probe.check("the peak is at least the training state", peak.allocated_bytes >= estimate)


# ---- all devices

VARIANTS: Final[dict[str, tuple[Callable[[], Strategy], str | None]]] = {
    "ddp": (Replicated, None),
    "fsdp2": (Sharded, None),
    "offload": (partial(Sharded, cpu_offload=True), None),
    "compiled": (partial(Replicated, compile_blocks=True), None),
    "compiled-fsdp2": (partial(Sharded, compile_blocks=True), None),
    "bf16-true": (Replicated, "bf16-true"),
    "zero1": (partial(Replicated, optimizer_states="sharded"), None),
}
"""Strategies to train with, each with its precision; None for the device's usual precision."""


def train_on_all(probe: Probe, variant: str, num_ranks: int | None = None) -> None:
    """Starts ranks that train a few steps, and compares their parameters and losses.

    Args:
        probe: The probe of the part.
        variant: A name in `VARIANTS`.
        num_ranks: The number of ranks; by default one for each device, and two on the CPU.
    """
    task = probe.task
    if not is_host(task.kind) and not _has_collectives(task.kind):
        raise SkippedError(f"torch.distributed has no backend for {task.kind}")
    num_ranks = num_ranks or (2 if is_host(task.kind) else count_devices(task.kind))
    probe.figure("ranks", num_ranks)
    probe.figure("backend", name_collectives(task.kind))
    ranks = [Task(task.kind, task.size, task.directory, rank, num_ranks) for rank in range(num_ranks)]
    run_together(
        "genesis.operations.doctor.rank",
        [[rank.to_json(), variant] for rank in ranks],
        build_rank_environments(num_ranks),
    )
    results = [torch.load(Path(task.directory) / f"rank-{rank.rank}.pt", weights_only=True) for rank in ranks]
    first = results[0]
    probe.check("all ranks have the same parameters", all(_is_equal(first["tensors"], of["tensors"]) for of in results))
    probe.check(
        f"{_RANK_STEPS} steps have finite losses",
        all(len(of["losses"]) == _RANK_STEPS and all(0 < loss < 50 for loss in of["losses"]) for of in results),
        ", ".join(f"{loss:.4f}" for loss in first["losses"]),
    )
    changed = sum(not torch.equal(*pair) for pair in zip(first["before"], first["tensors"], strict=True))
    probe.check("training changed the parameters", changed > len(first["tensors"]) // 2)
    probe.figure("step after the first two", first["seconds"], "s")


def _has_collectives(kind: str) -> bool:
    """Returns whether torch.distributed has a backend for a kind of accelerator."""
    return dist.is_available() and dist.is_backend_available(name_collectives(kind))


def build_rank_environments(num_ranks: int) -> list[dict[str, str]]:
    """Returns the variables by which each rank knows its place."""
    numbers = [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "NODE_RANK": 0} for rank in range(num_ranks)]
    return [{name: str(number) for name, number in of.items()} for of in numbers]


def _is_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def needs_group(task: Task, variant: str) -> bool:
    """Returns whether a strategy needs a process group: `Sharded` always, `Replicated` with several ranks."""
    build, _ = VARIANTS[variant]
    return task.num_ranks > 1 or (build.func if isinstance(build, partial) else build) is Sharded


def join_ranks(task: Task, store: str) -> None:
    """Creates the process group of the ranks without a port."""
    select_device(task.kind, task.rank)
    dist.init_process_group(
        name_collectives(task.kind),
        init_method=f"file://{Path(task.directory) / store}",
        rank=task.rank,
        world_size=task.num_ranks,
    )


def train_one_rank(task: Task, variant: str) -> None:
    """Trains as one rank of `train_on_all`, and writes its results at the end."""
    if needs_group(task, variant):
        join_ranks(task, "store")
    losses, times = KeepLosses(), StepTimes(task.kind, 2, _RANK_STEPS - 2)
    build, precision = VARIANTS[variant]
    options = {} if precision is None else {"precision": precision}
    before: list[Tensor] = []

    class Remember(pl.Callback):
        """Keeps the parameters before the first step."""

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            before.extend(_read_parameters(pl_module))

    module = build_module(task)
    trainer = build_trainer(task, build(), _RANK_STEPS, [losses, times, Remember()], **options)
    trainer.fit(module, datamodule=random_windows(SIZES[task.size], task.rank))
    torch.save(
        {
            "losses": losses.read(),
            "tensors": _read_parameters(module),
            "before": before,
            "seconds": times.seconds / (_RANK_STEPS - 2),
        },
        Path(task.directory) / f"rank-{task.rank}.pt",
    )
    if dist.is_initialized():
        dist.destroy_process_group()


def _read_parameters(module: pl.LightningModule) -> list[Tensor]:
    """Returns all parameters, whole and on the host. Communicates if they are sharded."""
    return [
        (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().cpu().clone()
        for parameter in module.parameters()
    ]
