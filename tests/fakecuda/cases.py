"""What can be asked to run on the fake device, by name; each case runs in a process of its own."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from inspect import unwrap
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from genesis.base import device
from genesis.data.loader import SequenceFormat
from genesis.evaluate.heldout import HeldOut, TextSource, measure_held_out
from genesis.evaluate.plan import Request as ScoreRequest
from genesis.evaluate.score import Scorer
from genesis.generate import load
from genesis.generate.batch import Batch, Request
from genesis.generate.sampling_options import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from genesis.model import loss
from genesis.model import norm as norms
from genesis.model.attend import fa4
from genesis.model.attention import AttentionConfig
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.precision import choose_precision
from genesis.operations.doctor import training as doctor
from genesis_callbacks.checkpoint import digest as digests
from tests.fakecuda.combinations import Combination
from tests.fakecuda.fits import SHAPE, run_fit
from tests.fakecuda.watch import FakeMode, Watch


def fit(combination: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Runs two steps; see `run_fit`."""
    return run_fit(Combination(**combination), **options)


def _build_decoder(dtype: str, **fields: Any) -> Decoder:
    with torch.device("cuda"):
        decoder = Decoder(DecoderConfig(**{**vars(SHAPE), **fields}))
    decoder = decoder.to(getattr(torch, dtype)).eval()
    prepare: Any = load
    prepare._prove_attention = lambda device_type, **options: None  # the fake device computes no number
    load.prepare_device(decoder.output_weight.device)
    return decoder


def _take(watch: Watch) -> dict[str, Any]:
    """Returns what has happened since the last call."""
    counts: dict[str, Any] = {"syncs": dict(watch.syncs), "kernels": dict(watch.kernels), "lines": dict(watch.lines)}
    for counter in (watch.syncs, watch.kernels, watch.casts):
        counter.clear()
    counts["operators"] = sorted(watch.operators)
    return {**counts, "has_planned_attention": torch.backends.cuda.cudnn_sdp_enabled()}


def batch(dtype: str, options: list[dict[str, Any]], num_layers: int = 2) -> dict[str, Any]:
    """Continues a text for each of the sampling options, as the server does: reads, decodes, lets one leave and join.

    Returns what happens in each of these steps, and how many tokens each brings.
    """
    with Watch(fake=FakeMode()) as watch:
        texts = Batch(_build_decoder(dtype, num_layers=num_layers), len(options) + 1, set())
        requests = [
            Request([1, 2, 3 + n], 9, SamplingOptions(**one), num_top_logprobs=2) for n, one in enumerate(options)
        ]
        handles = [texts.add(request) for request in requests]
        found = {}
        for name in ("read", "first", "decode", "decode again", "leave and join", "decode the others"):
            if name == "leave and join":
                texts.remove(handles[0])
                texts.add(requests[0])
            _take(watch)
            num_tokens = len(texts.step())
            found[name] = {**_take(watch), "num_tokens": num_tokens}
    return found


def text(dtype: str, sampling: dict[str, Any]) -> dict[str, Any]:
    """Generates text after two prompts, as the command does."""
    with Watch(fake=FakeMode()) as watch:
        decoder = _build_decoder(dtype)
        _take(watch)
        tokens = list(generate(decoder, [[1, 2, 3], [4]], GenerateOptions(5, SamplingOptions(**sampling)), set()))
        return {**_take(watch), "num_tokens": len(tokens)}


def score(dtype: str) -> dict[str, Any]:
    """Scores requests with contexts in common."""
    with Watch(fake=FakeMode()) as watch:
        scorer = Scorer(_build_decoder(dtype), batch_tokens=64)
        _take(watch)
        context = tuple(range(1, 30))
        requests = [ScoreRequest(context, (number, number + 1)) for number in range(5)]
        requests.append(ScoreRequest((1, 2), (3,)))
        with torch.no_grad():  # not its own inference mode, in which fake tensors leave their mode
            scores = unwrap(Scorer.score)(scorer, requests)
        return {**_take(watch), "num_scores": len(scores)}


def device_layer() -> dict[str, Any]:
    """Asks the device layer what the doctor and the benches ask it."""
    timers = [device.record_timer(torch.device("cuda")) for _ in range(2)]
    peak = device.read_peak_memory("cuda")
    device.synchronize("cuda")
    device.select_device("cuda", 0)
    device.reset_peak_memory("cuda")
    device.check_available("cuda")
    with doctor.counting_waits("cuda") as waits:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    return {
        "name": device.name_device("cuda"),
        "num_devices": device.count_devices("cuda"),
        "has_bfloat16": device.has_bfloat16("cuda"),
        "capability": device.read_capability(torch.device("cuda")),
        "peak": peak,
        "milliseconds": timers[0].elapsed_time(timers[1]),
        "precision": choose_precision("auto"),
        "waits": None if waits is None else dict(waits),
    }


def held_out(dtype: str) -> dict[str, Any]:
    """Measures held-out text of several documents a sequence: two batches."""
    ids = [list(range(1, length)) for length in (40, 90, 7, 200, 60, 100)]
    tokenizer: Any = SimpleNamespace(
        encode_batch=lambda documents, num_threads: ids, bos_id=1, eos_id=2, vocab_size=SHAPE.vocab_size
    )
    source = TextSource("web", [""] * len(ids), tokenizer)
    seq_format = SequenceFormat(SHAPE.max_seq_len, 0, np.full(SHAPE.vocab_size, 3, np.uint8), np.dtype(np.uint16))
    with Watch(fake=FakeMode()) as watch:
        losses: Any = loss
        losses._compile = watch.fuse
        decoder = _build_decoder(dtype)
        _take(watch)
        measures = measure_held_out(decoder, HeldOut((source,), seq_format, ""), 2 * SHAPE.max_seq_len)
        return {**_take(watch), "num_measures": len(measures)}


def norm() -> dict[str, Any]:
    """Normalises queries under autocast and beside it. Returns the dtypes that torch gets, and those of the results."""
    module: Any = norms
    original, given = module.rms_norm, []

    def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        given.append([str(x.dtype), str(weight.dtype)])
        out: Tensor = original(x, shape, weight, eps)
        return out

    module.rms_norm = rms_norm
    results = []
    with FakeMode(), torch.device("cuda"):
        part = norms.RMSNorm(64, 1e-6)
        for dtype, is_enabled in ((torch.bfloat16, True), (torch.float32, True), (torch.float32, False)):
            with torch.autocast("cuda", torch.bfloat16, enabled=is_enabled):
                results.append(str(part(torch.empty(2, 8, 4, 64, dtype=dtype)).dtype))
    return {"given": given, "results": results}


def digest(dtype: str) -> dict[str, Any]:
    """Takes the digests of all weights on the device, as a save does."""
    with Watch(fake=FakeMode()) as watch:
        weights: list[Tensor] = list(_build_decoder(dtype).state_dict().values())
        scratch = digests.DigestScratch(weights[0].device, 1 << 12)
        _take(watch)
        found = scratch.digest_all((weight, tuple(weight.shape), (0,) * weight.ndim) for weight in weights)
        return {**_take(watch), "num_digests": len(found), "num_weights": len(weights)}


def compiled_blocks(kernel: str) -> dict[str, Any]:
    """Runs forward and backward of a decoder with compiled blocks, one with a window.

    Returns the operators in the graph of each forward and backward that torch compiles.
    """
    fa4.find_version = lambda: "4"  # type: ignore[assignment]  # of the package, whose kernels do not run
    found: list[list[str]] = []

    def capture(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    config = replace(
        SHAPE, num_heads=None, num_kv_heads=None, attention=AttentionConfig(4, 2, sliding_window=40, window_layers=(0,))
    )
    with FakeMode():
        with torch.device("cuda"):
            decoder = Decoder(config).to(torch.bfloat16)
            ids, documents = (torch.zeros(2, 128, dtype=dtype) for dtype in (torch.int64, torch.int32))
            offsets = torch.zeros(6, dtype=torch.int32)
        decoder.attention_kernel = kernel
        compiler = aot_autograd(fw_compiler=capture)
        for block in decoder.blocks:
            block.forward = torch.compile(block.forward, backend=compiler)
        loss = decoder(ids, document_ids=documents, document_offsets=offsets).float().sum()
        loss.backward()
    return {"graphs": found, "has_gradients": all(p.grad is not None for p in decoder.parameters())}


CASES: Final[dict[str, Callable[..., Any]]] = {
    "fit": fit,
    "batch": batch,
    "text": text,
    "score": score,
    "held_out": held_out,
    "digest": digest,
    "norm": norm,
    "device_layer": device_layer,
    "compiled_blocks": compiled_blocks,
}
