"""The log of what offload moves: the bytes of a step, and refusals of options that do not go together."""

import os

import pytest
import torch
from torch import Tensor

from genesis.base.errors import UserError
from genesis.strategies import Replicated, Sharded
from genesis_callbacks.testing import run_ranks
from tests.train.support import TINY, build_module, build_strategy, build_trainer, loader


def log_of(strategy: str) -> dict[str, float]:
    trainer = build_trainer(build_strategy(strategy), int(os.environ["WORLD_SIZE"]), 3, [])
    trainer.fit(build_module(TINY), loader(3, 0, 1))
    return {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("offload/")}


def test_a_fit_logs_the_bytes_of_a_step_and_their_time() -> None:
    (found,) = run_ranks(log_of, 1, "host_alone")
    assert found.keys() == {"offload/to_device_bytes", "offload/to_host_bytes", "offload/idle_ms"}
    assert 0 < found["offload/to_device_bytes"] < found["offload/to_host_bytes"]  # a forward's last input stays
    assert found["offload/idle_ms"] > 0


def test_a_fit_with_states_on_a_disk_logs_its_bytes_and_its_waits() -> None:
    (found,) = run_ranks(log_of, 1, "disk_alone")
    assert found.keys() - {"offload/to_device_bytes", "offload/to_host_bytes", "offload/idle_ms"} == {
        "offload/disk_read_bytes",
        "offload/disk_written_bytes",
        "offload/disk_wait_ms",
    }
    assert found["offload/disk_read_bytes"] == found["offload/disk_written_bytes"] >= found["offload/to_host_bytes"] > 0
    assert found["offload/disk_wait_ms"] > 0


def test_a_fit_without_offload_logs_nothing_of_it() -> None:
    assert run_ranks(log_of, 1, "replicated") == [{}]


def states_around_a_validation(strategy: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    trainer = build_trainer(build_strategy(strategy), int(os.environ["WORLD_SIZE"]), 2, [])
    module = build_module(TINY)
    trainer.fit(module, loader(2, 0, 1))

    def read() -> dict[str, Tensor]:
        states = enumerate(trainer.optimizers[0].state.values())
        return {f"{number}.{key}": value.clone() for number, state in states for key, value in state.items()}

    fitted = read()
    trainer.validate(module, loader(1, 0, 1), verbose=False)
    return fitted, read()


@pytest.mark.parametrize("strategy", ["disk_alone", pytest.param("host_alone", marks=pytest.mark.slow)])
def test_a_validation_after_a_fit_changes_no_state_that_was_moved(strategy: str) -> None:
    ((fitted, validated),) = run_ranks(states_around_a_validation, 1, strategy)
    assert any(value.any() for key, value in fitted.items() if key.endswith("exp_avg"))
    assert [key for key, value in fitted.items() if not torch.equal(value, validated[key])] == []


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), True])
def test_a_share_beyond_its_range_is_refused(share: float) -> None:
    with pytest.raises(UserError, match="it must be a share from 0 to 1"):
        Replicated(optimizer_offload=share)


def test_two_owners_of_the_optimizer_are_refused() -> None:
    with pytest.raises(UserError, match="optimizer_offload is 1, and optimizer_states is 'sharded'"):
        Replicated(optimizer_states="sharded", optimizer_offload=1.0)
    with pytest.raises(UserError, match=r"optimizer_offload is 0\.5, and cpu_offload is 1, which"):
        Sharded(cpu_offload=True, optimizer_offload=0.5)
