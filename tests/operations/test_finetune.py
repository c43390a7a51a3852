"""`genesis finetune`: which commands it runs, what it does not repeat, and what it refuses."""

import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from genesis.cli.main import main
from genesis.data.manifest import ChatRecord, read_manifest, write_manifest
from genesis.export.recipe import build_recipe
from genesis.model.attention import AttentionConfig
from genesis.model.decoder import DecoderConfig
from genesis.model.mixture import MixtureConfig
from genesis.model.norm import NormConfig
from genesis.operations import finetune
from genesis.operations.commands import Commands, StepFailedError
from genesis.operations.finetune import Method, choose_dtype, find_chat
from genesis.recipe.yaml import dump_yaml
from tests.commands import STDOUT, ForkedCommand, start_genesis
from tests.data.corpus_support import write_jsonl
from tests.model.foreign.models import configure, describe
from tests.tokenizer.test_huggingface import qwen

FIT = "--config OUT/base/recipe.yaml --run_dir OUT/run --data.corpus OUT/corpus"
ADAPTER = f"{FIT} --model.adapter.rank 16"
SOURCES = """--sources '[{"name": "data", "paths": ["chat.jsonl"], "chat": "auto"}]' --validation_fraction 0.05"""
PREPARE = f"data prepare {SOURCES} --name corpus --out OUT --tokenizer OUT/base"
EXPORTS = [
    "export OUT/run OUT/adapter --adapter --proof sampled",
    "export OUT/run OUT/model --merge --dtype bfloat16 --proof sampled",
]
LORA = [
    "import MODEL OUT/base --proof sampled",
    PREPARE,
    f"validate {ADAPTER} --model.adapter null --ckpt_path OUT/base --json OUT/before.json",
    f"fit {ADAPTER}",
    f"validate {ADAPTER} --ckpt_path latest --json OUT/after.json",
    *EXPORTS,
]
PLAIN: Any = {"dim": 32, "num_layers": 2, "max_seq_len": 64, "vocab_size": 64}
HEADS: Any = {"num_heads": 4, "num_kv_heads": 2}
LLAMA = DecoderConfig(**PLAIN, **HEADS, ffn_dim=48)
PHI3 = DecoderConfig(**PLAIN, ffn_dim=48, attention=AttentionConfig(**HEADS, rotary_dim=4))
EXPERTS: Any = {"num_experts": 4, "top_k": 2, "ffn_dim": 24, "shared_ffn_dim": 24}
AFTER = replace(LLAMA, norm=NormConfig(placement="after"))
GLM = DecoderConfig(
    **PLAIN,
    attention=AttentionConfig(**HEADS),
    feed_forward=MixtureConfig(**EXPERTS, scores="sigmoid", has_balance_bias=True),
)
ALWAYS = {1, 3}
"""The parts that run until all is done: each finds out by itself what is left of its work."""


class Runner:
    """Takes the place of the processes: it notes each command, and makes what the command would make.

    Attributes:
        done: The commands, as they would be typed.
        fails_at: Number of the command that fails.
        corpus: The corpus that `data prepare` makes.
        config: The model that `import` makes.
    """

    def __init__(self, corpus: Path) -> None:
        self.done: list[str] = []
        self.fails_at: int | None = None
        self.corpus = corpus
        self.config = LLAMA

    def run(self, commands: Commands, *arguments: str, **options: Any) -> None:
        command = commands.show(*arguments)
        if len(self.done) == self.fails_at:
            raise StepFailedError(command, 2)
        self.done.append(shlex.join(arguments))
        made = {"import": 2, "export": 2, "validate": -1}.get(arguments[0])
        if arguments[0] == "data":
            out = Path(arguments[arguments.index("--out") + 1])
            shutil.copytree(self.corpus, out / "corpus", dirs_exist_ok=True)
        elif arguments[0] == "validate":
            Path(arguments[-1]).write_text('{"validation/loss": 1.25}')
        elif made is not None:
            Path(arguments[made]).mkdir()
            if arguments[0] == "import":
                write_base(Path(arguments[made]), self.config)


@pytest.fixture
def runner(tmp_path: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.chdir(tmp_path)
    Path("MODEL").mkdir()
    write_chat(Path("chat.jsonl"))
    found = Runner(tiny_corpus)
    monkeypatch.setattr(Commands, "run", lambda commands, *words, **options: found.run(commands, *words, **options))
    return found


def write_base(directory: Path, config: DecoderConfig) -> None:
    recipe = build_recipe(directory, directory / "checkpoints/step-00000000", config, None)
    (directory / "recipe.yaml").write_text(dump_yaml(recipe))


def write_chat(path: Path, number: int = 60) -> None:
    rows = [[("user", f"What is {n} and {n}?"), ("assistant", f"It is {2 * n}.")] for n in range(number)]
    lines = ({"messages": [{"role": role, "content": text} for role, text in row]} for row in rows)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("kind", "words"),
    [("cpu", {"lora": "", "full": "", "nf4": "nf4"}), ("cuda", {"lora": "stored", "full": "", "nf4": "nf4"})],
)
def test_a_base_has_16_bits_only_beside_adapters_on_an_accelerator(
    kind: str, words: dict[Method, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "find_kind", lambda: kind)
    assert {method: "".join(choose_dtype(method)).removeprefix("--dtype") for method in words} == words


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ((), {}),
        (
            ("--data.num_epochs", "1", "--", "--seed_everything", "3"),
            {2: ("rank 16", "rank 16 --data.num_epochs=1 --seed_everything 3")}
            | dict.fromkeys((3, 4), ("rank 16", "rank 16 --data.num_epochs=1 --seed_everything 3")),
        ),
        (("--nf4", "--proof", "weights"), {0: ("--proof", "--dtype nf4 --proof")}),
    ],
    ids=["adapters", "with-options-of-fit", "4-bits"],
)
def test_each_part_is_a_command_that_a_user_could_type(
    words: Sequence[str], changes: dict[int, tuple[str, str]], runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["finetune", "MODEL", "chat.jsonl", "--out", "OUT", *words]) == 0
    expected = [command.replace(*changes.get(number, ("", ""))) for number, command in enumerate(LORA)]
    if "--proof" in words:
        expected = [command.replace("sampled", "weights") for command in expected]
    shown = capsys.readouterr().out
    printed = [line.removeprefix("$ genesis ") for line in shown.splitlines() if line.startswith("$ genesis")]
    assert printed == expected
    assert "before 1.2500, after 1.2500 (held out: 9 documents)" in shown
    assert "genesis generate OUT/run --prompt" in shown


def test_all_weights_are_planned_trained_and_exported_whole(runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> None:
        if arguments[0] == "plan":
            raise StepFailedError(["genesis", "plan"], 1)

    plain = Runner.run
    runner.run = lambda commands, *words, **options: (run(*words), plain(runner, commands, *words))[1]  # type: ignore[method-assign]
    assert main(["finetune", "MODEL", "chat.jsonl", "--out", "OUT", "--full"]) == 0
    assert "all weights will not fit into the memory" in capsys.readouterr().out
    assert [command for command in runner.done if not command.startswith("data")] == [
        "import MODEL OUT/base --proof sampled",
        f"validate {FIT} --model.adapter null --ckpt_path OUT/base --json OUT/before.json",
        f"fit {FIT}",
        f"validate {FIT} --ckpt_path latest --json OUT/after.json",
        "export OUT/run OUT/model --dtype bfloat16 --proof sampled",
    ]


def test_pairs_of_answers_are_learned_as_preferences(runner: Runner, tmp_path: Path) -> None:
    chat = ChatRecord("chat/template.jinja", "its own", "0" * 64, None, "assistant", {}, is_paired=True)
    runner.corpus = shutil.copytree(runner.corpus, tmp_path / "pairs")
    write_manifest(runner.corpus, replace(read_manifest(runner.corpus), chat=chat))
    pair = {"prompt": "Hello?", "chosen": "Hello.", "rejected": "No."}
    Path("pairs.jsonl").write_text(json.dumps(pair) + "\n")
    assert main(["finetune", "MODEL", "pairs.jsonl", "--out", "OUT"]) == 0
    assert '"chat": "pairs"' in runner.done[1]
    learned = "--model.objective genesis.objectives.DPO --data.num_epochs 1 --model.optimizer.lr 5e-6"
    assert runner.done[2] == f"fit {ADAPTER} {learned}"  # the loss before is log 2, whatever the data
    steps = "--trainer.max_steps=5"
    assert main(["finetune", "MODEL", "pairs.jsonl", "--out", "OTHER", steps]) == 0
    fit = next(command for command in runner.done if command.startswith("fit") and "OTHER" in command)
    assert fit.endswith(f"{learned.replace('--data.num_epochs 1 ', '')} {steps}")


def test_data_too_few_to_hold_out_any_train_without_losses(
    runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.corpus = shutil.copytree(runner.corpus, tmp_path / "small")
    write_manifest(runner.corpus, replace(read_manifest(runner.corpus), validation=()))
    assert main(["finetune", "MODEL", "chat.jsonl", "--out", "OUT"]) == 0
    assert [command.split()[0] for command in runner.done] == ["import", "data", "fit", "export", "export"]
    assert "held-out loss   not measured (held out: 0 documents)" in capsys.readouterr().out


@pytest.mark.parametrize("failing", range(len(LORA)))
def test_a_part_that_fails_ends_with_its_status_and_the_next_call_goes_on_from_there(
    failing: int, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["finetune", "MODEL", "chat.jsonl", "--out", "OUT"]
    runner.fails_at = failing
    assert main(call) == 2
    assert capsys.readouterr().err == ""  # the part itself prints why
    first = list(runner.done)
    assert first == LORA[:failing]
    runner.fails_at, runner.done = None, []
    assert main(call) == 0
    is_trained = failing > LORA.index(f"fit {ADAPTER}") + 1
    again = {1} if is_trained else ALWAYS
    assert runner.done == [one for number, one in enumerate(LORA) if number >= failing or number in again]
    runner.done = []
    assert main(call) == 0
    assert runner.done == []
    assert "nothing to do: OUT is complete" in capsys.readouterr().out


NAMED = ["MODEL", "chat.jsonl"]


@pytest.mark.parametrize(
    ("failing", "changed", "line"),
    [
        (1, ["OTHER", "chat.jsonl"], "OUT/base was made with MODEL MODEL, and this call has MODEL OTHER"),
        (1, [*NAMED, "--nf4"], "OUT/base was made with --lora, and this call has --nf4"),
        (
            2,
            ["MODEL", "text.jsonl"],
            "OUT/corpus/manifest.json was made with DATA chat.jsonl, and this call has DATA text.jsonl",
        ),
        (
            *(2, [*NAMED, "--validation_fraction", "0.2"]),
            "OUT/corpus/manifest.json was made with --validation_fraction 0.05, and this call has "
            "--validation_fraction 0.2",
        ),
        (
            *(5, [*NAMED, "--data.num_epochs", "1"]),
            "OUT/after.json was made with the options of fit '', and this call has the options of fit "
            "'--data.num_epochs=1'",
        ),
        (0, ["OTHER", "text.jsonl", "--full"], None),  # nothing is made yet
        (1, ["MODEL", "text.jsonl"], None),
        (3, [*NAMED, "--data.num_epochs", "1"], None),
        (5, [*NAMED, "--proof", "weights"], None),
    ],
)
def test_an_argument_may_change_until_a_part_has_used_it(
    failing: int, changed: list[str], line: str | None, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("OTHER").mkdir()
    write_jsonl(Path("text.jsonl"), ["some text"])
    runner.fails_at = failing
    assert main(["finetune", *NAMED, "--out", "OUT"]) == 2
    runner.fails_at, runner.done = None, []
    capsys.readouterr()
    status = main(["finetune", *changed, "--out", "OUT"])
    if line is None:
        assert status == 0
        if "--data.num_epochs" in changed:  # the losses before and after are of the same recipe
            assert "before.json" in " ".join(runner.done)
    else:
        assert status == 2
        assert capsys.readouterr().err == f"genesis: error: {line}: give the same, or another --out\n"
        assert runner.done == []


def test_data_that_could_not_be_prepared_are_replaced_by_others(runner: Runner) -> None:
    write_jsonl(Path("text.jsonl"), ["some text"])
    runner.fails_at = 1
    assert main(["finetune", *NAMED, "--out", "OUT"]) == 2
    Path("OUT/corpus").mkdir()
    runner.fails_at, runner.done = None, []
    assert main(["finetune", "MODEL", "text.jsonl", "--out", "OUT"]) == 0
    assert "--out OUT --restart --tokenizer" in runner.done[0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["MODEL"], "the following arguments are required: DATA"),
        ([*NAMED, "--nf4", "--full"], "argument --full: not allowed with argument --nf4"),
        ([*NAMED, "--run_dir", "runs/x"], "--run_dir"),
        ([*NAMED, "--", "--run_dir", "runs/x"], "--run_dir is set by `genesis finetune` itself: leave it out"),
        ([*NAMED, "--data.corpus", "x"], "--data.corpus is set by `genesis finetune` itself: leave it out"),
        ([*NAMED, "--data.num_epchs", "1"], "unrecognized arguments: --data.num_epchs=1; did you mean"),
        ([*NAMED, "--data.num_epochs", "many"], "data.num_epochs is 'many'"),
        (
            [*NAMED, "--data.num_epochs", "1", "--trainer.max_steps", "5"],
            "trainer.max_steps 5 and data.num_epochs 1 each set how long to train: leave one out",
        ),
        (["MODEL", "a.yaml", "b.jsonl"], "a YAML file names all data"),
        (["MODEL", "none.jsonl"], "no such file: none.jsonl"),
        (["MODEL", "none.yaml"], "no such file: none.yaml"),
        ([*NAMED, "--validation_fraction", "2"], "--validation_fraction is 2.0: it must be from 0 to 0.5"),
        (["imported", "chat.jsonl", "--nf4"], "imported is imported already, and --nf4 chooses how"),
        (["", "chat.jsonl"], "MODEL is empty: give a value"),
        ([*NAMED, "--out", "mine"], "mine is not empty and was not made by `genesis finetune`: give another --out"),
        ([*NAMED, "--out", "damaged"], "damaged/finetune.json cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    words: list[str], line: str, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("imported/checkpoints").mkdir(parents=True)
    Path("imported/recipe.yaml").touch()
    Path("mine").mkdir()
    Path("mine/thesis.txt").touch()
    Path("damaged").mkdir()
    Path("damaged/finetune.json").write_text("{}")
    assert main(["finetune", *words]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert line in error
    assert not {"import", "fit", "validate", "export"} & {command.split()[0] for command in runner.done}


def test_an_import_is_its_own_base(runner: Runner) -> None:
    Path("imported/checkpoints").mkdir(parents=True)
    write_base(Path("imported"), runner.config)
    assert main(["finetune", "imported", "chat.jsonl"]) == 0
    assert runner.done[0].endswith("--out runs/imported-chat --tokenizer imported")
    assert "fit --config imported/recipe.yaml --run_dir runs/imported-chat/run" in runner.done[2]


@pytest.mark.parametrize(
    ("config", "options", "line"),
    [
        (PHI3, [], "phi3 hold blocks.0.attention.query with others in one tensor"),
        (GLM, [], "PEFT takes adapters on down_proj, gate_proj, up_proj of a model of type glm4_moe"),
        (GLM, ["--model.adapter.exclude=['*.shared.*']"], None),
    ],
    ids=["fused", "shared-experts", "without-shared-experts"],
)
def test_adapters_without_a_form_in_peft_are_trained_and_merged_and_a_line_says_so(
    config: DecoderConfig, options: list[str], line: str | None, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.config = config
    assert main(["finetune", *NAMED, "--out", "OUT", *options]) == 0
    printed = [one for one in capsys.readouterr().out.splitlines() if "will not be made" in one]
    exports = [command for command in runner.done if command.startswith("export")]
    if line is None:
        assert not printed
        assert exports == EXPORTS
    else:
        assert exports == EXPORTS[1:]
        assert printed[0].startswith("OUT/adapter will not be made, and OUT/model will: ")
        assert line in printed[0]
        assert len(printed) == 1


@pytest.mark.parametrize(
    ("words", "config", "line"),
    [
        (["--full", "--model.adapter.rank", "4"], None, "--full is asked for, and the options of fit train adapters"),
        (["--model.adapter", "null"], None, "--lora is asked for, and the options of fit train all weights"),
        ([], AFTER, "no family of Hugging Face's has this decoder"),
    ],
)
def test_what_could_not_be_exported_is_not_trained(
    words: list[str], config: DecoderConfig | None, line: str, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.config = config or runner.config
    assert main(["finetune", *NAMED, "--out", "OUT", *words]) == 2
    assert line in capsys.readouterr().err
    assert [command.split()[0] for command in runner.done] == ["import", "data"]


@pytest.mark.parametrize("method", ["--lora", "--full"])
def test_an_import_as_a_model_of_transformers_is_trained_and_exported_whole(
    method: str, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Runner.run

    def run(commands: Commands, *words: str, **options: Any) -> None:
        if words[0] == "plan":
            raise StepFailedError(["genesis", "plan"], 2)
        plain(runner, commands, *words, **options)

    runner.run = run  # type: ignore[method-assign]
    Path("imported/checkpoints").mkdir(parents=True)
    write_base(Path("imported"), describe(configure("llama")))
    assert main(["finetune", "imported", "chat.jsonl", "--out", "OUT", method, "--proof", "weights"]) == 0
    exports = [command for command in runner.done if command.startswith("export")]
    merge = "" if method == "--full" else "--merge "
    assert exports[-1] == f"export OUT/run OUT/model {merge}--dtype bfloat16"
    assert exports[:-1] == ([] if method == "--full" else ["export OUT/run OUT/adapter --adapter --proof weights"])
    assert "genesis generate" not in capsys.readouterr().out


@pytest.mark.parametrize("name", [".finetune.lock", "finetune.json.staging"])
def test_a_call_that_was_killed_as_it_began_does_not_keep_the_next_one_out(name: str, runner: Runner) -> None:
    Path("OUT").mkdir()
    Path("OUT", name).touch()
    assert main(["finetune", *NAMED, "--out", "OUT"]) == 0
    assert runner.done == LORA


@pytest.mark.parametrize(
    ("record", "chat"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "auto"),
        ({"instruction": "a", "input": "", "output": "b"}, "auto"),
        ({"prompt": "a", "completion": "b"}, "auto"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "pairs"),
        ({"text": "a"}, None),
        ({"question": "a", "answer": "b"}, "auto"),  # which `data prepare` refuses by the names of the fields
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_data_are_what_the_first_record_is(record: dict[str, Any], chat: str | None, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    assert find_chat([str(tmp_path / "data.jsonl")]) == chat


def test_files_of_text_are_text(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("some text")
    assert find_chat([str(tmp_path)]) is None


# ---- real processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = qwen(tmp_path_factory.mktemp("open"))
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends: dict[str, Any] = {"vocab_size": 640, "bos_token_id": 0, "eos_token_id": 2}
    Qwen2ForCausalLM(Qwen2Config(**shape, **heads, **ends)).to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def call(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ForkedCommand]:
    """Returns a function that starts a fine-tuning in a directory of that name."""
    home = tmp_path_factory.mktemp("home")
    write_chat(home / "chat.jsonl")
    options = ("--data.num_epochs", "1", "--checkpoint.every_n_steps", "2", "--trainer.accelerator", "cpu")

    def start(out: str) -> ForkedCommand:
        words = ("finetune", str(model), "chat.jsonl", "--out", out, "--proof", "weights", *options)
        with (home / f"{out}.log").open("ab") as log:
            return start_genesis(*words, cwd=home, stdout=log, stderr=STDOUT)

    start.home = home  # type: ignore[attr-defined]
    return start


@pytest.fixture(scope="module")
def straight(call: Any) -> Path:
    """Returns the results of a fine-tuning that nothing interrupts."""
    assert call("straight").wait(900) == 0, (call.home / "straight.log").read_text()
    out: Path = call.home / "straight"
    return out


def wait_for(process: ForkedCommand, is_there: Callable[[], bool]) -> None:
    while not is_there():
        assert process.poll() is None, "it has ended before"
        time.sleep(0.02)


def find_fit(process: ForkedCommand) -> list[int]:
    """Returns the process that trains, a child of the one that waits for it."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"fit" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1800)
def test_a_call_that_was_killed_in_every_part_ends_as_one_that_was_not(call: Any, straight: Path) -> None:
    log, out = call.home / "killed.log", call.home / "killed"
    parts = ("import ", "data prepare ", "validate ", "fit ", "export ", "export ")

    def interrupt(part: str, number: int, status: int, is_there: Callable[[], bool] = lambda: True) -> None:
        begin = log.stat().st_size if log.exists() else 0
        process = call("killed")
        wait_for(process, lambda: f"$ genesis {part}".encode() in log.read_bytes()[begin:] and is_there())
        if status == 137:
            wait_for(process, lambda: bool(find_fit(process)))
            os.kill(find_fit(process)[0], number)
        else:
            process.send_signal(number)
        assert process.wait(300) == status, log.read_text()[begin:]

    def has_saved(step: int) -> Callable[[], bool]:
        return lambda: any(
            int(path.parent.name[-8:]) >= step for path in (out / "run/checkpoints").glob("step-????????/COMMITTED")
        )

    for part in parts[:3]:
        interrupt(part, signal.SIGKILL, -9)
    interrupt("fit ", signal.SIGINT, 130, has_saved(2))
    assert log.read_text().rstrip().endswith("genesis: interrupted; the same command continues")
    interrupt("fit ", signal.SIGKILL, 137, has_saved(4))
    assert "` was ended by SIGKILL" in log.read_text()
    interrupt("validate ", signal.SIGTERM, 143, lambda: b"killed/after.json" in log.read_bytes())
    for part in ("killed/run killed/adapter", "killed/run killed/model"):
        interrupt(f"export {part}", signal.SIGKILL, -9)
    assert call("killed").wait(300) == 0, log.read_text()
    for name in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        ours, theirs = load_file(out / name), load_file(straight / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
    for name in ("before.json", "after.json"):
        assert json.loads((out / name).read_text()) == json.loads((straight / name).read_text())
    assert log.read_text().count("Restored step 0 ") == 1  # the training began once


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1800)
def test_the_result_answers_in_transformers(straight: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(straight / "model")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 and 2?"}], add_generation_prompt=True, return_tensors="pt"
    )
    model: Any = AutoModelForCausalLM.from_pretrained(straight / "model")
    answer = model.generate(**ids, max_new_tokens=3, do_sample=False)
    assert answer.shape[1] == ids["input_ids"].shape[1] + 3
    losses = [json.loads((straight / name).read_text())["validation/loss"] for name in ("before.json", "after.json")]
    assert losses[1] < losses[0]
