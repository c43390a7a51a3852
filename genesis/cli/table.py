"""The table of commands: each with its name, one line of help, and the location of its code.

`genesis --help` must respond at once, but importing Lightning takes many seconds. A command's module is therefore
imported only when the command is called. This is the only place in the project where a late import is right.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from genesis.base.errors import UserError
from genesis.cli.command_record import read_record

HELP: Final = frozenset({"-h", "--help"})
_OURS: Final = ("genesis", "genesis_callbacks")


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        name: One word or two: `fit`, `data prepare`.
        summary: One line of help.
        target: `module:function`; the function takes the arguments after the name and returns the exit status.
        extra: The optional dependency group that the command needs, if any.
        check: `module:function`, fast to import; it takes the same arguments and refuses wrong ones early.
        prepare: `module:function` without arguments, called before the command's code is imported: it sets
            environment variables that other packages read at import.
        first_imports: `module:function`, called with the arguments before the command's code is imported: it imports
            packages of others in a cheaper way than that code would.
        continues: Whether the same command continues the work of one that was interrupted.
        target_of: `module:function` by option: if one of the arguments is the option, this target runs instead. The
            other forms of the command then need not import what this form needs.
    """

    name: str
    summary: str
    target: str
    extra: str | None = None
    check: str | None = None
    prepare: str | None = None
    first_imports: str | None = None
    continues: bool = False
    target_of: Mapping[str, str] = field(default_factory=dict)

    def check_arguments(self, arguments: list[str]) -> None:
        """Refuses mistakes that can be found before the command's code is imported.

        Raises:
            UserError: An argument is wrong.
        """
        if self.check is not None:
            _find(self.check)(arguments)

    def load(self, arguments: Sequence[str] = ()) -> Callable[[list[str]], int]:
        """Imports the command's code and returns its function.

        Args:
            arguments: Those that the function will get.

        Raises:
            UserError: An optional dependency is missing; the message names the extra that installs it.
        """
        given = {word.partition("=")[0] for word in arguments}
        try:
            if self.prepare is not None:
                _find(self.prepare)()
            if self.first_imports is not None:
                _find(self.first_imports)(arguments)
            target = next((self.target_of[option] for option in self.target_of if option in given), self.target)
            main: Callable[[list[str]], int] = _find(target)
        except ImportError as error:
            if self.extra is None or (error.name or "").partition(".")[0] in _OURS:
                raise
            if given & HELP:
                return self._print_recorded_help
            raise UserError(
                f"`genesis {self.name}` needs {error.name}; pip install 'genesis-lm[{self.extra}]'"
            ) from error
        return main

    def _print_recorded_help(self, arguments: list[str]) -> int:
        """Prints the help of a command whose optional packages are missing."""
        print(read_record().help[self.name])
        print(f"`genesis {self.name}` needs optional packages: pip install 'genesis-lm[{self.extra}]'")
        return 0


def show_stages() -> AbstractContextManager[None]:
    """Returns a context that shows how far a command's work is; see `genesis.cli.progress.shown`."""
    context: AbstractContextManager[None] = importlib.import_module("genesis.cli.progress").shown()
    return context


def _find(target: str) -> Callable[..., Any]:
    module_name, _, function_name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    return function


SECTIONS: Final = {
    "Start here": (
        Command("demo", "run the whole workflow on Python's own sources, in minutes", "genesis.cli.demo:main"),
        Command("recipes", "list the recipes that come with Genesis", "genesis.cli.recipes:main"),
        Command("recipes copy", "copy recipes into configs/, to change them", "genesis.cli.recipes:copy_main"),
        Command(
            *("doctor", "examine a machine, its devices, or a recipe before it trains", "genesis.cli.doctor:main"),
            prepare="genesis.operations.doctor.environment:make_quiet",
            target_of={"--device": "genesis.cli.doctor:main", "--config": "genesis.cli.doctor_recipe:main"},
        ),
        Command("completion", "print a completion script for bash or zsh", "genesis.cli.completion:main"),
    ),
    "Text and tokens": (
        Command("tokenizer train", "train a tokenizer on text", "genesis.cli.tokenizer:train_main"),
        Command(
            "tokenizer inspect",
            "report bytes per token, round trip and unused pieces",
            "genesis.cli.tokenizer:inspect_main",
        ),
        Command(
            *("data clean", "filter and deduplicate raw text, with a report", "genesis.cli.clean:clean_main", "clean"),
            continues=True,
        ),
        Command(
            *("data prepare", "turn text into token shards with a manifest", "genesis.cli.data:prepare_main"),
            continues=True,
        ),
        Command("data adopt", "use token files of other tools as a corpus, without a copy", "genesis.cli.adopt:main"),
        Command("data plan", "pack the documents of a corpus into sequences", "genesis.cli.data:plan_main"),
        Command(
            *("data distill", "store a teacher's probabilities for a corpus", "genesis.cli.distill:main"),
            continues=True,
        ),
        Command("data inspect", "show a corpus: manifest, packings, decoded samples", "genesis.cli.data:inspect_main"),
        Command("data verify", "check every shard of a corpus against its manifest", "genesis.cli.data:verify_main"),
    ),
    "Models": (
        Command("import", "import a model from Hugging Face as a checkpoint", "genesis.cli.import_:main", "export"),
        Command("model describe", "print parameters by part, FLOPs and memory", "genesis.cli.model:describe_main"),
        Command("model add-tokens", "add special tokens to a model and its tokenizer", "genesis.cli.add_tokens:main"),
        Command("upcycle", "make a mixture of experts from a dense checkpoint", "genesis.cli.upcycle:main"),
    ),
    "Training": (
        Command("plan", "compute memory, time, cost and disk of a recipe before it runs", "genesis.cli.plan:main"),
        Command(
            "rehearse", "test a recipe with kills and restarts before a long training", "genesis.cli.rehearse:main"
        ),
        Command(
            *("finetune", "fine-tune a model on your data: all steps, from import to export"),
            *("genesis.cli.finetune:main", "export"),
            continues=True,
        ),
        Command(
            *("fit", "train, or resume from a checkpoint", "genesis.cli.fit:fit_main"),
            check="genesis.cli.option_names:check_fit",
            first_imports="genesis.cli.start_fit:begin_fit",
        ),
        Command(
            *("validate", "compute the loss of a checkpoint on the validation set", "genesis.cli.fit:validate_main"),
            check="genesis.cli.option_names:check_validate",
            first_imports="genesis.cli.start_fit:import_torchmetrics",
        ),
        Command(
            "supervise", "keep a run alive: restart after crashes, with a record of each", "genesis.cli.supervise:main"
        ),
    ),
    "Runs": (
        Command("runs", "list the runs under a directory: steps, tokens, loss, state, size", "genesis.cli.runs:main"),
        Command("report", "write a page about runs: curves, speed, checkpoints, crashes", "genesis.cli.report:main"),
        Command("crashes", "list the crashes of a run: class, rank, step, action, cost", "genesis.cli.crashes:main"),
        Command("mirror", "copy checkpoints to a second place while a run trains", "genesis.cli.mirror:main"),
        Command("mirror restore", "continue a run from its mirror", "genesis.cli.mirror_restore:main"),
    ),
    "Checkpoints": (
        Command(
            "checkpoint list",
            "list a run's checkpoints: step, tokens, age, verified",
            "genesis.cli.checkpoint.list:main",
        ),
        Command("checkpoint show", "show the content of a checkpoint", "genesis.cli.checkpoint.show:main"),
        Command(
            "checkpoint verify", "check sizes, hashes and digests of checkpoints", "genesis.cli.checkpoint.verify:main"
        ),
        Command(
            "checkpoint diff", "compare settings and tensors of two checkpoints", "genesis.cli.checkpoint.diff:main"
        ),
        Command("checkpoint prune", "remove older checkpoints of a run", "genesis.cli.checkpoint.prune:main"),
        Command(
            "checkpoint to-lightning",
            "write one .ckpt file for stock Lightning",
            "genesis.cli.checkpoint.to_lightning:main",
        ),
        Command("checkpoint repair", "report and fix broken checkpoints", "genesis.cli.checkpoint.repair:main"),
    ),
    "Using a model": (
        Command("generate", "generate text from prompts with a checkpoint", "genesis.cli.generate:main"),
        Command("serve", "serve checkpoints: a web page and an OpenAI-compatible API", "genesis.cli.serve:main"),
        Command(
            *("evaluate", "run benchmarks and held-out text on checkpoints", "genesis.cli.evaluate:main", "evaluate"),
            prepare="genesis.evaluate.environment:make_quiet",
            target_of={"--tasks": "genesis.cli.evaluate_tasks:main"},
        ),
        Command("export", "export a checkpoint for transformers, with a proof", "genesis.cli.export:main", "export"),
        Command("release", "prepare an export for the Hugging Face Hub", "genesis.cli.release:main", "release"),
    ),
}
"""All commands, in the sections and the order of `genesis --help`."""

COMMANDS: Final = tuple(chain.from_iterable(SECTIONS.values()))
