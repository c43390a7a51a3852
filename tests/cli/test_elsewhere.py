"""A run whose corpus was named relative to the working directory, used from other working directories."""

import shutil
from pathlib import Path

import pytest
import yaml

from genesis.serve.catalogue import Catalogue
from genesis_callbacks.base.event_reader import read_events
from tests.cli.conftest import Genesis
from tests.cli.tiny import build_recipe, write_recipe
from tests.data.stream.streams import make_texts, make_tokenizer, write_files

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
    outcome = genesis("generate", str(run_dir), "--max_new_tokens", "3", "--device", "cpu")
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


STEPS = "[trainer.max_steps]"


@pytest.fixture
def moved(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the working directory of a test whose run was moved, with its corpus, into a `runs` of another name."""
    there = tmp_path / "there"
    (there / "runs").mkdir(parents=True)
    (home / RUN).rename(there / "runs" / "renamed")
    # The record of places is relative to the run: what it leads to must have moved along.
    (home / "corpora").rename(there / "corpora")
    monkeypatch.chdir(there)
    return there


def check(genesis: Genesis, *arguments: str, status: int = 0) -> str:
    outcome = genesis(*arguments)
    assert outcome.status == status, (arguments, outcome.err)
    return outcome.out


@pytest.mark.slow
def test_every_command_finds_the_checkpoints_of_a_run_that_was_moved_and_renamed(genesis: Genesis, moved: Path) -> None:
    run, cpu = "renamed", ("--device", "cpu")
    newest, first = "step-00000004", "step-00000002"
    assert newest in check(genesis, "checkpoint", "list", run)
    assert newest in check(genesis, "checkpoint", "show", run)
    assert first in check(genesis, "checkpoint", "show", f"{run}/2")
    assert first in check(genesis, "checkpoint", "verify", f"runs/{run}/{first}")
    assert newest in check(genesis, "checkpoint", "verify", run)
    assert first in check(genesis, "checkpoint", "diff", f"{run}/2", f"{run}/latest")
    assert newest in check(genesis, "checkpoint", "prune", run, "--keep_last", "1", "--dry_run")
    assert newest in check(genesis, "checkpoint", "repair", run)
    assert "a.ckpt" in check(genesis, "checkpoint", "to-lightning", f"{run}/2", "a.ckpt")
    assert check(genesis, "generate", f"{run}/2", "--max_new_tokens", "2", *cpu)
    assert newest in check(genesis, "evaluate", run, *cpu, "--json")
    assert [source.latest_id for source in Catalogue([Path(run)])._sources] == ["latest"]
    (only,) = Catalogue([Path(run, "2")]).entries()
    assert only.path == moved / "runs" / run / "checkpoints" / first
    config = ("--config", f"runs/{run}/config.yaml", "--run_dir", f"runs/{run}")
    for wanted in ("latest", "2", first, run, f"runs/{run}/2", f"runs/{run}/checkpoints/{first}"):
        check(genesis, "validate", *config, "--ckpt_path", wanted)
    longer = ("--trainer.max_steps", "6", "--checkpoint.allow_changed", STEPS)
    check(genesis, "fit", *config, "--ckpt_path", f"{run}/2", "--fork", "fork", *longer)
    check(genesis, "fit", *config, "--ckpt_path", run, *longer)
    assert sorted(path.parts[1] for path in Path("runs").glob("*/checkpoints/step-00000006")) == ["fork", run]
    restored = [event for event in read_events(Path("runs/fork")) if event.kind == "restored"]
    assert [event.checkpoint for event in restored] == [f"../../{run}/checkpoints/{first}"]


@pytest.mark.slow
def test_exports_releases_and_imports_find_what_is_meant_after_a_move(genesis: Genesis, moved: Path) -> None:
    check(genesis, "export", "renamed/2", "exports/demo")
    to = ("--repo", "me/demo", "--license", "mit", "--allow", str(moved.parent), "--dry_run")
    check(genesis, "release", "exports/demo", "releases/demo", *to)
    outcome = genesis("release", "renamed", "releases/other", *to)
    assert "renamed is a run, not an export; `genesis export renamed OUT`" in outcome.err
    check(genesis, "import", "exports/demo", "runs/imported")
    assert check(genesis, "generate", "imported", "--max_new_tokens", "2", "--device", "cpu")
    assert check(genesis, "generate", "exports/demo", "--max_new_tokens", "2", "--device", "cpu")


@pytest.mark.slow
def test_a_run_from_a_stream_goes_on_from_another_working_directory(
    genesis: Genesis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    make_tokenizer(home / "tokenizer")
    write_files(home / "raw/web", make_texts(100, seed=1), ".jsonl.zst")
    write_files(home / "raw/code", make_texts(100, seed=2), ".jsonl.gz")
    recipe = build_recipe(CORPUS, RUN)
    del recipe["data"]["corpus"]
    recipe["data"]["stream"] = {
        "tokenizer": "tokenizer",
        "sources": [{"name": "web", "paths": ["raw/web"]}, {"name": "code", "paths": ["raw/code/*.gz"]}],
        "block_tokens": 400,
        "num_workers": 0,
    }
    recipe["trainer"]["limit_val_batches"] = 0
    monkeypatch.chdir(home)
    outcome = genesis("fit", "--config", str(write_recipe(home / "recipe.yaml", recipe)))
    assert outcome.status == 0, outcome.err
    monkeypatch.chdir(elsewhere)
    options = ("--config", str(home / RUN / "config.yaml"), "--run_dir", str(home / RUN), "--ckpt_path", "latest")
    longer = ("--trainer.max_steps", "6", "--checkpoint.allow_changed", "[trainer.max_steps]")
    resumed = genesis("fit", *options, *longer)
    assert resumed.status == 0, resumed.err
    written = yaml.safe_load((home / RUN / "config.resume-1.yaml").read_text())["data"]["stream"]
    assert [source["paths"] for source in written["sources"]] == [["../home/raw/web"], ["../home/raw/code/*.gz"]]
    assert written["tokenizer"] == "../home/tokenizer"
    (home / "raw/web").rename(home / "raw/other")
    refused = genesis("fit", *options, *longer)
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "the source web at raw/web of the run" in refused.err
    assert f"recorded in {home / RUN / 'data_paths.json'}" in refused.err


def test_a_corpus_that_was_moved_with_its_run_is_found(genesis: Genesis, home: Path) -> None:
    moved = home.rename(home.with_name("moved"))
    assert generate(genesis, moved / RUN) == (0, "")


def test_the_record_of_an_earlier_version_is_read(genesis: Genesis, home: Path) -> None:
    moved = (home / RUN).rename(home / RUN.with_name("b"))
    (moved / "data_paths.json").rename(moved / "data_places.json")
    assert generate(genesis, moved) == (0, "")


def test_a_run_without_recorded_paths_finds_its_corpus_by_its_own_directory(genesis: Genesis, home: Path) -> None:
    (home / RUN / "data_paths.json").unlink()
    assert generate(genesis, home / RUN) == (0, "")


def test_an_error_lists_every_path_that_was_tried_and_the_remedy(genesis: Genesis, home: Path) -> None:
    (home / CORPUS).rename(home / "other")
    (home / RUN).rename(home / "b")
    status, err = generate(genesis, home / "b")
    assert status == 2
    assert err.count("\n") == 1
    for part in (
        f"the tokenizer in {CORPUS} of the run {home / 'b'} does not exist; searched: ",
        f"{CORPUS} (relative to the working directory {home.with_name('elsewhere')})",
        f"(recorded in {home / 'b' / 'data_paths.json'})",
        "give --tokenizer",
    ):
        assert part in err
    outcome = genesis("validate", "--config", str(home / "recipe.yaml"), "--ckpt_path", str(home / "b"))
    assert outcome.status == 2
    assert "give it by --data.corpus" in outcome.err
    (home / "b" / "data_paths.json").write_text('{"corpora/tiny": 3}')
    status, err = generate(genesis, home / "b")
    assert (status, err.count("\n")) == (2, 1)
    assert "data_paths.json is damaged" in err
