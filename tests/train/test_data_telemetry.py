"""What is logged of the data, and when a run says that it waits for them."""

import csv
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from genesis.data.clock import LoaderTimes
from genesis.data.loader import WindowLoader
from genesis.train import data_telemetry
from genesis.train.csv_log import CSVLog
from genesis.train.data_telemetry import DataTelemetry, DataWaitWarning, rate_data
from tests.train.support import build_module, build_trainer, window_of_rank

# These runs train alone.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def test_rates_follow_from_what_the_loader_did() -> None:
    times = LoaderTimes(num_made=5, num_tokens=400, num_positions=500, make_seconds=0.1, num_given=4, wait_seconds=0.02)
    assert rate_data(times, seconds=2.0) == pytest.approx(
        {
            "data/wait_ms": 5.0,
            "data/wait_share": 0.01,
            "data/packer_fill": 0.8,
            "data/tokens_per_second": 4000.0,
            "data/headroom": 25.0,  # 4 windows of 80 tokens in 2 seconds were trained
        }
    )


def test_what_is_unknown_is_left_out() -> None:
    assert rate_data(LoaderTimes(), seconds=1.0) == {}
    assert rate_data(LoaderTimes(num_made=1, num_positions=8, make_seconds=0.1), seconds=1.0) == {
        "data/packer_fill": 0.0
    }


def train(directory: Path, make_seconds: float, num_steps: int, prefetch_windows: int) -> list[dict[str, str]]:
    """Trains on windows that take so long to make, and returns the rows of its log."""

    def make(index: int) -> Any:
        time.sleep(make_seconds)  # a slow disk
        return window_of_rank(index, 0, 1)

    loader = WindowLoader(make, lambda: range(num_steps), num_steps, prefetch_windows, pin_memory=False)
    log = CSVLog(directory / "metrics.csv")
    trainer = build_trainer("auto", 1, num_steps, [DataTelemetry()], logger=log)
    trainer.fit(build_module(), loader)
    with (directory / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_run_that_waits_for_its_data_says_so_once_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_telemetry, "_JUDGED_STEPS", 3)
    with pytest.warns(
        DataWaitWarning, match=r"rank 0 waits for data \d+% of the time .*data\.prefetch_windows"
    ) as told:
        rows = train(tmp_path, make_seconds=0.4, num_steps=12, prefetch_windows=0)
    assert sum(warning.category is DataWaitWarning for warning in told) == 1
    assert all(float(row["data/wait_ms"]) >= 400.0 for row in rows)
    assert all(0.05 < float(row["data/wait_share"]) < 1.0 for row in rows[3:])


@pytest.mark.slow
def test_a_run_whose_data_keep_up_logs_and_says_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWaitWarning)
        rows = train(tmp_path, make_seconds=0.0, num_steps=45, prefetch_windows=2)
    last = [row for row in rows if row["data/packer_fill"]][-1]  # the loader may have made all windows long ago
    assert float(last["data/packer_fill"]) == pytest.approx(62 / 128)
    assert float(last["data/headroom"]) > 1.0
    assert float(last["data/tokens_per_second"]) > 0.0
    assert {float(row["data/queue_depth"]) for row in rows} <= {0.0, 1.0, 2.0, 3.0}
    assert "data/host_to_device_ms" not in last
