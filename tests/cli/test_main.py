"""The table of commands: one page, quick, and every command helps."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from genesis import __version__
from genesis.base.errors import RunEndedError, UserError
from genesis.cli import main as main_module
from genesis.cli import table
from genesis.cli.command_record import COLUMNS, RECORD, Record, find_options, read_record
from genesis.cli.main import main
from genesis.cli.table import COMMANDS, Command
from genesis_callbacks.base.checkpoint_errors import DriftError
from tests.cli.conftest import Genesis

OPTIONS = {
    "tokenizer train": ("--sources", "--out", "--vocab_size"),
    "tokenizer inspect": ("--tokenizer", "--sources"),
    "data prepare": ("--sources", "--tokenizer", "--validation_fraction", "--restart"),
    "data adopt": ("paths", "--sources", "--add_eos", "--validation_paths"),
    "data inspect": ("corpus", "--num_samples", "--split"),
    "data plan": ("corpus", "--packing", "--seq_len"),
    "data distill": ("corpus", "teacher", "--seq_len", "--top_k", "--log_probs"),
    "data verify": ("corpus",),
    "model describe": ("--config", "--json"),
    "upcycle": ("model", "out", "--experts", "--top_k", "--noise"),
    "model add-tokens": ("model", "out", "tokens", "--eos", "--chat_template", "--multiple_of"),
    "fit": ("--config", "--model.decoder.dim", "--data.corpus", "--checkpoint.every_n_steps", "--ckpt_path"),
    "validate": ("--config", "--data.corpus", "--ckpt_path"),
    "generate": ("checkpoint", "--prompt", "--temperature", "--top_p"),
    "evaluate": ("checkpoint", "--tasks", "--heldout", "--limit", "--checkpoints", "--watch", "--until_step"),
    "serve": ("model", "--adapter", "--host", "--port", "--token", "--public", "--max_concurrent", "--max_models"),
    "release": ("export", "--repo", "--license", "--space", "--dry_run", "--upload"),
    "demo": ("--steps",),
    "recipes copy": ("NAME",),
    "completion": ("bash", "zsh"),
}
TRAIN = {"fit", "validate"}
NO_TENSORS = {
    "mirror",
    "runs",
    "supervise",
    "tokenizer train",
    "tokenizer inspect",
    "data prepare",
    "data adopt",
    "data inspect",
    "data plan",
    "data verify",
    "checkpoint list",
    "checkpoint show",
    "checkpoint verify",
    "checkpoint prune",
    "checkpoint repair",
    "completion",
}


def modules_after(statement: str) -> set[str]:
    """Returns the top-level modules that a new process has imported after `statement`."""
    program = (
        f"import json, sys\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    )
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    return set(json.loads(out.splitlines()[-1]))


def modules_of(names: set[str]) -> set[str]:
    targets = [command.target.partition(":")[0] for command in COMMANDS if command.name in names]
    return modules_after("import importlib\n" + "\n".join(f"importlib.import_module('{name}')" for name in targets))


def test_the_help_page_lists_every_command_with_its_summary(genesis: Genesis) -> None:
    page = genesis("--help")
    assert page.status == 0
    assert genesis("-h").out == page.out
    for command in COMMANDS:
        assert f"  {command.name} " in page.out
        assert command.summary in page.out


def test_the_help_page_imports_neither_torch_nor_lightning() -> None:
    heavy = {"torch", "lightning", "numpy", "yaml", "rich", "jsonargparse"}
    assert not heavy & modules_after("from genesis.cli.main import main\nmain(['--help'])")


def test_a_wrong_value_of_fit_is_found_without_the_parser() -> None:
    loaded = modules_after(
        "from genesis.cli.main import main\n"
        "assert main(['fit', '--config', 'demo', '--data.seq_len', 'many']) == 2\n"
        "assert main(['fit', '--config', 'demo', '--trainer.max_steps', '1', '--data.seq_len', 'many']) == 2"
    )
    assert not {"torch", "lightning", "numpy", "rich", "jsonargparse"} & loaded


@pytest.mark.slow  # import-linter proves it for imports that stand in a file
def test_commands_that_do_not_train_never_import_lightning() -> None:
    loaded = modules_of({command.name for command in COMMANDS} - TRAIN)
    assert not {"lightning", "pytorch_lightning", "lightning_fabric"} & loaded


@pytest.mark.slow
def test_commands_that_need_no_tensors_never_import_torch() -> None:
    assert "torch" not in modules_of(NO_TENSORS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name.replace(" ", "-"))
def test_every_command_helps_and_its_golden_record_agrees(
    command: Command, genesis: Genesis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    outcome = genesis(*command.name.split(), "--help")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith("usage: genesis")
    # What it does, and more than the option that was just given.
    assert len(outcome.out.splitlines()) > 6
    for option in OPTIONS.get(command.name, ()):
        assert option in outcome.out
    recorded = write_record(command, outcome.out) if os.environ.get("GENESIS_UPDATE_GOLDEN") == "1" else read_record()
    assert recorded.options[command.name] == find_options(outcome.out), "options have changed; `make golden`"
    assert recorded.help.get(command.name) == (outcome.out.rstrip() if command.extra else None)


def write_record(command: Command, text: str) -> Record:
    """Writes what the record has for one command; other workers may write at the same time."""
    with RECORD.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        record = Record(**json.load(file))
        names = {each.name for each in COMMANDS}
        options = {name: value for name, value in record.options.items() if name in names}
        helps = {name: value for name, value in record.help.items() if name in names}
        options[command.name] = find_options(text)
        if command.extra:
            helps[command.name] = text.rstrip()
        fresh = Record(dict(sorted(options.items())), dict(sorted(helps.items())))
        file.seek(0)
        file.truncate()
        file.write(json.dumps(fresh._asdict(), indent=1) + "\n")
    return fresh


def test_the_record_has_no_command_that_does_not_exist() -> None:
    assert set(read_record().options) == {command.name for command in COMMANDS}
    assert set(read_record().help) == {command.name for command in COMMANDS if command.extra}


def test_what_packages_read_at_their_import_is_set_before_a_command_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[str] = []

    def find(target: str) -> Callable[[], None]:
        found.append(target)
        return lambda: None

    monkeypatch.setattr(table, "_find", find)
    (command,) = [command for command in COMMANDS if command.name == "evaluate"]
    command.load()
    assert found == ["genesis.evaluate.environment:make_quiet", "genesis.cli.evaluate:main"]


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        ([], "genesis.cli.doctor"),
        (["--json", "a.json"], "genesis.cli.doctor"),
        (["--config", "a.yaml"], "genesis.cli.doctor_recipe"),
        (["--config=a.yaml"], "genesis.cli.doctor_recipe"),
        (["--device", "cpu", "--config", "a.yaml"], "genesis.cli.doctor"),
    ],
)
def test_only_the_form_of_the_doctor_that_trains_imports_what_trains(
    arguments: list[str], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(table, "_find", lambda target: found.append(target) or (lambda: None))
    (command,) = [command for command in COMMANDS if command.name == "doctor"]
    command.load(arguments)
    assert found == ["genesis.operations.doctor.environment:make_quiet", f"{module}:main"]


def test_a_group_alone_lists_its_commands_and_is_a_misuse(genesis: Genesis) -> None:
    page = genesis("data", "--help")
    assert page.status == 0
    assert "data prepare" in page.out
    assert "tokenizer train" not in page.out
    assert genesis("data").status == 2


def test_no_command_at_all_is_a_misuse_that_shows_the_page(genesis: Genesis) -> None:
    outcome = genesis()
    assert outcome.status == 2
    assert outcome.out == genesis("--help").out


def test_the_version_is_the_packages(genesis: Genesis) -> None:
    assert genesis("--version").out == f"genesis {__version__}\n"


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (("fti",), "genesis fit"),
        (("data", "prepares"), "genesis data prepare"),
        (("tokenizer-train",), "tokenizer train"),
    ],
)
def test_an_unknown_command_names_the_nearest(words: tuple[str, ...], near: str, genesis: Genesis) -> None:
    outcome = genesis(*words, "--config", "some.yaml")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith(f"genesis: error: no such command: {' '.join(words)!r}; did you mean `")
    assert near in outcome.err


def fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch, words: Sequence[str] = ("demo",)) -> int:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(Command, "load", lambda command, arguments: fail)
    return main(words)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("no such thing"), 2, "no such thing"),
        (RunEndedError("enough"), 1, "enough"),
        (OSError(errno.ENOSPC, "No space left on device", "shard"), 2, "shard: No space left on device; free space"),
        (
            OSError(errno.ELOOP, "Too many levels of symbolic links", "a"),
            2,
            "a: Too many levels of symbolic links; remove",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "run"),
            2,
            "run: Permission denied; make its directory writable",
        ),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_a_status(
    error: Exception, status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails_with(error, monkeypatch) == status
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith(f"genesis: error: {line}")


def test_line_breaks_of_a_class_that_writes_them_are_printed_and_all_else_is_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails_with(DriftError("of another run\n  model\n    dim is '\x1b[2J'"), monkeypatch) == 2
    assert capsys.readouterr().err == "genesis: error: of another run\n  model\n    dim is '\\x1b[2J'\n"
    assert fails_with(UserError("no file a\nb\x1b[2J"), monkeypatch) == 2
    assert capsys.readouterr().err == "genesis: error: no file a\\nb\\x1b[2J\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["demo"], "genesis: interrupted"),
        (["data", "prepare"], "genesis: interrupted; the same command continues"),
    ],
)
def test_an_interruption_has_the_shells_status_and_one_line(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails_with(KeyboardInterrupt(), monkeypatch, words) == 130
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("error", [AssertionError("ours"), OSError(errno.EBADF, "Bad file descriptor"), RuntimeError()])
def test_our_own_mistakes_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)):
        fails_with(error, monkeypatch)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, genesis: Genesis) -> None:
    command = Command("export", "", "not_there:main", extra="hub")
    monkeypatch.setattr(main_module, "COMMANDS", (command,))
    outcome = genesis("export")
    assert outcome.status == 2
    assert "pip install 'genesis-lm[hub]'" in outcome.err


def test_a_module_of_ours_that_is_missing_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"genesis\.not_there"):
        Command("export", "", "genesis.not_there:main", extra="hub").load()


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.extra], ids=lambda each: each.name)
def test_a_command_whose_extra_is_missing_still_helps(
    command: Command, monkeypatch: pytest.MonkeyPatch, genesis: Genesis
) -> None:
    """Reported as sgl-project/sglang#13244 and cqfn/aibolit#1339."""

    def find(target: str) -> None:
        raise ModuleNotFoundError(f"No module named {target}", name="lm_eval")

    monkeypatch.setattr(table, "_find", find)
    outcome = genesis(*command.name.split(), "--help")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith(f"usage: genesis {command.name}")
    assert outcome.out.endswith(f"pip install 'genesis-lm[{command.extra}]'\n")
    assert genesis(*command.name.split()).status == 2


def test_only_the_form_of_evaluate_with_tasks_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(table, "_find", lambda target: found.append(target) or (lambda: None))
    (command,) = [command for command in COMMANDS if command.name == "evaluate"]
    for arguments in (["run", "--heldout"], ["run", "--tasks", "x"], ["run", "--tasks=x"]):
        command.load(arguments)
    assert found[1::2] == ["genesis.cli.evaluate:main", *["genesis.cli.evaluate_tasks:main"] * 2]


# As modules do that take an interruption of their import for a failure of their own.
INTERRUPTED_IMPORT = """
import os, signal, sys, traceback
from genesis.cli.main import main
from genesis.cli.table import Command

def load(command, arguments):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
    except BaseException:
        traceback.print_exc()
        raise ImportError("a module of a module") from None

Command.load = load
sys.exit(main(["demo"]))
"""


@pytest.mark.process
def test_an_interruption_of_the_imports_ends_with_one_line() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "genesis: interrupted\n")


INTERRUPTED_START = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["--help"]
from genesis.cli.program import run
sys.exit(run())
"""


@pytest.mark.process
@pytest.mark.parametrize("module", ["genesis.cli.main", "argparse", "genesis.cli.command_record"])
def test_an_interruption_before_a_command_is_found_ends_with_one_line(module: str) -> None:
    program = INTERRUPTED_START.replace("{module}", module)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "genesis: interrupted\n")


IMPORTED = """
import sys
before = set(sys.modules)
import genesis.cli.program
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.process
def test_little_is_imported_before_ctrl_c_ends_with_one_line() -> None:
    program = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    ours = {"genesis", "genesis.cli", "genesis.cli.program"}
    imported = done.stdout.split()
    assert {name for name in imported if name.partition(".")[0] not in ("gc", "importlib", "warnings")} == ours


FINISHED = """
import signal, sys
from genesis.cli.program import run

sys.argv[1:] = ["--version"]
status = run()
signal.raise_signal(signal.SIGINT)
print("not ended")
"""


@pytest.mark.process
def test_ctrl_c_while_python_ends_is_answered_in_one_line() -> None:
    ended = subprocess.run([sys.executable, "-c", FINISHED], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "genesis: interrupted\n")


COLLECTED = """
import gc, sys
from genesis.cli.program import run
from genesis.cli.table import Command

def load(command, arguments):
    print(gc.isenabled())
    return lambda rest: print(gc.isenabled(), gc.get_freeze_count() > 0)

Command.load = load
sys.argv[1:] = ["demo"]
sys.exit(run())
"""


@pytest.mark.process
def test_garbage_is_collected_from_the_end_of_a_commands_imports_on() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, check=True)
    assert done.stdout == "False\nTrue True\n"


INTERRUPTED_DESTRUCTOR = """
import os, signal, sys, time
from genesis.cli.main import main
from genesis.cli.table import Command

class Slow:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass

def run(arguments):
    Slow()
    time.sleep(60)
    return 0

Command.load = lambda command, arguments: run
sys.exit(main(["demo"]))
"""


@pytest.mark.process
def test_an_interruption_that_comes_in_a_destructor_is_not_lost() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_DESTRUCTOR], capture_output=True, text=True, check=False, timeout=50
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "genesis: interrupted\n")


def test_an_interruption_that_became_an_exit_has_the_shells_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    monkeypatch.setattr(Command, "load", lambda command, arguments: fail)
    assert main(["demo"]) == 130
