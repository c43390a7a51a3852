"""The whole command, on real trainings: what repeats is found equal, what does not is named."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from genesis.base.errors import UserError
from genesis.cli.rehearse import main
from genesis_callbacks.checkpoint import read_tensors
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import STDOUT, run_genesis, start_genesis

DEADLINE_SECONDS = 120
POLL_SECONDS = 0.05
NOISE = """
import os
import torch
from lightning.pytorch import Callback


class Noise(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 1e-3)
"""


def rehearse(tmp_path: Path, recipe: Path, *arguments: str, **environment: str) -> tuple[int, str, dict[str, Any]]:
    """Returns the exit status, all output, and the JSON."""
    own = ("--config", str(recipe), "--dir", str(tmp_path / "out"), "--json", str(tmp_path / "found.json"))
    done = run_genesis("rehearse", *own, *arguments, stderr=STDOUT, env={**os.environ, **environment})
    return done.returncode, done.stdout, json.loads((tmp_path / "found.json").read_text())


def processes_about(path: Path) -> list[str]:
    """Returns the command lines of the live processes that name `path`."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                line = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if os.fsencode(path) in line:
                lines.append(line.decode(errors="replace"))
    return lines


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("axis", ["", "tensor_parallel", "context_parallel", "pipeline_parallel"])
def test_two_sharded_ranks_end_bit_equal_after_kills_of_all_one_and_a_writer(
    tmp_path: Path, tiny_corpus: Path, axis: str
) -> None:
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        build_recipe(tiny_corpus, tmp_path / "unused"),
        {
            "checkpoint.every_n_steps": 10,
            "checkpoint.mode": "process",
            "checkpoint.on_save_failure": "warn",
            "model.decoder.num_layers": 2,
            "trainer.devices": 2,
            "trainer.max_steps": 60,
            "trainer.strategy": {
                "class_path": "genesis.strategies.Sharded",
                "init_args": {axis: 2} if axis else {},
            },
            "trainer.val_check_interval": 10,
        },
    )
    status, output, found = rehearse(tmp_path, recipe, "--kills", "3", "--seed", "1")
    assert status == 0, output
    assert found["verdict"] == "equal"
    assert found["num_ranks"] == 2
    assert {kill["victim"] for kill in found["kills"]} == {"group", "rank", "writer"}
    assert "bit for bit" in output

    ended = [kill for kill in found["kills"] if kill["resumed_from"] is not None]
    assert [kill["victim"] for kill in found["kills"] if kill not in ended] == ["writer"]
    for kill in ended:
        assert kill["resumed_from"] % 10 == 0
        assert kill["lost_steps"] == max(0, kill["at_step"] - kill["resumed_from"])
    (killed,) = found["rounds"]
    assert killed["num_starts"] == len(ended) + 1
    # What was trained again was compared, too: 60 training losses and 6 of validation once, and then some.
    assert killed["num_losses"] >= 66
    assert killed["unlogged_steps"] == []

    straight, other = (
        read_tensors(tmp_path / "out" / name / "checkpoints" / "step-00000060") for name in ("straight", "killed")
    )
    assert straight.keys() == other.keys()
    for name, tensor in straight.items():
        assert torch.equal(tensor, other[name]), name
    assert killed["checkpoints"]["num_tensors"] == sum(name.startswith(("model.", "optimizer.")) for name in straight)
    assert processes_about(tmp_path) == []


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.early
def test_a_run_that_is_killed_while_it_starts_ends_bit_equal(tmp_path: Path, tiny_corpus: Path) -> None:
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        build_recipe(tiny_corpus, tmp_path / "unused"),
        {"checkpoint.every_n_steps": 10, "trainer.max_steps": 60, "trainer.val_check_interval": 20},
    )
    # This seed's kill falls among the imports: a restore and a first step are over within one look on a busy machine.
    status, output, found = rehearse(tmp_path, recipe, "--kills", "4", "--seed", "2")
    assert status == 0, output
    assert found["verdict"] == "equal"
    (kill,) = [kill for kill in found["kills"] if kill["phase"] is not None]
    assert kill["at_step"] is None
    assert f"in a start ({kill['phase']})" in output
    assert processes_about(tmp_path) == []


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_recipe_that_does_not_repeat_is_found_different_by_tensor_and_by_loss(
    tmp_path: Path, tiny_corpus: Path
) -> None:
    (tmp_path / "system_noise.py").write_text(NOISE)
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        build_recipe(tiny_corpus, tmp_path / "unused"),
        {
            "checkpoint.every_n_steps": 10,
            "trainer.max_steps": 40,
            "trainer.val_check_interval": 20,
            "trainer.callbacks": [{"class_path": "system_noise.Noise"}],
        },
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    status, output, found = rehearse(
        tmp_path, recipe, "--kills", "1", PYTHONPATH=path, GENESIS_ALLOW_IMPORTS="system_noise"
    )
    assert status == 1, output
    assert found["verdict"] == "different"
    differing = found["rounds"][0]["checkpoints"]["tensors"]
    assert differing[0]["name"] in output
    assert all(tensor["max_abs_difference"] > 0 for tensor in differing if tensor["verdict"] == "changed")
    assert "model.decoder.embedding.weight" in {tensor["name"] for tensor in differing}
    assert "the recipe is not deterministic" in output
    assert found["rounds"][0]["unlogged_steps"] == []
    assert found["rounds"][0]["losses"][0]["step"] < 40


@pytest.mark.slow
def test_an_interrupt_ends_what_was_started(tmp_path: Path, tiny_corpus: Path) -> None:
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        build_recipe(tiny_corpus, tmp_path / "unused"),
        {"trainer.max_steps": 1_000_000, "checkpoint.every_n_steps": 100, "checkpoint.mode": "process"},
    )
    out = tmp_path / "out"
    with (
        (tmp_path / "output").open("w") as output,
        start_genesis("rehearse", "--config", recipe, "--dir", out, stdout=output, stderr=STDOUT) as process,
    ):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (out / "straight" / "metrics.csv").exists():
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline
            time.sleep(POLL_SECONDS)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_SECONDS) == 130, (tmp_path / "output").read_text()
        assert processes_about(tmp_path) == []


def test_what_fit_refuses_is_refused_in_its_words(tmp_path: Path, tiny_corpus: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", build_recipe(tiny_corpus, tmp_path), {"trainer.max_step": 5})
    with pytest.raises(UserError, match=r"did you mean 'trainer.max_steps'\?"):
        main(["--config", str(recipe), "--dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(UserError, match="already exists; remove it, or give another"):
        main(["--config", "recipe.yaml", "--dir", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--kills", "3"], "--config"),
        (["--config", "c.yaml", "--kills", "0"], "'0' is not a whole number of at least 1"),
        (["--config", "c.yaml", "--kill", "3", "--sead", "1"], "did you mean --seed?"),
        (["--config", "c.yaml", "--", "--run_dir", "x"], "--run_dir"),
    ],
)
def test_bad_options_are_refused_in_one_line(arguments: list[str], part: str) -> None:
    with pytest.raises(UserError) as refused:
        main(arguments)
    assert part in str(refused.value)
    assert "\n" not in str(refused.value)
