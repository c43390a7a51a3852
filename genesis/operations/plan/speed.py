"""The time of a step: from a measured rate, or from a device's published peak and an assumed MFU.

The estimate is for comparing layouts: what activation checkpointing computes twice, and what a link must carry while
the device computes. Small products, kernels that wait for the host, and a slow loader are not in it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import DecoderConfig
from genesis.model.describe import count_flops_per_token, describe
from genesis.model.mixture import MixtureConfig
from genesis.operations.plan.axes import AxisTimes, find_link, time_axes
from genesis.operations.plan.bandwidths import Bandwidths
from genesis.operations.plan.layout import FLOAT32_BYTES, Layout, Workload, product_bytes
from genesis.operations.plan.timeline import Timeline, play_step

ASSUMED_MFU: Final = 0.4
_HOST_BYTES_PER_SECOND: Final = 20e9
"""Assumed rate at which a host's update reads and writes memory."""


_MOST_EXPOSED: Final = 100.0
"""A measured step may have been so many times as long as its products."""
_HALVINGS: Final = 40


@dataclass(frozen=True)
class Rate:
    """The rate at which one device trains.

    Args:
        flops_per_second: Of the model's own arithmetic, without what is computed twice.
        source: Where it comes from.
        is_assumed: Whether nothing has measured it.
    """

    flops_per_second: float
    source: str
    is_assumed: bool


@dataclass(frozen=True)
class StepTime:
    """The time of a step.

    Args:
        seconds: The whole step.
        compute_seconds: The products.
        exposed_seconds: What communication and offload add.
        offload_seconds: What of that copies to and from the host's memory, and the update there, add.
        tokens_per_second: Over all ranks, with padding.
        axes: What tensor, context and pipeline parallelism add, by axis: a part of `exposed_seconds`.
    """

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    offload_seconds: float
    tokens_per_second: float
    axes: AxisTimes


@lru_cache(maxsize=256)
def _count_flops(decoder: DecoderConfig, seq_len: int, adapter: AdapterConfig | None) -> tuple[float, float]:
    """Returns FLOPs of a token, and those of the forward of all blocks."""
    costs = describe(replace(decoder, max_seq_len=seq_len))
    head = 6 * decoder.num_output_rows * decoder.dim
    blocks_forward = (costs.flops_per_token + costs.attention_flops_per_token - head) / 3.0
    return count_flops_per_token(decoder, seq_len, adapter), blocks_forward


def flops_per_token(workload: Workload) -> float:
    """Returns the floating-point operations of a token's forward and backward."""
    return _count_flops(workload.decoder, workload.seq_len, workload.adapter)[0]


def time_step(workload: Workload, layout: Layout, rate: Rate, bandwidths: Bandwidths) -> StepTime:
    """Returns the estimated time of a step.

    Args:
        workload: What is trained.
        layout: How it is spread.
        rate: The rate of one device.
        bandwidths: What moves how fast.
    """
    per_token, blocks_forward = _count_flops(workload.decoder, workload.seq_len, workload.adapter)
    every_n = {"none": 0, "block": 1}.get(str(layout.activation_checkpointing), layout.activation_checkpointing)
    recomputed = 1.0 / every_n if isinstance(every_n, int) and every_n else 0.0
    num_micro_batches = workload.num_micro_batches(layout)
    # Ranks that read the same data share its products, and the rows that they send to experts.
    tokens = workload.tokens_per_step / layout.num_ranks
    per_token += teacher_flops_per_token(workload)
    compute = tokens * (per_token + recomputed * blocks_forward) / rate.flops_per_second
    timeline = play_step(workload, layout)
    passes = 2.0 + recomputed
    exposed = _expose_collectives(layout, timeline, compute, num_micro_batches, bandwidths)
    if layout.expert_parallel > 1:  # the products wait for the rows
        link = find_link("experts", layout, bandwidths)
        exposed += _time_rows(workload, layout, tokens, passes) / link.bytes_per_second
    axes = time_axes(workload, layout, bandwidths, compute, passes)
    if workload.scores_without_adapters:
        # A pipeline runs these forwards one micro-batch after the other: a rank waits for the layers of the others.
        scoring = tokens * count_flops_per_token(workload.decoder, workload.seq_len) / 3.0 / rate.flops_per_second
        axes = replace(axes, bubble=axes.bubble + (layout.pipeline_parallel - 1) * scoring)
        if layout.pipeline_parallel > 1 and layout.ranks_per_shard_group > 1:
            # Each forward gathers the stages, one after the other, and frees them.
            gather = timeline.sent.gathered / find_link("shards", layout, bandwidths).bytes_per_second
            of_forward = scoring / num_micro_batches
            exposed += layout.pipeline_parallel * num_micro_batches * max(0.0, gather - of_forward)
        compute += scoring
    exposed += axes.total
    offload = 0.0
    if layout.cpu_offload:
        trained = timeline.on_host.weights
        elements = trained // FLOAT32_BYTES
        copies = 2 * num_micro_batches * (trained + timeline.on_host.frozen) / bandwidths.to_device.bytes_per_second
        copies += trained / bandwidths.to_host.bytes_per_second
        # The gradient is read; the weight and its moments are read and written.
        of_moments = sum(workload.optimizer.parts[0].list_moment_bytes((elements,), FLOAT32_BYTES))
        of_update = 3 * FLOAT32_BYTES * elements + 2 * of_moments
        offload = max(0.0, copies - compute) + of_update / _HOST_BYTES_PER_SECOND
    offload += _time_states(timeline.state.moved, workload, bandwidths)
    seconds = compute + exposed + offload
    return StepTime(seconds, compute, exposed + offload, offload, workload.tokens_per_step / seconds, axes)


def _time_states(num_bytes: int, workload: Workload, bandwidths: Bandwidths) -> float:
    """Returns the least seconds in which offloaded optimizer states pass through the device and are back.

    Both directions work at once. A bus is taken to be the rank's own.
    """
    ways = [] if workload.is_cpu else [bandwidths.to_device, bandwidths.to_host]
    return max((num_bytes / way.bytes_per_second for way in ways), default=0.0)


def _expose_collectives(
    layout: Layout, timeline: Timeline, compute: float, num_micro_batches: int, bandwidths: Bandwidths
) -> float:
    """Returns the seconds by which gathers and reductions are longer than the products that run beside them."""
    sent, exposed = timeline.sent, 0.0
    if layout.is_sharded and layout.ranks_per_shard_group > 1:
        link = find_link("shards", layout, bandwidths).bytes_per_second
        gathers = 1 if layout.strategy == "grad_op" else 2
        if layout.pipeline_parallel > 1:
            # A stage is gathered once and stays whole; its gradients are reduced when no products are left.
            exposed += max(0.0, sent.gathered / link - compute / num_micro_batches) + sent.reduced / link
        else:
            count = 1 if layout.keeps_gathered else num_micro_batches
            exposed += count * max(0.0, gathers * sent.gathered / link - compute / num_micro_batches)
            reductions = num_micro_batches if layout.reduces_each else 1
            exposed += reductions * max(0.0, sent.reduced / link - compute / num_micro_batches / 2.0)
    if layout.num_ranks > 1 and (not layout.is_sharded or layout.strategy == "hybrid"):
        link, ranks = find_link("copies", layout, bandwidths).bytes_per_second, layout.num_ranks
        send = 2.0 * timeline.state.gradients * (ranks - 1) / ranks / link
        exposed += max(0.0, send - compute / num_micro_batches / 2.0)
        if layout.strategy == "zero1":
            exposed += timeline.state.weights / link
    return exposed


def _time_rows(workload: Workload, layout: Layout, tokens: float, passes: float) -> float:
    """Returns the bytes of rows that a rank sends to experts of other ranks and gets back, in so many passes."""
    decoder, mixture = workload.decoder, workload.decoder.parts.feed_forward
    assert isinstance(mixture, MixtureConfig), "play_step has checked it"
    num_mixtures = sum(mixture.is_mixture(layer) for layer in range(decoder.num_layers))
    leaving = (layout.expert_parallel - 1) / layout.expert_parallel
    rows = tokens * mixture.top_k * num_mixtures * leaving
    return 2.0 * passes * rows * decoder.dim * product_bytes(workload, layout)


def teacher_flops_per_token(workload: Workload) -> float:
    """Returns the operations of a teacher's forward for each token; 0 without a teacher that runs."""
    if workload.teacher is None:
        return 0.0
    return count_flops_per_token(workload.teacher, workload.seq_len, None) / 3.0


def rate_from_tokens(workload: Workload, layout: Layout, tokens_per_second: float, bandwidths: Bandwidths) -> Rate:
    """Returns the rate with which this layout has a measured number of tokens per second over all ranks.

    If communication alone would take longer than was measured, the link is quicker than given, and the products are
    taken to have all of the time.
    """
    source = f"{tokens_per_second:,.0f} tokens/s, as given"
    seconds = workload.tokens_per_step / tokens_per_second
    whole = Rate(1e15, source, is_assumed=False)
    unlimited = time_step(workload, layout, whole, bandwidths).compute_seconds * whole.flops_per_second
    slow, quick = unlimited / seconds, unlimited / seconds * _MOST_EXPOSED
    if time_step(workload, layout, replace(whole, flops_per_second=quick), bandwidths).seconds > seconds:
        return replace(whole, flops_per_second=slow)
    for _ in range(_HALVINGS):  # the time falls with the rate
        middle = (slow + quick) / 2.0
        rate = replace(whole, flops_per_second=middle)
        if time_step(workload, layout, rate, bandwidths).seconds > seconds:
            slow = middle
        else:
            quick = middle
    return replace(whole, flops_per_second=quick)


def find_rate(content: Mapping[str, Any], path: str) -> Rate | None:
    """Returns the rate in a report of `genesis doctor --device` or a record of the benchmark `step`; None without one.

    Args:
        content: The file's content.
        path: The file's name.
    """
    rate = _find_rate(content, path)
    return rate if rate is not None and math.isfinite(rate.flops_per_second) and rate.flops_per_second > 0.0 else None


def _find_rate(content: Mapping[str, Any], path: str) -> Rate | None:
    try:
        if isinstance(content.get("contenders"), Mapping):
            found = content["contenders"]["genesis"]["tokens_per_second"] * content["workload"]["flops_per_token"]
            return Rate(float(found), f"{path}, measured by the benchmark step", is_assumed=False)
        parts = {part["name"]: part.get("figures", []) for part in content.get("parts", ())}
        figures = {figure["name"]: figure["value"] for name in ("speed", "compiled") for figure in parts.get(name, ())}
        peaks = [
            figure["value"] for figure in parts.get("devices", ()) if "dense peak in bfloat16" in str(figure["name"])
        ]
        if "MFU" in figures and peaks:
            peak = _read_number(peaks[0])
            return Rate(float(figures["MFU"]) * peak * 1e12, f"{path}, measured by the doctor", is_assumed=False)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return None


def _read_number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float(str(value).split()[0].replace(",", ""))
