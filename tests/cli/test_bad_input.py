"""Bad input gets one line with the value and the remedy, and exit status 2; nothing is trained and nothing is lost."""

import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Genesis, Outcome
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import run_genesis


def check_is_one_line(outcome: Outcome, *parts: str, status: int = 2) -> None:
    assert outcome.status == status, outcome.err
    assert outcome.err.startswith("genesis: error: ")
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({"rundir": "runs/x"}, "run_dir"),
        ({"checkpoints": {"every_n_steps": 5}}, "checkpoint.every_n_steps"),
        ({"checkpoint.every_n_step": 5}, "checkpoint.every_n_steps"),
        ({"data.seq_length": 16}, "data.seq_len"),
        ({"trainer.max_step": 5}, "trainer.max_steps"),
        ({"model.decoder.num_layer": 2}, "model.decoder.num_layers"),
        ({"model.optimizer.wieght_decay": 0.1}, "weight_decay"),
        ({"model.optimizer.learning_rate": 0.1}, "lr"),
        ({"trainer.strategy": {"class_path": "genesis.strategies.Sharded", "init_args": {"shrad": "full"}}}, "shard"),
    ],
)
def test_an_unknown_key_of_a_file_names_the_near_one(
    changes: dict[str, Any], near: str, genesis: Genesis, tmp_path: Path, tiny_corpus: Path
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", build_recipe(tiny_corpus, tmp_path / "run"), changes)
    check_is_one_line(genesis("fit", "--config", str(recipe)), "unknown key", near)
    assert not (tmp_path / "run").exists()


RECIPES = Path(__file__).parents[2] / "configs/finetune"
EMPTY = {
    "data distill CORPUS ''": "teacher: the path is empty: give a path",
    "data distill '' TEACHER --seq_len 8": "corpus: the path is empty: give a path",
    "data distill CORPUS TEACHER --seq_len 8 --out ''": "out: the path is empty: give a path",
    "data distill CORPUS TEACHER --seq_len 8 --out=": "out: the path is empty: give a path",
    "export '' OUT --adapter": "argument checkpoint: the path is empty: give a path",
    "export RUN '' --merge": "argument out: the path is empty: give a path",
    "import '' OUT": "the model is empty",
    "generate RUN --chat --chat_template ''": "argument --chat_template: the path is empty: give a path",
    "fit --config GSPO --data.prompts.template ''": "template: the path is empty: give a path",
    "fit --config GSPO --data.prompts.tokenizer ''": "data.prompts.tokenizer is empty",
    "fit --config GSPO --data.prompts.reward ''": "data.prompts.reward is empty",
    "fit --config LORA --model.adapter.base ''": "model.adapter.base is empty",
    "fit --config LORA --model.adapter.base RUN --model.adapter.start ''": "model.adapter.start is empty",
    "fit --config LORA --ckpt_path ''": "ckpt_path is empty",
    "fit --config LORA --model.adapter null --ckpt_path null --data.corpus ''": "data.corpus is empty",
}


@pytest.mark.parametrize("command", EMPTY)
def test_an_empty_path_is_refused_by_its_name_and_is_not_the_working_directory(
    command: str, genesis: Genesis, run: Path
) -> None:
    words = {"GSPO": RECIPES / "gspo-tiny.yaml", "LORA": RECIPES / "smollm2-135m-lora.yaml", "RUN": run}
    outcome = genesis(*(str(words.get(word, word)) for word in shlex.split(command)))
    check_is_one_line(outcome, EMPTY[command])


@pytest.mark.parametrize(
    ("option", "value", "parts"),
    [
        ("--data.seqlen", "16", ("--data.seqlen", "did you mean 'data.seq_len'?")),
        ("--model.decoder.dmi", "16", ("--model.decoder.dmi", "did you mean 'model.decoder.dim'?")),
        ("--data.seq_len", "many", ("error: data.seq_len is 'many': give a whole number or one of auto\n",)),
        ("--trainer.max_steps", "4.5", ("trainer.max_steps is '4.5': give a whole number",)),
        ("--model.optimizer.name", "adamw", ("model.optimizer.name is gone: give the class",)),
        ("--schedule.shape", "cosin", ("schedule.shape", "cosine", "cosin")),
        ("--trainer.precision", "bf17", ("trainer.precision", "bf16-mixed", "bf17")),
        ("--trainer.accelerator", "tup", ("tup", "cpu")),
        ("--trainer.devices", "-3", ("trainer.devices is -3: ",)),
        ("--trainer.devices", "many", ("trainer.devices is 'many': ",)),
        ("--trainer.max_steps", "0", ("trainer.max_steps is 0, a run that trains nothing",)),
        ("--trainer.max_epochs", "0", ("trainer.max_epochs is 0, a run that trains nothing",)),
        ("--trainer.gradient_clip_val", "-1", ("gradient_clip_val is -1: give a norm above 0",)),
        ("--trainer.gradient_clip_val", ".nan", ("gradient_clip_val is nan: give a norm above 0",)),
        (
            "--trainer.gradient_clip_val",
            "much",
            ("gradient_clip_val is 'much': give a number or null",),
        ),
        ("--trainer.log_every_n_steps", "-2", ("log_every_n_steps is -2: give a number of steps",)),
        ("--trainer.callbacks", "[5]", ("trainer.callbacks is 5: give the options of Callback",)),
        ("--telemetry.trace_steps", "5", ("telemetry.trace_steps is 5: give a list\n",)),
        (
            "--data.mix",
            "{web: much}",
            ("data.mix is {'web': 'much'}: give a mapping of names to whole numbers or null",),
        ),
        ("--data.skip_positions", "[[a]]", ("has the entry ['a']: give [FIRST, STOP]",)),
        ("--model.objective", "dop", ("model.objective is 'dop': give the options of Objective or null",)),
        ("--checkpoint.every_n_steps", "often", ("every_n_steps is 'often': give a whole number or null",)),
        ("--trainer.strategy", "shraded", ("shraded",)),
        (
            "--trainer.strategy.init_args.compile_blocks",
            "auto",
            ("compile_blocks is an option of a class, and trainer.strategy has none: give --trainer.strategy CLASS",),
        ),
        ("--model.float8", "", ("model.float8 is '': give the options of Float8Options or null",)),
        ("--trainer.accumulate_grad_batches", "2", ("accumulate_grad_batches is 2", "data.global_batch_size")),
        ("--checkpoint.every_n_steps", "0", ("every_n_steps", "0")),
        ("--config", "nowhere.yaml", ("nowhere.yaml", "no such file")),
        ("--data.global_batch_size", "9", ("global_batch_size 9", "micro-batches of 2", "1, 3, 9")),
        ("--data.micro_batch_size", "-1", ("micro_batch_size", "-1")),
        ("--data.seq_len", "1000000", ("data.seq_len 1000000", "'web'", "lower data.seq_len")),
        ("--data.seq_len", "32", ("data.seq_len is 32", "model.decoder.max_seq_len 16")),
        ("--data.corpus", "nowhere", ("nowhere is not a prepared corpus", "genesis data prepare")),
        ("--data.tokenizer_hash", "0123", ("tokenizer", "0123", "prepare the corpus again")),
        ("--data.mix", "{wbe: 1}", ("'wbe'", "did you mean 'web'?")),
        ("--ckpt_path", "nowhere", ("no such directory: nowhere and runs/nowhere", "RUN/best")),
        ("--ckpt_path", ".", (". has no committed checkpoint", "genesis fit")),
        ("--run_dir", "", ("error: run_dir is ''", "runs/NAME")),
        ("--run_dir", "s3://bucket/run", ("error: run_dir is 's3://bucket/run', a URL", "copy its checkpoints")),
        ("--fork", "", ("error: --fork is ''", "give a name")),
        ("--fork", "..", ("error: --fork is '..'", "give a name")),
        ("--fork", "../../evil", ("error: --fork is '../../evil'", "without a directory")),
        ("--seed_everything", "-1", ("error: seed_everything is -1", "from 0 to 4294967295")),
        ("--model.decoder.num_heads", "6", ("dim 32", "6 heads", "multiple of 12")),
        ("--model.decoder.num_layers", "0", ("num_layers is 0", "at least 1")),
        (
            "--trainer.strategy",
            "genesis.strategies.Sharded",
            ("error: trainer.strategy is 'genesis.strategies.Sharded'", "--trainer.strategy.class_path genesis"),
        ),
        ("--model.decoder.vocab_size", "200", ("vocab_size is 200", "vocabulary of 300", "300 or more")),
    ],
)
def test_a_value_that_fit_cannot_use_is_refused(
    option: str, value: str, parts: tuple[str, ...], genesis: Genesis, recipe: Path, tmp_path: Path
) -> None:
    check_is_one_line(genesis("fit", "--config", str(recipe), option, value), *parts)
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


@pytest.mark.parametrize(
    ("share", "remedy"),
    [("1.1", "it must be a share from 0 to 1"), ("-1", "it must be a share from 0 to 1"), ("null", "give a number")],
)
def test_a_mistake_in_a_strategys_options_is_reported_without_the_parsers_types(
    genesis: Genesis, recipe: Path, share: str, remedy: str
) -> None:
    strategy = ("--trainer.strategy.class_path", "genesis.strategies.Replicated")
    outcome = genesis(
        "fit", "--config", str(recipe), *strategy, "--trainer.strategy.init_args.optimizer_offload", share
    )
    check_is_one_line(outcome, "error: ", "optimizer_offload is ", f"{remedy}\n")


@pytest.mark.parametrize("section", ["telemetry", "checkpoint", "trainer", "model"])
def test_a_section_that_is_a_value_is_one_line(
    section: str, genesis: Genesis, tmp_path: Path, tiny_corpus: Path
) -> None:
    recipe = {**build_recipe(tiny_corpus, tmp_path / "run"), section: True}
    check_is_one_line(
        genesis("fit", "--config", str(write_recipe(tmp_path / "recipe.yaml", recipe))),
        f"has no options in the section {section}",
    )


def test_a_run_may_log_nothing(genesis: Genesis, recipe: Path, tmp_path: Path) -> None:
    outcome = genesis("fit", "--config", str(recipe), "--trainer.log_every_n_steps", "0")
    assert outcome.status == 0, outcome.err
    assert list(tmp_path.glob("run/checkpoints/step-*"))


def test_a_recipe_without_a_required_key_names_it(genesis: Genesis, tmp_path: Path, tiny_corpus: Path) -> None:
    recipe = build_recipe(tiny_corpus, tmp_path / "run")
    del recipe["data"]["seq_len"]
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    for command in ("fit", "validate"):
        check_is_one_line(genesis(command, "--config", str(path)), "required: data.seq_len\n")
    del recipe["model"]["decoder"]["dim"]
    write_recipe(path, recipe)
    check_is_one_line(genesis("fit", "--config", str(path)), "required: model.decoder.dim, data.seq_len\n")


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"a: [1,\n", (", line 2, column 1, is not YAML: expected the node content",)),
        (b"trainer:\n  max_steps: 4\n bad: 1\n", (", line 3, column 2, is not YAML: expected <block end>",)),
        (b"trainer:\n\tmax_steps: 4\n", (", line 2, column 1, is not YAML: found character '\\t'",)),
        (b"run_dir: *x\n", (", line 1, column 10, is not YAML: found undefined alias 'x'",)),
        (b"a: 1\n---\nb: 2\n", (", line 2, column 1, is not YAML: but found another document",)),
        (b"a: \xff\n", (" is not YAML: ", "position 3")),
        (b"\x00", (" is not YAML: ", "position 0")),
        (b"trainer:\n  max_steps: 4\ntrainer:\n  devices: 1\n", (", line 3, column 1, has the key 'trainer' twice",)),
        (b"data: [{seq_len: 1, seq_len: 2}]\n", (", line 1, column 21, has the key 'seq_len' twice",)),
        (b"a: &again [*again]\n? [b]\n: 1\na: 2\n", (", line 4, column 1, has the key 'a' twice",)),
        (b"only words\n", (" has no options", "name: value")),
        (b"- a\n", (" has no options",)),
        (b"", (" has no options",)),
    ],
)
@pytest.mark.parametrize("command", [("fit",), ("data", "prepare"), ("tokenizer", "train")])
def test_a_file_that_is_no_yaml_is_refused_with_its_name_and_the_place(
    command: tuple[str, ...], data: bytes, parts: tuple[str, ...], genesis: Genesis, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(data)
    check_is_one_line(genesis(*command, "--config", str(path)), str(path) + parts[0], *parts[1:])


REPLICATED = "{class_path: genesis.strategies.Replicated, init_args: {compile_blocks: VALUE}}"
CHOICES = {
    "trainer.deterministic bogus": "trainer.deterministic is 'bogus': give auto or true",
    "trainer.deterministic warn": "trainer.deterministic is 'warn', with which torch takes kernels that do not repeat",
    "model.float8 true": "model.float8",
    "model.float8 {include: [nothing]}": "model.float8.include has 'nothing', which matches no linear layer",
    f"trainer.strategy {REPLICATED.replace('VALUE', 'maybe')}": "compile_blocks",
    f"trainer.strategy {REPLICATED.replace('VALUE', 'null')}": "compile_blocks is null: give",
}


@pytest.mark.parametrize("command", ["fit", "plan", "model describe", "doctor"])
@pytest.mark.parametrize("choice", CHOICES)
def test_every_command_that_reads_a_recipe_refuses_what_fit_refuses(
    choice: str, command: str, genesis: Genesis, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    option, _, value = choice.partition(" ")
    (tmp_path / "choice.yaml").write_text(recipe.read_text(encoding="utf-8"), encoding="utf-8")
    change = yaml.safe_load((tmp_path / "choice.yaml").read_text(encoding="utf-8"))
    group, _, key = option.partition(".")
    change[group][key] = yaml.safe_load(value)
    (tmp_path / "choice.yaml").write_text(yaml.safe_dump(change), encoding="utf-8")
    outcome = genesis(*command.split(), "--config", "choice.yaml")
    assert outcome.status == 2, outcome.err
    assert CHOICES[choice] in outcome.err.splitlines()[-1]


@pytest.mark.parametrize("command", ["plan", "model describe"])
def test_a_removed_option_is_reported(command: str, genesis: Genesis, recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text(encoding="utf-8").replace("model:\n", "model:\n  gradient_norm: device\n", 1)
    (tmp_path / "old.yaml").write_text(text, encoding="utf-8")
    with pytest.warns(FutureWarning, match="model.gradient_norm is ignored: "):
        assert genesis(*command.split(), "--config", str(tmp_path / "old.yaml")).status in (0, 1)


ALIASES = "model:\n  decoder:\n    dim:\n    - &a0 [1]\n" + "".join(
    f"    - &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]\n" for number in range(1, 10)
)
"""A billion values in ten lines."""
MERGES = "model:\n  decoder: {}\n  x0: &m0 {a: 1}\n" + "".join(
    f"  x{number}: &m{number} {{<<: [{', '.join([f'*m{number - 1}'] * 10)}]}}\n" for number in range(1, 10)
)


@pytest.mark.parametrize("text", [ALIASES, MERGES], ids=["sequences", "merges"])
@pytest.mark.parametrize(
    "command",
    [
        *("fit --config FILE", "validate --config FILE", "plan --config FILE", "doctor --config FILE"),
        *("rehearse --config FILE", "supervise -- fit --config FILE", "model describe --config FILE"),
        *("data prepare --config FILE", "plan --config OUTER", "fit --config OUTER"),
        "fit --config RECIPE --model.decoder FILE",
    ],
)
def test_a_file_whose_aliases_repeat_billions_of_values_is_refused(
    command: str, text: str, genesis: Genesis, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "aliases.yaml"
    path.write_text(text, encoding="utf-8")
    (tmp_path / "outer.yaml").write_text(f"model: {{decoder: {path}}}\n", encoding="utf-8")
    files = {"FILE": str(path), "RECIPE": str(recipe), "OUTER": str(tmp_path / "outer.yaml")}
    outcome = genesis(*(files.get(word, word) for word in command.split()))
    # With a Lightning whose options are not recorded, the doctor begins before it reads the file.
    outcome = replace(outcome, err=outcome.err.removeprefix("doctor: reading the recipe\n"))
    check_is_one_line(outcome, str(path), " has aliases (*name) that repeat more than 100,000 values")


def test_aliases_of_a_recipe_that_repeat_little_are_read(genesis: Genesis, recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8").replace("seq_len: 16", "seq_len: &length 16", 1)
    assert "&length" in text
    recipe.write_text(text.replace("max_seq_len: 16", "max_seq_len: *length", 1), encoding="utf-8")
    assert genesis("fit", "--config", str(recipe), "--print_config").status == 0


def test_a_tokenizer_that_is_not_the_corpuss_is_refused(genesis: Genesis, recipe: Path, tiny_corpus: Path) -> None:
    other = shutil.copytree(tiny_corpus, recipe.parent / "other")
    (other / "tokenizer.model").write_bytes(b"another tokenizer")
    outcome = genesis("fit", "--config", str(recipe), "--data.corpus", str(other))
    check_is_one_line(outcome, "has another tokenizer", "restore its files")


def test_a_truncated_shard_is_refused_before_training(genesis: Genesis, recipe: Path, tiny_corpus: Path) -> None:
    other = shutil.copytree(tiny_corpus, recipe.parent / "other")
    shard = other / "train/web/00000.ds"
    shard.write_bytes(shard.read_bytes()[:-2])
    outcome = genesis("fit", "--config", str(recipe), "--data.corpus", str(other))
    check_is_one_line(outcome, "00000.ds has", "the manifest lists", "genesis data prepare")


@pytest.mark.filterwarnings("ignore:Training failed .UserError.; nothing is saved yet")
def test_a_damaged_shard_ends_training_by_its_name(genesis: Genesis, recipe: Path, tiny_corpus: Path) -> None:
    other = shutil.copytree(tiny_corpus, recipe.parent / "other")
    for shard in other.glob("train/web/*.ds"):
        shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    outcome = genesis("fit", "--config", str(recipe), "--data.corpus", str(other))
    check_is_one_line(outcome, ".ds has hash", "damaged", "genesis data prepare")


def test_validation_without_a_checkpoint_is_refused(genesis: Genesis, recipe: Path) -> None:
    validate = ("validate", "--config", str(recipe))
    check_is_one_line(genesis(*validate), "needs a checkpoint", "--ckpt_path")
    check_is_one_line(genesis(*validate, "--ckpt_path", "latest"), "but", "run/checkpoints has none")
    check_is_one_line(genesis(*validate, "--ckpt_path", "nowhere"), "no such directory: nowhere")
    assert not (recipe.parent / "run" / "metrics.csv").exists()


def test_what_a_checkpoint_cannot_give_is_refused(genesis: Genesis, recipe: Path) -> None:
    fit = ("fit", "--config", str(recipe))
    assert genesis(*fit).status == 0
    resume = (*fit, "--ckpt_path", "latest")
    outcome = genesis(*resume, "--model.decoder.dim", "64", "--data.seq_len", "8")
    assert outcome.status == 2
    assert outcome.err.startswith("genesis: error: ")
    # The difference is a list, of a line a key.
    assert "model.decoder.dim is 64 and was" in outcome.err
    assert "data.seq_len is 8 and was" in outcome.err
    checkpoint = recipe.parent / "run/checkpoints/step-00000004"
    for shard in checkpoint.glob("*.distcp"):
        shard.write_bytes(bytes(byte ^ 0x55 for byte in shard.read_bytes()))
    # Asked for by name it is refused; only `latest` falls back.
    parts = ("step-00000004", "its bytes have changed")
    check_is_one_line(genesis(*fit, "--ckpt_path", str(checkpoint)), *parts, status=1)
    check_is_one_line(genesis("generate", str(checkpoint)), *parts, status=1)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("generate", "nowhere"), ("no such directory: nowhere",)),
        (("generate",), ("checkpoint", "--help")),
        (("generate", ".", "--temprature", "1"), ("--temprature", "did you mean --temperature?")),
        (("model", "describe", "--config", "nowhere.yaml"), ("--config nowhere.yaml: no such file", "genesis recipes")),
        (("data", "inspect", "nowhere"), ("nowhere is not a prepared corpus",)),
        (("data", "verify", "nowhere"), ("nowhere is not a prepared corpus",)),
        (("data", "prepare", "--nmae", "x"), ("did you mean name?",)),
        (("tokenizer", "train", "--vocab_sizes", "10"), ("did you mean vocab_size?",)),
        (("demo", "--stesp", "50"), ("did you mean --steps?",)),
        (("completion", "basic"), ("basic", "bash")),
    ],
)
def test_the_other_commands_refuse_in_one_line_too(
    arguments: tuple[str, ...], parts: tuple[str, ...], genesis: Genesis
) -> None:
    check_is_one_line(genesis(*arguments), *parts)


def test_an_option_of_another_place_is_not_proposed_for_itself(genesis: Genesis) -> None:
    """A tokenizer has no name; each of its sources has one."""
    outcome = genesis("tokenizer", "train", "--out", "x", "--sources", "[]", "--name", "x")
    check_is_one_line(outcome, "--name")
    assert "did you mean" not in outcome.err


@pytest.mark.slow
def test_a_real_process_says_one_line_and_ends_with_status_2(recipe: Path) -> None:
    done = run_genesis("fit", "--config", recipe, "--data.corpus", "nowhere")
    check_is_one_line(Outcome(done.returncode, done.stdout, done.stderr), "nowhere is not a prepared corpus")
    assert done.stdout == ""
