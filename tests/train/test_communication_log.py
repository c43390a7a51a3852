"""The log of what ranks send along each axis is the count by hand, of windows of training alone."""

import os
from dataclasses import replace
from typing import Any

from genesis.strategies import Sharded
from genesis_callbacks.testing import run_ranks
from tests.train.support import SEQ_LEN, TINY, build_module, build_trainer, loader, run_in_turn

DECODER = replace(TINY, vocab_size=64)
M, LAYERS = 8, DECODER.num_layers
STREAM = SEQ_LEN * DECODER.dim * 4
"""Bytes of the residual stream of a micro-batch of one row, in float32."""
FORMS: list[dict[str, Any]] = [
    {"tensor_parallel": 2},
    {"context_parallel": 2},
    {"pipeline_parallel": 2},
    {"tensor_parallel": 2, "activation_checkpointing": "block"},
    {"pipeline_parallel": 2, "stages_per_rank": 2},
    {},
]


def log_of(options: dict[str, Any]) -> dict[str, float]:
    decoder = replace(DECODER, num_layers=4) if options.get("stages_per_rank") else DECODER
    is_alone = not options
    trainer = build_trainer(Sharded(**options), int(os.environ["WORLD_SIZE"]), 2, [], val_check_interval=1)
    ranks = (int(os.environ["RANK"]), 2) if is_alone else (0, 1)
    trainer.fit(build_module(decoder), loader(2, *ranks), loader(2, *ranks))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {name: value for name, value in logged.items() if name.startswith("communication/")}


def logs_of(forms: list[dict[str, Any]]) -> list[dict[str, float]]:
    return run_in_turn(log_of, [(options,) for options in forms])


def test_what_is_logged_is_the_count_by_hand() -> None:
    first, second = run_ranks(logs_of, 2, FORMS)
    tensor, context, stages, recomputed, interleaved, alone = first
    # The embedding scatters and the head gathers; a layer gathers and scatters twice. Each rank sends half a stream, in
    # the forward and in the backward. The head then adds one and two numbers for each token.
    in_layers, of_head = 4 * LAYERS, SEQ_LEN * 4 + 2 * SEQ_LEN * 4
    of_streams = 2 * (2 + in_layers)
    assert tensor["communication/tensor_calls"] == M * (of_streams + 2)
    assert tensor["communication/tensor_sent_bytes"] == M * (of_streams * STREAM // 2 + of_head)
    # A layer that runs again gathers and scatters again; its last scatter is not needed.
    assert (
        tensor["communication/tensor_calls"]
        < recomputed["communication/tensor_calls"]
        <= M * (of_streams + in_layers + 2)
    )
    # Queries with as many values as the stream, keys and values with half as many, and the results; a sum of the loss.
    there, back = 2 * STREAM // 2, STREAM // 2
    assert context["communication/context_calls"] == M * (2 * 2 * LAYERS + 1)
    assert context["communication/context_sent_bytes"] == M * (2 * LAYERS * (there + back) // 2 + 4)
    # Outputs from the first stage, gradients from the last one, and the gradient of the tied embedding from both.
    tied = DECODER.vocab_size * DECODER.dim * 4
    for found in (stages, second[2]):
        assert found["communication/pipeline_calls"] == M + 1
        assert found["communication/pipeline_sent_bytes"] == M * STREAM + tied
    # Four stages, of which the first rank has the first and the third: outputs of both, and the gradient of the third.
    assert interleaved["communication/pipeline_sent_bytes"] == 3 * M * STREAM + tied
    assert alone == {}
    assert first[0] == second[0]
