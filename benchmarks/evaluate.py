"""Compares `genesis evaluate`'s engine with lm-eval's `hf` backend on each kind of request: scores, documents, texts.

Both engines load the same model, in float32, and receive the requests that lm-eval sends to a model
(`benchmarks.evaluate_tasks`); tokenization is part of the measured work. They take turns in one process. The
benchmark also compares the answers, and measures the matrix products of our forwards alone, which bound the speed of
an engine that computes the same forwards with torch's products.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks import harness
from benchmarks.demo_files import add_demo_options, find_conversations, find_model
from benchmarks.evaluate_tasks import TASKS, make_requests, read_pairs
from genesis.base.console import Console
from genesis.evaluate.model import GenesisLM
from genesis.export.importing import import_directory
from genesis.generate.load import Loaded, load_decoder
from genesis.model.decoder import Decoder

# isort: split
from lm_eval.models.huggingface import HFLM  # after the imports that silence its warnings

BATCH_SIZES: Final = (1, 8, 64)
"""Batch sizes of the `hf` backend; it runs with the fastest of them."""
OURS, THEIRS, PRODUCTS = "genesis", "hf", "products"
_GOAL = 3.0
_POSITIONS = 256
_TOLERANCE, _RELATIVE_TOLERANCE = 1e-3, 1e-5
"""The largest difference of two log-likelihoods, in nats, and for long texts as a share.

The `hf` backend's float32 softmax over 49,152 tokens is off by about 1e-5 nats for each token, mostly upwards.
"""

Answers = list[Any]
Work = Callable[[], Answers]


class Seconds(NamedTuple):
    """The time that a piece of work took: of the clock, and of all threads on all cores."""

    wall: float
    cpu: float


class Shape(NamedTuple):
    """The sizes of a forward: the tokens that it feeds, with padding, and the positions whose logits it computes."""

    num_tokens: int
    num_positions: int


def main(argv: list[str]) -> int:
    """Measures, prints the page and writes the record to `--out`; the exit status is 1 if answers differ."""
    options = _parse(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    model, conversations = find_model(options.model, console), read_pairs(find_conversations(options.conversations))
    what = "requests of lm-eval to a model: genesis evaluate's engine and lm-eval's hf backend"
    record = harness.begin_record("evaluate", what, argv, ("torch", "transformers", "lm-eval", "tokenizers"))
    record |= {"threads": torch.get_num_threads(), "tasks": {}}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        console.print("importing the model")
        import_directory(model, directory / "imported", has_tokenizer=True, compares_models=False)
        loaded = load_decoder(directory / "imported")
        record["parameters"] = sum(parameter.numel() for parameter in loaded.decoder.parameters())
        theirs = HFLM(str(model), device="cpu", dtype="float32", trust_remote_code=False)
        for name in options.tasks:
            console.print(f"measuring: {name}", highlight=False)
            requests = make_requests(directory / name, options.questions, conversations)
            record["tasks"][name] = measure(loaded, theirs, TASKS[name].kind, requests, options.pairs)
    harness.finish(record, format_record, options.out)
    return 0 if all(task["is_equal"] for task in record["tasks"].values()) else 1


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.build_parser("evaluate", __doc__)
    add_demo_options(parser)
    parser.add_argument(
        "--tasks", type=harness.read_list, default=list(TASKS), help=f"of {', '.join(TASKS)} (default: all)"
    )
    harness.add_counts(
        parser,
        questions=(6, "measure of the number of rows of each task"),
        pairs=(6, "number of rounds"),
        threads=(None, "CPU threads of torch (default: torch's own choice)"),
    )
    options = parser.parse_args(argv)
    harness.check_counts(options, "questions", "pairs", "threads")
    harness.check_choices("--tasks", options.tasks, list(TASKS))
    return options


# ---- the work


def measure(loaded: Loaded, theirs: Any, kind: str, requests: list[Any], num_pairs: int) -> dict[str, Any]:
    """Returns the times of both engines and of our products, which take turns, their ratios, and how answers differ.

    Args:
        loaded: The model for our engine.
        theirs: The `hf` backend, whose batch size is changed.
        kind: The method that answers the requests.
        requests: The requests.
        num_pairs: Number of rounds.
    """
    best, trials = choose_batch_size(theirs, kind, requests[: max(1, len(requests) // 2)])
    theirs.batch_size_per_gpu = best

    def ask_ours() -> Answers:  # built again for each call, because it caches the ids of texts
        answers: Answers = getattr(GenesisLM(loaded.decoder, loaded.text_tokenizer), kind)(requests)
        return answers

    with record_shapes(loaded.decoder) as shapes:
        ask_ours()
    contenders: dict[str, Work] = {
        OURS: ask_ours,
        THEIRS: lambda: getattr(theirs, kind)(requests, disable_tqdm=True),
        PRODUCTS: lambda: multiply(loaded.decoder, shapes),
    }
    turns = harness.take_rounds(contenders, num_pairs, _time, lambda turn: turn[1].wall, "s")
    wall, cpu = (
        {name: [getattr(seconds, of) for _, seconds in of_one] for name, of_one in turns.items()}
        for of in Seconds._fields
    )
    answers = {name: of_one[-1][0] for name, of_one in turns.items()}
    return {
        "kind": kind,
        "requests": len(requests),
        "forwards": len(shapes),
        "tokens": sum(shape.num_tokens for shape in shapes),
        "positions": sum(shape.num_positions for shape in shapes),
        "hf_batch_size": best,
        "hf_trials_seconds": trials,
        "seconds": {name: [round(value, 3) for value in values] for name, values in wall.items()},
        "cpu_seconds": {name: [round(value, 3) for value in values] for name, values in cpu.items()},
        "median_seconds": {name: round(statistics.median(values), 3) for name, values in wall.items()},
        "speedup": asdict(harness.compare_pairs(wall[THEIRS], wall[OURS])),
        "speedup_by_cpu_time": asdict(harness.compare_pairs(cpu[THEIRS], cpu[OURS])),
        "hf_over_products": asdict(harness.compare_pairs(wall[THEIRS], wall[PRODUCTS])),
        **compare_answers(answers[OURS], answers[THEIRS]),
    }


def choose_batch_size(model: Any, kind: str, requests: list[Any]) -> tuple[int, dict[int, float]]:
    """Returns the fastest of `BATCH_SIZES`, and the time of each, measured after a warm-up.

    Of the sizes that hold all requests only the smallest is tried.
    """
    model.batch_size_per_gpu = BATCH_SIZES[0]
    getattr(model, kind)(requests[:1], disable_tqdm=True)
    seconds: dict[int, float] = {}
    for size in BATCH_SIZES[: 1 + sum(size < len(requests) for size in BATCH_SIZES)]:
        model.batch_size_per_gpu = size
        seconds[size] = round(_time(lambda: getattr(model, kind)(requests, disable_tqdm=True))[1].wall, 3)
    return min(seconds, key=lambda size: seconds[size]), seconds


@contextmanager
def record_shapes(decoder: Decoder) -> Iterator[list[Shape]]:
    """Gives the sizes of the decoder's forwards in the `with` block."""
    shapes: list[Shape] = []

    def note(_: nn.Module, args: tuple[Tensor, ...], options: Mapping[str, Any]) -> None:
        kept = options.get("logits_to_keep")
        num_tokens = args[0].numel()
        shapes.append(Shape(num_tokens, num_tokens if kept is None else kept.numel()))

    handle = decoder.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield shapes
    finally:
        handle.remove()


@torch.inference_mode()
def multiply(decoder: Decoder, shapes: Sequence[Shape]) -> Answers:
    """Multiplies with every weight as forwards of these sizes do, by torch's products in float32; returns nothing."""
    weights = [module.weight for module in decoder.blocks.modules() if isinstance(module, nn.Linear)]
    for shape in shapes:
        for weight in weights:
            linear(torch.ones(shape.num_tokens, weight.shape[1]), weight)
        for start in range(0, shape.num_positions, _POSITIONS):  # in parts, as engines do, to bound memory
            num = min(_POSITIONS, shape.num_positions - start)
            linear(torch.ones(num, decoder.output_weight.shape[1]), decoder.output_weight)
    return []


def _time(work: Work) -> tuple[Answers, Seconds]:
    start, start_cpu = time.perf_counter(), time.process_time()
    answers = work()
    return answers, Seconds(time.perf_counter() - start, time.process_time() - start_cpu)


def compare_answers(ours: Answers, theirs: Answers) -> dict[str, Any]:
    """Returns the largest difference of log-likelihoods, the number of equal texts or greediness, and whether all are.

    Answers are log-likelihoods, log-likelihoods with greediness, or texts.
    """
    pairs = [(_split(a), _split(b)) for a, b in zip(ours, theirs, strict=True)]
    differences = [abs(a[0] - b[0]) for a, b in pairs]
    num_equal = sum(a[1] == b[1] for a, b in pairs)
    is_near = all(
        difference <= max(_TOLERANCE, _RELATIVE_TOLERANCE * abs(b[0]))
        for difference, (_, b) in zip(differences, pairs, strict=True)
    )
    return {
        "largest_difference": max(differences),
        "num_equal": num_equal,
        "is_equal": is_near and num_equal == len(pairs),
    }


def _split(answer: Any) -> tuple[float, Any]:
    """Returns the log-likelihood of an answer, 0 for a text, and what must be the same in another answer."""
    if isinstance(answer, str):
        return 0.0, answer
    return answer if isinstance(answer, tuple) else (answer, None)


# ---- the report


_COLUMNS: Final = (
    *("task", "requests", "genesis s", "hf s (batch)", "speedup", "by CPU time", "largest difference"),
    "products alone",
)


def format_record(record: Mapping[str, Any]) -> str:
    """Returns the record as a page of Markdown."""
    notes = [
        f"a model of {record['parameters'] / 1e6:.0f}M parameters in float32, {record['threads']} threads. Both "
        "engines receive lm-eval's requests; the time includes tokenization",
        f"`hf` has the fastest batch size of {', '.join(map(str, BATCH_SIZES))}; its `auto` takes 64, or half of it as "
        "often as memory runs out, after forwards that search",
        f"seconds are medians; a ratio is the median over pairs, with a 95% interval. Goal: {_GOAL:.0f}. The last "
        "column is the speedup that torch's float32 matrix products of our forwards would have by themselves: the "
        "bound for an engine that computes the same forwards with them",
    ]
    rows = []
    for name, task in record["tasks"].items():
        seconds = task["median_seconds"]
        difference = "equal texts" if task["kind"] == "generate_until" else f"{task['largest_difference']:.1e}"
        if not task["is_equal"]:
            difference += f"; {task['num_equal']} of {task['requests']} equal"
        ratios = (harness.format_ratio(task[key], 2) for key in ("speedup", "speedup_by_cpu_time"))
        times = (f"{seconds[OURS]:.2f}", f"{seconds[THEIRS]:.2f} ({task['hf_batch_size']})")
        products = harness.format_ratio(task["hf_over_products"], 2)
        rows.append([name, str(task["requests"]), *times, *ratios, difference, products])
    tasks = [f"- **{name}** (`{TASKS[name].kind}`): {TASKS[name].summary}." for name in record["tasks"]]
    title = "Evaluation compared with lm-eval's hf backend"
    return harness.format_page(title, record, notes, [*harness.format_table(_COLUMNS, rows), *tasks])
