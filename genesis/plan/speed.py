"""The time of a step: from a measured rate, or from a device's published peak and an assumed MFU.

The estimate is for comparing layouts: what activation checkpointing computes twice, and what a link must carry while
the device computes. Small products, kernels that wait for the host, and a slow loader are not in it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from genesis.errors import UserError
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import DecoderConfig
from genesis.model.describe import count_flops_per_token, describe
from genesis.plan.layout import FLOAT32_BYTES, Layout, Workload
from genesis.plan.timeline import play_step

ASSUMED_MFU: Final = 0.4
LINKS: Final = {"pcie": 12e9, "nvlink": 50e9, "nvswitch": 300e9}
"""Assumed bytes per second in each direction of collectives: PCIe 4.0 x16 through the host's memory, the bridge of two
workstation cards, and the switch of a server with eight."""
_HOST_BYTES_PER_SECOND: Final = 20e9
"""Assumed rate at which a host's AdamW reads and writes memory."""
_ADAM_BYTES: Final = 28
"""Bytes that AdamW reads and writes for each parameter in float32: weight, gradient and two moments."""


_UNLIMITED: Final = 1e30
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
        tokens_per_second: Over all ranks, with padding.
    """

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    tokens_per_second: float


@lru_cache(maxsize=256)
def _count_flops(decoder: DecoderConfig, seq_len: int, adapter: AdapterConfig | None) -> tuple[float, float]:
    """Returns FLOPs of a token, and those of the forward of all blocks."""
    costs = describe(replace(decoder, max_seq_len=seq_len))
    head = 6 * decoder.vocab_size * decoder.dim
    blocks_forward = (costs.flops_per_token + costs.attention_flops_per_token - head) / 3.0
    return count_flops_per_token(decoder, seq_len, adapter), blocks_forward


def flops_per_token(workload: Workload) -> float:
    """Returns the floating-point operations of a token's forward and backward."""
    return _count_flops(workload.decoder, workload.seq_len, workload.adapter)[0]


def time_step(workload: Workload, layout: Layout, rate: Rate, link_bytes_per_second: float) -> StepTime:
    """Returns the estimated time of a step.

    Args:
        workload: What is trained.
        layout: How it is spread.
        rate: The rate of one device.
        link_bytes_per_second: What a rank sends to the others per second.
    """
    per_token, blocks_forward = _count_flops(workload.decoder, workload.seq_len, workload.adapter)
    every_n = {"none": 0, "block": 1}.get(str(layout.activation_checkpointing), layout.activation_checkpointing)
    recomputed = 1.0 / every_n if isinstance(every_n, int) and every_n else 0.0
    num_micro_batches = workload.num_micro_batches(layout.num_ranks)
    tokens = workload.tokens_per_step / layout.num_ranks
    compute = tokens * (per_token + recomputed * blocks_forward) / rate.flops_per_second
    timeline = play_step(workload, layout)
    shards, ranks = layout.ranks_per_shard_group, layout.num_ranks
    reduced = timeline.state.gradients * (shards if layout.is_sharded else 1)
    exposed = 0.0
    if layout.is_sharded and shards > 1:
        per_micro_batch = timeline.gathered_whole_bytes * (shards - 1) / shards
        gathers = 1 if layout.strategy == "grad_op" else 2
        count = 1 if layout.keeps_gathered else num_micro_batches
        one = gathers * per_micro_batch / link_bytes_per_second
        exposed += count * max(0.0, one - compute / num_micro_batches)
        reductions = num_micro_batches if layout.reduces_each else 1
        each = reduced * (shards - 1) / shards / link_bytes_per_second
        exposed += reductions * max(0.0, each - compute / num_micro_batches / 2.0)
    if ranks > 1 and (not layout.is_sharded or layout.strategy == "hybrid"):
        whole = reduced / (shards if layout.strategy == "hybrid" else 1)
        send = 2.0 * whole * (ranks - 1) / ranks / link_bytes_per_second
        exposed += max(0.0, send - compute / num_micro_batches / 2.0)
        if layout.strategy == "zero1":
            exposed += timeline.state.weights / link_bytes_per_second
    if layout.cpu_offload:
        elements = timeline.state.weights / FLOAT32_BYTES
        copies = (2 * num_micro_batches + 1) * timeline.state.weights / LINKS["pcie"]
        exposed += max(0.0, copies - compute) + elements * _ADAM_BYTES / _HOST_BYTES_PER_SECOND
    seconds = compute + exposed
    return StepTime(seconds, compute, exposed, workload.tokens_per_step / seconds)


def rate_from_tokens(
    workload: Workload, layout: Layout, tokens_per_second: float, link_bytes_per_second: float
) -> Rate:
    """Returns the rate with which this layout has a measured number of tokens per second over all ranks.

    If communication alone would take longer than was measured, the link is quicker than given, and the products are
    taken to have all of the time.
    """
    source = f"{tokens_per_second:,.0f} tokens/s, as given"
    seconds = workload.tokens_per_step / tokens_per_second
    whole = Rate(1e15, source, is_assumed=False)
    unlimited = time_step(workload, layout, whole, _UNLIMITED).compute_seconds * whole.flops_per_second
    slow, quick = unlimited / seconds, unlimited / seconds * _MOST_EXPOSED
    if time_step(workload, layout, replace(whole, flops_per_second=quick), link_bytes_per_second).seconds > seconds:
        return replace(whole, flops_per_second=slow)
    for _ in range(_HALVINGS):  # the time falls with the rate
        middle = (slow + quick) / 2.0
        rate = replace(whole, flops_per_second=middle)
        if time_step(workload, layout, rate, link_bytes_per_second).seconds > seconds:
            slow = middle
        else:
            quick = middle
    return replace(whole, flops_per_second=quick)


def read_rates(path: Path) -> Rate:
    """Returns the rate in a report of `genesis doctor --device` or in a record of `genesis bench step`.

    Raises:
        UserError: The file cannot be read, or has no rate.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"cannot read --rates {path}: {reason}") from None
    except (ValueError, RecursionError):
        raise UserError(
            f"--rates {path} is not JSON: give a report of `genesis doctor --device --out FILE`, or a record of "
            "`genesis bench step`"
        ) from None
    rate = _find_rate(content, str(path)) if isinstance(content, Mapping) else None
    if rate is None or not (math.isfinite(rate.flops_per_second) and rate.flops_per_second > 0.0):
        raise UserError(
            f"--rates {path} has no rate: it needs the parts devices and speed of `genesis doctor --device`, on a "
            "device whose peak is known, or a record of `genesis bench step`; or give --tokens_per_second"
        )
    return rate


def _find_rate(content: Mapping[str, Any], path: str) -> Rate | None:
    try:
        if isinstance(content.get("contenders"), Mapping):
            found = content["contenders"]["genesis"]["tokens_per_second"] * content["workload"]["flops_per_token"]
            return Rate(float(found), f"{path}, measured by bench step", is_assumed=False)
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
