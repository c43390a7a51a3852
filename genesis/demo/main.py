"""The whole path from raw text to a trained model in minutes on a CPU; each step runs an ordinary command.

The demo collects text that every Python includes, trains a tokenizer, and prepares token shards. It trains a model,
sends one real SIGKILL in the middle, and resumes. It validates the last checkpoint, generates text from an early and
the last checkpoint, plots the loss, and lists the paths of the results.
"""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule

from genesis.demo.plot import plot_loss, read_curve
from genesis.demo.scale import scale_recipe
from genesis.demo.text import gather_text
from genesis.errors import UserError
from genesis.run_directory import RunDirectory
from genesis_callbacks.checkpoint import list_committed, read_manifest

PROMPTS = ("class Stack:\n", "def __init__(self,", "import os\n\ndef ")

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Kill:
    """The state at a kill: the last step in the log, and the newest committed checkpoint."""

    step: int
    checkpoint: Path


def _step_of(checkpoint: Path) -> int:
    """Returns the step of the checkpoint from its name, because retention may have removed the checkpoint since."""
    return int(checkpoint.name.removeprefix("step-"))


class StepFailedError(RuntimeError):
    """A command of the demo failed; `status` is its exit status."""

    def __init__(self, command: Sequence[str], status: int) -> None:
        super().__init__(f"`{shlex.join(command)}` ended with status {status}")
        self.status = status


class Demo:
    """The steps of the demo in order; each step prints its command and its duration."""

    def __init__(
        self, directory: Path, recipe: Path, corpus_config: Path, tokenizer_config: Path, num_steps: int | None
    ) -> None:
        self.directory = directory
        self.recipe, self.corpus_config, self.tokenizer_config = recipe, corpus_config, tokenizer_config
        options = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        scaled = () if num_steps is None else scale_recipe(options, num_steps)
        self.recipe_options = ("--config", str(recipe), *scaled)
        self.num_steps: int = num_steps or options["trainer"]["max_steps"]
        self.run_dir = directory / "run"
        self.metrics = RunDirectory(self.run_dir).metrics
        self.console = Console(highlight=False, soft_wrap=True)

    def run(self) -> None:
        """Runs every step."""
        began = time.monotonic()
        self._title("1/8  Text: Python's standard library")
        num_documents, num_bytes = gather_text(self.directory / "text")
        self.console.print(f"{num_documents} documents, {num_bytes / 1e6:.1f} MB")
        self._title("2/8  Tokenizer")
        self._genesis("tokenizer", "train", "--config", str(self.tokenizer_config))
        self._title("3/8  Tokens")
        self._genesis("data", "prepare", "--config", str(self.corpus_config))
        self._title("4/8  Training, until it is killed")
        fit = ("fit", *self.recipe_options)
        kill = self._train_and_kill(fit)
        self._title("5/8  Training resumes from the last checkpoint")
        self._genesis(*fit, "--ckpt_path", "latest")
        self._title("6/8  Validation of the last checkpoint, in a separate process")
        last = self._committed()[-1]
        self._genesis("validate", *self.recipe_options, "--ckpt_path", str(last))
        self._title("7/8  Text from an early and from the last checkpoint")
        for checkpoint in (self._committed()[0], last):
            self.console.print(f"\n[bold]{checkpoint.name}[/bold]")
            prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
            self._genesis(
                "generate", str(checkpoint), *prompts, "--max-new-tokens", "80", "--temperature", "0.6", "--seed", "1"
            )
        self._title("8/8  Results")
        self._summarise(kill, last, time.monotonic() - began)

    def _train_and_kill(self, fit: Sequence[str]) -> Kill:
        """Starts training, waits until it is a few steps past a checkpoint in the middle, and sends SIGKILL."""
        gap = min(3, self.num_steps // 20)  # at most half of the steps between two saves
        process = subprocess.Popen(self._command(*fit))
        try:
            while self._newest_step() < self.num_steps // 2 or self._last_step() <= self._newest_step() + gap:
                if process.poll() is not None:
                    raise StepFailedError(self._command(*fit), process.returncode)
                time.sleep(_POLL_SECONDS)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        kill = Kill(self._last_step(), self._committed()[-1])
        self.console.print(
            f"\n[bold red]SIGKILL[/bold red] at step {kill.step}; the newest checkpoint is {kill.checkpoint.name}"
        )
        return kill

    def _committed(self) -> list[Path]:
        return [path for path, _ in list_committed(self.run_dir)]

    def _newest_step(self) -> int:
        committed = self._committed()
        return _step_of(committed[-1]) if committed else 0

    def _last_step(self) -> int:
        if not self.metrics.exists():
            return 0
        steps, _ = read_curve(self.metrics, "step", "train/loss")
        return int(steps[-1]) if steps else 0

    def _summarise(self, kill: Kill, last: Path, seconds: float) -> None:
        picture = RunDirectory(self.run_dir).loss_plot
        plot_loss(self.metrics, picture, kill.step, _step_of(kill.checkpoint))
        _, held_out = read_curve(self.metrics, "step", "validation/bits_per_byte")
        manifest = read_manifest(last)
        print_ = self.console.print
        print_(f"held-out text     {held_out[-1]:.3f} bits per byte ({held_out[0]:.3f} at the start)")
        print_(
            f"trained           {manifest.counters['updates']} updates, {manifest.counters['tokens_updated']:,} tokens"
        )
        print_(f"checkpoint        {last}")
        print_(f"loss              {picture}")
        print_(f"metrics           {self.metrics}")
        print_(f"recipe            {RunDirectory(self.run_dir).recipe}")
        print_(f"total time        {seconds / 60:.1f} minutes")
        print_("\nNext:")
        print_(f"  genesis generate {self.run_dir} --prompt 'class '")
        print_(f"  genesis serve {self.run_dir}   a page with its checkpoints, side by side")
        longer = f"--trainer.max_steps {2 * self.num_steps} --checkpoint.allow_changed '[trainer.max_steps]'"
        options = shlex.join(self.recipe_options)
        print_(f"  genesis fit {options} --ckpt_path latest {escape(longer)}   continue for longer")
        print_("  configs/genesis-10m.yaml   a larger model; configs/corpora/ shows how to bring your own text")

    def _title(self, text: str) -> None:
        self.console.print()
        self.console.print(Rule(text, align="left"))

    def _command(self, *arguments: str) -> list[str]:
        self.console.print(f"[dim]$ genesis {shlex.join(arguments)}[/dim]")
        return [sys.executable, "-m", "genesis", *arguments]

    def _genesis(self, *arguments: str) -> None:
        command = self._command(*arguments)
        began = time.monotonic()
        status = subprocess.run(command, check=False).returncode
        if status:
            raise StepFailedError(command, status)
        self.console.print(f"[dim]{time.monotonic() - began:.0f} s[/dim]")


def run_demo(configs: Path, num_steps: int | None = None) -> int:
    """Runs the demo in `runs/demo`; returns 0, or the status of the step that failed.

    Args:
        configs: The repository's folder of configs.
        num_steps: Number of training steps; by default the recipe's.

    Raises:
        UserError: `configs` has no recipe for the demo, or `num_steps` is too small.
    """
    recipe = configs / "demo.yaml"
    if not recipe.exists():
        raise UserError(f"{recipe} does not exist; run the demo from a clone of the repository, or give --configs")
    directory = Path("runs/demo")
    folders = (configs / "corpora" / "demo.yaml", configs / "tokenizers" / "demo.yaml")
    demo = Demo(directory, recipe, *folders, num_steps)
    if (directory / "run").exists():
        number = 1 + sum(1 for _ in directory.glob("run.before-*"))
        (directory / "run").rename(directory / f"run.before-{number}")
    try:
        demo.run()
    except StepFailedError as error:
        print(f"genesis: error: {error}", file=sys.stderr)
        return error.status if error.status > 0 else 128 - error.status
    return 0
