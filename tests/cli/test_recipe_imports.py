"""A recipe names classes of the packages that every run uses; other code is neither imported nor called unasked."""

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonargparse
import pytest

from genesis.base.errors import UserError
from genesis.cli import import_gate, supervise_recipe
from genesis.optim.recipe import read_algorithm
from genesis.recipe.imports import VARIABLE, import_allowed
from genesis.recipe.yaml import find_imports
from tests.cli.conftest import Genesis, Outcome
from tests.cli.tiny import build_recipe, write_recipe

REPOSITORY = Path(__file__).parents[2]
PLANTED = """
from pathlib import Path

from lightning.pytorch import Callback

MARK = Path(__file__).with_name("mark")
MARK.touch()


class Part(Callback):
    pass


def count(batch):
    return 1
"""
POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "mark"]}}
PROFILER = "lightning.pytorch.profilers.PyTorchProfiler"
LAMBDA = "lightning.pytorch.callbacks.LambdaCallback"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the mark that the module `planted` leaves when it is imported, and that a shell command would leave."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mark"


def check_refused(outcome: Outcome, mark: Path, path: str, allows: str) -> None:
    assert outcome.status == 2, outcome.err
    assert outcome.err.startswith("genesis: error: ")
    assert outcome.err.count("\n") == 1
    assert path in outcome.err
    assert f"add `--allow-imports {allows}` or set `{VARIABLE}={allows}`\n" in outcome.err
    assert not mark.exists()


PART = {"class_path": "planted.Part"}
CODE: list[tuple[dict[str, Any], str, str]] = [
    ({"trainer.callbacks": [PART]}, "planted.Part", "planted"),
    ({"trainer.callbacks": "planted.Part"}, "planted.Part", "planted"),
    ({"trainer.callbacks": ["planted.Part"], "trainer.logger": "os.system"}, "planted.Part, os.system", "planted,os"),
    ({"trainer.strategy": PART}, "planted.Part", "planted"),
    ({"trainer.strategy.class_path": "planted.Part"}, "planted.Part", "planted"),
    ({"model.objective": {"class_path": "os.system"}}, "os.system", "os"),
    ({"model.decoder.feed_forward": PART}, "planted.Part", "planted"),
    ({"telemetry": PART}, "planted.Part", "planted"),
    ({"trainer.callbacks": [{"class_path": LAMBDA, "init_args": {"setup": PART}}]}, "planted.Part", "planted"),
    # What follows only the types of the options show.
    ({"trainer.callbacks": "parts.yaml"}, "planted.Part", "planted"),
    ({"counters.count_fn": "planted.count"}, "planted.count", "planted"),
    (
        {"trainer.callbacks": [{"class_path": LAMBDA, "init_args": {"setup": "planted.count"}}]},
        "planted.count",
        "planted",
    ),
    (
        {"trainer.callbacks": [{"class_path": LAMBDA, "init_args": {"setup": "torch.os.system"}}]},
        "no class of torch: torch.os.system",
        "torch.os.system",
    ),
    ({"trainer.callbacks": [{"class_path": "torch.load"}]}, "no class of torch: torch.load", "torch.load"),
    (
        {"trainer.callbacks": [{"class_path": "lightning.pytorch.cli.os.system"}]},
        "code that is no class of lightning: lightning.pytorch.cli.os.system",
        "lightning.pytorch.cli.os.system",
    ),
]


@pytest.mark.parametrize(("changes", "path", "allows"), CODE)
def test_code_of_others_is_named_with_what_allows_it_and_is_not_imported(
    changes: dict[str, Any], path: str, allows: str, genesis: Genesis, planted: Path, tiny_corpus: Path
) -> None:
    Path("parts.yaml").write_text("- class_path: planted.Part\n")
    write_recipe(Path("recipe.yaml"), build_recipe(tiny_corpus, Path("run")), changes)
    check_refused(genesis("fit", "--config", "recipe.yaml"), planted, path, allows)
    assert not Path("run").exists()


@pytest.mark.parametrize("depth", [0, 1])
def test_an_option_of_any_value_builds_no_class(depth: int, genesis: Genesis, planted: Path, tiny_corpus: Path) -> None:
    # Of a package that a recipe may name: its classes are for options that take them.
    handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler"
    value: Any = {"class_path": handler, "init_args": {"entrypoint": "touch", "args": ["mark"]}}
    for _ in range(depth):
        value = [{"deeper": value}]
    logger = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger"}
    logger["init_args"] = {"save_dir": "logs", "comment": value}  # type: ignore[assignment]
    write_recipe(Path("recipe.yaml"), build_recipe(tiny_corpus, Path("run")), {"trainer.logger": logger})
    outcome = genesis("fit", "--config", "recipe.yaml")
    check_refused(outcome, planted, f"for an option that takes no class: {handler}", handler)


def test_a_tag_of_python_runs_nothing(genesis: Genesis, planted: Path, tiny_corpus: Path) -> None:
    recipe = write_recipe(Path("recipe.yaml"), build_recipe(tiny_corpus, Path("run")))
    with recipe.open("a") as file:
        file.write("fork: !!python/object/apply:os.system ['touch mark']\n")
    outcome = genesis("fit", "--config", "recipe.yaml")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1), outcome.err
    assert not planted.exists()


@pytest.mark.parametrize("address", ["memory://parts.yaml", "https://127.0.0.1:9/parts.yaml", "pipe"])
def test_a_value_names_regular_files_alone(address: str, genesis: Genesis, planted: Path, tiny_corpus: Path) -> None:
    os.mkfifo("pipe")
    changes = {"trainer.callbacks": address}
    write_recipe(Path("recipe.yaml"), build_recipe(tiny_corpus, Path("run")), changes)
    outcome = genesis("fit", "--config", "recipe.yaml")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1), outcome.err
    assert f"trainer.callbacks is '{address}': give" in outcome.err


def test_of_many_paths_the_first_are_listed_with_what_allows_these(genesis: Genesis, planted: Path) -> None:
    paths = [f"package_{number}.Part" for number in range(12)]
    Path("recipe.yaml").write_text(f"trainer: {{callbacks: [{', '.join(paths)}]}}")
    allows = ",".join(f"package_{number}" for number in range(10))
    check_refused(genesis("fit", "--config", "recipe.yaml"), planted, "package_9.Part and 2 more; ", allows)


def test_an_address_is_no_recipe(genesis: Genesis) -> None:
    outcome = genesis("fit", "--config", "https://127.0.0.1:9/recipe.yaml")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert "--config 'https://127.0.0.1:9/recipe.yaml' is an address: download the recipe" in outcome.err


def test_every_command_refuses_or_only_reads(genesis: Genesis, planted: Path, tiny_corpus: Path) -> None:
    recipe = ("--config", str(write_recipe(Path("recipe.yaml"), build_recipe(tiny_corpus, Path("run")), CODE[0][0])))
    corpus = Path("corpus.yaml")
    corpus.write_text("name: mine\ntokenizer: bytes\ntrain:\n- class_path: planted.Part\n")
    for words in (("fit", *recipe), ("validate", *recipe), ("doctor", *recipe), ("rehearse", *recipe)):
        check_refused(genesis(*words), planted, "planted.Part", "planted")
    for words in (("plan", *recipe), ("model", "describe", *recipe)):
        assert genesis(*words).status in (0, 1)
    for command in ("prepare", "clean"):
        assert genesis("data", command, "--config", str(corpus)).status == 2
    assert not planted.exists()


@pytest.mark.parametrize(
    "find",
    [import_gate._import_object, import_allowed, lambda path: read_algorithm(path, "recipe.yaml: model.optimizer")],
    ids=["the parser", "a checkpoint", "an optimizer of a plan"],
)
def test_a_package_that_is_allowed_and_not_found_is_refused_with_where_python_looks(
    find: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "no_such_package_here")
    with pytest.raises((ImportError, UserError), match=r"No module named 'no_such.*; install it, or set PYTHONPATH to"):
        find("no_such_package_here.parts.Part")


@pytest.mark.parametrize("allowed", [[], ["--allow-imports", "planted"]])
def test_a_supervisor_resolves_no_other_recipe_than_a_fit(
    allowed: list[str],
    planted: Path,
    tiny_corpus: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["genesis"])
    changes = {**CODE[0][0], "counters.count_fn": "planted.count"}
    write_recipe(Path("recipe.yaml"), build_recipe(tiny_corpus, Path("run")), changes)
    status = supervise_recipe.main(["out.json", "fit", "--config", "recipe.yaml", *allowed])
    assert (status, planted.exists()) == ((0, True) if allowed else (2, False))
    assert allowed or "`--allow-imports planted`" in capsys.readouterr().err
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("words", "variable"),
    [
        (("--allow-imports", "others,planted"), None),
        (("--allow_imports=planted.Part", "--allow-imports", "planted.count"), None),
        ((), "planted, others"),
        (("--trainer.callbacks", "planted.Part", "--counters.count_fn=planted.count"), None),
        (("--trainer.callbacks+=planted.Part", "--counters.count_fn", "planted.count"), None),
        (("--trainer.callbacks", "[{class_path: planted.Part}]", "--counters.count_fn", "planted.count"), None),
    ],
)
def test_the_user_allows_code_by_an_argument_a_variable_or_the_command_line_itself(
    words: tuple[str, ...],
    variable: str | None,
    genesis: Genesis,
    planted: Path,
    tiny_corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    is_typed = any("Part" in word and "callbacks" in word for word in words) or "[{" in " ".join(words)
    changes = {} if is_typed else {**CODE[0][0], "counters.count_fn": "planted.count"}
    write_recipe(Path("recipe.yaml"), build_recipe(tiny_corpus, Path("run")), changes)
    before = words if words == ("--allow-imports", "others,planted") else ()  # the permission may stand first
    outcome = genesis(*before, "fit", "--config", "recipe.yaml", *words[len(before) :], "--print_config")
    assert outcome.status == 0, outcome.err
    assert planted.exists()
    assert "class_path: planted.Part" in outcome.out
    assert "count_fn: planted.count" in outcome.out
    assert "allow_imports" not in outcome.out
    assert os.environ.get(VARIABLE) == variable


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--allow-imports",), "--allow_imports has no names"),
        (("--allow-imports", "a-b"), "--allow_imports is 'a-b': give names of packages or classes"),
        (("--allow-imports=../x",), "--allow_imports is '../x': give names"),
        (("--allow-imports", "*"), "--allow_imports is '*': give names"),
    ],
)
def test_a_wrong_name_is_refused(words: tuple[str, ...], problem: str, genesis: Genesis) -> None:
    outcome = genesis("fit", "--config", "demo", *words)
    assert outcome.status == 2
    assert problem in outcome.err


def test_a_recipe_cannot_allow_itself(genesis: Genesis, planted: Path, tiny_corpus: Path) -> None:
    changes = {"allow_imports": "planted", **CODE[10][0]}
    write_recipe(Path("recipe.yaml"), build_recipe(tiny_corpus, Path("run")), changes)
    outcome = genesis("fit", "--config", "recipe.yaml")
    assert outcome.status == 2
    assert "unknown key allow_imports" in outcome.err
    # A stranger chooses the name of the file, too.
    write_recipe(Path("planted.Part"), build_recipe(tiny_corpus, Path("run")), CODE[0][0])
    check_refused(genesis("fit", "--config", "planted.Part"), planted, "planted.Part", "planted")


def test_a_supervisor_gives_the_permission_to_its_training(genesis: Genesis) -> None:
    outcome = genesis("supervise", "--allow-imports", "mine", "--", "fit", "--config", "demo")
    assert outcome.status == 2
    assert "--allow_imports is an option of the training: give it after --" in outcome.err


def test_the_list_of_a_recipe_has_each_place_that_names_code() -> None:
    text = """
    x: &a {class_path: one.A, init_args: {inner: [{class_path: two.B}, {class_path: [3]}], self: *a}}
    trainer: {strategy.class_path: three.C, callbacks+: [*a, four.D, parts.yaml], devices: 2.5}
    model: {objective: five.E, name: not.code}
    """
    assert find_imports(text) == ["one.A", "two.B", "3", "three.C", "four.D", "2.5", "five.E"]
    assert find_imports("a: [") == find_imports("") == []


def test_jsonargparse_imports_by_our_function_alone() -> None:
    names = [f"jsonargparse.{each.name}" for each in pkgutil.iter_modules(jsonargparse.__path__)]
    holders = {
        name: vars(module)["import_object"]
        for name in names
        if "import_object" in vars(module := importlib.import_module(name))
    }
    own = [holders.pop(f"jsonargparse.{name}") for name in ("_util", "typing")]  # `typing` imports what it lists itself
    assert own == [import_gate._find_object] * 2
    assert len(holders) >= 4
    assert set(holders.values()) == {import_gate._import_object}


IMPORTERS = {
    "callbacks/src/genesis_callbacks/__init__.py": "its own modules",
    "callbacks/src/genesis_callbacks/_hang_report.py": "one module of torch",
    "callbacks/src/genesis_callbacks/checkpoint/__init__.py": "its own modules",
    "callbacks/src/genesis_callbacks/base/manifest.py": "torch",
    "callbacks/src/genesis_callbacks/checkpoint/verify.py": "its own module",
    "genesis/cli/export.py": "one module of ours, with an extra",
    "genesis/cli/import_.py": "one module of ours, with an extra",
    "genesis/cli/program.py": "one module of ours",
    "genesis/export/export.py": "one module of ours, with an extra",
    "genesis/cli/start_fit.py": "torchmetrics",
    "genesis/cli/table.py": "the module of a command",
    "genesis/recipe/imports.py": "modules of classes that the user allows",
    "genesis/operations/demo/finetune.py": "one of its own modules",
    "genesis/operations/doctor/parts.py": "its own modules",
    "genesis/generate/grammar.py": "an optional package",
    "genesis/huggingface/shape.py": "one module of transformers",
    "genesis/model/attend/fa4.py": "an optional package",
    "genesis/model/delta_kernel.py": "an optional package",
    "genesis/model/float8.py": "an optional package",
    "genesis/model/foreign/config.py": "one module of ours, with an extra",
    "genesis/strategies/float8_gather.py": "an optional package",
    "genesis/strategies/replicated.py": "one module of torch",
    "genesis/operations/supervise/forked_writer.py": "one module of ours",
    "genesis/operations/supervise/launcher.py": "modules that its supervisor names, by a socket of the same user",
    "genesis/tokenizer/train.py": "one module of SentencePiece",
    "genesis/train/reward_worker.py": "what --allow_reward_code allows",
    "genesis/train/wandb_log.py": "an optional package",
}
"""Every module of both packages that imports by a text, and what it imports."""


def test_no_other_module_imports_by_a_text() -> None:
    call = re.compile(r"\b(?:import_module|__import__|spec_from_file_location|run_module)\(|(?<![.\w])(?:exec|eval)\(")
    found = [
        str(path.relative_to(REPOSITORY))
        for package in ("genesis", "callbacks/src")
        for path in (REPOSITORY / package).rglob("*.py")
        if call.search(path.read_text(encoding="utf-8"))
    ]
    assert sorted(found) == sorted(IMPORTERS)
