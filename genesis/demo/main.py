"""The whole path from raw text to a trained model in minutes on a CPU; each step runs an ordinary command.

The demo collects text that every Python includes, trains a tokenizer, and prepares token shards. It trains a model,
sends one real SIGKILL in the middle, and resumes. It validates the last checkpoint, generates text from an early and
the last checkpoint, plots the loss, writes a report, and lists the paths of the results.
"""

import shlex
import sys
import time
from pathlib import Path

import yaml
from rich.markup import escape

from genesis.demo.commands import Commands, Kill, StepFailedError, move_aside, step_of
from genesis.demo.plot import plot_loss, read_curve
from genesis.demo.scale import scale_recipe
from genesis.demo.text import gather_text
from genesis.errors import UserError
from genesis.run_directory import RunDirectory
from genesis_callbacks.checkpoint import list_committed, read_manifest

PROMPTS = ("class Stack:\n", "def __init__(self,", "import os\n\ndef ")


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
        self.commands = Commands()
        self.console = self.commands.console

    def run(self) -> None:
        """Runs every step."""
        began = time.monotonic()
        self.commands.title("1/9  Text: Python's standard library")
        num_documents, num_bytes = gather_text(self.directory / "text")
        self.console.print(f"{num_documents} documents, {num_bytes / 1e6:.1f} MB")
        self.commands.title("2/9  Tokenizer")
        self.commands.run("tokenizer", "train", "--config", str(self.tokenizer_config))
        self.commands.title("3/9  Tokens")
        self.commands.run("data", "prepare", "--config", str(self.corpus_config))
        self.commands.title("4/9  Training, until it is killed")
        fit = ("fit", *self.recipe_options)
        kill = self.commands.run_and_kill(fit, self.run_dir, self.num_steps)
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
                "generate", str(checkpoint), *prompts, "--max-new-tokens", "80", "--temperature", "0.6", "--seed", "1"
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
            f"trained           {manifest.counters['updates']} updates, {manifest.counters['tokens_updated']:,} tokens"
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
        longer = f"--trainer.max_steps {2 * self.num_steps} --checkpoint.allow_changed '[trainer.max_steps]'"
        options = shlex.join(self.recipe_options)
        print_(f"  genesis fit {options} --ckpt_path latest {escape(longer)}   continue for longer")
        print_("  configs/genesis-10m.yaml   a larger model; configs/corpora/ shows how to bring your own text")


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
    move_aside(directory / "run")
    try:
        demo.run()
    except StepFailedError as error:
        print(f"genesis: error: {error}", file=sys.stderr)
        return error.status if error.status > 0 else 128 - error.status
    return 0
