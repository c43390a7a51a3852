"""Single parts of a session on a GPU: repeated fits, kernels of attention, a server under load, and parts of a step.

    python -m genesis.bench.device_parts sampling --device cuda --out sampling.json

`genesis bench session` runs them. Sampling, attention while decoding and chunks of the loss are measured before and
after a change for GPUs: "before" is the slower way, which the code takes no more or only without a device;
"after" the one of now. A way that does not exist yet on this device has no figure and a reason.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from genesis.base.arguments import Parser
from genesis.base.device import (
    CPU,
    check_available,
    is_host,
    name_device,
    read_peak_memory,
    reset_peak_memory,
    send,
    synchronize,
)
from genesis.bench.device_attention import measure_attention, time_work
from genesis.bench.device_repeat import measure_repeats
from genesis.bench.device_serving import measure_serving
from genesis.generate.batch import Batch, Request
from genesis.generate.load import prepare_device
from genesis.generate.sample import RowSampler, SamplingOptions
from genesis.model import loss
from genesis.model.attend.cache import distrust_lengths, trust_lengths
from genesis.model.decoder import Decoder, DecoderConfig

SIZES: Final[dict[str, dict[str, int]]] = {
    "tiny": {"rows": 2, "vocab": 512, "dim": 64, "layers": 2, "tokens": 256, "new": 4, "heads": 4},
    "full": {"rows": 16, "vocab": 49152, "dim": 2048, "layers": 20, "tokens": 2048, "new": 64, "heads": 16},
}


# ---- sampling


def _sample_row(logits: Tensor, options: SamplingOptions, generator: torch.Generator) -> int:
    """Returns a token as before: from the logits of one row, on the host."""
    if options.is_greedy:
        return int(logits.argmax())
    probs, order = (logits / options.temperature).softmax(dim=0).sort(descending=True, stable=True)
    probs = probs.masked_fill(probs.cumsum(dim=0) - probs >= options.top_p, 0.0)
    return int(order[torch.multinomial(probs, 1, generator=generator)])


def measure_sampling(kind: str, size: dict[str, int]) -> dict[str, Any]:
    """Measures a step's sampling for all rows: row by row on the host, and all at once where the logits are."""
    generator, device = torch.Generator().manual_seed(0), torch.device(kind)
    logits = torch.randn(size["rows"], size["vocab"], generator=generator).to(device)
    result: dict[str, Any] = {"unit": "s per step", "rows": size["rows"], "vocabulary": size["vocab"]}
    for name, options in (("greedy", SamplingOptions(temperature=0.0)), ("top_p", SamplingOptions(top_p=0.9))):
        generators = [torch.Generator().manual_seed(row) for row in range(size["rows"])]
        sampler = RowSampler([options] * size["rows"], size["vocab"], device)

        def by_row(options: SamplingOptions = options, generators: list[torch.Generator] = generators) -> list[int]:
            lines = logits.float().cpu()
            return [_sample_row(line, options, own) for line, own in zip(lines, generators, strict=True)]

        def together(sampler: RowSampler = sampler, generators: list[torch.Generator] = generators) -> list[int]:
            uniforms = torch.cat([torch.rand(1, dtype=torch.float64, generator=own) for own in generators])
            tokens: list[int] = sampler.draw(logits, send(uniforms, device)).cpu().tolist()
            return tokens

        result[name] = {"before": time_work(kind, by_row), "after": time_work(kind, together)}
    return result


# ---- attention while decoding


def measure_decoding(kind: str, size: dict[str, int]) -> dict[str, Any]:
    """Measures tokens per second of a batch: under a mask, planned by cuDNN, and as texts are generated."""
    config = DecoderConfig(
        vocab_size=size["vocab"],
        dim=size["dim"],
        num_layers=size["layers"],
        num_heads=size["heads"],
        num_kv_heads=size["heads"],
        ffn_dim=size["dim"] * 2,
        max_seq_len=size["tokens"],
    )
    with torch.device(kind):
        decoder = Decoder(config)
    decoder.init_weights(seed=0)
    decoder = decoder.to(torch.float32 if is_host(kind) else torch.bfloat16).eval()
    result: dict[str, Any] = {"unit": "tokens per second", "rows": size["rows"], "new tokens": size["new"]}
    for name, is_avoided in (("before", False), ("after", True)):
        if kind != "cuda" and not is_avoided:
            result["reason"] = f"{kind} has no attention of cuDNN"
            continue
        if is_avoided:
            trust_lengths(torch.device(kind))
            prepare_device(torch.device(kind))
        else:
            distrust_lengths(torch.device(kind))
        batch = Batch(decoder, size["rows"], set())
        for row in range(size["rows"]):
            batch.add(Request([1 + row] * (3 + row), size["new"], SamplingOptions(temperature=0.0)))
        batch.step()  # the prompts
        synchronize(kind)
        begin, count = time.perf_counter(), 0
        for _ in range(size["new"] - 1):
            count += len(batch.step())
        synchronize(kind)
        result[name] = count / (time.perf_counter() - begin)
    return result


# ---- chunks of the loss


@contextlib.contextmanager
def _chunks_as_before() -> Iterator[None]:
    """Makes the loss take chunks of 128 MiB with a rest, and round the weight's gradient to 16 bits before each sum."""
    before = (loss.split_tokens, loss.add_product)

    def split(num_tokens: int, vocab_size: int, device: torch.device) -> int:
        return max(loss.MIN_CHUNK_TOKENS, 128 * 2**20 // (4 * vocab_size))

    def add(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        total += a @ b
        return total

    loss.split_tokens, loss.add_product = split, add
    try:
        yield
    finally:
        loss.split_tokens, loss.add_product = before


def measure_loss(kind: str, size: dict[str, int]) -> dict[str, Any]:
    """Measures forward and backward of the chunked loss, with the chunks of now and those of before."""
    dtype = torch.float32 if is_host(kind) else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size["tokens"], size["dim"], generator=generator).to(kind, dtype).requires_grad_()
    weight = torch.randn(size["vocab"], size["dim"], generator=generator).mul(0.02).to(kind).requires_grad_()
    labels = torch.randint(size["vocab"], (size["tokens"],), generator=generator).to(kind)

    def step() -> Tensor:
        hidden.grad = weight.grad = None
        with torch.autocast(kind, dtype, enabled=not is_host(kind) and kind in ("cuda", "xpu")):
            total = loss.sum_cross_entropy(hidden, weight, labels)
        total.backward()  # type: ignore[no-untyped-call]  # torch's
        return total

    result: dict[str, Any] = {"unit": "s per forward and backward", "tokens": size["tokens"]}
    for name, context in (("before", _chunks_as_before), ("after", contextlib.nullcontext)):
        with context():
            reset_peak_memory(kind)
            result[name] = time_work(kind, step)
            peak = read_peak_memory(kind)
            result[f"loss {name}"] = float(step().detach()) / size["tokens"]
        if peak is not None:
            result[f"peak bytes {name}"] = peak.allocated_bytes
    return result


def _sized(measure: Callable[[str, dict[str, int]], dict[str, Any]]) -> Callable[[str, str], dict[str, Any]]:
    return lambda kind, size: measure(kind, SIZES[size])


PARTS: Final[dict[str, Callable[[str, str], dict[str, Any]]]] = {
    "repeat": measure_repeats,
    "attention": measure_attention,
    "serving": measure_serving,
    "sampling": _sized(measure_sampling),
    "decoding": _sized(measure_decoding),
    "loss": _sized(measure_loss),
}
"""Each takes the kind of device and the name of a size. `failures` among its figures makes the part a failure."""


def main(argv: list[str]) -> int:
    """Measures one part, writes its figures, and returns 1 if the part found a failure."""
    options = _parse(argv)
    figures = PARTS[options.part](options.device, options.size)
    record = {"part": options.part, "device": name_device(options.device), "size": options.size, **figures}
    print(json.dumps(record, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return 1 if figures.get("failures") else 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m genesis.bench.device_parts", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default=CPU)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    check_available(options.device)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
