"""The benchmark of the telemetry callbacks: which callbacks each burst has, and what the record holds."""

import json
import time
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from benchmarks.telemetry import OwnTime, main

OPTIONS = {"throughput", "step_timer", "memory", "loss", "gradient", "everything"}


@pytest.mark.bench
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")  # nothing is validated
def test_each_callback_has_its_overhead_and_the_record_names_no_path(tmp_path: Path) -> None:
    assert main(["--small", "--rounds", "2", "--steps", "5", "--out", str(tmp_path / "record")]) == 0
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert record["overheads"].keys() == OPTIONS
    own = {name: row["own_microseconds_per_step"] for name, row in record["overheads"].items()}
    assert min(own.values()) > 0
    assert own["everything"] > own["loss"]
    page = (tmp_path / "record.md").read_text(encoding="utf-8")
    assert str(tmp_path) not in page + json.dumps(record)
    assert all(f"| {name} |" in page for name in OPTIONS)


class Busy(Callback):
    def on_train_batch_start(self, *_: object) -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < 0.01:
            pass

    def on_train_batch_end(self, *_: object) -> None:
        self.on_train_batch_start()


def test_own_time_counts_the_outermost_call_alone() -> None:
    busy = Busy()
    own = OwnTime([busy])
    busy.on_train_batch_end()
    assert 0.01 <= own.take_seconds() < 0.019
    assert own.take_seconds() == 0.0
