"""FSDP2 gathers the weights of float8 layers in float8: each rank casts its rows, with one scale for the whole weight.

A gather then moves one byte for each element, and the weight is cast once and not again by each rank's products. The
scale follows from the float32 shards of all ranks, so that a weight has the same float8 values under every strategy.

torchao's own way wraps the parameter in a tensor subclass without an address, on which digests, staging and restores
of a checkpoint would fail. Here the parameter stays an ordinary tensor: FSDP2 asks the local shard for
`fsdp_pre_all_gather` and `fsdp_post_all_gather`, which are attributes of that tensor object.
"""

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from genesis.model.float8 import find_float8_layers


def gather_in_float8(decoder: nn.Module, mesh: DeviceMesh) -> None:
    """Makes FSDP2 gather the weights of a decoder's float8 layers in float8. Does not communicate.

    From now on, every forward of the decoder computes the scales of all weights at its beginning, with one reduction
    over the ranks that shard them.

    Args:
        decoder: Sharded.
        mesh: Of `fully_shard`: one axis (shard), or two (replicate, shard).
    """
    if find_float8_layers(decoder):
        # Before FSDP2's own hook, which looks in the first forward which tensors have methods for a gather.
        decoder.register_forward_pre_hook(_SetScales(mesh.get_group(mesh.ndim - 1)), prepend=True)


class _SetScales:
    """A hook before each forward of the decoder.

    Args:
        group: The ranks that shard a weight.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._weights: list[_Float8Weight] = []

    def __call__(self, decoder: nn.Module, *_: Any) -> None:
        if not self._weights:  # before the first forward, because what allocates or moves a model replaces tensors
            self._weights = [_Float8Weight(layer) for layer in find_float8_layers(decoder).values()]
        with torch.no_grad():
            largest = torch.stack([weight.find_largest() for weight in self._weights])
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
            scales = import_module("torchao.float8.float8_utils").amax_to_scale(largest, self._weights[0].dtype)
            for weight, scale in zip(self._weights, scales.unbind(), strict=True):
                weight.scale = scale


class _Float8Weight:
    """The weight of one layer, as FSDP2 gathers it.

    Args:
        layer: Its weight is a DTensor: no unit is gathered now.
    """

    def __init__(self, layer: Any) -> None:
        tensors: Any = import_module("torchao.float8.float8_training_tensor")
        self._tensor_class, self._role = tensors.Float8TrainingTensor, tensors.GemmInputRole.WEIGHT
        self._cast = tensors.hp_tensor_and_scale_to_float8
        self._mm_config = layer.linear_mm_config
        self.dtype: torch.dtype = layer.config.cast_config_weight.target_dtype
        self.scale: Tensor | None = None
        assert isinstance(layer.weight, DTensor), "sharded, and not gathered"
        self._weight: Any = layer.weight
        shard: Any = layer.weight._local_tensor
        shard.fsdp_pre_all_gather = self._before_gather
        shard.fsdp_post_all_gather = self._after_gather
        self._shard: Tensor = shard

    def find_largest(self) -> Tensor:
        """Returns the largest absolute value of this rank's rows; 0 without rows."""
        assert self._weight._local_tensor is self._shard, "a replaced tensor would be gathered in another dtype"
        rows: Tensor = self._shard.detach()
        return torch.linalg.vector_norm(rows, torch.inf) if rows.numel() else rows.new_zeros(())

    def _before_gather(
        self, mesh: DeviceMesh, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        assert self.scale is not None, "a forward of the decoder sets it"
        rows: Tensor = self._cast(self._shard.detach(), self.scale, self.dtype, self._mm_config, self._role)._data
        data = rows.view(torch.uint8)  # gloo knows no float8
        # FSDP2 gathers as many rows from each rank.
        num_missing = -(-size[0] // mesh.size()) - len(data)
        return (nn.functional.pad(data, (0, 0, 0, num_missing)) if num_missing else data,), (self.scale,)

    def _after_gather(
        self, gathered: tuple[Tensor], metadata: tuple[Tensor], dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        (data,), (scale,) = gathered, metadata
        if out is not None:  # it has the memory that was gathered into
            out._scale = scale
            return None
        values = data.view(self.dtype)
        return self._tensor_class(values, scale, dtype, self._mm_config, gemm_input_role=self._role), (data,)
