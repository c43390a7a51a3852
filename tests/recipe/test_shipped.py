"""The recipes that come with Genesis: their names stand for files, wherever Genesis is installed."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from genesis.base.errors import UserError
from genesis.recipe.shipped import copy_recipe, find_recipe, find_recipes, list_names, read_summary, resolve_recipes
from tests.commands import REPOSITORY


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["genesis-10m", "genesis-10m.yaml", "configs/genesis-10m", "configs/genesis-10m.yaml"])
def test_a_name_stands_for_the_recipe_that_comes_with_genesis(name: str) -> None:
    """Reported as meta-pytorch/torchtune#350: a recipe's name was looked for in the working directory alone."""
    file = REPOSITORY / "configs" / "genesis-10m.yaml"
    assert find_recipe(name) == file
    assert resolve_recipes(["--config", name, "--run_dir", "x"]) == ["--config", str(file), "--run_dir", "x"]
    assert resolve_recipes([f"--config={name}"]) == [f"--config={file}"]
    assert resolve_recipes(["-c", name]) == ["-c", str(file)]


def test_a_file_is_taken_before_a_copy_and_a_copy_before_the_recipe_of_genesis(here: Path) -> None:
    copy_recipe("genesis-10m")
    assert resolve_recipes(["--config", "genesis-10m"]) == ["--config", "configs/genesis-10m.yaml"]
    Path("genesis-10m").write_text("{}")
    assert resolve_recipes(["--config", "genesis-10m"]) == ["--config", "genesis-10m"]


def test_a_directory_is_not_taken_for_a_recipe(here: Path) -> None:
    """The recipe corpora/genesis-10m writes the directory corpora/genesis-10m: its command can be given again."""
    (here / "corpora/genesis-10m").mkdir(parents=True)
    recipe = REPOSITORY / "configs/corpora/genesis-10m.yaml"
    assert resolve_recipes(["--config", "corpora/genesis-10m"]) == ["--config", str(recipe)]
    with pytest.raises(UserError, match=r"^--config \.: a directory, not a file, and no recipe of Genesis"):
        resolve_recipes(["--config", "."])
    (here / "config.yaml").touch()
    with pytest.raises(UserError, match=r"^--config \. is a directory; its recipe is config\.yaml$"):
        resolve_recipes(["--config", "."])


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_recipe_that_is_no_file_is_refused_without_waiting(here: Path, put: Callable[[Path], None]) -> None:
    put(here / "recipe.yaml")
    with pytest.raises(UserError, match=r"--config recipe\.yaml is a (FIFO|device), but must be a file"):
        resolve_recipes(["--config", "recipe.yaml"])


def test_a_recipe_that_a_shell_gives_by_a_descriptor_stays_as_it_is() -> None:
    reader, writer = os.pipe()
    assert resolve_recipes([f"--config=/dev/fd/{reader}"]) == [f"--config=/dev/fd/{reader}"]
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("value", ["{data: {seq_len: 8}}", "data: {}", "/dev/null", "--trainer.max_steps", ""])
def test_what_is_no_name_stays_as_it_is(value: str) -> None:
    assert resolve_recipes(["--config", value]) == ["--config", value]


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("genesis-10", "did you mean genesis-10m?"),
        ("smollm2-135m-lora", "did you mean finetune/smollm2-135m-lora?"),
        ("configs/corpora/genesis-10.yaml", "did you mean corpora/genesis-10m?"),
        ("../genesis-10m", "did you mean"),
        ("my/recipe.yaml", "(`genesis recipes` lists them)"),
    ],
)
def test_a_name_of_nothing_is_refused_with_the_nearest(value: str, hint: str) -> None:
    with pytest.raises(UserError) as refusal:
        resolve_recipes(["--config", value])
    assert str(refusal.value).startswith(f"--config {value}: no such file, and no recipe of Genesis")
    assert hint in str(refusal.value)


def test_every_recipe_is_listed_with_a_summary() -> None:
    files = {path.relative_to(REPOSITORY / "configs") for path in (REPOSITORY / "configs").rglob("*.yaml")}
    assert {Path(f"{name}.yaml") for name in list_names()} == files
    assert [name for name in list_names() if not read_summary(name)] == []


def test_a_copy_brings_the_files_that_the_recipe_names() -> None:
    copied = copy_recipe("finetune/gspo-tiny")
    assert set(map(str, copied)) == {
        "configs/finetune/gspo-tiny.yaml",
        "configs/finetune/gspo/prompts.jsonl",
        "configs/finetune/gspo/chat.jinja",
        "configs/finetune/gspo/reward.py",
    }
    assert all(path.read_bytes() == (REPOSITORY / path).read_bytes() for path in copied)
    assert [str(path) for path in copy_recipe("genesis-10m")][1] == "configs/model/genesis-10m.yaml"


def test_a_copy_never_replaces_a_file_that_was_changed() -> None:
    copy_recipe("corpora/genesis-10m")
    copy_recipe("corpora")  # those that are there already are the same
    Path("configs/corpora/demo.yaml").write_text("mine")
    Path("configs/corpora/assistant.yaml").unlink()
    with pytest.raises(UserError, match=r"configs/corpora/demo\.yaml exists and differs"):
        copy_recipe("corpora")
    assert not Path("configs/corpora/assistant.yaml").exists()
    with pytest.raises(UserError, match=r"no recipe 'nothing'"):
        copy_recipe("nothing")


@pytest.mark.process
def test_the_wheel_has_the_recipes_and_an_installed_genesis_finds_them(here: Path) -> None:
    """Reported as vllm-project/vllm-omni#4932 and thammegowda/mtdata#82: a wheel without its YAML files."""
    (wheel,) = WheelBuilder(str(REPOSITORY)).build(directory=str(here / "dist"), versions=["standard"])
    site, work = here / "site", here / "work"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    ours = find_recipes()
    packaged = {path.relative_to(site / "genesis/configs") for path in (site / "genesis/configs").rglob("*.*")}
    assert packaged == {path.relative_to(ours) for path in ours.rglob("*.*")}
    (licence,) = site.glob("genesis_lm-*.dist-info/licenses/LICENSE")
    assert "Apache License" in licence.read_text()
    metadata = (licence.parents[1] / "METADATA").read_text()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    work.mkdir()
    program = "from genesis.recipe.shipped import find_recipe; print(find_recipe('genesis-10m'))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{site}/genesis/configs/genesis-10m.yaml\n"
