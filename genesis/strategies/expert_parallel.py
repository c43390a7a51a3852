"""Expert parallelism: the ranks of a group share the experts, and send each other the rows of their tokens.

Each rank of a group holds an equal number of consecutive experts. Before the experts, a rank sends each row to the rank
that holds the row's expert, and afterwards the outputs travel back; gradients take the same way. No row is dropped, so
that splits are uneven and the host reads their sizes, once for each layer and forward.

N  rows of this rank, sorted by expert     M  rows of this rank's experts, from all ranks of the group
G  experts     L  experts of this rank     D  model width
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from genesis.base.errors import UserError, numbered
from genesis.model.experts import Experts
from genesis.model.language_model import LanguageModel
from genesis.model.mixture import Mixture


class _Splits(NamedTuple):
    sent: list[int]
    received: list[int]


class Flight:
    """Rows on their way to the experts of other ranks. On an accelerator the transfer runs while others compute.

    Args:
        rows: The rows that arrive, by source and expert; reading them waits.
        counts: The number of rows of each of this rank's experts, for each source.
        splits: The number of rows from and to each rank.
        group: The ranks.
    """

    def __init__(
        self,
        rows: Float[Tensor, "M D"],
        counts: Int64[Tensor, "sources L"],
        splits: _Splits,
        group: dist.ProcessGroup,
    ) -> None:
        self._rows, self._counts, self._splits, self._group = rows, counts, splits, group

    # What it computes has another size in every forward, for which torch.compile would compile again. Outside of the
    # graph, the shared expert's graph does not see the rows either: a graph waits for all that it gets at its start.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def finish(self, run: Callable[[Tensor, Tensor], Tensor]) -> Float[Tensor, "N D"]:
        """Returns the outputs of the experts for the rows that were sent, in their order.

        Args:
            run: Computes this rank's experts, given rows that are sorted by expert and the number of each.
        """
        num_sources, num_experts = self._counts.shape
        expert_of_block = torch.arange(num_experts, device=self._counts.device).repeat(num_sources)
        expert_of_row = expert_of_block.repeat_interleave(self._counts.flatten(), output_size=len(self._rows))
        order = expert_of_row.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        made = run(_permute(self._rows, order, inverse), self._counts.sum(0))
        made = _permute(made, inverse, order)
        back = all_to_all_single_autograd(made, self._splits.sent, self._splits.received, self._group)
        # Here and not in the graph that comes next: while torch.compile compiles one, a wait holds Python's lock, which
        # gloo's thread needs where blocks are recomputed, so that neither would go on.
        waited: Tensor = wait_tensor(back)  # type: ignore[no-untyped-call]  # torch's
        return waited


class Exchange:
    """Sends rows to the ranks of a group that hold their experts.

    Args:
        group: The ranks, in the order of their experts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    # The sizes of the splits are known on the host alone, so that torch.compile would break its graph here anyway.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def send(self, rows: Float[Tensor, "N D"], counts: Int64[Tensor, " G"]) -> Flight:
        """Begins to send rows. Communicates; every rank of the group calls it for the same layers in the same order.

        Args:
            rows: The rows, sorted by expert.
            counts: The number of rows of each expert.
        """
        by_rank = counts.view(self._group.size(), -1)
        arriving = torch.empty_like(by_rank)
        dist.all_to_all_single(arriving, by_rank.contiguous(), group=self._group)
        splits = _Splits(*torch.stack((by_rank.sum(1), arriving.sum(1))).tolist())  # the layer's wait for the device
        received: Tensor = all_to_all_single_autograd(rows.contiguous(), splits.received, splits.sent, self._group)
        return Flight(received, arriving, splits, self._group)


def _permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    permuted: Tensor = _Permute.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return permuted


class _Permute(torch.autograd.Function):
    """Rows in another order; a gather in the backward, too, so that there is no sum whose order could vary."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


def share_experts(
    decoder: LanguageModel,
    ranks: DeviceMesh,
    shard: DeviceMesh,
    *,
    reshard_after_forward: bool,
    precision: MixedPrecisionPolicy,
    policies: Mapping[nn.Module, OffloadPolicy],
) -> None:
    """Divides the experts of a freshly built decoder among ranks, and shards what each of them holds, in place.

    Args:
        decoder: The decoder, on the meta device or not, before its blocks are sharded.
        ranks: The ranks that share the experts.
        shard: The ranks that hold the same experts and shard them: one axis, or two under hybrid sharding.
        reshard_after_forward: As for `fully_shard`.
        precision: As for `fully_shard`.
        policies: Where each module keeps its parameters between uses.
    """
    for mixture in (module for module in decoder.modules() if isinstance(module, Mixture)):
        experts = mixture.experts
        for part in experts.modules():  # the experts themselves, and their adapters
            for name, parameter in list(part.named_parameters(recurse=False)):
                held = distribute_tensor(parameter.data, ranks, [Shard(0)], src_data_rank=None)
                part.register_parameter(name, nn.Parameter(held, requires_grad=parameter.requires_grad))
        mixture.exchange = Exchange(ranks.get_group())
        fully_shard(
            experts,
            mesh=shard,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=partial(_place, ranks.size(), shard.size(-1)),
            mp_policy=precision,
            offload_policy=policies[experts],
        )


def _place(num_holders: int, num_shards: int, parameter: nn.Parameter) -> Shard:
    """Returns how ranks that hold the same experts shard a stack: FSDP2 divides other dimensions than the first evenly.

    By experts where every rank gets as many, so that an optimizer such as Muon finds whole matrices; else by the rows
    of each, or by the columns where the rows cannot be divided, as those of an adapter of low rank.
    """
    sizes = [parameter.shape[0] // num_holders, *parameter.shape[1:]]
    found = next((dim for dim, size in enumerate(sizes) if size % num_shards == 0), None)
    if found is None:
        raise UserError(
            f"{numbered(num_shards, 'ranks')} hold the same experts and cannot share a stack of "
            f"{numbered(sizes[0], 'tensors')} of {' by '.join(map(str, sizes[1:]))}: choose expert_parallel or "
            f"model.adapter.rank so that {numbered(num_shards, 'divides')} one of them"
        )
    return Shard(found)


def list_experts(module: nn.Module) -> list[nn.Module]:
    """Returns the experts in a module that are units of their own."""
    return [part for part in module.modules() if isinstance(part, Experts)]
