"""The table of commands: name, one line of help, and where its code is.

`genesis --help` must answer in a moment, and importing Lightning takes many seconds: so a command's module is
imported when the command is called and not before. This is the one place where a late import is right.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from genesis.errors import UserError


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        name: One word or two: `fit`, `data prepare`.
        summary: One line of help.
        target: `module:function`; the function takes the arguments after the name and returns the exit status.
        extra: The optional dependency group that it needs, if any.
        check: `module:function`, light to import; it takes the same arguments and refuses what is certainly wrong.
        prepare: `module:function` without arguments, called before the command's code is imported: it sets up what
            packages of others read when they are imported.
    """

    name: str
    summary: str
    target: str
    extra: str | None = None
    check: str | None = None
    prepare: str | None = None

    def check_arguments(self, arguments: list[str]) -> None:
        """Refuses mistakes that can be seen before the command's code is imported.

        Raises:
            UserError: There is one.
        """
        if self.check is not None:
            _find(self.check)(arguments)

    def load(self) -> Callable[[list[str]], int]:
        """Imports the command's code.

        Raises:
            UserError: An optional dependency is missing; it names the extra.
        """
        try:
            if self.prepare is not None:
                _find(self.prepare)()
            main: Callable[[list[str]], int] = _find(self.target)
        except ImportError as error:
            if self.extra is None:
                raise
            raise UserError(
                f"`genesis {self.name}` needs {error.name}; pip install 'genesis-lm[{self.extra}]'"
            ) from error
        return main


def _find(target: str) -> Callable[..., Any]:
    module_name, _, function_name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    return function


COMMANDS = (
    Command("tokenizer train", "train a tokenizer on text", "genesis.cli.tokenizer:train_main"),
    Command("tokenizer inspect", "bytes per token, round trip and unused pieces", "genesis.cli.tokenizer:inspect_main"),
    Command("data clean", "filter and deduplicate raw text, with account", "genesis.cli.clean:clean_main", "clean"),
    Command("data prepare", "turn text into token shards with a manifest", "genesis.cli.data:prepare_main"),
    Command("data adopt", "a corpus of tokens that other tools wrote, not copied", "genesis.cli.adopt:main"),
    Command("data plan", "put the documents of a corpus into sequences", "genesis.cli.data:plan_main"),
    Command("data inspect", "show a corpus: manifest, packings, decoded samples", "genesis.cli.data:inspect_main"),
    Command("data verify", "check every shard of a corpus against its manifest", "genesis.cli.data:verify_main"),
    Command(
        "model describe", "parameters by part, FLOPs and memory; builds nothing", "genesis.cli.model:describe_main"
    ),
    Command(
        *("fit", "train, or go on from a checkpoint", "genesis.cli.fit:fit_main"),
        check="genesis.cli.option_names:check_fit",
    ),
    Command(
        *("validate", "loss on the validation set, from a checkpoint", "genesis.cli.fit:validate_main"),
        check="genesis.cli.option_names:check_validate",
    ),
    Command("generate", "write text from prompts with a checkpoint", "genesis.cli.generate:main"),
    Command("serve", "a page and an OpenAI-compatible server over a run's checkpoints", "genesis.cli.serve:main"),
    Command(
        *("evaluate", "benchmarks and held-out text, while training goes on", "genesis.cli.evaluate:main", "evaluate"),
        prepare="genesis.evaluate.environment:make_quiet",
    ),
    Command("export", "a checkpoint for transformers, with its proof", "genesis.cli.export:main", "export"),
    Command("import", "a model from Hugging Face as a checkpoint", "genesis.cli.import_:main", "export"),
    Command("release", "an export as a folder for the Hugging Face Hub", "genesis.cli.release:main", "release"),
    Command("checkpoint list", "a run's checkpoints: step, tokens, age, verified", "genesis.cli.checkpoint.list:main"),
    Command("checkpoint show", "what is in a checkpoint", "genesis.cli.checkpoint.show:main"),
    Command("checkpoint verify", "sizes, hashes and digests of checkpoints", "genesis.cli.checkpoint.verify:main"),
    Command("checkpoint diff", "settings and tensors of two checkpoints", "genesis.cli.checkpoint.diff:main"),
    Command("checkpoint prune", "remove older checkpoints of a run", "genesis.cli.checkpoint.prune:main"),
    Command(
        "checkpoint to-lightning", "one .ckpt file for stock Lightning", "genesis.cli.checkpoint.to_lightning:main"
    ),
    Command("checkpoint repair", "what to do about broken checkpoints", "genesis.cli.checkpoint.repair:main"),
    Command("demo", "the whole road on Python's own sources, in minutes", "genesis.cli.demo:main"),
    Command("rehearse", "kill and restart a recipe before it is trained in earnest", "genesis.cli.rehearse:main"),
    Command("bench tokenize", "data prepare beside the tokenizer's own encode", "genesis.bench.tokenize:main"),
    Command("bench data", "tokens per second of the data alone, prepared and streamed", "genesis.bench.data:main"),
    Command("bench step", "the training step beside bare loops and other trainers", "genesis.bench.step:main"),
    Command(
        *("bench evaluate", "evaluation beside lm-eval's hf backend", "genesis.bench.evaluate:main", "evaluate,peers"),
        prepare="genesis.evaluate.environment:make_quiet",
    ),
    Command("bench checkpoint", "training steps around a save, ours and torch's", "genesis.bench.checkpoint:main"),
    Command("bench versions", "this version's speed beside another checkout's", "genesis.bench.versions:main"),
    Command("completion", "print a completion script for bash or zsh", "genesis.cli.completion:main"),
)
