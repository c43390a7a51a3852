import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch

from benchmarks.checkpoint import MODELS, MODES, Team, choose_modes, main
from benchmarks.checkpoint_results import (
    BASELINE,
    OVERLAPPED,
    ModeRun,
    Turn,
    compare_steps_beside,
    count_extra_seconds,
    list_findings,
    merge_ranks,
    summarise,
)
from benchmarks.step import plan_workload
from benchmarks.workers.checkpoint_task import Farewell, Task
from benchmarks.workers.protocol import Burst
from genesis.base.errors import UserError
from genesis.model.describe import describe

MODE = {mode.name: mode for mode in MODES}
# Eight processes import Lightning, and one of them starts another that does.
MANY_PROCESSES = pytest.mark.timeout(900)


def run_bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Returns the record of a run of the tiny model with turns of three windows."""
    out = tmp_path / "records" / "checkpoint.json"
    common = ["--model", "tiny", "--every_n_steps", "3", "--threads", "1", "--dir", str(tmp_path / "dir")]
    assert main([*common, *arguments, "--out", str(out)]) == 0
    record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert str(tmp_path) not in out.read_text(encoding="utf-8") + out.with_suffix(".md").read_text(encoding="utf-8")
    assert list((tmp_path / "dir").iterdir()) == []
    return record


@MANY_PROCESSES
@pytest.mark.long
def test_a_run_measures_every_mode_and_each_saved_the_whole_state(tmp_path: Path) -> None:
    record = run_bench(tmp_path, "--pairs", "2")

    expected = [mode.name for mode in MODES]
    assert list(record["modes"]) == expected
    decoder = describe(MODELS["tiny"].decoder)
    num_tensors = 2 * 9 + 3  # of two layers, the table, the head and the last norm: each with a step of four bytes
    state_bytes = 3 * decoder.weights_bytes + 4 * num_tensors
    for name, mode in record["modes"].items():
        assert mode["state_bytes"] == state_bytes
        assert [len(turn["step_seconds"]) for turn in mode["turns"]] == [3, 3]
        assert mode["tokens_per_second"] > 0
        if name == BASELINE:
            assert mode["save"] is None
            assert mode["mean_step_ratio"]["median"] == 1.0
        else:
            check_saves(mode, state_bytes)
    for name in ("thread", "process", OVERLAPPED):
        assert record["modes"][name]["save"]["own_stall_seconds"] > 0
    check_pictures_and_page(tmp_path / "records", expected)


def check_saves(mode: dict[str, Any], state_bytes: int) -> None:
    save = mode["save"]
    assert save["tensor_bytes"] == state_bytes
    assert [turn["step"] for turn in (mode["first_turn"], *mode["turns"])] == [3, 6, 9]
    for turn in (mode["first_turn"], *mode["turns"]):
        assert turn["file_bytes"] > state_bytes
        # The hook in which it begins is within all hooks, and these within the turn.
        assert 0 < turn["begin_seconds"] <= turn["stall_seconds"] < sum(turn["step_seconds"])
        assert turn["save_seconds"] > 0
    assert save["bytes_per_second"] == pytest.approx(save["file_bytes"] / save["save_seconds"])
    assert save["overhead_by_minutes"]["5"] == pytest.approx(save["extra_seconds"] / 300)


def check_pictures_and_page(directory: Path, names: list[str]) -> None:
    page = (directory / "checkpoint.md").read_text(encoding="utf-8")
    for name in names:
        assert page.count(f"| {name} |") == 2
    pixels = matplotlib.image.imread(directory / "checkpoint.png")
    assert pixels.shape[0] > 300
    assert len({tuple(pixel) for pixel in pixels[::5, ::5].reshape(-1, pixels.shape[2]).tolist()}) > len(names)


@MANY_PROCESSES
@pytest.mark.bench
@pytest.mark.usefixtures("forked_contenders")
def test_saves_of_adapters_hold_the_adapters_alone_and_their_stall_is_measured(tmp_path: Path) -> None:
    modes = f"{BASELINE},process,torch-sync"
    record = run_bench(tmp_path, "--pairs", "2", "--adapter_rank", "4", "--modes", modes)
    assert list(record["modes"]) == [BASELINE, "process"]
    assert record["left_out"] == {"torch-sync": "saves the base beside the adapters"}
    mode = record["modes"]["process"]
    decoder = describe(MODELS["tiny"].decoder)
    assert mode["state_bytes"] < decoder.weights_bytes / 2
    check_saves(mode, mode["state_bytes"])
    assert mode["save"]["own_stall_seconds"] > 0
    assert "with adapters of rank 4, which are saved alone" in (tmp_path / "records/checkpoint.md").read_text()


@pytest.mark.slow
def test_a_trainer_whose_saves_cannot_begin_is_named_with_the_reason(tmp_path: Path) -> None:
    workload = plan_workload(MODELS["tiny"], Namespace(threads=1), num_warmup_steps=1)
    (tmp_path / "checkpoints").write_text("in the way")
    task = Task(MODE["sync"], workload, "replicated", 2, str(tmp_path), 0, 1)
    with (
        Team([task], tmp_path) as team,
        pytest.raises(UserError, match=r"sync \(rank 0\) ended before its work was done(.|\n)*File exists"),
    ):
        team.wait_until_ready()


# ---- the options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "baseline,dcp"], "--modes has 'dcp'; there are baseline, sync"),
        (["--modes", "sync"], "--modes has no 'baseline'"),
        (["--modes", "baseline,sync,sync"], "--modes has 'sync' more than once"),
        (["--every_n_steps", "1"], "--every_n_steps is 1: it must be at least 2"),
        (["--pairs", "0"], "--pairs is 0: it must be at least 1"),
        (["--dir", "pyproject.toml"], "--dir is pyproject.toml, which is not a directory"),
    ],
)
def test_mistakes_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(UserError, match="no CUDA device was found"):
        main(["--device", "cuda"])


def test_modes_that_would_save_the_base_beside_adapters_are_left_out_with_the_reason() -> None:
    chosen, left_out = choose_modes([BASELINE, "torch-sync"], has_adapter=True)
    assert [mode.name for mode in chosen] == [BASELINE]
    assert left_out == {"torch-sync": "saves the base beside the adapters"}


def test_the_default_model_has_half_a_gigabyte_of_state() -> None:
    decoder = describe(MODELS["43m"].decoder)
    assert 3 * decoder.weights_bytes == pytest.approx(0.52e9, rel=0.01)


# ---- the report


def build_turn(step_seconds: list[float], **changes: Any) -> Turn:
    return replace(Turn(step_seconds, peak_resident_bytes=100, step=5), **changes)


def build_run(name: str, turns: list[Turn], farewell: Farewell | None = None) -> ModeRun:
    return ModeRun(MODE[name], turns[0], turns[1:], farewell or Farewell(100, 1200, 1200, {}))


SAVE = {"stall_seconds": 0.5, "save_seconds": 2.0, "turn_seconds_since_begin": 4.0, "file_bytes": 1300}


def test_results_are_judged_within_rounds() -> None:
    # The machine is ten times slower in the second round; the mode's overhead is a quarter in both.
    baseline = build_run(BASELINE, [build_turn([9.0] * 4), build_turn([1.0] * 4), build_turn([10.0] * 4)])
    turns = [
        build_turn([30.0] * 4, stall_seconds=7.0, save_seconds=20.0),
        build_turn([1.5, 1.25, 1.25, 1.0], **SAVE),
        build_turn([15.0, 12.5, 12.5, 10.0], **{**SAVE, "stall_seconds": 0.7, "turn_seconds_since_begin": 35.5}),
    ]
    results = summarise([baseline, build_run("process", turns, Farewell(100, 1200, 1200, {"5": 0.45, "15": 9.0}))], 55)

    result = results["process"]
    assert result.mean_step_ratio.median == 1.25
    assert result.median_step_ratio.median == 1.25
    assert result.mean_step_seconds == 6.875
    assert result.tokens_per_second == 8.0
    save = result.save
    assert save is not None
    assert (save.stall_seconds, save.max_stall_seconds) == (pytest.approx(0.6), 0.7)
    assert save.own_stall_seconds == 0.45
    assert (save.first_stall_seconds, save.first_save_seconds) == (7.0, 20.0)
    assert (save.bytes_per_parameter, save.bytes_per_second) == (13.0, 650.0)
    assert save.steps_beside_ratio is not None
    assert save.steps_beside_ratio.median == 1.25
    # A quarter of the baseline's median turn of 22 s.
    assert save.extra_seconds == 5.5
    assert save.overhead_by_minutes == {1: 5.5 / 60, 5: 5.5 / 300, 20: 5.5 / 1200}
    assert results[BASELINE].save is None


def test_a_write_that_outlasts_its_turn_costs_what_it_would_have_slowed_down() -> None:
    in_turn = count_extra_seconds(turn_ratio=1.25, baseline_turn_seconds=8.0, beside_ratio=1.25, wait_seconds=0.0)
    assert in_turn == 2.0
    after = count_extra_seconds(turn_ratio=1.25, baseline_turn_seconds=8.0, beside_ratio=2.0, wait_seconds=4.0)
    assert after == 4.0
    # A write beside which windows were faster than alone is noise, not a gain.
    assert count_extra_seconds(turn_ratio=1.0, baseline_turn_seconds=8.0, beside_ratio=0.5, wait_seconds=4.0) == 0.0


@pytest.mark.parametrize(("save_seconds", "count"), [(0.3, 0), (0.5, 0), (0.6, 1), (1.7, 2), (99.0, 3)])
def test_windows_count_as_beside_a_write_if_they_began_before_its_end(save_seconds: float, count: int) -> None:
    # The save began half a second before the end of the first window.
    turn = build_turn([1.5, 1.0, 1.0, 1.0], save_seconds=save_seconds, turn_seconds_since_begin=3.5)
    assert turn.num_steps_beside == count
    assert turn.wait_seconds == max(0.0, save_seconds - 3.5)


def test_rounds_in_which_no_window_ran_beside_a_write_say_nothing_of_it() -> None:
    beside, alone = ({"save_seconds": seconds, "turn_seconds_since_begin": 4.5} for seconds in (1.0, 0.1))
    turns = [build_turn([1.0, 3.0, 1.0], **beside), build_turn([1.0, 9.0, 9.0], **alone)]
    baseline = [build_turn([1.0, 2.0, 1.0]), build_turn([1.0, 1.0, 1.0])]
    ratio = compare_steps_beside(turns[:1], baseline[:1])
    assert ratio is not None
    assert (ratio.median, ratio.num_pairs) == (1.5, 1)
    assert compare_steps_beside([build_turn([1.0, 9.0, 9.0])], baseline[1:]) is None


def test_the_slowest_rank_counts() -> None:
    first = Burst(3.0, 3.0, 1.0, 100, None, None, SAVE, [1.0, 2.0])
    slower = {**SAVE, "stall_seconds": 0.9, "save_seconds": 1.0, "file_bytes": 1}
    other = replace(first, peak_device_bytes=7, step_seconds=[9.0, 9.0], figures=slower)
    expected = build_turn([1.0, 2.0], peak_device_bytes=7, step=0, **{**SAVE, "stall_seconds": 0.9})
    assert merge_ranks([first, other]) == expected


@pytest.mark.parametrize(
    ("stall_seconds", "step", "verdicts"),
    [
        (0.0019, 1.11, ("reached", "reached")),
        (0.0021, 1.13, ("missed", "missed")),
        (0.0021, 1.0, ("reached", "missed")),
    ],
)
def test_goals_are_judged_by_what_was_measured(stall_seconds: float, step: float, verdicts: tuple[str, str]) -> None:
    baseline = build_run(BASELINE, [build_turn([1.0] * 4)] * 3)
    ours = build_run(OVERLAPPED, [build_turn([step] * 4, **{**SAVE, "stall_seconds": stall_seconds})] * 3)
    runs = [baseline, ours]
    (finding,) = list_findings(runs, summarise(runs, 1), "cpu")
    overhead, stall = finding.split(";")
    assert verdicts[0] in overhead
    assert verdicts[1] in stall
    # The GPU's goal allows a longer stall.
    assert "ms, reached" in list_findings(runs, summarise(runs, 1), "cuda")[0]


def test_a_mode_that_saved_less_than_the_state_is_named() -> None:
    turns = [build_turn([1.0] * 4, **SAVE)] * 2
    baseline = build_run(BASELINE, [build_turn([1.0] * 4)] * 2)
    runs = [baseline, build_run("torch-sync", turns, Farewell(100, 1200, 800, {}))]
    (finding,) = list_findings(runs, summarise(runs, 1), "cpu")
    assert finding.startswith("torch-sync saved 800 bytes of a state of 1,200")
