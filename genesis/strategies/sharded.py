"""Sharded: every rank holds a part of the parameters, gradients and optimizer state (FSDP2)."""

from datetime import timedelta
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from genesis.errors import UserError
from genesis.model.decoder import Decoder
from genesis.strategies.skew import ForwardSkewWatchdog
from genesis.strategies.start import Launcher, Start
from genesis.strategies.wrap import ActivationCheckpointing, ShardOptions, apply_wrappers

DType = Literal["float32", "bfloat16"]


class Sharded(ModelParallelStrategy):
    """FSDP2 over all ranks, one or many; all of them read different data.

    Args:
        shard: `full` frees a unit's parameters after its forward and gathers them again in backward; `grad_op` keeps
            them from forward to backward (gradients and optimizer state are sharded all the same); `hybrid` shards as
            `full` within a group of `ranks_per_shard_group` ranks and replicates over the groups.
        ranks_per_shard_group: For `hybrid`; by default the ranks of one node.
        blocks_per_unit: Blocks whose parameters are gathered by one collective.
        max_gathers_in_flight: Units gathered or being gathered at once; 1 prefetches nothing.
        gather_dtype: In what parameters are gathered and computed; by default bfloat16 under `bf16-mixed`, else as
            they are.
        reduce_dtype: In what gradients are reduced.
        cpu_offload: Whether parameters, gradients and optimizer state live in CPU memory between uses.
        activation_checkpointing: `none`, `block`, or n for every n-th block.
        compile_blocks: Whether each block is compiled by torch.compile.
        forward_skew_seconds: A rank that is alone in a forward for longer ends the run with its name.
        process_group_backend: `gloo` or `nccl`; by default the one of the device.
        timeout_seconds: How long a collective may wait.

    Attributes:
        start: What the ranks compare when they have met.
    """

    def __init__(
        self,
        shard: Literal["full", "grad_op", "hybrid"] = "full",
        ranks_per_shard_group: int | None = None,
        blocks_per_unit: int = 1,
        max_gathers_in_flight: int = 2,
        gather_dtype: DType | None = None,
        reduce_dtype: DType = "float32",
        cpu_offload: bool = False,
        activation_checkpointing: ActivationCheckpointing = "none",
        compile_blocks: bool = False,
        forward_skew_seconds: float = 60.0,
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_seconds),
        )
        self.shard = shard
        self.ranks_per_shard_group = ranks_per_shard_group
        self.blocks_per_unit = blocks_per_unit
        self.max_gathers_in_flight = max_gathers_in_flight
        self.gather_dtype = gather_dtype
        self.reduce_dtype = reduce_dtype
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = activation_checkpointing
        self.compile_blocks = compile_blocks
        self.forward_skew_seconds = forward_skew_seconds
        self.start = Start()
        self._watchdog: ForwardSkewWatchdog | None = None

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Joins the ranks and makes the mesh.

        All ranks are data-parallel; by default the base would make those of a node tensor-parallel, on the same data.
        """
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()

    def _setup_distributed(self) -> None:
        # Before the mesh, whose making is a collective: ranks of another start must not take part in one.
        self.start.begin()
        super()._setup_distributed()
        self.start.check(self.node_rank)

    def setup(self, trainer: "pl.Trainer") -> None:
        """Prepares training; starts the watchdog over forwards that one rank enters alone."""
        # A parameter first gathered under inference mode is an inference tensor for ever: backward would fail on it.
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            loop.inference_mode = False
        super().setup(trainer)
        if self.world_size > 1:
            assert self.lightning_module is not None
            self._watchdog = ForwardSkewWatchdog(self.lightning_module, self.forward_skew_seconds)
            self._watchdog.start()

    def teardown(self) -> None:
        """Ends the watchdog, what the start began, and what the base did."""
        self.start.end()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        super().teardown()

    def model_to_device(self) -> None:
        """Moves what is not sharded; offloaded parameters stay in CPU memory."""
        if not self.cpu_offload:
            super().model_to_device()

    @property
    def parameter_device(self) -> torch.device:
        """Where parameters live between steps."""
        return torch.device("cpu") if self.cpu_offload else self.root_device

    def apply_to(self, decoder: Decoder) -> None:
        """Applies this strategy's wrappers to a freshly built decoder, in place."""
        gather = self.gather_dtype or self._default_gather_dtype()
        precision = MixedPrecisionPolicy(
            param_dtype=None if gather is None else getattr(torch, gather),
            reduce_dtype=getattr(torch, self.reduce_dtype),
            # Rotary tables stay in float32: positions beyond 256 are not all different in bfloat16.
            cast_forward_inputs=False,
        )
        options = ShardOptions(
            mesh=self._shard_mesh(),
            reshard_after_forward=self.shard != "grad_op",
            blocks_per_unit=self.blocks_per_unit,
            max_gathers_in_flight=self.max_gathers_in_flight,
            precision=precision,
            offload_to_cpu=self.cpu_offload,
        )
        apply_wrappers(decoder, self.activation_checkpointing, self.compile_blocks, options)

    def _default_gather_dtype(self) -> DType | None:
        plugin = self.precision_plugin
        return "bfloat16" if isinstance(plugin, MixedPrecision) and plugin.precision == "bf16-mixed" else None

    def _shard_mesh(self) -> DeviceMesh:
        if self.shard != "hybrid":
            return self.device_mesh["data_parallel"]
        group = self.ranks_per_shard_group or self.num_processes
        if group < 1 or self.world_size % group:
            divisors = [n for n in range(1, self.world_size + 1) if self.world_size % n == 0]
            raise UserError(
                f"ranks_per_shard_group {group} does not divide {self.world_size} ranks; one of {divisors} does"
            )
        return init_device_mesh(
            self.root_device.type, (self.world_size // group, group), mesh_dim_names=("replicate", "shard")
        )
