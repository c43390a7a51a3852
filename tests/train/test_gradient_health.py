"""A value that is not finite is named with its module and rank, and the window is skipped as before."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from genesis_callbacks import GradientHealth, TokenCounters
from genesis_callbacks.base.event_reader import read_events
from genesis_callbacks.testing import run_ranks
from tests.train.support import build_module, build_strategy, build_trainer, loader

TEXT = "the forward of decoder.blocks.1.feed_forward.down on rank {rank}"


def train(directory: str, strategy: str, world_size: int, bad_rank: int) -> tuple[list[str], dict[str, int]]:
    """Returns the warnings and the skips of a fit whose third window has a bad product on one rank."""
    module, counters = build_module(), TokenCounters()
    trainer = build_trainer(
        build_strategy(strategy), world_size, 4, [counters, GradientHealth(directory)], log_every_n_steps=1
    )

    def fail(layer: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        is_bad = trainer.global_step == 2 and trainer.global_rank == bad_rank
        return output / 0.0 if is_bad else output

    build = module.configure_model

    def configure_model() -> None:
        build()
        assert module.decoder is not None
        module.decoder.blocks[1].feed_forward.down.register_forward_hook(fail)  # type: ignore[union-attr]

    module.configure_model = configure_model  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(4, int(os.environ["RANK"]), world_size))
    return [str(one.message) for one in caught if "is not finite" in str(one.message)], counters.skips


@pytest.mark.process
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("replicated", 1), ("replicated", 2), pytest.param("full", 2, marks=pytest.mark.slow)],
)
def test_the_module_and_the_rank_are_named(tmp_path: Path, strategy: str, world_size: int) -> None:
    results = run_ranks(train, world_size, str(tmp_path), strategy, world_size, world_size - 1)
    text = TEXT.format(rank=world_size - 1)
    assert [found for found, _ in results] == [
        [f"the gradient of step 2 is not finite: {text}"] if rank == 0 else [] for rank in range(world_size)
    ]
    assert all(skips == {"nonfinite_gradient": 1} for _, skips in results)
    (event,) = read_events(tmp_path)
    assert (event.kind, event.step, event.text) == ("nonfinite_gradient", 2, text)
