"""A misspelt option of `fit` is refused before Lightning is imported, and nothing that the real parser takes is."""

import json
import os
import random
import re
import types
import typing
from argparse import SUPPRESS
from dataclasses import is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser, Namespace

from genesis.base.errors import UserError
from genesis.cli import option_names
from genesis.cli.fit import GenesisCLI
from genesis.cli.help import _our_subclasses, _public_path
from genesis.cli.option_names import check
from genesis.recipe import options
from genesis.recipe.options import RECORD, Options
from tests.cli.conftest import Genesis
from tests.cli.test_main import modules_after
from tests.cli.tiny import build_recipe, write_recipe

REPOSITORY = Path(__file__).parents[2]
COMMANDS = ("fit", "validate")
SEED = 0


class ParserIsBuiltError(Exception):
    """Ends a GenesisCLI before it parses."""


class ParserOnly(GenesisCLI):
    def parse_arguments(self, parser: Any, args: Any) -> None:
        self.own_parser = parser
        raise ParserIsBuiltError


def build_parser(command: str) -> ArgumentParser:
    """Returns the real parser of `genesis COMMAND`."""
    cli = ParserOnly.__new__(ParserOnly)
    with pytest.raises(ParserIsBuiltError):
        ParserOnly.__init__(cli, command, [command])
    (subparsers,) = [action for action in cli.own_parser._actions if isinstance(action.choices, dict)]
    return subparsers.choices[command]


def list_members(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def find_base(name: str, hint: Any) -> type | None:
    """Returns the class of an option's value, if that is a section of ours, or one that our recipes choose."""
    if re.fullmatch(r"trainer\.(?!strategy$).*", name):
        return None
    kinds = [kind for member in list_members(hint) for kind in (member, *typing.get_args(member))]
    classes = (kind for kind in kinds if isinstance(kind, type) and kind.__module__ != "builtins")
    ours = (kind for kind in classes if is_dataclass(kind) or _our_subclasses(kind))
    return next(ours, None)


def to_plain(value: Any) -> Any:
    if isinstance(value, dict | Namespace):
        return {key: to_plain(each) for key, each in (value if isinstance(value, dict) else vars(value)).items()}
    return [to_plain(each) for each in value] if isinstance(value, list | tuple) else value


def describe(parser: Any, bases: set[type]) -> dict[str, Any]:
    """Returns what the record has for the options of a parser, and notes the bases of their classes."""
    found: dict[str, Any] = {}
    for action in parser._actions:
        hint = getattr(action, "_typehint", action.type)
        spellings = [word.removeprefix("--").removesuffix("+") for word in action.option_strings if word[:2] == "--"]
        kinds = "typing.Any" if hint is None else " | ".join(sorted(map(str, list_members(hint))))
        given: dict[str, Any] = {"types": kinds.replace("<class 'NoneType'>", "NoneType")}
        if action.default != SUPPRESS:
            if not action.required:
                given["default"] = to_plain(action.default)
            base = find_base(action.dest, hint)
            if base is not None:
                bases.add(base)
                given["base"] = find_path(base)
        if type(action).__name__ != "_ActionConfigLoad":
            found |= {name: given for name in sorted({action.dest, *spellings}) if " " not in name}
    return found


def find_path(kind: type) -> str:
    return _public_path(kind) if kind.__module__.startswith("genesis.") else f"{kind.__module__}.{kind.__qualname__}"


def describe_all(parsers: dict[str, Any]) -> dict[str, Any]:
    """Returns the record, from the real parsers."""
    waiting, known = set[type](), set[type]()
    options = {command: describe(parser, waiting) for command, parser in parsers.items()}
    names = sorted({name for each in options.values() for name in each})
    groups = [each.dest for each in parsers["fit"]._actions if type(each).__name__ == "_ActionConfigLoad"]
    bases, classes = {}, {}
    while waiting - known:
        base = min(waiting - known, key=find_path)
        known.add(base)
        chosen = sorted(_our_subclasses(base), key=find_path)
        if chosen:
            bases[find_path(base)] = list(map(find_path, chosen))
        for kind in chosen or [base]:
            parser = ArgumentParser(add_help=False)
            parser.add_class_arguments(kind)
            own = describe(parser, waiting)
            classes[find_path(kind)] = {name: own[name] for name in own if not name.endswith("help")}
    found = {}
    for name in names:
        having = [command for command in parsers if name in options[command]]
        found[name] = options[having[0]][name] | ({} if len(having) == len(parsers) else {"only": having})
    return {"lightning": version("lightning"), "groups": sorted(groups), "bases": bases, "options": found,
            "classes": dict(sorted(classes.items()))}  # fmt: skip


def write_record(record: dict[str, Any]) -> str:
    """Returns the record with one option a line, so that a change of it shows what has changed."""

    def write(value: Any, depth: int) -> str:
        if not depth or not value:
            return json.dumps(value)
        lines = ",\n".join(f"{json.dumps(key)}: {write(each, depth - 1)}" for key, each in value.items())
        return f"{{\n{lines}\n}}"

    depths = {"bases": 1, "options": 1, "classes": 2}
    return "{\n" + ",\n".join(f"{json.dumps(k)}: {write(v, depths.get(k, 0))}" for k, v in record.items()) + "\n}\n"


@pytest.fixture(scope="module")
def parsers() -> dict[str, ArgumentParser]:
    return {command: build_parser(command) for command in COMMANDS}


def test_the_golden_record_lists_the_options_of_the_real_parser(parsers: dict[str, ArgumentParser]) -> None:
    fresh = describe_all(parsers)
    if os.environ.get("GENESIS_UPDATE_GOLDEN") == "1":
        RECORD.write_text(write_record(fresh), encoding="utf-8")
    assert json.loads(RECORD.read_text(encoding="utf-8")) == fresh, "options have changed; `make golden` records them"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data.seqlen", "16"],
        ["--config", "recipe.yaml"],
        ["--schedule.shape", "wds"],
        ["--data.corpus", "none"],
        ["--model.optimizer", "Muon", "--model.optimizer.others.lrr", "1"],
        ["--model.optimizer", "adamv"],
        ["--model.decoder.dim", "8", "--trainer.max_steps", "0"],
    ],
    ids=[
        "on the command line",
        "in a file",
        "a wrong value",
        "a missing corpus",
        "an option of a class",
        "a class",
        "a length",
    ],
)
def test_a_mistake_is_refused_without_importing_torch_or_lightning(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("data: {seqlen: 16}\n")
    loaded = modules_after(f"from genesis.cli.main import main\nassert main(['fit', *{arguments!r}]) == 2")
    assert not {"torch", "lightning", "pytorch_lightning", "lightning_fabric"} & loaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule.shape", "wds"], "schedule.shape is wds: give one of cosine, wsd, linear, constant, own"),
        (["--data.packing", "bestfit"], "data.packing is 'bestfit': give one of chunk, best_fit, pad or null"),
        (["--data.seq_len", "2k"], "data.seq_len is '2k': give a whole number or one of auto"),
        (["--data.seq_len", "null"], "data.seq_len is 'null': give a whole number or one of auto"),
        (["--checkpoint.save_at_end", "maybe"], "checkpoint.save_at_end is maybe: give true or false"),
        (["--telemetry.hang_seconds", "soon"], "telemetry.hang_seconds is 'soon': give a number or null"),
    ],
)
def test_a_wrong_value_is_refused_on_the_command_line_and_in_a_file(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        check("fit", arguments)
    name, value = " ".join(arguments).removeprefix("--").replace("=", " ").split(" ")
    content: Any = value
    for part in reversed(name.split(".")):
        content = {part: content}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content).replace("'null'", "null"))
    with pytest.raises(UserError, match=f"^{re.escape(f'{path}: {message}')}"):
        check("fit", ["--config", str(path)])


OPTIMIZERS = "genesis.optim.AdamW, genesis.optim.AdamW8bit, genesis.optim.Muon"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.optimizer", "adamv"], f"model.optimizer is adamv: give one of {OPTIMIZERS}"),
        (
            ["--model.optimizer", "genesis.optim.adamv"],
            f"model.optimizer is genesis.optim.adamv: give one of {OPTIMIZERS}",
        ),
        (
            ["--model.optimizer", "Muon", "--model.optimizer.others", "AdamV"],
            f"model.optimizer.others is AdamV: give one of {OPTIMIZERS}",
        ),
        (["--model.objective", "DPOO"], "model.objective is DPOO: give one of genesis.objectives.CPO, "),
        (
            ["--trainer.strategy", "genesis.strategies.Shard"],
            "trainer.strategy is genesis.strategies.Shard: give one of genesis.strategies.Replicated, ",
        ),
    ],
)
def test_a_class_that_does_not_exist_is_refused_with_those_that_do(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENESIS_ALLOW_IMPORTS", "")  # classes of others may have any name
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        check("fit", arguments)


def test_a_class_that_others_may_have_goes_on_to_the_real_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    check("fit", ["--model.optimizer", "mine.optim.Lion"])
    check("fit", ["--trainer.strategy", "ddp"])
    check("fit", ["--model.optimizer", "genesis.optim.adamw.AdamW"])
    monkeypatch.setenv("GENESIS_ALLOW_IMPORTS", "mine.optim")
    check("fit", ["--model.optimizer", "Lion"])


def test_devices_and_the_length_of_a_run_are_judged_before_lightning_is_imported() -> None:
    given = ["--model.decoder.dim", "8", "--trainer.max_steps", "5"]
    option_names.check_fit(given)
    with pytest.raises(UserError, match=r"^trainer\.devices is 'many': give a number of at least 1"):
        option_names.check_fit([*given, "--trainer.devices", "many"])
    with pytest.raises(UserError, match=r"^trainer\.max_steps is 0, a run that trains nothing"):
        option_names.check_fit([*given[:2], "--trainer.max_steps", "0"])
    option_names.check_fit([*given, "--trainer.devices", "many", "--print_config"])


@pytest.mark.parametrize("wrong", ["gradient_clip_val: [1]", "log_every_n_steps: {x: 1}"])
def test_a_value_of_another_type_in_a_file_goes_on_to_the_real_parser(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {{decoder: {{dim: 8}}}}\ntrainer:\n  max_steps: 5\n  {wrong}\n")
    option_names.check_fit([f"--config={path}"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--schedule.shape", "wsd"],
        ["--trainer.precision", "32"],
        ["--trainer.precision", "bf16-mixed"],
        ["--data.seq_len", "1e3"],
        ["--model.adapter.alpha", "1e-4"],
        ["--model.adapter.alpha", ".inf"],
        ["--checkpoint.every_n_minutes", "null"],
        ["--checkpoint.save_at_end", "False"],
        ["--trainer.limit_val_batches", "0.5"],
        ["--schedule.shape"],  # its value is missing, which the real parser reports
    ],
)
def test_a_value_that_may_be_right_goes_on_to_the_real_parser(arguments: list[str]) -> None:
    check("fit", arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_corpus_is_refused_unless_a_checkpoint_knows_where_it_is(command: str, tmp_path: Path) -> None:
    look = {"fit": option_names.check_fit, "validate": option_names.check_validate}[command]
    given = ["--model.decoder.dim", "8", "--trainer.max_steps", "1", "--data.corpus", str(tmp_path)]
    with pytest.raises(UserError, match=f"^{re.escape(str(tmp_path))} is not a prepared corpus"):
        look(given)
    look([*given, "--ckpt_path", "latest"])
    look([*given, "--print_config"])
    (tmp_path / "manifest.json").touch()
    look(given)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["--data.seqlen", "16"], "did you mean 'data.seq_len'?"),
        (["--data.seqlen=16", "--print_config"], "did you mean 'data.seq_len'?"),
        (["--model.decoder.dmi", "16"], "did you mean 'model.decoder.dim'?"),
        (["--model.adapter.rnak", "1"], "did you mean 'model.adapter.rank'?"),
        (["--run-dir", "x"], "did you mean 'run_dir'?"),
        (["--limit_val_batches", "5"], "did you mean 'trainer.limit_val_batches'?"),
        (["--trainers.max_step", "5"], "did you mean 'trainer.max_steps'?"),
        (["--verification.xyzzy", "1"], "the options are directory, directory_holds, finite, ignore"),
    ],
)
def test_a_misspelt_option_names_the_nearest(command: str, arguments: list[str], near: str) -> None:
    with pytest.raises(UserError, match="unrecognized arguments: --") as error:
        check(command, arguments)
    assert near in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data.seq", "16"],  # argparse takes abbreviations
        ["--trainer.strategy", "mine.Sharded", "--trainer.strategy.shrad", "full"],
        ["--trainer.logger+=CSVLogger", "--trainer.logger.save_dir", "x"],
        ["--trainer.callbacks.init_args.x", "1"],
        ["--model.optimizer.init_args.lr", "1"],
        ["--data.mix.web", "2"],
        ["--checkpoint.allow_changed+=a"],
        ["--trainer.strategy.help=genesis.strategies.Sharded"],
        ["--help", "--data.seqlen", "16"],
        ["--data.seqlen", "16", "--he"],
        ["--trainer.logger.he", "CSVLogger", "--data.seqlen", "16"],
        ["--run_dir", "--a directory"],
        ["--", "--data.seqlen"],
        ["-x", "word", "--data", "{seqlen: 16}", "--data", "nowhere.yaml", "--config", "nowhere.yaml", "--config"],
    ],
)
def test_what_the_list_cannot_judge_goes_on_to_the_real_parser(arguments: list[str]) -> None:
    check("fit", arguments)


@pytest.mark.parametrize(
    "text",
    [
        "data: {mix: {web: 1}}\ncheckpoint.every_n_steps: 5\n",
        "trainer: {strategy: {class_path: lightning.pytorch.Strategy, init_args: {shrad: 1}}, callbacks+: []}\n",
        "model: {optimizer: {class_path: Options, init_args: {a: 1}}}\ncheckpoint: {run_dir: x}\ntrainer: null\n",
        "foo: {}\n__path__: x\n1: 2\nnull: 3\na..b: 1\n",
        "trainer: {max_time: {days: 1}, max_steps: {x: 1}}\n",
        "<<: {a: 1}\n",
    ],
)
def test_a_file_that_the_list_cannot_judge_goes_on_to_the_real_parser(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    check("fit", [f"--config={path}"])


def test_a_pipe_is_left_to_the_real_parser(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check("fit", ["--config", str(tmp_path / "pipe")])


def test_every_recipe_and_every_resolved_recipe_passes() -> None:
    tops = [*(REPOSITORY / "configs").glob("*.yaml"), *(REPOSITORY / "tests/golden/configs").glob("*.yaml")]
    parts = [path for folder in ("strategies", "loggers") for path in (REPOSITORY / "configs" / folder).glob("*.yaml")]
    assert len(tops) > 6
    for path in (*tops, *parts):
        for command in COMMANDS:
            check(command, ["-c", str(path)])


def misspell(name: str, chooser: random.Random) -> str:
    place = chooser.randrange(len(name))
    return name[:place] + chooser.choice(["", "x", "_", ".", name[place] * 2]) + name[place + 1 :]


@pytest.mark.parametrize("num_options", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_whatever_is_refused_the_real_parser_refuses_too(
    num_options: int, parsers: dict[str, ArgumentParser], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(option_names, "is_declared", lambda name: False)
    names = Options.read("fit")
    chooser = random.Random(SEED)
    num_refused = 0
    for option in chooser.choices(sorted(names.names), k=num_options):
        word = misspell(option, chooser)
        for arguments in ([f"--{word}", "1"], ["--config", str(tmp_path / "recipe.yaml")]):
            (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({word: 1}))
            try:
                check("fit", arguments)
            except UserError:
                num_refused += 1
                with pytest.raises(SystemExit):
                    parsers["fit"].parse_args(arguments)
    assert num_refused > num_options
    capsys.readouterr()


def test_a_list_of_another_lightning_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "version", lambda name: "2.6.99")
    check("fit", ["--data.seqlen", "16"])


def test_an_option_that_is_newer_than_the_list_is_not_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text("class Options:\n    seqlen: int\n")
    monkeypatch.setattr(options, "_folders", lambda package: [tmp_path])
    check("fit", ["--data.seqlen", "16"])


def test_the_command_prints_one_line_and_ends_with_2(genesis: Genesis) -> None:
    outcome = genesis("fit", "--data.seqlen", "16")
    assert outcome.status == 2
    assert outcome.err == "genesis: error: unrecognized arguments: --data.seqlen; did you mean 'data.seq_len'?\n"


def test_an_option_under_its_old_name_is_accepted_with_one_line_of_warning(
    genesis: Genesis, tiny_corpus: Path, tmp_path: Path
) -> None:
    recipe = build_recipe(tiny_corpus, tmp_path / "run")
    recipe["trainer"]["strategy"] = {"class_path": "Sharded", "init_args": {"forward_skew_seconds": 30.0}}
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    with pytest.warns(FutureWarning) as caught:
        outcome = genesis("fit", "--config", str(path), "--print_config")
    assert outcome.status == 0, outcome.err
    assert "desync_seconds: 30.0" in outcome.out
    assert "forward_skew" not in outcome.out
    old = "trainer.strategy.init_args.forward_skew_seconds"
    expected = f"{old} is deprecated; write {old.replace('forward_skew', 'desync')}"
    assert {str(warning.message) for warning in caught} == {expected}, "Python prints equal warnings once"
