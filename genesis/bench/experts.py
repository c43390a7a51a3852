"""Compares a mixture of experts with a dense model of the same active FLOPs, and with transformers' Mixtral.

Each contender is a process with the same plain loop, which trains on the same random tokens. The contenders train in
short bursts, one after another, in a rotating order (`genesis.bench.pairs`). One of them routes tokens evenly, which
shows the cost of imbalance.
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
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.device import CPU
from genesis.base.errors import UserError
from genesis.bench.contenders import Contender, Worker, find_peer
from genesis.bench.pairs import PairedRatio, compare_pairs, rotate_order
from genesis.bench.record import anonymise, describe_hardware, write_record
from genesis.bench.workers.protocol import Burst, Ready, Workload
from genesis.model.decoder import DecoderConfig
from genesis.model.describe import count_flops_per_token
from genesis.model.mixture import MixtureConfig
from genesis.model.recipe import dump_decoder_config
from genesis.optim import OptimizerOptions

REFERENCE: Final = "mixture"
_LOOP: Final = Path(__file__).resolve().parent / "workers" / "experts_loop.py"
_PEER: Final = "mixtral_worker.py"
_PAUSE_SECONDS: Final = 0.1
_SHAPES: Final[dict[str, dict[str, int]]] = {
    "34m": {"vocab_size": 8192, "dim": 256, "num_layers": 6, "num_heads": 4, "ffn_dim": 768, "seq_len": 256, "rows": 8},
    "tiny": {"vocab_size": 128, "dim": 32, "num_layers": 2, "num_heads": 4, "ffn_dim": 48, "seq_len": 32, "rows": 2},
}


@dataclass(frozen=True)
class Result:
    """The results of one contender.

    Args:
        tokens_per_second: Median over rounds.
        speed_of_mixture: The mixture's tokens per second over this contender's, paired.
        update_seconds: Median time of a clipping and update of all weights, which is a part of each step.
        speed_without_update: The mixture's speed over this contender's, both without the time of their updates.
        peak_resident_bytes: Peak resident memory of the contender's first process.
        imbalance: The largest load of an expert over the mean, of the worst layer in the last burst; None if unknown.
        loss: Loss of a late step, which shows that the contender really trains.
    """

    tokens_per_second: float
    speed_of_mixture: PairedRatio
    update_seconds: float
    speed_without_update: PairedRatio
    peak_resident_bytes: int
    imbalance: float | None
    loss: float | None


def main(argv: list[str]) -> int:
    """Measures, prints a table and writes the record to the path of `--out`."""
    options = _parse(argv)
    chosen = choose_contenders(options)
    readies, bursts = _run(chosen, options.pairs, options.burst_steps)
    results = summarise(bursts, options.burst_steps)
    table = Table(*_COLUMNS, title=_title(options))
    for name, result in results.items():
        table.add_row(*_format_result(name, asdict(result)))
    Console().print(table)
    if options.out is not None:
        record = _build_record(argv, options, chosen, readies, results, bursts)
        write_record(record, format_record(record), options.out)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="genesis bench experts", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", choices=tuple(_SHAPES), default="34m", help="the shape (default %(default)s)")
    parser.add_argument("--experts", type=int, default=8, help="number of experts (default %(default)s)")
    parser.add_argument("--top_k", type=int, default=2, help="experts of a token (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each contender (default %(default)s)")
    parser.add_argument("--rows", type=int, help="sequences of a step, over all ranks (default: those of the shape)")
    parser.add_argument(
        "--mixtral", default="", help="transformers' Mixtral with these implementations: grouped_mm,eager"
    )
    parser.add_argument("--pairs", type=int, default=10, help="number of rounds (default %(default)s)")
    parser.add_argument("--burst_steps", type=int, default=5, help="steps of a burst (default %(default)s)")
    parser.add_argument(
        "--warmup_steps", type=int, default=4, help="steps before the first round (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all cores)")
    parser.add_argument(
        "--out", type=Path, help="file for the record, such as benchmarks/records/experts.json; also writes an .md page"
    )
    options = parser.parse_args(argv)
    if options.rows is None:
        options.rows = _SHAPES[options.model]["rows"]
    for name in ("ranks", "rows", "pairs", "burst_steps", "warmup_steps", "threads"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(options, name)}: it must be at least 1")
    if options.rows % options.ranks:
        raise UserError(f"--ranks is {options.ranks}, which does not divide the {options.rows} rows of a step")
    if options.ranks > 1 and options.experts % options.ranks:
        raise UserError(f"--ranks is {options.ranks}, which does not divide the {options.experts} experts")
    return options


def choose_contenders(options: argparse.Namespace) -> list[tuple[Contender, Workload]]:
    """Returns the contenders, each with its work.

    Raises:
        UserError: The mixture cannot be, or there is no script for Mixtral.
    """
    shape = dict(_SHAPES[options.model])
    ffn_dim, seq_len, _ = (shape.pop(name) for name in ("ffn_dim", "seq_len", "rows"))
    common: dict[str, Any] = {
        **shape, "num_kv_heads": shape["num_heads"], "max_seq_len": seq_len, "has_tied_embeddings": False,
    }  # fmt: skip
    config = MixtureConfig(options.experts, options.top_k, ffn_dim, has_balance_bias=True)
    mixed = DecoderConfig(**common, feed_forward=config)
    dense = DecoderConfig(**common, ffn_dim=options.top_k * ffn_dim)

    def plan(decoder: DecoderConfig) -> Workload:
        optimizer = OptimizerOptions()
        return Workload(
            decoder=dump_decoder_config(decoder),
            optimizer={name: getattr(optimizer, name) for name in ("lr", "betas", "eps", "weight_decay")},
            seq_len=seq_len,
            # One micro-batch for each rank.
            micro_batch_size=options.rows // options.ranks,
            num_micro_batches=options.ranks,
            documents="one_per_row",
            flops_per_token=count_flops_per_token(decoder, seq_len),
            device=CPU,
            precision="32-true",
            is_compiled=False,
            num_threads=options.threads,
            num_warmup_steps=options.warmup_steps,
        )

    ranks = str(options.ranks)

    def own(name: str, summary: str, decoder: DecoderConfig, *words: str) -> tuple[Contender, Workload]:
        return Contender(name, summary, _LOOP, arguments=(ranks, *words)), plan(decoder)

    chosen = [
        own(REFERENCE, "our mixture", mixed),
        own("dense", "our dense model of the same active FLOPs", dense),
    ]
    if options.ranks == 1:
        chosen.append(own("even", "our mixture with even loads", mixed, "even"))
    else:
        shared = "our mixture, whose experts the ranks share"
        chosen.append(own("shared", shared, mixed, "shared"))
        chosen.append(own("shared-even", f"{shared}, with even loads", mixed, "shared", "even"))
    for name in filter(None, options.mixtral.split(",")):
        summary = f"transformers' Mixtral of the same shape, experts by {name}"
        chosen.append((Contender(f"mixtral-{name}", summary, find_peer(_PEER), arguments=(ranks, name)), plan(mixed)))
    return chosen


def _run(
    chosen: Sequence[tuple[Contender, Workload]], num_pairs: int, burst_steps: int
) -> tuple[dict[str, Ready], dict[str, list[Burst]]]:
    console = Console(stderr=True)
    bursts: dict[str, list[Burst]] = {contender.name: [] for contender, _ in chosen}
    readies: dict[str, Ready] = {}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers: list[Worker] = []
        for contender, workload in chosen:
            console.print(f"warming up {contender.name}: {contender.summary}", highlight=False)
            workers.append(stack.enter_context(Worker(contender, workload, logs / contender.name)))
            readies[contender.name] = workers[-1].wait_until_ready()
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


def summarise(bursts: Mapping[str, Sequence[Burst]], burst_steps: int) -> dict[str, Result]:
    """Returns the result of each contender."""
    speeds = {name: [burst.tokens / burst.seconds for burst in of_one] for name, of_one in bursts.items()}
    without = {
        name: [b.tokens / (b.seconds - burst_steps * b.figures["update_seconds"]) for b in of_one]
        for name, of_one in bursts.items()
    }
    return {
        name: Result(
            tokens_per_second=statistics.median(speeds[name]),
            speed_of_mixture=compare_pairs(speeds[REFERENCE], speeds[name]),
            update_seconds=statistics.median(burst.figures["update_seconds"] for burst in of_one),
            speed_without_update=compare_pairs(without[REFERENCE], without[name]),
            peak_resident_bytes=max(burst.peak_resident_bytes for burst in of_one),
            imbalance=of_one[-1].figures.get("imbalance"),
            loss=of_one[-1].loss,
        )
        for name, of_one in bursts.items()
    }


_COLUMNS = (
    *("contender", "tokens/s (median)", "speed of mixture / contender (95%)", "update ms", "without updates"),
    *("imbalance", "memory MiB", "loss"),
)


def _format_result(name: str, result: Mapping[str, Any]) -> list[str]:
    ratio = result["speed_of_mixture"]
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.3f} to {ratio['high']:.3f})"
    return [
        name,
        f"{result['tokens_per_second']:,.0f}",
        f"{ratio['median']:.3f}{interval}",
        f"{1e3 * result['update_seconds']:.0f}",
        f"{result['speed_without_update']['median']:.3f}",
        "" if result["imbalance"] is None else f"{result['imbalance']:.2f}",
        f"{result['peak_resident_bytes'] / 2**20:,.0f}",
        "" if result["loss"] is None else f"{result['loss']:.2f}",
    ]


def _title(options: argparse.Namespace) -> str:
    shape = _SHAPES[options.model]
    return (
        f"vocabulary {shape['vocab_size']:,}, dim {shape['dim']}, {shape['num_layers']} layers, {options.experts} "
        f"experts of {shape['ffn_dim']}, top {options.top_k}; {options.rows} x "
        f"{shape['seq_len']} tokens, float32, AdamW, ranks: {options.ranks}"
    )


def _build_record(
    argv: Sequence[str],
    options: argparse.Namespace,
    chosen: Sequence[tuple[Contender, Workload]],
    readies: Mapping[str, Ready],
    results: Mapping[str, Result],
    bursts: Mapping[str, Sequence[Burst]],
) -> dict[str, Any]:
    return {
        "what": "tokens per second of training steps of a mixture of experts, in interleaved bursts",
        "command": f"genesis bench experts {shlex.join(anonymise(argv))}".rstrip(),
        "date": date.today().isoformat(),
        "hardware": describe_hardware(CPU),
        "python": platform.python_version(),
        "work": _title(options),
        "threads": options.threads,
        "pairs": options.pairs,
        "burst_steps": options.burst_steps,
        "load_average_after": round(os.getloadavg()[0], 1),
        "contenders": {
            contender.name: {
                "summary": contender.summary,
                "versions": readies[contender.name].versions,
                "flops_per_token": workload.flops_per_token,
                **asdict(results[contender.name]),
                "tokens_per_second_by_round": [round(b.tokens / b.seconds, 1) for b in bursts[contender.name]],
            }
            for contender, workload in chosen
        },
    }


def format_record(record: Mapping[str, Any]) -> str:
    """Returns a record as a page of Markdown."""
    rows = [_format_result(name, contender) for name, contender in record["contenders"].items()]
    lines = [
        "# A mixture of experts",
        "",
        f"- command: `{record['command']}`",
        f"- date: {record['date']}",
        f"- hardware: {record['hardware']}; load average at the end {record['load_average_after']}, its own included",
        f"- work: {record['work']}; {record['threads']} threads each",
        f"- {record['pairs']} rounds of {record['burst_steps']} steps each, in rotating order; ratios are medians of "
        "pairs within a round, above 1 where the mixture is faster. `even` and `shared-even` show the cost of "
        "imbalance. An update clips and changes all weights, those of experts that no token saw, too; `without "
        "updates` is the same ratio without that time.",
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
