"""`genesis plan` on the command line: tables, JSON, exit statuses, and one line for each mistake."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from genesis.base.errors import UserError
from genesis.cli.plan import main, read_bytes
from genesis.data.manifest import read_manifest
from genesis.data.packing import count_train_sequences
from tests.cli.tiny import build_recipe, write_recipe

REPOSITORY = Path(__file__).parents[3]
RECIPE = str(REPOSITORY / "configs" / "genesis-1b.yaml")


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["--config", RECIPE, "--json", *words])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_every_strategy_with_its_phases(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "--gpus", "2,1", "--memory", "24GB")
    rows = found["strategies"]
    assert [row["num_gpus"] for row in rows] == [2] * 5 + [1] * 2
    (own,) = [row for row in rows if row["is_own"]]
    assert (own["strategy"], own["num_gpus"], own["fits"]) == ("full", 2, True)
    assert list(own["phases"]) == ["rest", "forward", "backward", "step", "save"]
    assert sum(own["phases"][own["peak_phase"]].values()) == own["peak_bytes"]
    replicated = rows[0]
    assert not replicated["fits"]
    assert all(remedy["needed_bytes"] <= 24 * 10**9 for remedy in replicated["remedies"])
    assert found["run"]["tokens_per_update"] == 262_144
    assert found["rate"] is None
    assert "hours" not in found["run"], "no rate is known, so that no time is"


def test_a_rate_gives_time_energy_money_and_the_comparison_with_spot(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tokens_per_second", "6400", "--watts", "450", "--cost_per_hour", "1", "--spot_cost_per_hour", "0.4"]
    found = run_json(capsys, "--gpus", "2", *words, "--interruptions_per_day", "2", "--mtbf_hours", "12")
    run = found["run"]
    assert run["num_steps"] == 20_000
    assert run["money"] == pytest.approx(2 * run["hours"])
    assert run["kilowatt_hours"] == pytest.approx(0.9 * run["hours"])
    assert found["spot"]["is_spot_cheaper"]
    assert found["interval"]["daly_seconds"] < found["interval"]["young_seconds"]


def test_a_changed_global_batch_proposes_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "--gpus", "2", "--data.global_batch_size", "512")
    assert found["learning_rate"]["lr"] == pytest.approx(6e-4)
    assert run_json(capsys, "--gpus", "2")["learning_rate"] is None
    given = run_json(capsys, "--gpus", "2", "--from_global_batch_size", "32")
    assert given["learning_rate"]["lr"] == pytest.approx(6e-4)


def test_the_status_is_one_if_the_recipe_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", RECIPE, "--gpus", "2", "--memory", "8GB"]) == 1
    assert "cpu_offload 0.5" in capsys.readouterr().out
    assert main(["--config", RECIPE, "--gpus", "2", "--memory", "10EB"]) == 0


def test_ranks_that_do_not_divide_the_batch_are_refused_in_their_row(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "--gpus", "2,3")
    refused = [row["refusal"] for row in found["strategies"] if row["num_gpus"] == 3]
    assert all("not divisible" in text for text in refused)
    with pytest.raises(UserError, match="not divisible"):
        main(["--config", RECIPE, "--gpus", "3"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "0"], "--memory: '0' is no possible memory: write at least one byte"),
        (["--memory", "lots"], "--memory: 'lots' is no size: write it as 5GB"),
        (["--memory", "0.5B"], "at least one byte"),
        (["--memory", "nanGB"], "is no size"),
        (["--memory", "-24GB"], "(expected one argument|is no size)"),
        (["--memory", "24XB"], "is no size"),
        (["--memory", "24"], "'24' has no unit: write 24GB, or 24B for bytes"),
        (["--mfu", "1e308"], "--mfu: '1e308' must lie between"),
        (["--mfu", "40"], "'40' is a share of the peak: write at most 1"),
        (["--trainer.devices", "0"], "trainer.devices is 0: give a number of at least 1"),
        (["--trainer.devices", "two"], "trainer.devices is 'two': give a number"),
        (["--trainer.devices", "[]"], r"trainer.devices is \[\]: give a number"),
        (["--trainer.strategy", "nope"], "trainer.strategy is 'nope': a plan knows genesis.strategies.Replicated"),
        (["--trainer.strategy.init_args.expert_parallel", "2"], "expert_parallel 2 does not divide|has no experts"),
        (["--teacher", RECIPE], "the objective is CrossEntropy, which has no teacher"),
        (["--base_dtype", "bfloat16"], "--base_dtype is bfloat16, but .* has no adapters"),
        (["--gpus", "0"], "--gpus is '0'"),
        (["--gpus", "2,two"], "--gpus is '2,two'"),
        (["--gpus", ""], "--gpus is ''"),
        (["--gpus", "99999999"], "--gpus is"),
        (["--cost_per_hour", "nan"], "--cost_per_hour: 'nan' must be a number above 0"),
        (["--spot_cost_per_hour", "inf"], "--spot_cost_per_hour: 'inf' must"),
        (["--interruptions_per_day", "-1"], "--interruptions_per_day: '-1' must be a number at least 0"),
        (["--watts", "many"], "--watts: 'many' must"),
        (["--steps", "1e308"], "--steps: '1e308' must lie between 1e-09 and 1e"),
        (["--tokens_per_second", "1e-320"], "--tokens_per_second: '1e-320' must lie between"),
        (["--mtbf_hours", "1e308"], "--mtbf_hours: '1e308' must lie between"),
        (["--link", "1e300"], "--link is '1e300'"),
        (["--trainer.devices", "100000000"], "make 100,000,000 ranks: a plan has at most 65536"),
        (["--trainer.num_nodes", "1000000000"], "ranks: a plan has at most 65536"),
        (["--link", "string"], "--link is 'string'"),
        (["--link", "nan"], "--link is 'nan'"),
        (["--margin", "nan"], "--margin: 'nan' must"),
        (["--rates", "/nowhere.json"], "cannot read --rates /nowhere.json: No such file"),
        (["--rates", RECIPE], "is not JSON"),
        (["--device_name", "Abacus 9000"], "'Abacus 9000' is not known"),
        (["--model.decoder.num_heads", "7"], "num_heads 7 is not a multiple of num_kv_heads 4"),
        (["--model.decoder.num_heads", "12"], "dim 2048 does not give 12 heads an even width"),
        (["--model.decoder.num_layers", "1000000"], "num_layers is 1000000"),
        (["--model.decoder.vocab_size", "10000000000000000"], "more than 2"),
        (["--model.decoder.vocab_size", "1" + "0" * 30], "more than 2"),
        (["--model.optimizer", "[" * 3000], "it must be a value as YAML writes it"),
        (["--model.optimizer.betas", "[a, b]"], "model.optimizer.betas"),
        (["--model.optimizer.name", "sgd"], "model.optimizer.name is gone: give the class"),
        (["--trainer.strategy.init_args.max_gathers_in_flight", "many"], "max_gathers_in_flight is many: give a whole"),
        (["--trainer.strategy.init_args", "3"], "init_args is 3"),
        (["--trainer.strategy.tensor_paralel", "4"], "unknown key trainer.strategy.tensor_paralel"),
        (["--model.decoder.num_kv_heads", "0"], "num_kv_heads is 0"),
        (["--model.decoder.dim", "wide"], "dim is wide: give a whole number"),
        (["--data.seq_len", "4096"], "longer than model.decoder.max_seq_len 2048"),
        (["--data.micro_batch_size", "0"], "data.micro_batch_size is 0"),
        pytest.param(["--data.micro_batch_sise", "1"], "did you mean", id="unknown-option"),
        (["--data.seq_len"], "has no value"),
        (["--trainer.precision", "8-bit"], "trainer.precision is '8-bit'"),
        (["--trainer.strategy.init_args.shard", "some"], "shard is some: give one of full"),
        (["--trainer.strategy.init_args.activation_checkpointing", "0"], "activation_checkpointing is 0"),
        (["--trainer.strategy.init_args.blocks_per_unit", "0"], "blocks_per_unit is 0"),
        (
            [
                *("--trainer.strategy.init_args.activation_offload", "true"),
                *("--trainer.strategy.init_args.activation_checkpointing", "none"),
            ],
            "set activation_checkpointing to block",
        ),
        (["--model.optimizer.lr", "[]"], "lr is"),
        (["--model.optimizer", "torch.optim.AdamW"], "class_path is 'torch.optim.AdamW': it must be an algorithm"),
        (["--model.optimizer", "elsewhere.Lion"], "names code of other packages: elsewhere.Lion"),
        (["--memroy", "24GB"], "did you mean --memory"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as found:
        main(["--config", RECIPE, *words])
    assert "\n" not in str(found.value)
    assert found.value.exit_status == 2


@pytest.mark.parametrize("content", ["", "[]", "a: [", "model: 3", "model: {decoder: nowhere.yaml}", "\x00"])
def test_a_file_that_is_no_recipe_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as found:
        main(["--config", str(path)])
    assert "\n" not in str(found.value)
    with pytest.raises(UserError, match="cannot read"):
        main(["--config", str(tmp_path / "missing.yaml")])


def test_amounts_have_decimal_and_binary_units() -> None:
    assert [read_bytes(text) for text in ("24GB", "24 gib", "1.5TB", "512B", "1e3 kB", "10EB")] == [
        24 * 10**9, 24 * 2**30, 1_500_000_000_000, 512, 10**6, 10**19,
    ]  # fmt: skip


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.repeat  # a contract of import-linter forbids it
def test_the_answer_needs_no_lightning() -> None:
    code = (
        "import sys; from genesis.cli.plan import main; "
        f"main(['--config', {RECIPE!r}, '--gpus', '1,2,8', '--memory', '24GB']); "
        "sys.exit(any(name.partition('.')[0] in ('lightning', 'pytorch_lightning') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_a_recipe_nested_too_deeply_is_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "deep.yaml"
    recipe.write_text("model: " + "[" * 3000 + "]" * 3000)
    with pytest.raises(UserError, match="nested too deeply for a recipe: remove them"):
        main(["--config", str(recipe)])


@pytest.mark.parametrize(
    ("options", "num_steps"),
    [
        (["--data.num_epochs", "2"], None),
        (["--trainer.max_steps", "30"], 30),
        (["--data.num_tokens", "1000"], 8),
        (["--trainer.max_epochs", "2"], None),
    ],
)
def test_a_plan_has_steps_and_epochs_whichever_is_given(
    tiny_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], num_steps: int | None
) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", build_recipe(tiny_corpus, tmp_path / "run"))
    sources = read_manifest(tiny_corpus).train
    num_sequences = sum(count_train_sequences(source.num_tokens, 16) for source in sources)
    main(["--config", str(path), "--json", *options])
    run = json.loads(capsys.readouterr().out)["run"]
    assert run["num_steps"] == (num_steps or 2 * num_sequences // 8)
    assert run["num_epochs"] == pytest.approx(run["num_steps"] * 8 / num_sequences)
    main(["--config", str(path), *options])
    printed = capsys.readouterr().out
    assert re.search(rf"epochs +{run['num_epochs']:.3g}, each {num_sequences:,} sequences by chunk", printed)
    assert "of the work is lost" not in printed
