"""Tensor parallelism: ranks share the matrices of each layer, and between layers the tokens of each row.

    weights that are cut    rows of the matrices that read the stream, columns of those that write to it, rows of the
                            vocabulary: DTensors over tp, which FSDP2 shards further over the ranks that read other data
    the other weights       sharded by FSDP2 over all of these ranks; each rank has the gradient of its own tokens or
                            heads, and FSDP2's reduction adds them

A part that is cut gets whole rows of all ranks, and the sum of all outputs is scattered: two collectives in the
forward and two in the backward of each part. Norms, dropout, the residual stream and mixtures of experts see this
rank's tokens alone (sequence parallelism).

Every collective is waited for where it begins: a result that torch still waits for loses its gradient in a compiled
block, without an error.

B  sequences     S  tokens of a row     T  tokens of this rank in a row     D  model width
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from genesis.base.errors import UserError, numbered
from genesis.model.adapter import AdaptedLinear, use_rows
from genesis.strategies.axis_traffic import AxisTraffic, reduced_bytes


class RowShare:
    """This rank's share of the tokens of each row: a `SequenceShare`.

    Args:
        group: The ranks that share rows, in the order of their tokens.
        traffic: Counts what this rank sends to the others.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: AxisTraffic | None = None) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.traffic = traffic or AxisTraffic()

    def cut(self, rows: Tensor) -> Tensor:
        """Returns this rank's tokens of whole rows (B S ...). Does not communicate.

        Raises:
            UserError: The ranks do not divide the tokens of a row.
        """
        if rows.shape[1] % self.size:
            raise UserError(
                f"rows have {rows.shape[1]} tokens, which {numbered(self.size, 'ranks')} cannot share: make "
                f"data.seq_len a multiple of {self.size}"
            )
        return rows.chunk(self.size, dim=1)[self.rank]

    def gather(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B S D"]:
        """Returns whole rows of the tokens of all ranks. Communicates, like its backward, which adds gradients."""
        rows = _wait(functional.all_gather_single_autograd(x.contiguous(), 1, self.group))
        return self.traffic.note_both(rows, x.nbytes * (self.size - 1))

    def scatter(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B T D"]:
        """Returns this rank's tokens of the sum of all ranks' rows. Communicates, like its backward."""
        own = _wait(functional.reduce_scatter_single_autograd(x.contiguous(), "sum", 1, self.group))
        return self.traffic.note_both(own, own.nbytes * (self.size - 1))

    def sum_over_row(self, counts: Tensor) -> Tensor:
        """Returns the sum of what the ranks have counted in their tokens, without a gradient. Communicates."""
        self.note_reduction(counts)
        return _wait(functional.all_reduce(counts.detach(), "sum", self.group))

    def note_reduction(self, x: Tensor) -> None:
        """Counts a reduction of a tensor over all ranks."""
        self.traffic.note(reduced_bytes(x, self.size))


class MatrixCutter:
    """Cuts the parameters of parts among ranks: the `MatrixShares` of this rank.

    Args:
        mesh: The ranks, one axis.
        traffic: Counts what this rank sends to the others.
    """

    def __init__(self, mesh: DeviceMesh, traffic: AxisTraffic | None = None) -> None:
        self._mesh, self._traffic = mesh, traffic or AxisTraffic()
        self.size, self.rank = mesh.size(), mesh.get_local_rank()

    def cut(self, module: nn.Module, name: str, dim: int = 0) -> None:
        """Replaces a parameter by a DTensor, of which this rank holds an even part along `dim`."""
        parameter = module.get_parameter(name)
        assert parameter.shape[dim] % self.size == 0, "check_tensor_share has checked the sizes"
        part = distribute_tensor(parameter.data, self._mesh, [Shard(dim)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))

    def cut_linear(self, layer: nn.Linear, dim: int) -> None:
        """Leaves this rank even rows (0) or columns (1) of a linear layer and its adapter."""
        assert dim == 0 or layer.bias is None, "each rank would add the bias"
        self.cut(layer, "weight", dim)
        if layer.bias is not None:
            self.cut(layer, "bias")
        if isinstance(layer, AdaptedLinear):
            self.cut(layer, "lora_B" if dim == 0 else "lora_A", dim)
            if dim == 1:
                layer.column_ranks = self
            elif layer.lora_magnitude is not None:
                self.cut(layer, "lora_magnitude")
        else:
            use_rows(layer, None)

    def use_rows(self, layer: nn.Linear, rows: slice | Tensor) -> None:
        """Makes a linear layer multiply some rows; its gradient is 0 in the others, and FSDP2 adds those of ranks."""
        use_rows(layer, rows)

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks, and sums its gradient. Communicates."""
        total: Tensor = _Sum.apply(x, self._mesh.get_group())  # type: ignore[no-untyped-call]  # torch's
        return self._traffic.note_both(total, reduced_bytes(x, self.size))


def _wait(pending: Tensor) -> Tensor:
    waited: Tensor = functional.wait_tensor(pending)  # type: ignore[no-untyped-call]  # torch's
    return waited


class _Sum(torch.autograd.Function):
    """A sum of which each rank makes another use, so that the gradient of an addend is the sum of all gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _wait(functional.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _wait(functional.all_reduce(grads[0].contiguous(), "sum", ctx.group)), None


def place_by_cut(uncut: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Returns where FSDP2 shards each parameter: cut ones over the mesh of their unit, the others over `uncut`.

    So the gradient of a parameter that is not cut, of which each rank has its own tokens' or heads' part, is summed by
    the reduction that shards it.
    """
    if uncut.ndim == 1:
        info = _fsdp_common.FSDPMeshInfo(uncut, shard_mesh_dim=0)
    else:
        info = _fsdp_common.HSDPMeshInfo(uncut, replicate_mesh_dim=0, shard_mesh_dim=1)

    def place(parameter: nn.Parameter) -> Any:
        return Shard(0) if isinstance(parameter, DTensor) else _fsdp_common.ShardPlacementResult(Shard(0), info)

    return place


def check_torch(num_ranks: int) -> None:
    """Checks that torch has what tensor parallelism needs.

    Raises:
        UserError: It has not.
    """
    if not hasattr(_fsdp_common, "ShardPlacementResult"):  # nor has torch the autograd of these collectives
        raise UserError(
            f"tensor_parallel is {num_ranks}, which needs torch 2.13; this is {torch.__version__}: set it to 1"
        )
