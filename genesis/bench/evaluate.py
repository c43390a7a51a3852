"""Times multiple-choice tasks in `genesis evaluate`'s engine and in lm-eval's `hf` backend on the exported model.

Two tasks are made from the documentation that comes with Python. Their lengths are similar to HellaSwag (a context of
many words, four long endings) and to ARC (a question, four short answers). The tokenizer is trained on Python's
standard library and these tasks. The measured work is the request that lm-eval sends to a model: log-likelihoods of
texts, including tokenization. Both engines take turns in one process. The weights are random, which takes the same
time as trained weights. The benchmark also compares the answers.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from pydoc_data.topics import topics
from typing import Any, Final

import torch
import yaml
from rich.console import Console

from genesis.arguments import Parser
from genesis.bench.pairs import compare_pairs, rotate_order
from genesis.bench.record import anonymise, describe_hardware, write_record
from genesis.bench.tokenize import read_texts
from genesis.errors import UserError
from genesis.evaluate.model import GenesisLM
from genesis.evaluate.tasks import load_tasks
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.generate.load import Loaded, load_decoder
from genesis.model.decoder import Decoder
from genesis.model.recipe import build_decoder_config
from genesis.run_directory import RunDirectory
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer
from genesis_callbacks.checkpoint import Ranks, RunMetadata, SaveTarget, Snapshot, local_shards, save_blocking

# isort: split
from lm_eval.models.huggingface import HFLM  # after the imports that silence its warnings

BATCH_SIZES: Final = (1, 4, 8, 16, 32, 64)
"""Batch sizes of the `hf` backend; it runs with the fastest of them."""
TASKS: Final = {"hellaswag-like": ((30, 60), (15, 30)), "arc-like": ((12, 35), (1, 8))}
"""Minimum and maximum number of words of a context and of a choice, by task."""
_NUM_CHOICES: Final = 4
_OURS, _THEIRS = "genesis", "hf"
_GOAL = 2.0
_TOLERANCE = 1e-3
_TEXT_BYTES = 8_000_000
_LEAST_WORDS = 200

Ask = Callable[[], list[tuple[float, bool]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the record and writes it to the path of `--out`; the exit status is 1 if answers differ."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parse(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    record: dict[str, Any] = {
        "what": "log-likelihoods of multiple-choice tasks: genesis evaluate and lm-eval's hf backend on the export",
        "command": f"genesis bench evaluate {shlex.join(anonymise(arguments))}".rstrip(),
        "date": date.today().isoformat(),
        "hardware": describe_hardware("cpu"),
        "threads": torch.get_num_threads(),
        "versions": {"python": python_version()}
        | {name: version(name) for name in ("torch", "transformers", "lm-eval", "sentencepiece")},
        "questions": options.questions,
        "tasks": {},
    }
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        texts = [*read_texts(_TEXT_BYTES), *topics.values()]
        console.print("building the model and its export")
        checkpoint = make_checkpoint(directory / "run", texts, options.config)
        export_checkpoints([checkpoint], directory / "export", ExportOptions())
        loaded = load_decoder(checkpoint)
        theirs = HFLM(str(directory / "export"), device="cpu", dtype="float32")
        for name in TASKS:
            console.print(f"measuring: {name}", highlight=False)
            requests = make_requests(directory / name, options.questions)
            best, trials = choose_batch_size(theirs, requests[: len(requests) // 2])
            theirs.batch_size_per_gpu = best
            record["tasks"][name] = {
                **_describe_requests(loaded.text_tokenizer, requests),
                "hf_batch_size": best,
                "hf_trials_seconds": trials,
                **measure(_build_contenders(loaded, theirs, requests), options.pairs),
            }
    record["load_average_after"] = round(os.getloadavg()[0], 1)
    page = format_page(record)
    sys.stdout.write(page)
    if options.out is not None:
        write_record(record, page, options.out)
    differ = [name for name, task in record["tasks"].items() if task["largest_difference"] > _TOLERANCE]
    return 1 if differ else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="genesis bench evaluate", description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        default=Path("configs/model/genesis-10m.yaml"),
        help="configuration of the model's shape (default %(default)s)",
    )
    add("--questions", type=int, default=200, help="questions per task (default %(default)s)")
    add("--pairs", type=int, default=10, help="number of rounds (default %(default)s)")
    add("--threads", type=int, help="CPU threads of torch (default: torch's own choice)")
    add(
        "--out",
        type=Path,
        help="file for the record, such as benchmarks/records/evaluate.json; also writes an .md page",
    )
    options = parser.parse_args(argv)
    for name in ("questions", "pairs", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}: it must be at least 1")
    if not options.config.is_file():
        raise UserError(f"there is no file {options.config}; give the shape of a model by --config")
    return options


def make_checkpoint(run: Path, texts: Sequence[str], config: Path) -> Path:
    """Returns a committed checkpoint of random weights in the new run `run`, with a tokenizer of these texts."""
    shape = yaml.safe_load(config.read_text(encoding="utf-8"))
    decoder_config = build_decoder_config(shape, where=str(config))
    run.mkdir(parents=True)
    train_tokenizer(texts, TokenizerOptions(decoder_config.vocab_size), run)
    decoder = Decoder(decoder_config)
    decoder.init_weights(0)
    parts = [
        part
        for name, tensor in decoder.state_dict().items()
        for part in local_shards(f"model.decoder.{name}", tensor, "parameter")
    ]
    RunDirectory(run).checkpoints.mkdir()
    origin = RunMetadata({"tokenizer_hash": open_tokenizer(run).hash}, {"model": {"decoder": shape}})
    target = SaveTarget(RunDirectory(run).checkpoints, Ranks(), origin=origin)
    return save_blocking(target, lambda: Snapshot(1, {"step": 1}, parts, {}))


def make_requests(folder: Path, num_questions: int) -> list[Any]:
    """Returns lm-eval's requests for a task that is written to `folder`; the task's name is a key of `TASKS`."""
    chooser = random.Random(folder.name)
    documents = [words for _, text in sorted(topics.items()) if len(words := text.split()) > _LEAST_WORDS]

    def cut(least: int, most: int) -> str:
        words = chooser.choice(documents)
        num_words = chooser.randint(least, most)
        start = chooser.randrange(len(words) - num_words)
        return " ".join(words[start : start + num_words])

    context, choice = TASKS[folder.name]
    rows = [
        {"question": cut(*context), "choices": [cut(*choice) for _ in range(_NUM_CHOICES)], "answer": 0}
        for _ in range(num_questions)
    ]
    settings = {
        "task": folder.name,
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
    }
    folder.mkdir()
    (folder / "task.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (task,) = load_tasks(f"{folder}/").tasks["tasks"].values()
    task.build_all_requests(limit=None, rank=0, world_size=1)
    requests: list[Any] = task.instances
    return requests


def choose_batch_size(model: Any, requests: list[Any]) -> tuple[int, dict[int, float]]:
    """Returns the fastest of `BATCH_SIZES`, and the better of two times of each, measured after a warm-up."""
    model.batch_size_per_gpu = BATCH_SIZES[-1]
    model.loglikelihood(requests, disable_tqdm=True)
    seconds: dict[int, float] = {}
    for _ in range(2):
        for size in BATCH_SIZES:
            model.batch_size_per_gpu = size
            taken = _time(lambda: model.loglikelihood(requests, disable_tqdm=True))[1]
            seconds[size] = round(min(taken, seconds.get(size, taken)), 3)
    return min(seconds, key=lambda size: seconds[size]), seconds


def _build_contenders(loaded: Loaded, theirs: Any, requests: list[Any]) -> dict[str, Ask]:
    """Returns the functions to time; ours is built again for each call, because it caches the ids of texts."""
    return {
        _OURS: lambda: GenesisLM(loaded.decoder, loaded.text_tokenizer).loglikelihood(requests),
        _THEIRS: lambda: theirs.loglikelihood(requests, disable_tqdm=True),
    }


def measure(contenders: dict[str, Ask], num_pairs: int) -> dict[str, Any]:
    """Returns the times of both engines, which take turns, their ratio, and the difference of their answers."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    answers: dict[str, list[tuple[float, bool]]] = {}
    for round_index in range(num_pairs):
        for name in rotate_order(list(contenders), round_index):
            answers[name], taken = _time(contenders[name])
            seconds[name].append(taken)
    pairs = list(zip(answers[_OURS], answers[_THEIRS], strict=True))
    return {
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "median_seconds": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
        "speed_of_genesis": asdict(compare_pairs(seconds[_THEIRS], seconds[_OURS])),
        "largest_difference": max(abs(ours[0] - theirs[0]) for ours, theirs in pairs),
        "num_greedy_equal": sum(ours[1] == theirs[1] for ours, theirs in pairs),
    }


def _time(ask: Ask) -> tuple[list[tuple[float, bool]], float]:
    start_seconds = time.perf_counter()
    answers = ask()
    return answers, time.perf_counter() - start_seconds


def _describe_requests(tokenizer: Tokenizer, requests: Sequence[Any]) -> dict[str, Any]:
    contexts, choices = (
        [len(ids) for ids in tokenizer.encode_batch([request.args[index] for request in requests])] for index in (0, 1)
    )
    return {
        "requests": len(requests),
        "median_context_tokens": statistics.median(contexts),
        "median_choice_tokens": statistics.median(choices),
    }


def format_page(record: dict[str, Any]) -> str:
    """Returns the record as a page of Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        "# Evaluation compared with lm-eval's hf backend",
        "",
        f"`{record['command']}`, {record['date']}. {record['hardware']}, {record['threads']} threads; {versions}. Load "
        f"average at the end {record['load_average_after']}.",
        "",
        f"{record['questions']} questions of four choices, in float32. Both engines receive lm-eval's requests and "
        "return log-likelihoods; the time includes tokenization. `hf` has the fastest batch size of "
        f"{', '.join(map(str, BATCH_SIZES))}. Seconds are medians; the speedup is the median over pairs, with a 95% "
        f"interval. Goal: {_GOAL:.0f}.",
        "",
        "| task | tokens of a context, a choice | genesis s | hf s (batch) | speedup over hf | largest difference |",
        "|---|---|---|---|---|---|",
    ]
    for name, task in record["tasks"].items():
        ratio, seconds = task["speed_of_genesis"], task["median_seconds"]
        interval = "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
        lines.append(
            f"| {name} | {task['median_context_tokens']:.0f}, {task['median_choice_tokens']:.0f} | "
            f"{seconds[_OURS]:.2f} | {seconds[_THEIRS]:.2f} ({task['hf_batch_size']}) | "
            f"{ratio['median']:.2f}{interval} | {task['largest_difference']:.1e} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
