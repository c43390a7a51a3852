"""The reader of recipes without Lightning finds what the real parser finds."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from genesis.base.errors import UserError
from genesis.recipe.options import CLASS_PATH, Options
from genesis.recipe.resolved import ResolvedRecipe, list_steps
from genesis.recipe.yaml import FastRecipeLoader, load_yaml
from tests.cli.test_configs import CONFIGS, NAMES, PRINT, command_of
from tests.cli.test_option_names import build_parser
from tests.golden.files import GOLDEN

DEMO = str(CONFIGS / "demo.yaml")
SHARDED = "genesis.strategies.Sharded"
RECIPES = [name for name in NAMES if command_of(name)[0] == "fit"]


def list_values(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields all options with their values, except the defaults of classes that are not ours."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from list_values(each, f"{name}.{key}")
    elif isinstance(value, list):
        yield name, len(value)
        for place, each in enumerate(value):
            yield from list_values(each, f"{name}[{place}]")
    else:
        yield name, value


def compare(ours: Any, real: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the options with another value in the real parser's recipe."""
    own, other = dict(list_values(ours)), dict(list_values(real))
    foreign = (".trainer.logger.init_args", ".config")
    names = [name for name in own | other if not name.startswith(foreign)]
    pairs = {name: (own.get(name, "missing"), other.get(name, "missing")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_resolves_to_what_the_real_parser_finds(name: str) -> None:
    recipe = ResolvedRecipe.read(list_steps([word for word in command_of(name) if word != PRINT]))
    recipe.check_classes()
    golden = GOLDEN / "configs" / name
    assert compare(recipe.content, load_yaml(golden.read_text(encoding="utf-8"), golden)) == {}
    assert ResolvedRecipe.complete(recipe.content, "again").content == recipe.content


OPTIONS = {
    "dotted": [
        "--data.micro_batch_size",
        "2",
        "--trainer.max_steps=7",
        "--run_dir",
        "12",
        "--schedule.floor_share",
        "0",
    ],
    "a class by its path": ["--trainer.strategy", SHARDED, "--trainer.strategy.blocks_per_unit", "2"],
    "another optimizer": ["--model.optimizer.lr=3", "--model.optimizer", "genesis.optim.AdamW"],
    "the optimizer beside Muon": ["--model.optimizer", "Muon", "--model.optimizer.others.lr", "0.1"],
    "a mapping": ["--model.optimizer=AdamW", "--model.optimizer", "{lr: 0.5, betas: [0.8, 0.9]}"],
    "optional sections": ["--model.adapter.rank", "4", "--model.float8", "{}"],
    "a stream": ["--data.stream", "{sources: [{name: a, paths: [x.jsonl]}], tokenizer: t}"],
    "nulls": ["--trainer.max_steps", "null", "--checkpoint.keep_last=null", "--data.corpus", "null"],
    "lists": ["--trainer.devices", "[0, 1]", "--telemetry.trace_steps", "[3, 4]", "--data.skip_positions", "[[2, 3]]"],
    "appended": ["--checkpoint.allow_changed+=a", "--checkpoint.allow_changed+=b"],
    "a callback": ["--trainer.callbacks+=genesis.train.start_report.StartReport"],
    "a key of a mapping": ["--data.mix", "{web: 2, code: 1}", "--data.mix.web", "3"],
    "a length": ["--data.num_epochs", "2"],
    "two lengths": ["--data.num_epochs", "2", "--trainer.max_steps", "5"],
    "a rate": ["--model.optimizer.lr", "1e-2", "--model.adapter.rank=2"],
    "a warm-up": ["--schedule.warmup_updates", "5"],
    "an objective": ["--model.objective", "DPO", "--model.objective.beta", "0.2"],
    "a part of the decoder": ["--model.decoder.attention", "{num_heads: 4, num_kv_heads: 2}"],
    "a chosen part": [
        "--model.decoder.feed_forward",
        "{class_path: genesis.model.mixture.MixtureConfig, init_args: {num_experts: 4, top_k: 2, ffn_dim: 64}}",
    ],
    "mixers": [
        "--model.decoder.mixers",
        "[{class_path: genesis.model.attention.AttentionConfig, init_args: {num_heads: 4, num_kv_heads: 4}}]",
    ],
    "an abbreviation": ["--data.micro", "2"],
    "an old name": ["--trainer.strategy", SHARDED, "--trainer.strategy.forward_skew_seconds", "3"],
    "a removed option": ["--model.gradient_norm", "host"],
    "a file behind options": ["--trainer.max_steps", "7", "--data.seed", "3", "--config", DEMO],
}
FILES = {
    "another strategy": [
        f"trainer: {{strategy: {{class_path: {SHARDED}, init_args: {{shard: grad_op, optimizer_offload: 0.5}}}}}}",
        "trainer: {strategy: {class_path: genesis.strategies.Replicated}}",
    ],
    "the same strategy": [
        f"trainer: {{strategy: {{class_path: {SHARDED}, init_args: {{shard: grad_op}}}}}}",
        "trainer: {strategy: {init_args: {blocks_per_unit: 2}}}",
    ],
    "another optimizer": [
        "model: {optimizer: {class_path: genesis.optim.AdamW, init_args: {lr: 0.1}}}",
        "model: {optimizer: {class_path: genesis.optim.Muon, init_args: {others: {init_args: {lr: 0.2}}}}}",
    ],
    "an optimizer by its name": ["model: {optimizer: {name: muon, lr: 0.1, muon_lr: 0.3}}"],
    "dotted keys": [f"data.seq_len: 32\ntrainer.strategy.class_path: {SHARDED}", "{checkpoint.every_n_steps: 5}"],
    "dotted keys of an old spelling": ["model.optimizer.name: adamw\nmodel.optimizer.lr: 0.1"],
    "a mapping": ["data: {mix: {web: 1, code: 2}}", "data: {mix: {books: 2}}"],
    "a section": ["model: {adapter: {rank: 4, alpha: 8}}", "model: {adapter: {rank: 2}}"],
    "a section by its class": [
        "model: {adapter: {class_path: genesis.model.adapter.AdapterConfig, init_args: {rank: 4}}}"
    ],
    "a section that is null": ["model: {adapter: {rank: 4, alpha: 8}}", "model: {adapter: null}"],
    "two lengths": ["trainer: {max_steps: 9}", "data: {num_epochs: 2}"],
    "another objective": [
        "model: {objective: {class_path: genesis.objectives.DPO, init_args: {beta: 0.3}}}",
        "model: {objective: {class_path: genesis.objectives.GSPO, init_args: {kl: 0.1}}}",
    ],
    "a list": ["checkpoint: {allow_changed: [a, b]}", "checkpoint: {allow_changed+: [c]}"],
    "part of a stream": [
        "data: {stream: {sources: [{name: a, paths: [x]}], tokenizer: t}}",
        "data: {stream: {num_lanes: 2}}",
    ],
    "part of a chosen part": [
        "model: {decoder: {feed_forward: {class_path: genesis.model.mixture.MixtureConfig, "
        "init_args: {num_experts: 4, top_k: 2, ffn_dim: 64}}}}",
        "model: {decoder: {feed_forward: {init_args: {top_k: 1}}}}",
    ],
}


@pytest.fixture(scope="module")
def parser() -> Any:
    return build_parser("fit")


@pytest.mark.parametrize("case", [*OPTIONS, *(f"files: {name}" for name in FILES)])
def test_options_and_later_files_change_a_recipe_as_in_the_real_parser(
    case: str, parser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", DEMO, *OPTIONS.get(case, ())]
    for number, text in enumerate(FILES.get(case.removeprefix("files: "), ()) if case not in OPTIONS else ()):
        (tmp_path / f"{number}.yaml").write_text(text)
        words.append(f"--config={tmp_path / str(number)}.yaml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        real = parser.parse_args(words)
        recipe = ResolvedRecipe.read(list_steps(words))
    recipe.check_classes()
    text = parser.dump(real, skip_none=False, skip_validation=True)
    assert compare(recipe.content, load_yaml(text, "the real parser's")) == {}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("model.optimizer.lrr", "1"), "unknown key model.optimizer.lrr; did you mean 'lr'?"),
        (("model.optimizer.others.lr", "many"), "model.optimizer.others.lr is many: give a number"),
        (("model.optimizer.betas", "1"), "unknown key model.optimizer.betas"),
        (("trainer.strategy", f"{{class_path: {SHARDED}, init_args: {{shrad: 4}}}}"), "strategy.shrad; did you mean"),
        (
            ("trainer.strategy", f"{{class_path: {SHARDED}, init_args: {{shard: all}}}}"),
            "shard is all: give one of full",
        ),
        (("data.prompts", "{sources: [{name: a, pathss: [x]}]}"), "prompts.sources.pathss; did you mean 'paths'?"),
    ],
)
def test_an_option_that_a_class_does_not_have_is_refused_by_its_whole_name(
    option: tuple[str, str], message: str
) -> None:
    recipe = ResolvedRecipe.read([Path(DEMO), ("model.optimizer", "genesis.optim.Muon"), option])
    with pytest.raises(UserError) as refused:
        recipe.check_classes()
    assert message in str(refused.value)


def test_an_option_that_our_sources_declare_may_be_newer_than_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new.py").write_text(
        "class Sharded:\n    def __init__(self, fresh: int = 1): ...\n\nclass B:\n    c: int\n"
    )
    monkeypatch.setattr("genesis.recipe.options._folders", lambda package: [tmp_path])
    recipe = ResolvedRecipe.read([("trainer.strategy.class_path", SHARDED), ("trainer.strategy.fresh", "4")])
    recipe.check_classes()
    assert recipe.get("trainer.strategy.init_args.fresh") == 4
    with pytest.raises(UserError, match=r"unknown key trainer\.strategy\.c"):
        recipe.override([("trainer.strategy.c", "4")]).check_classes()


def test_the_defaults_of_a_run_of_an_earlier_version_are_those_of_its_class() -> None:
    strategy = {CLASS_PATH: SHARDED, "init_args": {"shard": "grad_op", "forward_skew_seconds": 3.0}}
    recipe = ResolvedRecipe.complete({"trainer": {"strategy": strategy}, "model": {"gradient_norm": "host"}}, "run")
    choice = recipe.find_choice("trainer.strategy")
    assert choice is not None
    assert choice.options.keys() == Options.read().classes[SHARDED].keys()
    assert (choice.options["desync_seconds"], choice.options["blocks_per_unit"]) == (3.0, 1)


def test_a_file_that_contains_itself_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data: &data {mix: *data}\n")
    with pytest.raises(UserError, match="is not YAML"):
        ResolvedRecipe.read([tmp_path / "a.yaml"])


@pytest.mark.parametrize("value", ["!!timestamp x", "!!timestamp 2001-99-99", "!!bool x", "!!float x", "!!int x"])
def test_a_tag_that_does_not_fit_its_value_is_no_yaml(value: str) -> None:
    with pytest.raises(yaml.YAMLError, match="a value does not fit its tag"):
        load_yaml(f"a: {value}", "a file")
    with pytest.raises(yaml.YAMLError, match="a value does not fit its tag"):
        yaml.load(f"a: {value}", FastRecipeLoader)
