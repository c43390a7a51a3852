"""Single parts of a session on a GPU: repeated fits, kernels of attention, a server under load.

    python -m benchmarks.device attention --device cuda --out attention.json

The benchmark `session` runs them.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.device_repeat import measure_repeats
from benchmarks.device_serving import measure_serving
from genesis.base.arguments import Parser
from genesis.base.device import (
    CPU,
    check_available,
    is_host,
    leave_memory_unfilled,
    name_device,
    read_capability,
    synchronize,
)
from genesis.model.attend.kernel import Place
from genesis.model.attend.table import KERNELS, MASK, attend
from genesis.model.attention import AttentionConfig, build_attention_metadata

_REPEATS: Final = 7
_DOCUMENTS_PER_ROW: Final = 4


class Shape(NamedTuple):
    """Rows, tokens of a row, heads of queries and of keys, and the width of a head."""

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    width: int


SHAPES: Final = {"tiny": Shape(1, 64, 4, 2, 16), "full": Shape(8, 2048, 16, 4, 128)}


def measure_attention(kind: str, size: str) -> dict[str, Any]:
    """Measures each kernel of attention in genesis-1b's shape, with and without determinism.

    Each row has about four documents, which attention does not cross; `rows` has one document a row.

    Args:
        kind: Kind of device.
        size: A name in `SHAPES`.

    Returns:
        For each kernel milliseconds of forward, and of forward and backward, whether two runs are equal bit for bit,
        and the largest difference from the mask, in relation to the largest value; or the reason why it did not run.
        `failures` names kernels under determinism that differ between two runs.
    """
    shape, dtype = SHAPES[size], torch.float32 if is_host(kind) else torch.bfloat16
    device = torch.device(kind)
    place = Place(kind, read_capability(device), dtype, shape.width)
    generator = torch.Generator().manual_seed(0)
    numbers = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    drawn = [torch.randn(shape.rows, shape.tokens, number, shape.width, generator=generator) for number in numbers]
    inputs = [part.to(device, dtype).requires_grad_() for part in drawn]
    cuts = torch.rand(shape.rows, shape.tokens, generator=generator) < _DOCUMENTS_PER_ROW / shape.tokens
    documents = cuts.cumsum(1).to(device, torch.int32)
    wanted: list[Tensor] = []
    results: dict[str, Any] = {}
    for is_on in (True, False):
        for name in (MASK.name, *(name for name in KERNELS if name != MASK.name), "rows"):
            title = f"{name}, deterministic" if is_on else name
            kernel = MASK.name if name == "rows" else name
            obstacle = KERNELS[kernel].find_obstacle(place)
            if obstacle is not None:
                results[title] = {"reason": obstacle}
                continue
            try:
                with _deterministic(is_on):
                    ids = None if name == "rows" else documents
                    results[title] = _measure(kind, kernel, inputs, ids, [] if name == "rows" else wanted)
            except RuntimeError as error:  # a kernel that is refused in this mode
                results[title] = {"reason": str(error)[:300]}
    found = {name: one for name, one in results.items() if "reason" not in one}
    return {
        "shape": shape._asdict(),
        "kernels": results,
        "failures": [name for name, one in found.items() if "deterministic" in name and not one["is_repeatable"]],
        "findings": [
            f"{name}: {one['forward_backward_ms']:.2f} ms{'' if one['is_repeatable'] else ', not repeatable'}"
            for name, one in found.items()
        ],
    }


@contextmanager
def _deterministic(is_on: bool) -> Iterator[None]:
    leave_memory_unfilled()
    torch.use_deterministic_algorithms(is_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _measure(
    kind: str, kernel: str, inputs: list[Tensor], document_ids: Tensor | None, wanted: list[Tensor]
) -> dict[str, Any]:
    """Returns the figures of a kernel; the first result of all becomes `wanted`, with which others are compared."""
    *qkv, upstream = inputs
    query, key, value = qkv
    config = AttentionConfig(query.shape[2], key.shape[2], head_dim=query.shape[3])
    metadata = build_attention_metadata(config, query.detach().flatten(2), document_ids, kernel=kernel)

    def both() -> list[Tensor]:
        out = attend(query, key, value, metadata)
        return [out, *torch.autograd.grad(out, qkv, upstream)]

    first, second = ([part.detach() for part in both()] for _ in range(2))
    if not wanted:
        wanted += first
    pairs = zip(first, wanted, strict=True)
    distances = [float((one - other).float().abs().max() / other.float().abs().max()) for one, other in pairs]
    return {
        "is_repeatable": all(torch.equal(one, other) for one, other in zip(first, second, strict=True)),
        "largest_difference": max(distances),
        "forward_ms": 1000 * time_work(kind, lambda: attend(query, key, value, metadata)),
        "forward_backward_ms": 1000 * time_work(kind, both),
    }


def time_work(kind: str, work: Callable[[], object]) -> float:
    """Returns the seconds of `work`, the median of some runs after one that is not counted."""
    seconds = []
    for _ in range(_REPEATS + 1):
        synchronize(kind)
        begin = time.perf_counter()
        work()
        synchronize(kind)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


PARTS: Final[dict[str, Callable[[str, str], dict[str, Any]]]] = {
    "repeat": measure_repeats,
    "attention": measure_attention,
    "serving": measure_serving,
}
"""Each takes the kind of device and the name of a size. `failures` among its figures makes the part a failure."""


def main(argv: list[str]) -> int:
    """Measures one part, writes its figures, and returns 1 if the part found a failure."""
    parser = Parser(prog="python -m benchmarks.device", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default=CPU)
    parser.add_argument("--size", choices=SHAPES, default="full")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    check_available(options.device)
    figures = PARTS[options.part](options.device, options.size)
    record = {"part": options.part, "device": name_device(options.device), "size": options.size, **figures}
    print(json.dumps(record, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return 1 if figures.get("failures") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
