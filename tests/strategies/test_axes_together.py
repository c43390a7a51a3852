"""Tensor, context, pipeline, expert and data parallelism together: every gradient beside that of one process."""

from typing import Any

import pytest

from genesis_callbacks.testing import run_ranks
from tests.strategies.test_context import check_fit, fit_each

TP2: dict[str, Any] = {"tensor_parallel": 2}
CP2: dict[str, Any] = {"context_parallel": 2}
PP2: dict[str, Any] = {"pipeline_parallel": 2}
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": "block"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (
            4,
            [
                ("deep", TP2 | PP2 | {"stages_per_rank": 2} | RECOMPUTED),
                ("mixture", TP2 | PP2),
                ("linear", TP2 | PP2),
                ("gate", TP2 | CP2 | RECOMPUTED),
                ("mixture", TP2 | CP2 | {"expert_parallel": 4}),
                ("linear", TP2 | CP2),
                ("window", CP2 | PP2),
            ],
        ),
        (
            8,
            [
                ("tied", TP2 | CP2 | PP2),
                ("mixture", TP2 | PP2 | {"expert_parallel": 2}),
                ("mixture", TP2 | CP2 | {"expert_parallel": 4}),
                ("tied", TP2 | PP2 | {"shard": "hybrid", "ranks_per_shard_group": 2}),
            ],
        ),
    ],
)
def test_axes_together_train_as_one_process(world_size: int, cases: list[tuple[Any, ...]]) -> None:
    found = run_ranks(fit_each, world_size, cases, timeout_seconds=600.0)
    for (model, _), *of_ranks in zip(cases, *found, strict=True):
        check_fit(model, of_ranks, 1e-5 if "linear" in model else 2e-6)
