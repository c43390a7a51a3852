"""Our trainer with the strategy `Sharded` on one rank or two, and the link between two ranks, for the benchmark `axes`.

The arguments are the workload, the number of ranks, and options of the strategy as JSON; with `link` in the place of
the options, the ranks exchange tensors instead. A window has the same sequences under every strategy.
"""

import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.workers.protocol import ENDLESS, Gate, Workload, workload_from_json
from benchmarks.workers.windows import build_windows
from genesis.base.parent import end_with_forker
from genesis.data.window import AccumulationWindow
from genesis.model.decoder import Decoder
from genesis.model.recipe import build_decoder_config
from genesis.operations.doctor.fits import Windows, build_trainer
from genesis.operations.doctor.probe import Task
from genesis.optim import AdamW
from genesis.strategies import Sharded
from genesis.train.module import GenesisModule

LINK: Final = "link"
BUBBLE: Final = ("bubble_share", "bubble_share_ideal")
"""The share of a window in which ranks of a pipeline wait, as a fit logs it, and that of the formula."""
_SMALL_BYTES, _LARGE_BYTES = 64, 2**20
_NUM_EXCHANGES: Final = 20


def main(arguments: list[str]) -> None:
    """Trains until the parent sends `quit`."""
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("fork")  # before anything is computed: no threads, and no second import
        for rank in range(1, int(arguments[1])):
            context.Process(target=_run, args=(arguments, directory, rank), daemon=True).start()
        _run(arguments, directory, 0)


def _run(arguments: list[str], directory: str, rank: int) -> None:
    workload, num_ranks = workload_from_json(arguments[0]), int(arguments[1])
    if rank:
        end_with_forker()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output carries the first rank's messages
    torch.set_num_threads(workload.num_threads)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "NODE_RANK": 0}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=num_ranks)
    if arguments[2] == LINK:
        _exchange(workload, rank)
    else:
        _train(workload, json.loads(arguments[2]), directory, rank, num_ranks)


class _Sleep(pl.Callback):
    """Makes each block take a time in the forward and twice as long in the backward; its products should be short.

    Args:
        seconds: Of a forward.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Adds the hooks."""
        assert isinstance(pl_module, GenesisModule)
        assert isinstance(pl_module.decoder, Decoder)
        for block in pl_module.decoder.numbered_blocks.values():
            block.register_forward_hook(self._sleep)

    def _sleep(self, module: nn.Module, given: Any, out: tuple[Tensor, Any]) -> None:
        time.sleep(self._seconds)
        out[0].register_hook(self._sleep_backward)  # type: ignore[no-untyped-call]  # torch's

    def _sleep_backward(self, gradient: Tensor) -> None:
        time.sleep(2.0 * self._seconds)


def _train(workload: Workload, options: dict[str, Any], directory: str, rank: int, num_ranks: int) -> None:
    sleep_seconds = options.pop("sleep_seconds", None)

    def read_figures() -> dict[str, float]:
        logged = trainer.callback_metrics
        return {name: float(logged[f"parallel/{name}"]) for name in BUBBLE if f"parallel/{name}" in logged}

    def read_loss() -> float:
        return float(trainer.callback_metrics["train/loss"])  # of all ranks: the last stage of a pipeline has it

    gate = Gate(workload, ["torch", "lightning"], read_loss, read_figures) if rank == 0 else None
    shared = [name for name, degree in options.items() if name.endswith("_parallel") and degree > 1]
    num_readers, data_rank = (1, 0) if shared else (num_ranks, rank)
    windows = [_take(window, data_rank, num_readers) for window in build_windows(workload)]
    trainer = build_trainer(
        Task(workload.device, "", str(Path(directory) / str(rank)), rank, num_ranks),
        Sharded(**options),
        ENDLESS,
        [] if sleep_seconds is None else [_Sleep(sleep_seconds)],
        precision=workload.precision,
        log_every_n_steps=1,
        max_epochs=1,
    )
    decoder = build_decoder_config(workload.decoder, "the workload")
    data = Windows(lambda index: windows[index % len(windows)], ENDLESS, functools.partial(_may_begin, gate))
    trainer.fit(GenesisModule(decoder, AdamW(**workload.optimizer)), datamodule=data)


def _take(window: AccumulationWindow, data_rank: int, num_readers: int) -> AccumulationWindow:
    """Returns the share of a window of one of the ranks that read different data."""
    own = window.micro_batches[data_rank::num_readers]
    num_tokens = sum(micro_batch.labels.numel() for micro_batch in own)
    return AccumulationWindow(tuple(own), num_tokens, 4 * num_tokens, window.data_position)


def _exchange(workload: Workload, rank: int) -> None:
    """Times gathers of few bytes and of many; the figures are medians of a burst."""
    seconds: dict[int, list[float]] = {_SMALL_BYTES: [], _LARGE_BYTES: []}

    def read_figures() -> dict[str, float]:
        small, large = (statistics.median(seconds[size]) for size in (_SMALL_BYTES, _LARGE_BYTES))
        for of_size in seconds.values():
            of_size.clear()
        return {"latency_seconds": small, "bytes_per_second": _LARGE_BYTES / max(large - small, 1e-9)}

    gate = Gate(workload, ["torch"], read_figures=read_figures) if rank == 0 else None
    while _may_begin(gate):
        for size, of_size in seconds.items():
            own, whole = torch.ones(size // 4), torch.empty(2 * size // 4)
            for _ in range(_NUM_EXCHANGES):
                begin_seconds = time.perf_counter()
                dist.all_gather_into_tensor(whole, own)
                of_size.append(time.perf_counter() - begin_seconds)


def _may_begin(gate: Gate | None) -> bool:
    """Returns whether the next step begins, which the first rank's gate decides for all ranks."""
    begins = torch.ones(1)
    if gate is not None:
        begins.fill_(float(gate.may_begin()))
    with suppress(RuntimeError):  # the first rank has ended
        dist.broadcast(begins, 0)
        return bool(begins)
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
