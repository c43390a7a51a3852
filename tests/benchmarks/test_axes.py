import json
from itertools import permutations
from pathlib import Path

import pytest

from benchmarks.axes import LAYOUTS, MODELS, main, order, predict
from benchmarks.harness import RECORDS
from benchmarks.step import plan_workload
from genesis.base.errors import UserError

RECORD = RECORDS / "axes.json"
SEPARATE = 1.05
"""The ratio of two times from which on a measurement decides which layout is quicker."""
LINK = {"latency_seconds": 1e-4, "bytes_per_second": 1e9}


class Options:
    micro_batches = 4
    threads = 1


@pytest.mark.bench
@pytest.mark.usefixtures("forked_contenders")
def test_a_run_measures_axes_and_the_link_and_writes_both_orders(tmp_path: Path) -> None:
    out = tmp_path / "axes.json"
    arguments = ["--model", "tiny", "--contenders", "one,tensor,pipeline-x2", "--pairs", "2", "--burst_steps", "1"]
    assert main([*arguments, "--warmup_steps", "1", "--out", str(out)]) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    assert list(record["contenders"]) == ["one", "tensor", "pipeline-x2"]
    assert all(one["loss"] == pytest.approx(4.852, abs=0.2) for one in record["contenders"].values())
    assert (
        record["bubbles"]["pipeline-x2-asleep"]["bubble_share"]
        > record["bubbles"]["pipeline-x2-asleep"]["bubble_share_ideal"]
    )
    assert record["link"]["bytes_per_second"] > 1e6
    assert "- order by the plan: " in out.with_suffix(".md").read_text(encoding="utf-8")


def test_degree_1_is_predicted_as_no_degree_and_a_step_of_one_process_as_measured() -> None:
    work = plan_workload(MODELS["4m"], Options(), 1)  # type: ignore[arg-type]
    times = {name: predict(name, work, 1000.0, LINK) for name in LAYOUTS}
    assert {times[f"{axis}-1"] for axis in ("tensor", "context", "pipeline")} == {times["one"]}
    assert times["one"] == pytest.approx(work.tokens_per_window / 1000.0)
    assert all(times["one"] / 2.0 <= times[axis] for axis in ("data", "tensor", "context", "pipeline"))


@pytest.mark.skipif(
    not RECORD.is_file(), reason="python -m benchmarks axes --out benchmarks/records/axes has no record"
)
def test_the_plan_s_order_of_layouts_is_the_recorded_one() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    Options.micro_batches, Options.threads = record["micro_batches"], record["threads"]
    work = plan_workload(MODELS[record["model"]], Options(), 1)  # type: ignore[arg-type]
    measured = {
        name: record["contenders"][name]["step_seconds"] for name in order(record["contenders"], "step_seconds")
    }
    rate = record["contenders"]["one"]["tokens_per_second"]
    planned = {name: predict(name, work, rate, record["link"]) for name in measured}
    for slow, quick in permutations(measured, 2):
        if measured[slow] > SEPARATE * measured[quick]:
            assert planned[slow] > planned[quick], (slow, quick)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contenders", "one,diagonal"], "--contenders has 'diagonal'; there are one, tensor-1"),
        (["--micro_batches", "1"], "--micro_batches is 1: it must be at least 2"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(arguments)
