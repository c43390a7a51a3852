"""Compares the training step with a bare PyTorch loop, other projects' trainers and the machine's matmul rate.

Each contender is a process that trains the same shape on the same random tokens. The contenders train in short bursts,
one after another, in a rotating order; speeds are compared by ratios within a round (`genesis.bench.pairs`).
"""

import argparse
import os
import platform
import shlex
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.table import Table

from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.device import CPU, check_available
from genesis.base.errors import UserError
from genesis.bench.contenders import OWN, Contender, Worker, choose_contenders
from genesis.bench.pairs import PairedRatio, compare_pairs, rotate_order
from genesis.bench.record import anonymise, describe_hardware, write_record
from genesis.bench.workers.protocol import Burst, Ready, Workload
from genesis.model.decoder import DecoderConfig
from genesis.model.describe import count_flops_per_token
from genesis.model.precision import AUTO, choose_precision
from genesis.model.recipe import dump_decoder_config, read_decoder_config
from genesis.optim import OptimizerOptions
from genesis_callbacks.device_peaks import PeakType, compute_mfu, read_peak_flops

REFERENCE = "genesis"
PEAK = "matmul"

_PEAK_TYPES: dict[str, PeakType] = {"32-true": "tfloat32", "bf16-mixed": "bfloat16"}
"""The type of peak for each precision; `genesis fit` allows TF32 for products of float32 matrices."""

_PAUSE_SECONDS = 0.1  # a contender's threads spin for a moment after their last work


@dataclass(frozen=True)
class Recipe:
    """The part of a training recipe that a step's speed depends on."""

    decoder: DecoderConfig
    optimizer: OptimizerOptions
    seq_len: int
    micro_batch_size: int
    precision: Literal["auto", "32-true", "bf16-mixed"]


MODELS = {
    # Untied, because not every peer can tie its embeddings.
    "9m": Recipe(
        DecoderConfig(
            vocab_size=8192,
            dim=256,
            num_layers=6,
            num_heads=4,
            num_kv_heads=4,
            ffn_dim=768,
            max_seq_len=256,
            has_tied_embeddings=False,
        ),
        OptimizerOptions(),
        seq_len=256,
        micro_batch_size=8,
        precision="32-true",
    ),
    "tiny": Recipe(
        DecoderConfig(
            vocab_size=128,
            dim=32,
            num_layers=2,
            num_heads=4,
            num_kv_heads=4,
            ffn_dim=48,
            max_seq_len=32,
            has_tied_embeddings=False,
        ),
        OptimizerOptions(),
        seq_len=32,
        micro_batch_size=2,
        precision="32-true",
    ),
}


@dataclass(frozen=True)
class Result:
    """The results of one contender.

    Args:
        tokens_per_second: Median over rounds.
        speed_of_genesis: Our tokens per second over this contender's, paired.
        speed_of_genesis_by_cpu_time: The same ratio by CPU time instead of wall time. Other work on the machine hardly
            affects CPU time. None if CPU time is meaningless, because threads that wait for one another or for a GPU
            also use CPU time.
        share_of_peak: This contender's operations per second divided by the matmul worker's, paired.
        mfu: This contender's median operations per second divided by the published dense peak of the device; None if
            the peak is unknown.
        peak_resident_bytes: Peak resident memory of the contender's process.
        peak_device_bytes: Peak memory on the GPU.
        loss: Loss of a late step, which shows that the contender really trains.
    """

    tokens_per_second: float
    speed_of_genesis: PairedRatio | None
    speed_of_genesis_by_cpu_time: PairedRatio | None
    share_of_peak: PairedRatio | None
    mfu: float | None
    peak_resident_bytes: int
    peak_device_bytes: int | None
    loss: float | None


def main(argv: list[str]) -> int:
    """Measures, prints a table and writes the record to the path of `--out`."""
    options = _parse(argv)
    recipe = read_recipe(options.config) if options.config else MODELS[options.model]
    workload = plan_workload(recipe, options, options.warmup_steps)
    contenders = choose_contenders(options.contenders, options.peers)
    readies, bursts = _run(contenders, workload, options.pairs, options.burst_steps)
    device_name = next(iter(readies.values())).device_name
    peak_flops = read_peak_flops(device_name, _PEAK_TYPES[workload.precision])
    if peak_flops is None:
        Console(stderr=True).print(f"the peak of {device_name} is not known: no MFU", highlight=False)
    results = summarise(bursts, workload, peak_flops)
    Console().print(_build_table(contenders, results, workload))
    if options.out is not None:
        record = _build_record(argv, options, workload, contenders, readies, results, bursts)
        write_record(record, format_record(record), options.out)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="genesis bench step", description=(__doc__ or "").split("\n", 1)[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", choices=MODELS, default="9m", help="name of a model shape (default %(default)s)")
    what.add_argument("--config", type=Path, help="recipe file, such as configs/genesis-1b.yaml")
    parser.add_argument(
        "--contenders",
        default=",".join(contender.name for contender in OWN),
        help="contenders of genesis to compare (default %(default)s); options of `genesis fit` may follow a name: "
        "genesis+model.attention=flex+trainer.deterministic=false",
    )
    parser.add_argument(
        "--peers", default="", help="trainers of other projects: transformers,litgpt=PYTHON,olmo_core=PYTHON"
    )
    parser.add_argument("--pairs", type=int, default=10, help="number of rounds (default %(default)s)")
    parser.add_argument(
        "--burst_steps", type=int, default=5, help="windows of each contender per round (default %(default)s)"
    )
    parser.add_argument(
        "--warmup_steps", type=int, default=4, help="windows before the first round (default %(default)s)"
    )
    parser.add_argument("--micro_batch_size", type=int, help="sequences per micro-batch (default: the recipe's)")
    parser.add_argument("--micro_batches", type=int, default=1, help="micro-batches per window (default %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all cores)")
    parser.add_argument(
        "--device", default=CPU, help="cpu, cuda or another kind that torch finds (default %(default)s)"
    )
    parser.add_argument(
        "--precision", choices=("32-true", "bf16-mixed"), help="training precision (default: the recipe's)"
    )
    parser.add_argument("--memory_gib", type=float, help="memory of the GPU that a contender may use (default: all)")
    parser.add_argument("--compile", action="store_true", help="compile every contender's model")
    parser.add_argument(
        "--out",
        type=Path,
        help="file for the record, such as benchmarks/records/step-9m-cpu.json; also writes an .md page",
    )
    options = parser.parse_args(argv)
    for name in ("pairs", "burst_steps", "warmup_steps", "micro_batches", "threads"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(options, name)}: it must be at least 1")
    check_available(options.device)
    if options.memory_gib is not None and (options.memory_gib <= 0 or options.device == CPU):
        raise UserError(f"--memory_gib is {options.memory_gib}: it must be above 0, and limits a GPU's memory alone")
    return options


# ---- the work


def read_recipe(path: Path) -> Recipe:
    """Returns the settings of a recipe of `genesis fit` that affect the step; AdamW replaces any other optimizer.

    Raises:
        UserError: The file is not a recipe.
    """
    decoder = read_decoder_config(path)
    own = [part for part in decoder.parts._fields if getattr(decoder, part) is not None]
    if own:
        raise UserError(f"{path} has its own configuration {own[0]}, which peers cannot build; choose another recipe")
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        optimizer = OptimizerOptions(**{**recipe["model"].get("optimizer", {}), "name": "adamw"})
        data = recipe["data"]
        precision = recipe.get("trainer", {}).get("precision", AUTO)
        return Recipe(decoder, optimizer, data["seq_len"], data["micro_batch_size"], precision)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is not a recipe of `genesis fit`: {error}") from error


def _choose_precision(precision: str, device: str) -> Any:
    return choose_precision(device) if precision == AUTO else precision


def plan_workload(recipe: Recipe, options: argparse.Namespace, num_warmup_steps: int) -> Workload:
    """Returns the work of a contender, from the recipe and the options that all benchmarks of training share."""
    adamw = ("lr", "betas", "eps", "weight_decay")
    return Workload(
        decoder=dump_decoder_config(recipe.decoder),
        optimizer={name: getattr(recipe.optimizer, name) for name in adamw},
        seq_len=recipe.seq_len,
        micro_batch_size=options.micro_batch_size or recipe.micro_batch_size,
        num_micro_batches=options.micro_batches,
        documents="one_per_row",
        flops_per_token=count_flops_per_token(recipe.decoder, recipe.seq_len),
        device=options.device,
        precision=_choose_precision(options.precision or recipe.precision, options.device),
        is_compiled=options.compile,
        num_threads=options.threads,
        num_warmup_steps=num_warmup_steps,
        memory_bytes=int(options.memory_gib * 2**30) if getattr(options, "memory_gib", None) else None,
    )


def _run(
    contenders: Sequence[Contender], workload: Workload, num_pairs: int, burst_steps: int
) -> tuple[dict[str, Ready], dict[str, list[Burst]]]:
    """Returns each contender's description of itself, and its bursts by round."""
    console = Console(stderr=True)
    bursts: dict[str, list[Burst]] = {contender.name: [] for contender in contenders}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers: list[Worker] = []
        readies: dict[str, Ready] = {}
        for index, contender in enumerate(contenders):  # together: most of a warm-up is imports and compilation
            console.print(f"warming up {contender.name}: {contender.summary}", highlight=False)
            own_workload = replace(workload, documents=contender.documents)
            workers.append(stack.enter_context(Worker(contender, own_workload, logs / str(index))))
        for worker in workers:
            readies[worker.contender.name] = worker.wait_until_ready()
        for round_index in range(num_pairs):
            for worker in rotate_order(workers, round_index):
                time.sleep(_PAUSE_SECONDS)
                bursts[worker.contender.name].append(worker.run_burst(burst_steps))
            speeds = ", ".join(f"{name} {b[-1].tokens / b[-1].seconds:,.0f}" for name, b in bursts.items())
            console.print(f"round {round_index + 1}/{num_pairs}, tokens/s: {speeds}", highlight=False)
        for worker in workers:
            worker.stop()
    return readies, bursts


# ---- the report


def summarise(
    bursts: Mapping[str, Sequence[Burst]], workload: Workload, peak_flops: float | None = None
) -> dict[str, Result]:
    """Returns the result of each contender."""
    speeds = {name: [burst.tokens / burst.seconds for burst in of_one] for name, of_one in bursts.items()}
    cpu_speeds = {name: [burst.tokens / burst.cpu_seconds for burst in of_one] for name, of_one in bursts.items()}
    has_reference = REFERENCE in bursts
    is_cpu_time_telling = has_reference and workload.device == "cpu" and workload.num_threads == 1
    return {
        name: Result(
            tokens_per_second=statistics.median(speeds[name]),
            speed_of_genesis=compare_pairs(speeds[REFERENCE], speeds[name]) if has_reference else None,
            speed_of_genesis_by_cpu_time=(
                compare_pairs(cpu_speeds[REFERENCE], cpu_speeds[name]) if is_cpu_time_telling else None
            ),
            share_of_peak=compare_pairs(speeds[name], speeds[PEAK]) if PEAK in speeds else None,
            mfu=None
            if peak_flops is None or name == PEAK
            else compute_mfu(statistics.median(speeds[name]), workload.flops_per_token, peak_flops),
            peak_resident_bytes=max(burst.peak_resident_bytes for burst in of_one),
            peak_device_bytes=of_one[-1].peak_device_bytes,
            loss=of_one[-1].loss,
        )
        for name, of_one in bursts.items()
    }


def _build_table(contenders: Sequence[Contender], results: Mapping[str, Result], workload: Workload) -> Table:
    table = Table(*_COLUMNS, title=_title(asdict(workload)))
    for contender in contenders:
        table.add_row(*_format_result(contender.name, asdict(results[contender.name])))
    return table


_COLUMNS = (
    "contender",
    "tokens/s (median)",
    "speed of genesis / contender (95%)",
    "same by CPU time (95%)",
    "share of matmul peak",
    "MFU",
    "peak memory MiB",
    "loss",
)


def _format_result(name: str, result: Mapping[str, Any]) -> list[str]:
    """Returns the cells of one contender's row, from its result in plain types."""
    share, device_bytes = result["share_of_peak"], result["peak_device_bytes"]
    resident = f"{result['peak_resident_bytes'] / 2**20:,.0f}"
    is_trainer = name != PEAK
    return [
        name,
        f"{result['tokens_per_second']:,.0f}",
        _format_ratio(result["speed_of_genesis"]) if is_trainer else "",
        _format_ratio(result["speed_of_genesis_by_cpu_time"]) if is_trainer else "",
        f"{share['median']:.3f}" if share is not None and is_trainer else "",
        "" if result["mfu"] is None else f"{result['mfu']:.3f}",
        resident if device_bytes is None else f"{resident}, on the GPU {device_bytes / 2**20:,.0f}",
        "" if result["loss"] is None else f"{result['loss']:.2f}",
    ]


def _format_ratio(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return ""
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.3f} to {ratio['high']:.3f})"
    return f"{ratio['median']:.3f}{interval}"


def _title(workload: Mapping[str, Any]) -> str:
    decoder = workload["decoder"]
    return (
        f"vocabulary {decoder['vocab_size']:,}, dim {decoder['dim']}, {decoder['num_layers']} layers, "
        f"{decoder['num_heads']} heads ({decoder['num_kv_heads']} kv), ffn {decoder['ffn_dim']}, "
        f"seq {workload['seq_len']}; micro-batch {workload['micro_batch_size']} x {workload['num_micro_batches']}, "
        f"{workload['precision']}, "
        f"{'compiled' if workload['is_compiled'] else 'not compiled'}, {workload['device']}"
    )


def _build_record(
    argv: Sequence[str],
    options: argparse.Namespace,
    workload: Workload,
    contenders: Sequence[Contender],
    readies: Mapping[str, Ready],
    results: Mapping[str, Result],
    bursts: Mapping[str, Sequence[Burst]],
) -> dict[str, Any]:
    """Returns the record in plain types, without paths or the host name of this machine."""
    peak = results.get(PEAK)
    return {
        "what": "tokens per second of training steps, in interleaved bursts",
        "command": f"genesis bench step {shlex.join(anonymise(argv))}",
        "date": date.today().isoformat(),
        "hardware": describe_hardware(next(iter(readies.values())).device_name),
        "python": platform.python_version(),
        "workload": asdict(workload),
        "load_average_after": round(os.getloadavg()[0], 1),
        "pairs": options.pairs,
        "burst_steps": options.burst_steps,
        "matmul_flops_per_second": None if peak is None else round(peak.tokens_per_second * workload.flops_per_token),
        "contenders": {
            contender.name: {
                "summary": contender.summary,
                "versions": readies[contender.name].versions,
                "documents": contender.documents,
                **asdict(results[contender.name]),
                "tokens_per_second_by_round": [
                    round(burst.tokens / burst.seconds, 1) for burst in bursts[contender.name]
                ],
            }
            for contender in contenders
        },
    }


def format_record(record: Mapping[str, Any]) -> str:
    """Returns a record as a page of Markdown."""
    rows = [_format_result(name, contender) for name, contender in record["contenders"].items()]
    flops = record["matmul_flops_per_second"]
    lines = [
        "# The training step",
        "",
        f"- command: `{record['command']}`",
        f"- date: {record['date']}",
        f"- hardware: {record['hardware']}; load average at the end {record['load_average_after']}, its own included",
        f"- work: {_title(record['workload'])}; {record['workload']['num_threads']} threads each",
        f"- {record['pairs']} rounds of {record['burst_steps']} windows each, in rotating order; ratios are medians of "
        "pairs within a round, above 1 where genesis is faster",
        *([] if flops is None else [f"- matmul peak of the same run: {flops / 1e9:,.0f} GFLOP/s (median)"]),
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
    for name, contender in record["contenders"].items():
        versions = ", ".join(f"{package} {number}" for package, number in contender["versions"].items())
        lines.append(f"- **{name}**: {contender['summary']}. {versions}.")
    return "\n".join(lines) + "\n"
