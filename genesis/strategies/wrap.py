"""The wrappers of a decoder, applied in the one order in which they work together.

    1. compile                    innermost: sees the computation of one block, and nothing of the communication
    2. activation checkpointing   recomputes what a block kept, with that block's gathered parameters
    3. shard                      outermost: its hooks gather parameters before the forward, and free them after it

A checkpoint within the compiled function would be no better, and a trap: where anything breaks the graph inside of it,
such as the hooks of a mixture's router or a kernel for documents, torch.compile runs the whole block eagerly and does
not warn.

Groups of blocks that are recomputed together (`genesis.strategies.recompute`) lie outside of all three: the second
forward of a group runs the compiled blocks and FSDP2's hooks, which gather what is not gathered in this backward.

Checkpointing and compilation replace `forward` of a block, or `run_blocks` of the decoder, and leave the module tree
alone, so that parameter names, and with them checkpoints, are the same under every option.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch._dynamo.decorators import maybe_mark_dynamic
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from genesis.base.device import CPU, find_kind
from genesis.base.errors import UserError
from genesis.model.compilation import compile_each_shape
from genesis.model.language_model import LanguageModel
from genesis.model.recomputation import ActivationCheckpointing, check_groups
from genesis.optim.offload_share import spread_units
from genesis.strategies.activation_offload import ActivationOffload
from genesis.strategies.expert_parallel import list_experts, share_experts
from genesis.strategies.recompute import apply_recomputation, split_blocks
from genesis.strategies.tensor_parallel import place_by_cut


@dataclass(frozen=True)
class ShardOptions:
    """How FSDP2 shards a decoder.

    Args:
        mesh: One axis (shard), or two (replicate, shard) for hybrid sharding. Gradients are summed over all of it.
        reshard_after_forward: Whether a unit's parameters are freed between its forward and its backward.
        blocks_per_unit: Blocks whose parameters are gathered by one collective.
        max_gathers_in_flight: Units that are gathered or being gathered at once: the one that computes and those
            prefetched.
        precision: The dtypes of gathered parameters and of reduced gradients.
        cpu_offload: Share of the units of blocks whose parameters, gradients and optimizer states are in the host's
            memory between uses; 1 for the whole model.
        uncut: Where parameters live that tensor parallelism does not cut, if `mesh` is that of those which it cuts;
            None if it cuts none.
        experts: The ranks that share the experts, and the mesh over which the experts of a rank are sharded; None if
            experts are sharded like other weights.
        stages: The stages of a pipeline on this rank, each of which is a root that holds the units of its blocks.
    """

    mesh: DeviceMesh
    reshard_after_forward: bool
    blocks_per_unit: int
    max_gathers_in_flight: int
    precision: MixedPrecisionPolicy
    cpu_offload: float
    uncut: DeviceMesh | None = None
    experts: tuple[DeviceMesh, DeviceMesh] | None = None
    stages: Sequence[nn.Module] = ()


def apply_wrappers(
    decoder: LanguageModel,
    activation_checkpointing: ActivationCheckpointing = "none",
    has_compiled_blocks: bool = False,
    shard: ShardOptions | None = None,
    *,
    blocks_per_recomputation: int = 1,
    offload: ActivationOffload | None = None,
) -> None:
    """Applies the wrappers to `decoder` in place, in their order. Does not communicate.

    Args:
        decoder: Freshly built, on the meta device or not.
        activation_checkpointing: See `ActivationCheckpointing`.
        has_compiled_blocks: Whether each block's forward is compiled by torch.compile.
        shard: How to shard, or None.
        blocks_per_recomputation: Blocks that are recomputed together.
        offload: Moves the inputs of recomputed blocks to the host; None to leave them on the device.

    Raises:
        UserError: An option is out of its range.
    """
    if shard is not None:
        if shard.blocks_per_unit < 1:
            raise UserError(f"blocks_per_unit is {shard.blocks_per_unit}; it must be at least 1")
        check_groups(
            activation_checkpointing,
            blocks_per_recomputation,
            shard.blocks_per_unit,
            has_offload=offload is not None,
        )
    if has_compiled_blocks:
        for block in decoder.numbered_blocks.values():
            block.forward = partial(_run_compiled, compile_each_shape(block.forward))
    apply_recomputation(decoder, activation_checkpointing, blocks_per_recomputation, offload)
    if shard is not None:
        is_group = blocks_per_recomputation > 1 or offload is not None
        _apply_shard(decoder, shard, blocks_per_recomputation // shard.blocks_per_unit if is_group else None)


def _run_compiled(
    compiled: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> Any:
    # The number of documents is a size, too. With the mark, one form serves all numbers. If a kernel needs a fixed size
    # after all, torch ignores the mark.
    for argument in (*arguments, *options.values()):
        offsets = getattr(argument, "offsets", None)  # the one field that `SequenceMixerConfig.build_metadata` names
        if offsets is not None:
            maybe_mark_dynamic(offsets, 0)
    return compiled(*arguments, **options)


def _apply_shard(decoder: LanguageModel, options: ShardOptions, units_per_group: int | None) -> None:
    if options.max_gathers_in_flight < 1:
        raise UserError(f"max_gathers_in_flight is {options.max_gathers_in_flight}; it must be at least 1")
    units_of_stages = list_units(decoder, options.blocks_per_unit)
    units = [unit for of_stage in units_of_stages for unit in of_stage]
    policies = _choose_policies(decoder, units, options.cpu_offload)
    place = None if options.uncut is None else place_by_cut(options.uncut)
    # The innermost units first and the root last: `fully_shard` takes only the parameters that no unit has taken.
    # What no forward reads is never gathered, while the root would gather it and keep it. Without a dtype to reduce in:
    # where gradients are not reduced, FSDP2 would look for those of a gathered parameter.
    idle = decoder.idle_modules
    for module in idle:
        fully_shard(module, mesh=options.mesh, shard_placement_fn=place, offload_policy=policies[module])
    float32 = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    in_idle = {part for module in idle for part in module.modules()}
    for part in _list_float32(decoder):
        if part in in_idle:
            continue
        fully_shard(
            part,
            mesh=options.mesh,
            reshard_after_forward=options.reshard_after_forward,
            shard_placement_fn=place,
            mp_policy=float32,
            offload_policy=policies[part],
        )
    if options.experts is not None:
        share_experts(
            decoder,
            *options.experts,
            reshard_after_forward=options.reshard_after_forward,
            precision=options.precision,
            policies=policies,
        )
    for unit in units:
        fully_shard(
            unit if len(unit) > 1 else unit[0],
            mesh=options.mesh,
            reshard_after_forward=options.reshard_after_forward,
            shard_placement_fn=place,
            mp_policy=options.precision,
            offload_policy=policies[unit[0]],
        )
    # The root (embedding, final norm, head) is last in forward and first in backward, so it is not freed in between.
    for root in options.stages or (decoder,):
        fully_shard(
            root,
            mesh=options.mesh,
            reshard_after_forward=False,
            shard_placement_fn=place,
            mp_policy=options.precision,
            offload_policy=policies[decoder],
        )
        _sum_gradients(root)
    for of_stage in units_of_stages:
        # Not over the end of a stage: between two stages of a rank, the other stages of the pipeline run.
        _limit_prefetch(of_stage, options.max_gathers_in_flight - 1, units_per_group)


def list_units(decoder: LanguageModel, blocks_per_unit: int) -> list[list[list[nn.Module]]]:
    """Returns the blocks of each unit of each run of consecutive blocks: the stages of this rank, or one run of all."""
    blocks = decoder.numbered_blocks
    runs = groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0])
    numbers = [[number for _, number in run] for _, run in runs]
    return [
        [[blocks[number] for number in unit] for unit in split_blocks(range(run[0], run[-1] + 1), blocks_per_unit)]
        for run in numbers
    ]


def _choose_policies(
    decoder: LanguageModel, units: list[list[nn.Module]], share: float
) -> dict[nn.Module, OffloadPolicy]:
    """Returns where each module keeps its parameters between uses."""
    on_device = OffloadPolicy()
    # Pinned memory needs an accelerator; without one the default policy fails.
    on_host = CPUOffloadPolicy(pin_memory=find_kind() != CPU) if share else on_device
    policies: dict[nn.Module, OffloadPolicy] = dict.fromkeys(decoder.modules(), on_host if share >= 1 else on_device)
    for unit, is_on_host in zip(units, spread_units(len(units), share), strict=True):
        for block in unit:
            policies.update(dict.fromkeys(block.modules(), on_host if is_on_host else on_device))
    return policies


def allocate_sharded(decoder: LanguageModel, device: torch.device, blocks_per_unit: int, cpu_offload: float) -> None:
    """Allocates a sharded decoder that is on the meta device: what is offloaded on the host, the rest on `device`."""
    host = torch.device(CPU)
    units = [unit for of_stage in list_units(decoder, blocks_per_unit) for unit in of_stage]
    for unit, is_on_host in zip(units, spread_units(len(units), cpu_offload), strict=True):
        for block in unit:
            block.to_empty(device=host if is_on_host else device)
    of_root = host if cpu_offload >= 1 else device
    in_blocks = {module for unit in units for block in unit for module in block.modules()}
    for module in reversed(list(decoder.modules())):  # the decoder is the last, where FSDP2 takes note of the others
        if module not in in_blocks:
            module.to_empty(device=of_root, recurse=False)


def _list_float32(module: nn.Module) -> list[nn.Module]:
    """Returns the parts that are gathered in float32, each by itself: a unit gathers its parameters in one dtype."""
    return [part for part in module.modules() if getattr(part, "keeps_float32", False)]


def _sum_gradients(root: nn.Module) -> None:
    """Makes every unit's reduction a sum, so that the scale of the loss does not depend on how many ranks share it.

    FSDP2's own average divides by the ranks of the unit's mesh, which need not be the ranks that read different data.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The factor alone would need a product before the sum, which gloo does not support.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _limit_prefetch(units_of_blocks: list[list[nn.Module]], num_prefetched: int, units_per_group: int | None) -> None:
    """Makes each unit prefetch the next `num_prefetched` units in forward and the previous ones in backward.

    The small units within a unit are prefetched with it.

    Args:
        units_of_blocks: The blocks of each unit.
        num_prefetched: Units to prefetch.
        units_per_group: Units that are recomputed together; None if units are recomputed alone or not at all. Only the
            last one of a group prefetches those of the next group: when a group is recomputed, the next one has run
            backward already and would be gathered in vain. FSDP2 then treats the last unit as in a backward, in which
            it prefetches none of the next.
    """
    first_blocks = (unit[0] for unit in units_of_blocks)
    units: list[FSDPModule] = [block for block in first_blocks if isinstance(block, FSDPModule)]
    for index, (unit, blocks) in enumerate(zip(units, units_of_blocks, strict=True)):
        inner = (part for block in blocks for part in (*_list_float32(block), *list_experts(block)))
        within = [part for part in inner if isinstance(part, FSDPModule)]
        ahead = within if num_prefetched else []
        end = index + 1 + num_prefetched
        if units_per_group is not None and (index + 1) % units_per_group:
            end = min(end, (index // units_per_group + 1) * units_per_group)
        unit.set_modules_to_forward_prefetch([*ahead, *units[index + 1 : end]])
        previous = units[max(0, index - num_prefetched) : index][::-1]
        # An empty list would mean FSDP2's own choice (one unit); a unit that "prefetches" itself prefetches nothing.
        unit.set_modules_to_backward_prefetch([*ahead, *previous] or [unit])
        for part in within:
            part.set_modules_to_backward_prefetch([part])


def set_gradient_sync(module: nn.Module, is_reduced: bool) -> None:
    """Sets whether the next backward reduces gradients over ranks.

    Only FSDP2 needs this. Under DDP the reducer is armed once per training step, after its forward, so that
    backwards which `training_step` runs itself stay local.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            # Without recursion, because this loop visits every unit already.
            child.set_requires_gradient_sync(is_reduced, recurse=False)


def set_resharding(decoder: LanguageModel, *, after_forward: bool, after_backward: bool) -> None:
    """Sets whether the units of a sharded decoder free their parameters after their next forward and backward."""
    root: nn.Module = decoder
    for child in root.modules():
        if isinstance(child, FSDPModule):
            # The root is last in forward and first in backward, so it is never freed between them.
            child.set_reshard_after_forward(after_forward and child is not root, recurse=False)
            child.set_reshard_after_backward(after_backward, recurse=False)


def free_gathered_parameters(module: nn.Module) -> None:
    """Frees the parameters that a forward without backward left gathered under sharding. Does not communicate."""
    # The root keeps its parameters after a forward, for the backward that follows in training and not in validation.
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
