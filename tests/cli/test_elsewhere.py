"""A run whose corpus was named relative to the working directory, used from other working directories."""

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Genesis
from tests.cli.tiny import build_recipe, write_recipe

RUN, CORPUS = Path("runs/a"), Path("corpora/tiny")


@pytest.fixture
def home(genesis: Genesis, tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the directory that a run was started from; the test goes on in another."""
    home = tmp_path / "home"
    shutil.copytree(tiny_corpus, home / CORPUS)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(home)
    recipe = write_recipe(home / "recipe.yaml", build_recipe(CORPUS, RUN))
    outcome = genesis("fit", "--config", str(recipe))
    assert outcome.status == 0, outcome.err
    monkeypatch.chdir(tmp_path / "elsewhere")
    return home


def generate(genesis: Genesis, run_dir: Path) -> tuple[int, str]:
    outcome = genesis("generate", str(run_dir), "--max-new-tokens", "3", "--device", "cpu")
    return outcome.status, outcome.err


def test_commands_find_the_corpus_of_a_run_from_another_working_directory(genesis: Genesis, home: Path) -> None:
    assert generate(genesis, home / RUN) == (0, "")
    assert generate(genesis, home / RUN / "checkpoints/step-00000002") == (0, "")
    evaluated = genesis("evaluate", str(home / RUN), "--device", "cpu", "--json")
    assert evaluated.status == 0, evaluated.err
    config = ("--config", str(home / RUN / "config.yaml"))
    validated = genesis("validate", *config, "--ckpt_path", str(home / RUN / "checkpoints/step-00000004"))
    assert validated.status == 0, validated.err
    resumed = genesis(
        *("fit", *config, "--run_dir", str(home / RUN), "--ckpt_path", "latest"),
        *("--trainer.max_steps", "6", "--checkpoint.allow_changed", "[trainer.max_steps]"),
    )
    assert resumed.status == 0, resumed.err
    # The run that went on here names the corpus as seen from here.
    assert f"corpus: {Path('..', home.name) / CORPUS}\n" in (home / RUN / "config.resume-1.yaml").read_text()
    assert generate(genesis, home / RUN) == (0, "")


def test_a_corpus_that_was_moved_with_its_run_is_found(genesis: Genesis, home: Path) -> None:
    moved = home.rename(home.with_name("moved"))
    assert generate(genesis, moved / RUN) == (0, "")


def test_a_run_that_recorded_no_places_finds_its_corpus_by_its_own_directory(genesis: Genesis, home: Path) -> None:
    (home / RUN / "data_places.json").unlink()
    assert generate(genesis, home / RUN) == (0, "")


def test_an_error_names_every_place_that_was_tried_and_the_remedy(genesis: Genesis, home: Path) -> None:
    (home / CORPUS).rename(home / "other")
    (home / RUN).rename(home / "b")
    status, err = generate(genesis, home / "b")
    assert status == 2
    assert err.count("\n") == 1
    for part in (
        f"the tokenizer in {CORPUS} of the run {home / 'b'} is not there; looked for at ",
        f"{CORPUS} (relative to the working directory {home.with_name('elsewhere')})",
        f"(recorded in {home / 'b' / 'data_places.json'})",
        "give --tokenizer",
    ):
        assert part in err
    outcome = genesis("validate", "--config", str(home / "recipe.yaml"), "--ckpt_path", str(home / RUN))
    assert outcome.status == 2
    assert "give it by --data.corpus" in outcome.err
    (home / "b" / "data_places.json").write_text('{"corpora/tiny": 3}')
    status, err = generate(genesis, home / "b")
    assert (status, err.count("\n")) == (2, 1)
    assert "data_places.json is damaged" in err
