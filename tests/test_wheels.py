"""Both distributions install from their wheels into an empty environment, and the callbacks without the application.

Nothing is fetched: the packages that they depend on come from this environment, by a path file. A path file does not
run the path files of the directory that it names, so what is installed here for development is not to be found there.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from genesis.cli.main import help_text
from genesis.model.recipe import dump_decoder_config
from genesis_callbacks.checkpoint import read_manifest, read_tensors
from tests.cli.test_adapter import make_base
from tests.cli.test_mixers import write_latent
from tests.cli.tiny import build_recipe, write_recipe
from tests.outside.test_kto import SEQ_LEN, SHAPE, prepare_answers

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("wheels")]

REPOSITORY = Path(__file__).parents[1]
QUICK_TESTS = ("test_retention.py", "test_tagged_json.py")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def check(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the wheels of both distributions by their names."""
    out = tmp_path_factory.mktemp("wheels")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", out)
    check(run(sys.executable, "-m", "pip", "wheel", *options, REPOSITORY, REPOSITORY / "callbacks", cwd=out))
    return {wheel.name.partition("-")[0]: wheel for wheel in out.glob("*.whl")}


def make_environment(directory: Path, *wheels: Path) -> Path:
    """Returns the interpreter of a new environment that holds `wheels` and sees this one's packages."""
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    # Python compiles what is imported; pip would compile all modules.
    options = ("--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check")
    check(run(sys.executable, "-m", "pip", "--python", python, "install", *options, *wheels, cwd=directory))
    site_packages = next(directory.glob("lib/python*/site-packages"))
    (site_packages / "dependencies.pth").write_text(
        "".join(f"{path}\n" for path in sys.path if path.endswith("site-packages"))
    )
    return python


@pytest.fixture(scope="module")
def python(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the interpreter of an environment with both distributions."""
    return make_environment(tmp_path_factory.mktemp("environment"), *wheels.values())


def test_wheels_hold_their_package_and_nothing_else(wheels: dict[str, Path]) -> None:
    assert wheels.keys() == {"genesis_lm", "genesis_callbacks"}
    for distribution, package in (("genesis_lm", "genesis"), ("genesis_callbacks", "genesis_callbacks")):
        with zipfile.ZipFile(wheels[distribution]) as wheel:
            names = wheel.namelist()
        folders = {name.split("/")[0] for name in names}
        assert folders == {package, wheels[distribution].name.removesuffix("-py3-none-any.whl") + ".dist-info"}
        assert f"{package}/py.typed" in names
        for folder in ("serve/page", "supervise/files"):
            for file in (REPOSITORY / package / folder).glob("*"):
                assert f"{package}/{folder}/{file.name}" in names


def test_the_application_runs_from_its_wheel(python: Path, tmp_path: Path) -> None:
    assert check(run(python.with_name("genesis"), "--help", cwd=tmp_path)) == help_text() + "\n"
    program = "import genesis.cli.fit, genesis_callbacks; print(genesis.__file__, genesis_callbacks.__file__)"
    for file in check(run(python, "-c", program, cwd=tmp_path)).split():
        assert Path(file).is_relative_to(python.parents[1])


@pytest.mark.timeout(900)  # eight processes, each of which imports torch
def test_a_mixer_and_an_optimizer_of_own_files_train_on_two_ranks_go_on_and_generate_beside_the_wheels(
    python: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    for module in ("model/latent_attention.py", "extend/lion.py"):
        shutil.copy(REPOSITORY / "tests" / module, next(python.parents[1].glob("lib/python*/site-packages")))
    changes = {
        "model.optimizer": {"class_path": "lion.Lion", "init_args": {"lr": 1e-3}},
        "trainer.devices": 2,
        "trainer.strategy": {"class_path": "genesis.strategies.Sharded", "init_args": {"optimizer_offload": 0.5}},
    }
    latent = yaml.safe_load(write_latent(tmp_path, tiny_corpus, "latent_attention").read_text())
    recipe = write_recipe(tmp_path / "recipe.yaml", latent, changes)

    def genesis(*words: str | Path) -> str:
        return check(run(python.with_name("genesis"), *words, "--allow_imports", "latent_attention,lion", cwd=tmp_path))

    fit = ("fit", "--config", recipe)
    genesis(*fit, "--trainer.max_steps", "2")
    genesis(*fit, "--ckpt_path", "latest", "--checkpoint.allow_changed", "[trainer.max_steps]")
    assert any(name.endswith(".momentum") for name in read_manifest(tmp_path / "run/checkpoints/step-00000004").tensors)
    text = ("generate", tmp_path / "run", "--prompt", "a", "--max_new_tokens", "4", "--temperature", "0")
    assert genesis(*text).endswith("\n")
    refused = run(python.with_name("genesis"), *text, cwd=tmp_path)
    assert refused.returncode == 2
    assert "add `--allow-imports latent_attention`" in refused.stderr


COMMANDS = """
import json, os, sys
from genesis.cli.main import main

environment = dict(os.environ)
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["genesis", *arguments]
    assert main(arguments) == 0, arguments
    os.environ.clear()  # a fit leaves its rank there
    os.environ.update(environment)
"""
"""Runs commands one after the other: each process of its own would import Lightning again."""


def test_an_objective_in_one_file_of_another_package_is_planned_trains_resumes_bit_for_bit_and_is_reported(
    python: Path, tmp_path: Path
) -> None:
    corpus = prepare_answers(tmp_path)
    base = make_base(tmp_path / "base", corpus, shape=vars(SHAPE))
    shutil.copy(REPOSITORY / "tests" / "outside" / "kto.py", tmp_path / "outside_kto.py")
    recipe = build_recipe(corpus, tmp_path / "run")
    recipe["model"] |= {
        "decoder": dump_decoder_config(SHAPE),
        "objective": {"class_path": "outside_kto.KTO", "init_args": {"beta": 0.5}},
        "adapter": {"rank": 4, "dropout": 0.1, "base": str(base)},
    }
    recipe["data"] |= {"seq_len": SEQ_LEN, "packing": "pad"}
    config = ("--config", str(write_recipe(tmp_path / "recipe.yaml", recipe)), "--allow-imports", "outside_kto")
    commands = [
        ["plan", *config, "--gpus", "1", "--memory", "1GB"],
        ["fit", *config, "--run_dir", str(tmp_path / "straight")],
        ["fit", *config, "--trainer.max_steps", "2"],
        ["fit", *config, "--ckpt_path", "latest", "--checkpoint.allow_changed", "[trainer.max_steps]"],
        ["report", str(tmp_path / "run")],
    ]
    out = check(run(python, "-c", COMMANDS, json.dumps(commands), cwd=tmp_path))
    assert "the reference of KTO is a forward without adapters: no second model is in memory" in " ".join(out.split())
    ends = [read_tensors(tmp_path / name / "checkpoints/step-00000004") for name in ("straight", "run")]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items() if not name.startswith("state."))
    straight, resumed = (read_metrics(tmp_path / name) for name in ("straight", "run"))
    assert resumed == straight
    assert {row["train/loss"] for row in straight} != {""}
    assert "validation/loss" in straight[0]


def read_metrics(run_dir: Path) -> list[dict[str, str]]:
    """Returns the rows of a run's log, without what measures time."""
    with (run_dir / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name.startswith(("train/", "validation/")) and "second" not in name]
    return [{name: row[name] for name in names} for row in rows]


def test_the_callbacks_run_from_their_wheel_where_genesis_is_absent(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment", wheels["genesis_callbacks"])
    absent = run(python, "-c", "import genesis", cwd=tmp_path)
    assert "ModuleNotFoundError: No module named 'genesis'" in absent.stderr
    program = "import genesis_callbacks as g; print(g.__file__); [getattr(g, name) for name in g.__all__]"
    assert Path(check(run(python, "-c", program, cwd=tmp_path)).strip()).is_relative_to(tmp_path)
    shutil.copytree(
        REPOSITORY / "callbacks" / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__")
    )
    for plugin in (REPOSITORY / ".ci").glob("*.py"):
        shutil.copy(plugin, tmp_path / "tests")
    shutil.copy(REPOSITORY / "callbacks" / "pyproject.toml", tmp_path)
    tests = [Path("tests") / name for name in QUICK_TESTS]
    options = ("-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'files'}")
    check(run(python, "-m", "pytest", *options, *tests, cwd=tmp_path))
