"""What can be asked to run on the fake device, by name; each case runs in a process of its own."""

from collections.abc import Callable
from inspect import unwrap
from typing import Any, Final

import torch

from genesis.evaluate.plan import Request as ScoreRequest
from genesis.evaluate.score import Scorer
from genesis.generate.batch import Batch, Request
from genesis.generate.load import avoid_planned_attention
from genesis.generate.sample import SamplingOptions
from genesis.model.decoder import Decoder
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


CASES: Final[dict[str, Callable[..., Any]]] = {"fit": fit, "batch": batch, "score": score}
