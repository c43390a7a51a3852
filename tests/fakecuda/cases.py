"""What can be asked to run on the fake device, by name; each case runs in a process of its own."""

import warnings
from collections.abc import Callable
from inspect import unwrap
from typing import Any, Final

import torch

from genesis import device
from genesis.doctor import training as doctor
from genesis.evaluate.plan import Request as ScoreRequest
from genesis.evaluate.score import Scorer
from genesis.generate.batch import Batch, Request
from genesis.generate.load import avoid_planned_attention
from genesis.generate.sample import SamplingOptions
from genesis.model.decoder import Decoder
from genesis.precision import choose_precision
from tests.fakecuda.combinations import Combination
from tests.fakecuda.fits import SHAPE, run_fit
from tests.fakecuda.watch import FakeMode, Watch

NUM_CACHED: Final = 7
"""Tokens that a cache is said to hold."""


def fit(combination: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Runs three steps; see `run_fit`."""
    return run_fit(Combination(**combination), **options)


def _build_decoder(dtype: str) -> Decoder:
    with torch.device("cuda"):
        decoder = Decoder(SHAPE)
    decoder = decoder.to(getattr(torch, dtype)).eval()
    avoid_planned_attention(decoder.output_weight.device)
    return decoder


def _describe(watch: Watch) -> dict[str, Any]:
    return {
        "syncs": dict(watch.syncs),
        "kernels": dict(watch.kernels),
        "has_planned_attention": torch.backends.cuda.cudnn_sdp_enabled(),
    }


def batch(dtype: str, num_tokens: int, options: list[dict[str, Any]]) -> dict[str, Any]:
    """Continues a text for each of the sampling options by some tokens, as the server does; tells the last step."""
    with Watch({"build_attention_metadata": NUM_CACHED, "copy_row": NUM_CACHED}, FakeMode()) as watch:
        texts = Batch(_build_decoder(dtype), len(options) + 1, set())
        for given in options:
            texts.add(Request([1, 2, 3], num_tokens, SamplingOptions(**given), num_top_logprobs=2))
        for _ in range(num_tokens):
            for counts in (watch.syncs, watch.kernels):
                counts.clear()
            new = texts.step()
    return {**_describe(watch), "num_new": len(new)}


def score(dtype: str) -> dict[str, Any]:
    """Scores requests with contexts in common."""
    with Watch(fake=FakeMode()) as watch:
        scorer = Scorer(_build_decoder(dtype), batch_tokens=64)
        context = tuple(range(1, 30))
        requests = [ScoreRequest(context, (number, number + 1)) for number in range(5)]
        requests.append(ScoreRequest((1, 2), (3,)))
        with torch.no_grad():  # not its own inference mode, in which fake tensors leave their mode
            scores = unwrap(Scorer.score)(scorer, requests)
    return {**_describe(watch), "num_scores": len(scores)}


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


CASES: Final[dict[str, Callable[..., Any]]] = {"fit": fit, "batch": batch, "score": score, "device_layer": device_layer}
