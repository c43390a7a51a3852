"""A plain training loop for the benchmark `experts`, of any model, on one rank or several: the same for each contender.

The arguments are the workload, the number of ranks, and words. With `even` every expert sees the same number of tokens,
which shows the cost of imbalance; otherwise the routers choose. With `shared` the ranks share the experts, and FSDP2
shards the rest; otherwise DDP holds the whole model on each rank.
"""

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workers.protocol import Gate, NoMoreStepsError, Workload, workload_from_json
from benchmarks.workers.windows import build_windows
from genesis.base.device import CPU
from genesis.data.window import IGNORE_INDEX, MicroBatch
from genesis.model.balance import update_balance_biases
from genesis.model.decoder import Decoder
from genesis.model.loss import sum_cross_entropy
from genesis.model.mixture import MixtureConfig
from genesis.model.recipe import build_decoder_config
from genesis.model.router import LOAD, Routing, find_routers
from genesis.optim import OptimizerOptions, build_optimizer
from genesis.strategies.degrees import Degrees
from genesis.strategies.mesh import WorldMesh
from genesis.strategies.wrap import ShardOptions, allocate_sharded, apply_wrappers
from genesis.train.gradients import global_gradient_norm, scale_gradients

_MAX_GRADIENT_NORM = 1.0


class Trained(NamedTuple):
    """What a contender trains.

    Args:
        model: The model, which may be wrapped.
        optimizer: Its optimizer.
        compute_loss: Returns the summed loss of a micro-batch by a model that may be wrapped.
        end_step: Called after each step.
        read_figures: The figures of the last step; the loop adds the median time of a burst's updates.
        is_sharded: Whether the model sums the gradients of all ranks itself; else DDP averages them.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    compute_loss: Callable[[nn.Module, MicroBatch], Tensor]
    end_step: Callable[[], None] = lambda: None
    read_figures: Callable[[], dict[str, float]] = dict
    is_sharded: bool = False


def run(build: Callable[[Workload, list[str]], Trained], arguments: list[str], packages: list[str]) -> None:
    """Trains until the parent sends `quit`.

    Args:
        build: Builds what is trained; it gets the workload and the arguments after the number of ranks.
        arguments: The arguments of the script.
        packages: The packages whose versions are reported.
    """
    workload, num_ranks = workload_from_json(arguments[0]), int(arguments[1])
    if num_ranks > 1:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        os.environ["MASTER_ADDR"] = "localhost"
        context = torch.multiprocessing.get_context("spawn")
        for rank in range(1, num_ranks):
            context.Process(target=_train, args=(build, arguments, packages, rank), daemon=True).start()
    del workload
    _train(build, arguments, packages, 0)


def _train(
    build: Callable[[Workload, list[str]], Trained], arguments: list[str], packages: list[str], rank: int
) -> None:
    workload, num_ranks = workload_from_json(arguments[0]), int(arguments[1])
    torch.set_num_threads(max(1, workload.num_threads // num_ranks))
    windows = build_windows(workload)
    if num_ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    trained = build(workload, arguments[2:])
    model: nn.Module = trained.model
    if num_ranks > 1 and not trained.is_sharded:
        model = DistributedDataParallel(model)
    factor = 1 if trained.is_sharded else num_ranks  # DDP averages over ranks
    loss = torch.zeros(())
    update_seconds: list[float] = []

    def read_figures() -> dict[str, float]:
        of_burst = statistics.median(update_seconds)
        update_seconds.clear()
        return {**trained.read_figures(), "update_seconds": of_burst}

    gate = Gate(workload, packages, lambda: float(loss), read_figures) if rank == 0 else None
    torch.set_num_threads(max(1, workload.num_threads // num_ranks))
    for step in range(sys.maxsize):
        if not _may_begin(gate, num_ranks):
            break
        window = windows[step % len(windows)]
        trained.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros(())
        for micro_batch in window.micro_batches[rank::num_ranks]:
            part = trained.compute_loss(model, micro_batch) * (factor / window.num_valid_tokens)  # of all ranks' tokens
            part.backward()  # type: ignore[no-untyped-call]  # torch's
            loss += part.detach() * (num_ranks / factor)
        begin_seconds = time.perf_counter()
        # As a training step does it: gradients are written again only if their norm is above the limit.
        norm = global_gradient_norm(
            model.parameters(), torch.device(CPU), num_stage_ranks=num_ranks, world_size=num_ranks
        )
        if norm > _MAX_GRADIENT_NORM:
            scale_gradients(model.parameters(), _MAX_GRADIENT_NORM / norm)
        trained.optimizer.step()
        update_seconds.append(time.perf_counter() - begin_seconds)
        trained.end_step()


def _may_begin(gate: Gate | None, num_ranks: int) -> bool:
    """Returns whether the next step begins, which the first rank's gate decides for all ranks."""
    begins = torch.ones(1)
    if gate is not None:
        try:
            gate.before_step()
        except NoMoreStepsError:
            begins.zero_()
    if num_ranks > 1:
        with suppress(RuntimeError):  # the first rank has ended
            dist.broadcast(begins, 0)
            return bool(begins)
        return False
    return bool(begins)


def build_own(workload: Workload, arguments: list[str]) -> Trained:
    """Builds our decoder, dense or a mixture."""
    is_shared, is_even = "shared" in arguments, "even" in arguments
    decoder = _build_shared(workload) if is_shared else Decoder(build_decoder_config(workload.decoder, "the workload"))
    decoder.init_weights(seed=0)
    routers = find_routers(decoder)
    if is_even:
        for router in routers.values():
            router.forward = partial(_route_evenly, router.config, router.forward)  # type: ignore[method-assign]
    loads: dict[str, Tensor] = {}

    def compute_loss(model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        counted = micro_batch.labels != IGNORE_INDEX
        loss: Tensor
        loss, by_mixture = model(
            micro_batch.input_ids,
            document_ids=micro_batch.document_ids,
            head=partial(sum_cross_entropy, labels=micro_batch.labels),
            has_statistics=True,
            counted=counted,
        )
        for name, part in by_mixture.items():
            load = part.counts[LOAD].double()
            loads[name] = loads[name] + load if name in loads else load
            loss = loss if part.loss_sum is None else loss + part.loss_sum
        return loss

    def end_step() -> None:
        if dist.is_initialized():
            for load in loads.values():
                dist.all_reduce(load)
        if loads:
            update_balance_biases(decoder, loads)
            # The statistics are those of the router, before its choice is replaced.
            imbalances[:] = [1.0 if is_even else float(load.max() / load.mean()) for load in loads.values()]
        loads.clear()

    imbalances: list[float] = []
    optimizer = build_optimizer(decoder, OptimizerOptions(**workload.optimizer))
    return Trained(
        decoder,
        optimizer,
        compute_loss,
        end_step,
        lambda: {"imbalance": max(imbalances)} if imbalances else {},
        is_shared,
    )


def _build_shared(workload: Workload) -> Decoder:
    """Returns a decoder whose experts all ranks share, and whose other weights stay gathered within a step."""
    num_ranks = dist.get_world_size()
    mesh = WorldMesh(Degrees(ep=num_ranks).resolve(num_ranks), CPU)
    with torch.device("meta"):
        decoder = Decoder(build_decoder_config(workload.decoder, "the workload"))
    options = ShardOptions(
        mesh=mesh.shard,
        reshard_after_forward=False,
        blocks_per_unit=1,
        max_gathers_in_flight=2,
        precision=MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
        cpu_offload=0.0,
        experts=(mesh.experts, mesh.expert_shard),
    )
    apply_wrappers(decoder, shard=options)
    allocate_sharded(decoder, torch.device(CPU), options.blocks_per_unit, options.cpu_offload)
    return decoder


def _route_evenly(
    config: MixtureConfig, forward: Callable[[Tensor, Tensor | None], Routing], x: Tensor, counted: Tensor | None = None
) -> Routing:
    """Routes as the router does, in the same time, and then takes each expert in turn."""
    routing = forward(x, counted)
    choices = torch.arange(routing.experts.numel(), device=x.device) % config.num_experts
    return routing._replace(experts=choices.view(routing.experts.shape))


if __name__ == "__main__":
    run(build_own, sys.argv[1:], ["torch"])
