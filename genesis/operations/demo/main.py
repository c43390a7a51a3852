"""The whole path from raw text to a trained model in minutes on a CPU; each step runs an ordinary command.

The demo collects text that every Python includes, trains a tokenizer, and prepares token shards. It trains a model,
sends one real SIGKILL in the middle, and resumes. It validates the last checkpoint, generates text from an early and
the last checkpoint, plots the loss, writes a report, and lists the paths of the results.
"""

import time
from pathlib import Path
from typing import Final

import yaml

from genesis.base.errors import numbered
from genesis.base.run_directory import RunDirectory
from genesis.operations.commands import Commands
from genesis.operations.demo.commands import Kill, move_aside, run_and_kill, step_of
from genesis.operations.demo.plot import plot_loss, read_curve
from genesis.operations.demo.scale import scale_recipe
from genesis.operations.demo.text import gather_text
from genesis.recipe.shipped import find_recipe
from genesis_callbacks.checkpoint import list_committed, read_manifest

_RECIPE: Final = "demo"
PROMPTS = ("class Stack:\n", "def __init__(self,", "import os\n\ndef ")


class Demo:
    """The steps of the demo in order; each step prints its command and its duration."""

    def __init__(self, directory: Path, num_steps: int | None) -> None:
        self.directory = directory
        recipe = find_recipe(_RECIPE)
        assert recipe is not None, "it comes with Genesis"
        options = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        scaled = () if num_steps is None else scale_recipe(options, num_steps)
        self.recipe_options = ("--config", _RECIPE, *scaled)
        self.num_steps: int = num_steps or options["trainer"]["max_steps"]
        self.run_dir = directory / "run"
        self.metrics = RunDirectory(self.run_dir).metrics
        self.commands = Commands()
        self.console = self.commands.console

    def run(self) -> None:
        """Runs every step."""
        began = time.monotonic()
        self.commands.title("1/9  Text: Python's standard library")
        num_documents, num_bytes = gather_text(self.directory / "text")
        self.console.print(f"{numbered(num_documents, 'documents')}, {num_bytes / 1e6:.1f} MB")
        self.commands.title("2/9  Tokenizer")
        self.commands.run("tokenizer", "train", "--config", "tokenizers/demo")
        self.commands.title("3/9  Tokens")
        self.commands.run("data", "prepare", "--config", "corpora/demo")
        self.commands.title("4/9  Training, until it is killed")
        fit = ("fit", *self.recipe_options)
        kill = run_and_kill(self.commands, fit, self.run_dir, self.num_steps)
        self.commands.title("5/9  Training resumes from the last checkpoint")
        self.commands.run(*fit, "--ckpt_path", "latest")
        self.commands.title("6/9  Validation of the last checkpoint, in a separate process")
        last = self._committed()[-1]
        self.commands.run("validate", *self.recipe_options, "--ckpt_path", str(last))
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        self.commands.title("7/9  Text from an early and from the last checkpoint")
        for checkpoint in (self._committed()[0], last):
            self.console.print(f"\n[bold]{checkpoint.name}[/bold]")
            self.commands.run(
                "generate", str(checkpoint), *prompts, "--max_new_tokens", "80", "--temperature", "0.6", "--seed", "1"
            )
        self.commands.title("8/9  Report")
        run = RunDirectory(self.run_dir)
        self.commands.run("report", str(self.run_dir), "--png", str(run.pictures), *prompts)
        self.commands.title("9/9  Results")
        self._summarise(kill, last, time.monotonic() - began)

    def _committed(self) -> list[Path]:
        return [path for path, _ in list_committed(self.run_dir)]

    def _summarise(self, kill: Kill, last: Path, seconds: float) -> None:
        picture = RunDirectory(self.run_dir).loss_plot
        plot_loss(self.metrics, picture, kill.step, step_of(kill.checkpoint))
        _, held_out = read_curve(self.metrics, "step", "validation/bits_per_byte")
        manifest = read_manifest(last)
        print_ = self.console.print
        print_(f"held-out text     {held_out[-1]:.3f} bits per byte ({held_out[0]:.3f} at the start)")
        print_(
            f"trained           {numbered(manifest.counters['updates'], 'updates')}, "
            f"{numbered(manifest.counters['tokens_updated'], 'tokens')}"
        )
        print_(f"checkpoint        {last}")
        print_(f"report            {RunDirectory(self.run_dir).report}: open it in a browser")
        print_(f"pictures          {RunDirectory(self.run_dir).pictures}, {picture}")
        print_(f"metrics           {self.metrics}")
        print_(f"recipe            {RunDirectory(self.run_dir).recipe}")
        print_(f"total time        {seconds / 60:.1f} minutes")
        print_("\nNext:")
        print_(f"  genesis generate {self.run_dir} --prompt 'class '")
        print_(f"  genesis serve {self.run_dir}   a page with its checkpoints, side by side")
        print_("  genesis recipes   larger models, and recipes for your own text")


def run_demo(num_steps: int | None = None) -> int:
    """Runs the demo in `runs/demo`; returns 0.

    Args:
        num_steps: Number of training steps; by default the recipe's.

    Raises:
        UserError: `num_steps` is too small.
    """
    directory = Path("runs/demo")
    demo = Demo(directory, num_steps)
    for name in ("run", "corpus", "tokenizer"):  # of an earlier demo, which may have been interrupted
        move_aside(directory / name)
    demo.run()
    return 0
