"""A fit on the fake device: one combination of strategy, precision, optimizer, ranks and offload, for two steps."""

import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loops import fit_loop
from lightning.pytorch.strategies import ddp as lightning_ddp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention
from torch.nn.parallel import distributed as ddp
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchmetrics import metric

from genesis.base.errors import UserError
from genesis.data.clock import CopyClock
from genesis.data.loader import SequenceFormat, WindowLoader
from genesis.data.window import AccumulationWindow
from genesis.model import loss
from genesis.model.attend import fa4, flex
from genesis.model.attend.table import AttentionName
from genesis.model.attention import AttentionConfig, RopeScaling
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.float8 import Float8Options, load_torchao
from genesis.model.norm import NormConfig
from genesis.strategies import Replicated, Sharded, agree, mesh, replicated, sharded
from genesis.strategies.host_memory import HostOffload
from genesis.strategies.start import Start
from genesis.train.module import GenesisModule
from genesis.train.telemetry import TelemetryOptions, build_telemetry
from genesis_callbacks import AsyncProcessCheckpoint, SkipAwareLR, StepTimer, TokenCounters
from genesis_callbacks.host_group import HostGroup, Pending
from tests.algorithms import algorithm_of
from tests.fakecuda import device
from tests.fakecuda.combinations import Combination
from tests.fakecuda.device import outside
from tests.fakecuda.tuning import build_adapter, build_objective, build_tuning_window, choose_base_format
from tests.fakecuda.watch import FakeMode, Watch
from tests.mixtures import MIXTURES, mix

STEPS: Final = 2
BATCH, SEQ_LEN = 2, 128
SHAPE: Final = DecoderConfig(
    dim=256, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=512, max_seq_len=SEQ_LEN, vocab_size=1024
)


PARTS: Final = {
    **MIXTURES,
    "windows": {
        "attention": AttentionConfig(
            **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "rotary_dim": 32, "no_rope_every": 2},
            **{"sliding_window": 40, "window_layers": (0,), "has_qkv_bias": True, "qk_norm": "projection"},
            **{"has_output_gate": True, "rope_scaling": RopeScaling(2.0, 1.0, 4.0, SEQ_LEN)},
        ),
        "norm": NormConfig(1e-5, placement="after"),
        "dropout": 0.1,
        "has_tied_embeddings": False,
    },
}
"""Fields of decoders that together have every part and option."""


class FakeCUDA(Accelerator):
    """Lightning's view of the fake device."""

    def __init__(self, num_ranks: int = 1) -> None:
        self._num_ranks = num_ranks

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cuda", 0)] * devices

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "cuda"

    def setup_device(self, device: torch.device) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    def teardown(self) -> None: ...


FORMAT: Final = SequenceFormat(SEQ_LEN, 0, np.full(SHAPE.vocab_size, 3, np.uint8), np.dtype(np.uint16))


class Windows(pl.LightningDataModule):
    """Windows for training and one for validation; made on the training thread, where the fake mode is."""

    def __init__(self, objective: str) -> None:
        super().__init__()
        self._objective = objective

    def _build(self, index: int) -> AccumulationWindow:
        return outside(build_tuning_window)(self._objective, index, FORMAT, BATCH).pin_memory()

    def train_dataloader(self) -> WindowLoader:
        return WindowLoader(self._build, lambda: range(9), 9, 0, False)

    def val_dataloader(self) -> WindowLoader:
        return WindowLoader(self._build, lambda: range(1), 1, 0, False)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return CopyClock().copy(batch, device)


class KeepStep(pl.Callback):
    """Keeps what the last step did: from the end of the step before to its own."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.syncs, self.kernels, self.casts = watch, {}, {}, {}
        self.num_bytes: dict[str, int] = {}
        self.memory: dict[str, int] = {}
        self.moved: dict[str, int] = {}
        self.peak_bytes = self.num_steps = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.num_steps = trainer.global_step
        offload = vars(trainer.strategy)["offload"]
        assert isinstance(offload, HostOffload)
        moved = offload.traffic.take()
        self.moved = {
            "to device": moved.to_device_bytes,
            "to host": moved.to_host_bytes,
            "idle ns": round(1e9 * moved.idle_seconds),
        }
        self.memory = count_bytes(pl_module, trainer.optimizers[0])
        watch = self.watch
        self.peak_bytes = watch.live.peak
        watch.live.reset_peak()
        self.syncs, self.kernels, self.casts = dict(watch.syncs), dict(watch.kernels), dict(watch.casts)
        self.num_bytes = dict(watch.num_bytes)
        for counts in (watch.syncs, watch.kernels, watch.casts, watch.num_bytes):
            counts.clear()


def count_bytes(module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Returns the bytes that this rank holds between two steps, by what holds them and where."""
    found: Counter[str] = Counter()
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [parameter.grad for parameter in module.parameters()]
    for what, tensors in (("parameters", module.parameters()), ("gradients", gradients), ("optimizer state", states)):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                found[f"{what} on {local.device.type}"] += local.numel() * local.element_size()
    return dict(sorted(found.items()))


class Votes(AsyncProcessCheckpoint):
    """The checkpoint callback as it stands in every run, without its saves: the engine has tests of its own."""


for _hook in (name for name in dir(pl.Callback) if name.startswith(("on_", "setup", "teardown", "state_dict"))):
    setattr(Votes, _hook, getattr(pl.Callback, _hook))


class FakePending:
    """A reduction that has ended, of numbers on the host."""

    def __init__(self, values: Any) -> None:
        self._values = tuple(values)

    def wait(self) -> tuple[Any, ...]:
        return self._values


@contextmanager
def fake_ranks(num_ranks: int) -> Iterator[None]:
    """Makes this process the first of `num_ranks`, whose others agree with it in everything."""
    os.environ.update(LOCAL_RANK="0", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    group: Any = HostGroup
    group.join = lambda self: None
    group._group = None  # nothing may ask for gloo
    group.sum = group.sum_floats = lambda self, values: FakePending(value * num_ranks for value in values)
    group.max = lambda self, values: FakePending(values)
    pending: Any = Pending
    pending.wait = outside(Pending.wait)
    counters: Any = TokenCounters
    counters.on_train_batch_start = outside(TokenCounters.on_train_batch_start)
    agreeing: Any = agree
    agreeing.Ranks = _FirstRank
    start: Any = Start
    start.begin = lambda self: None
    start.check = lambda self, node: None
    module: Any = sharded
    module.DesyncWatchdog = _NoWatchdog
    for strategy in (Replicated, Sharded):
        of_class: Any = strategy
        of_class.barrier = lambda self, name=None: None
        of_class.broadcast = lambda self, value, src=0: value
        of_class.reduce = lambda self, tensor, *arguments, **options: tensor
    loop: Any = fit_loop
    loop.has_len_all_ranks = lambda *arguments, **options: True
    # They compare and send numbers, which fake tensors have not.
    metrics: Any = metric
    metrics.gather_all_tensors = lambda result, group=None: [result] * num_ranks
    parallel: Any = ddp
    parallel._verify_param_shape_across_processes = lambda *arguments, **options: None
    parallel._sync_module_states = lambda *arguments, **options: None
    parallel.DistributedDataParallel = _FakeReducedDDP
    for place in (lightning_ddp, torch.nn.parallel, replicated):
        if hasattr(place, "DistributedDataParallel"):
            place.DistributedDataParallel = _FakeReducedDDP
    meshes: Any = mesh
    meshes.init_device_mesh = outside(mesh.init_device_mesh)
    for name in ("__getitem__", "_flatten", "_unflatten", "_concatenate", "get_group", "get_all_groups"):
        setattr(DeviceMesh, name, outside(getattr(DeviceMesh, name)))
    for name in ("get_coordinate", "get_local_rank"):
        setattr(DeviceMesh, name, outside(getattr(DeviceMesh, name)))
    yield


class _FakeReducedDDP(ddp.DistributedDataParallel):
    """DDP whose reduction gives back what it gets; that of the fake process group gives nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_comm_hook(None, _reduce)
        self.logger = _NoLogger()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}


class _NoLogger:
    """DDP's own asks a timer for the times of kernels."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def _reduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


class _FirstRank:
    """The first of ranks that agree with it."""

    is_first = True

    def __init__(self, timeout_seconds: float) -> None: ...

    def gather(self, value: Any) -> list[Any]:
        return [value]


class _NoWatchdog:
    def __init__(self, *arguments: Any) -> None: ...

    def start(self) -> None: ...

    def end_window(self) -> None: ...

    def stop(self) -> None: ...


def build_strategy(combination: Combination, options: dict[str, Any]) -> Any:
    name, offload = combination.strategy, combination.has_offload
    if name in ("replicated", "zero1"):
        return Replicated(optimizer_states="sharded" if name == "zero1" else "replicated", **options)
    groups = {"ranks_per_shard_group": 1} if name == "hybrid" else {}
    return Sharded(**{"shard": name, "cpu_offload": offload, **groups, **options})


def run_fit(
    combination: Combination,
    shape: dict[str, Any] | None = None,
    parts: str = "",
    capability: tuple[int, int] = (9, 0),
    strategy_options: dict[str, Any] | None = None,
    free_bytes: int = 0,
    attention: AttentionName = "auto",
    has_float8: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Runs a fit in this process, which can run no other one. Returns what its last step did, or what refused it.

    Args:
        combination: What to run.
        shape: Fields of the decoder that are not those of `SHAPE`.
        parts: A name of `PARTS`, for a decoder of other parts.
        capability: Of the device.
        strategy_options: Of the strategy, beside those of the combination.
        free_bytes: What is free on the device.
        attention: Of the module; for `fa4`, its package seems to be installed.
        has_float8: Whether linear layers compute in float8.
        options: Of the Trainer.
    """
    warnings.simplefilter("ignore")
    cuda: Any = torch.cuda
    device.FREE_BYTES[0] = free_bytes
    cuda.get_device_capability = lambda device=None: tuple(capability)
    # Torch compiles nothing under a mode that watches. The kernel runs as the operator that inductor would compile.
    package: Any = fa4
    if attention == "fa4":
        package.find_version = lambda: "4"
    kernel: Any = flex
    kernel.compile_kernel = lambda: flex.attend_blocks
    torchs: Any = flex_attention
    torchs._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    if has_float8:
        load_torchao()  # outside of the fake mode
    decoder: Any = Decoder
    decoder.init_weights = lambda self, seed: None  # fake tensors have no values
    module: Any = GenesisModule
    module.log = module.log_dict = lambda self, *arguments, **options: None  # it copies numbers on the host
    with fake_ranks(combination.num_ranks), FakeMode(), Watch() as watch:
        keep = KeepStep(watch)
        watch.live.watch_resizes()
        losses: Any = loss
        losses._compile = watch.fuse  # torch.compile runs what it gets as it is under the modes of this process
        try:
            trainer = pl.Trainer(
                accelerator=FakeCUDA(),
                devices=combination.num_ranks,
                strategy=build_strategy(combination, strategy_options or {}),
                precision=combination.precision,
                max_steps=STEPS,
                max_epochs=-1,
                use_distributed_sampler=False,
                num_sanity_val_steps=0,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                inference_mode=False,
                deterministic=True,
                gradient_clip_val=0.5,
                callbacks=[
                    *(TokenCounters(), SkipAwareLR(warmup_updates=2)),
                    *(callbacks := build_telemetry(TelemetryOptions(hang_seconds=None), Path(tempfile.gettempdir()))),
                    *(keep, Votes(run_dir=tempfile.gettempdir())),
                ],
                default_root_dir=tempfile.gettempdir(),
                **{"log_every_n_steps": 100, "val_check_interval": STEPS, "check_val_every_n_epoch": None, **options},
            )
            decoder_config = (
                replace(mix(SHAPE, parts, PARTS), **(shape or {})) if parts else replace(SHAPE, **(shape or {}))
            )
            adapter = build_adapter(combination.adapter)
            module = GenesisModule(
                decoder_config,
                algorithm_of(combination.optimizer),
                adapter=adapter,
                attention=attention,
                float8=Float8Options() if has_float8 else None,
                objective=build_objective(combination.objective, has_adapter=adapter is not None, shape=decoder_config),
            )
            module.base_format = choose_base_format(combination.adapter)
            trainer.fit(module, datamodule=Windows(combination.objective))
        except (UserError, ValueError) as error:
            if keep.num_steps:
                raise
            return {"refused": " ".join(str(error).split())}
    assert keep.num_steps == STEPS, keep.num_steps
    return {
        "syncs": keep.syncs,
        "kernels": keep.kernels,
        "casts": keep.casts,
        "num_bytes": keep.num_bytes,
        "memory": keep.memory,
        "moved": keep.moved,
        "peak_bytes": keep.peak_bytes,
        "lines": watch.lines,
        "operators": sorted(watch.operators),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "timed_steps": sum(each.state_dict()["num_steps"] for each in callbacks if isinstance(each, StepTimer)),
        "num_streams_entered": len(device.STREAMS_ENTERED),
    }
