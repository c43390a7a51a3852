import json
from pathlib import Path

import pytest

from benchmarks.harness import compare_pairs, find_interval_rank, rotate_order
from benchmarks.processes import Contender
from benchmarks.step import MODELS, choose_contenders, count_flops_per_token, main, read_recipe
from benchmarks.workers.protocol import Workload
from genesis.base.errors import UserError


@pytest.mark.bench
@pytest.mark.usefixtures("forked_contenders")
def test_a_run_measures_every_contender_and_writes_a_record_without_paths(tmp_path: Path) -> None:
    out = tmp_path / "records" / "step.json"
    arguments = ["--model", "tiny", "--contenders", "genesis,genesis-packed,bare,matmul", "--pairs", "2"]
    arguments += ["--burst_steps", "2", "--warmup_steps", "2", "--threads", "1", "--out", str(out)]

    assert main(arguments) == 0

    record = json.loads(out.read_text(encoding="utf-8"))
    assert list(record["contenders"]) == ["genesis", "genesis-packed", "bare", "matmul"]
    for name, contender in record["contenders"].items():
        assert len(contender["tokens_per_second_by_round"]) == 2
        assert contender["peak_resident_bytes"] > 0
        # Both sides train: a tiny model's first losses on random tokens are those of guessing.
        assert name == "matmul" or contender["loss"] == pytest.approx(4.852, abs=0.2)
    assert record["contenders"]["genesis"]["loss"] == pytest.approx(record["contenders"]["bare"]["loss"], abs=0.01)
    page = out.with_suffix(".md").read_text(encoding="utf-8")
    assert "| bare |" in page
    assert str(tmp_path) not in page + out.read_text(encoding="utf-8")


def test_a_worker_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit('out of luck')")
    workload = Workload({}, {}, 8, 1, 1, "one_per_row", 1.0, "cpu", "32-true", False, 1, 1)
    with (
        Contender("unlucky", "ends at once", script).start(workload, tmp_path / "log") as worker,
        pytest.raises(UserError, match=r"unlucky ended before its work was done(.|\n)*out of luck"),
    ):
        worker.receive()


def test_flops_are_those_of_the_matrices_and_of_attention() -> None:
    decoder = MODELS["9m"].decoder
    matrices = 6 * (4 * 256 * 256 + 3 * 256 * 768) + 8192 * 256
    assert count_flops_per_token(decoder, 128) == 6 * matrices + 12 * 6 * 256 * 128


def test_a_recipe_of_fit_gives_shape_and_precision() -> None:
    recipe = read_recipe(Path("configs/genesis-1b.yaml"))
    assert (recipe.seq_len, recipe.precision, recipe.optimizer.name) == (2048, "bf16-mixed", "adamw")


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shape.yaml"
    path.write_text("{dim: 32, num_layers: 1, num_heads: 2, num_kv_heads: 2, ffn_dim: 8, max_seq_len: 8}")
    with pytest.raises(UserError, match=r"data\.seq_len is None"):
        read_recipe(path)


@pytest.mark.parametrize(
    ("own", "peers", "message"),
    [
        ("genesis,mine", "", "--contenders has 'mine'"),
        ("genesis", "megatron", "--peers has 'megatron'"),
        ("genesis", "litgpt=/nowhere/python", "no such file"),
    ],
)
def test_unknown_contenders_are_refused(own: str, peers: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_contenders(own, peers)


def test_ratios_are_paired_within_rounds() -> None:
    ratio = compare_pairs([10.0, 100.0, 1.0] * 2, [5.0, 50.0, 0.5] * 2)
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


def test_the_interval_covers_the_median_often_enough() -> None:
    # Between the 2nd and the 9th of 10: 1 - 2 * (1 + 10) / 1024.
    assert find_interval_rank(10) == 2
    assert find_interval_rank(5) == 0


def test_everyone_comes_first_equally_often() -> None:
    firsts = [rotate_order("abc", index)[0] for index in range(6)]
    assert sorted(firsts) == list("aabbcc")
