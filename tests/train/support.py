"""Small runs: a tiny decoder, windows from a pure function, a Trainer on any number of ranks."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.strategies import Replicated, Sharded
from genesis.train.module import GenesisModule
from genesis_callbacks import TokenCounters
from tests.algorithms import algorithm_of

TINY = DecoderConfig(vocab_size=61, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=16)
GLOBAL_BATCH_SIZE = 8
SEQ_LEN = 16


def rows_of_step(step: int, is_empty: bool = False) -> MicroBatch:
    """Returns the global batch of `step`: rows with very uneven numbers of valid labels."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (GLOBAL_BATCH_SIZE, SEQ_LEN)
    input_ids = torch.randint(TINY.vocab_size, shape, generator=generator)
    labels = torch.randint(TINY.vocab_size, shape, generator=generator)
    num_valid = torch.tensor([16, 1, 9, 0, 3, 16, 12, 5])
    if is_empty:
        num_valid = torch.zeros_like(num_valid)
    labels[torch.arange(SEQ_LEN) >= num_valid[:, None]] = IGNORE_INDEX
    document_ids = (torch.arange(SEQ_LEN) >= 7).to(torch.int32).expand(shape).clone()
    return MicroBatch(input_ids, labels, document_ids)


def window_of_rank(
    step: int, rank: int, world_size: int, micro_batch_size: int = 1, is_empty: bool = False
) -> AccumulationWindow:
    """Returns the rows of `rank`, in micro-batches."""
    rows = rows_of_step(step, is_empty)
    size = GLOBAL_BATCH_SIZE // world_size
    micro_batches = tuple(
        MicroBatch(*(t[start : start + micro_batch_size] for t in (rows.input_ids, rows.labels, rows.document_ids)))
        for start in range(rank * size, (rank + 1) * size, micro_batch_size)
    )
    num_valid = sum(int((m.labels != IGNORE_INDEX).sum()) for m in micro_batches)
    return AccumulationWindow(micro_batches, num_valid, 3 * num_valid, (step + 1) * GLOBAL_BATCH_SIZE)


class Windows(IterableDataset[AccumulationWindow]):
    """Windows of one rank; `empty_steps` have no valid label on any rank."""

    def __init__(self, num_steps: int, rank: int, world_size: int, empty_steps: tuple[int, ...] = ()) -> None:
        self.arguments = (num_steps, rank, world_size, empty_steps)

    def __iter__(self) -> Iterator[AccumulationWindow]:
        num_steps, rank, world_size, empty_steps = self.arguments
        for step in range(num_steps):
            yield window_of_rank(step, rank, world_size, is_empty=step in empty_steps)

    def __len__(self) -> int:
        return self.arguments[0]


def loader(
    num_steps: int, rank: int, world_size: int, empty_steps: tuple[int, ...] = ()
) -> DataLoader[AccumulationWindow]:
    return DataLoader(Windows(num_steps, rank, world_size, empty_steps), batch_size=None)


def build_strategy(name: str) -> Any:
    """Returns a fresh strategy by a short name."""
    return {
        "single": lambda: "auto",
        "replicated": lambda: Replicated(),
        "zero1": lambda: Replicated(optimizer_states="sharded"),
        "full": lambda: Sharded(),
        "grad_op": lambda: Sharded(shard="grad_op"),
        "hybrid": lambda: Sharded(shard="hybrid", ranks_per_shard_group=2),
        "two_blocks": lambda: Sharded(blocks_per_unit=2, max_gathers_in_flight=1),
        "reduced_each": lambda: Sharded(gradient_reduction="micro_batch"),
        "offload": lambda: Sharded(cpu_offload=True),
        "half_offload": lambda: Sharded(cpu_offload=0.5),
        "float8_alone": lambda: Replicated(activation_checkpointing="block"),
        "float8_shards": lambda: Sharded(activation_checkpointing="block", keep_gathered=True),
        "float8_experts": lambda: Sharded(expert_parallel=2, activation_checkpointing="block"),
        "tensor": lambda: Sharded(tensor_parallel=2),
        "context": lambda: Sharded(context_parallel=2),
        "pipeline": lambda: Sharded(pipeline_parallel=2),
        "interleaved": lambda: Sharded(pipeline_parallel=2, stages_per_rank=2),
        "tensor, context": lambda: Sharded(tensor_parallel=2, context_parallel=2),
        "tensor, pipeline": lambda: Sharded(tensor_parallel=2, pipeline_parallel=2),
        "compiled": lambda: Replicated(compile_blocks=True),
        "compiled_shards": lambda: Sharded(compile_blocks=True, activation_checkpointing="block"),
        "checkpointing": lambda: Sharded(activation_checkpointing="block"),
        "host_alone": lambda: Replicated(
            activation_checkpointing="block", activation_offload=True, optimizer_offload=0.6
        ),
        "host_shards": lambda: Sharded(
            activation_checkpointing="block", blocks_per_recomputation=2, activation_offload=True, optimizer_offload=1.0
        ),
        "host_compiled": lambda: Sharded(
            expert_parallel=2,
            compile_blocks=True,
            activation_checkpointing="block",
            blocks_per_recomputation=2,
            activation_offload=True,
            optimizer_offload=1.0,
        ),
        "host_experts": lambda: Sharded(
            expert_parallel=2, activation_checkpointing="block", activation_offload=True, optimizer_offload=0.6
        ),
        "half_experts": lambda: Sharded(expert_parallel=2, activation_checkpointing="block", cpu_offload=0.5),
        "experts_2": lambda: Sharded(expert_parallel=2),
        "experts_4": lambda: Sharded(expert_parallel=4),
        "experts_hybrid": lambda: Sharded(expert_parallel=2, shard="hybrid", ranks_per_shard_group=2),
        "experts_each": lambda: Sharded(expert_parallel=2, gradient_reduction="micro_batch", cpu_offload=True),
        "experts_2_compiled": lambda: Sharded(expert_parallel=2, compile_blocks=True),
        "experts_4_compiled": lambda: Sharded(expert_parallel=4, compile_blocks=True),
        "experts_compiled": lambda: Sharded(
            expert_parallel=2, compile_blocks=True, activation_checkpointing="block", shard="grad_op"
        ),
    }[name]()


def whole(tensor: Tensor) -> Tensor:
    """Returns a detached copy of the whole of a tensor that may be sharded. Communicates under sharding."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


COMPILE_SECONDS = 280.0
"""A limit for ranks that compile, on a machine that does other work, too."""


class RequireCompiled(pl.Callback):
    """Fails if blocks that shall be compiled ran eagerly, which torch.compile does without an error.

    Each kind of block must have a graph, and none may be compiled again and again.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch._dynamo.config.fail_on_recompile_limit_hit = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GenesisModule)
        kinds = {tuple(type(part) for part in block.modules()) for block in pl_module.decoder.numbered_blocks.values()}
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= len(kinds)


def build_trainer(strategy: Any, world_size: int, max_steps: int, callbacks: list[Any], **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_steps=max_steps,
        max_epochs=-1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        inference_mode=False,
        callbacks=[*callbacks, *([RequireCompiled()] if getattr(strategy, "compile_blocks", False) else [])],
        **{"logger": False, "log_every_n_steps": 1, **options},
    )


def run_in_turn(function: Callable[..., Any], of_each: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Returns what `function` returns for each tuple of arguments: several fits on ranks that are started once."""
    place = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    found = []
    for arguments in of_each:
        os.environ.update(place)  # Lightning removes them at the end of a fit
        found.append(function(*arguments))
    return found


class KeepGradients(pl.Callback):
    """Keeps the whole gradients that the optimizer is about to use."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.gradients = {
            name: whole(parameter.grad)
            for name, parameter in pl_module.named_parameters()
            if parameter.grad is not None
        }


def build_module(decoder: DecoderConfig = TINY, **optimizer: Any) -> GenesisModule:
    return GenesisModule(decoder, algorithm_of(**({"name": "adamw", "lr": 1e-2} | optimizer)))


def reference_gradients(decoder: DecoderConfig, step: int) -> tuple[dict[str, Tensor], float]:
    """Returns the gradient of one big batch's token-mean loss in float64, and its norm: the slow obvious way."""
    model = Decoder(decoder)
    model.init_weights(0)
    model.double()
    rows = rows_of_step(step)
    logits = model(rows.input_ids, document_ids=rows.document_ids)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    gradients = {f"decoder.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))


def counters_of(trainer: pl.Trainer) -> TokenCounters:
    return next(callback for callback in trainer.callbacks if isinstance(callback, TokenCounters))
