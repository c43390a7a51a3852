"""Compares a mixture of experts with a dense model of the same active FLOPs, and with transformers' Mixtral.

Each contender is a process with the same plain loop, which trains on the same random tokens. The contenders train in
short bursts, one after another, in a rotating order. One of them routes tokens evenly, which
shows the cost of imbalance.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks import harness
from benchmarks.processes import PEERS, WORKERS, Contender, run_bursts
from benchmarks.step import Recipe, add_burst_options, describe_contender, format_contenders, plan_workload
from benchmarks.workers.protocol import Burst, Workload
from genesis.base.errors import UserError
from genesis.model.decoder import DecoderConfig
from genesis.model.mixture import MixtureConfig

REFERENCE: Final = "mixture"
_PEER: Final = PEERS / "mixtral_worker.py"
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
    speed_of_mixture: dict[str, Any]
    update_seconds: float
    speed_without_update: dict[str, Any]
    peak_resident_bytes: int
    imbalance: float | None
    loss: float | None


def main(argv: list[str]) -> int:
    """Measures, prints the page and writes the record to the path of `--out`."""
    options = _parse(argv)
    chosen = choose_contenders(options)
    readies, bursts = run_bursts(chosen, options.pairs, options.burst_steps, is_together=False)
    results = summarise(bursts, options.burst_steps)
    what = "tokens per second of training steps of a mixture of experts, in interleaved bursts"
    record = harness.begin_record("experts", what, argv)
    record |= {
        "work": _title(options),
        **{name: getattr(options, name) for name in ("threads", "pairs", "burst_steps")},
    }
    record["contenders"] = {
        one.name: {
            "flops_per_token": workload.flops_per_token,
            **describe_contender(one, readies[one.name], asdict(results[one.name]), bursts[one.name]),
        }
        for one, workload in chosen
    }
    harness.finish(record, format_record, options.out)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.build_parser("experts", __doc__)
    parser.add_argument("--model", choices=tuple(_SHAPES), default="34m", help="the shape (default %(default)s)")
    harness.add_counts(
        parser,
        experts=(8, "number of experts"),
        top_k=(2, "experts of a token"),
        ranks=(1, "ranks of each contender"),
        rows=(None, "sequences of a step, over all ranks (default: those of the shape)"),
    )
    parser.add_argument("--mixtral", default="", help="transformers' Mixtral by these kernels: grouped_mm,eager")
    add_burst_options(parser)
    options = parser.parse_args(argv)
    options.rows = _SHAPES[options.model]["rows"] if options.rows is None else options.rows
    harness.check_counts(options, "ranks", "rows", "pairs", "burst_steps", "warmup_steps", "threads")
    if options.rows % options.ranks:
        raise UserError(f"--ranks is {options.ranks}, which does not divide the {options.rows} rows of a step")
    if options.ranks > 1 and options.experts % options.ranks:
        raise UserError(f"--ranks is {options.ranks}, which does not divide the {options.experts} experts")
    return options


def choose_contenders(options: argparse.Namespace) -> list[tuple[Contender, Workload]]:
    """Returns the contenders, each with its work.

    Raises:
        UserError: The mixture cannot be.
    """
    shape = dict(_SHAPES[options.model])
    ffn_dim, seq_len, _ = (shape.pop(name) for name in ("ffn_dim", "seq_len", "rows"))
    common: dict[str, Any] = {
        **shape, "num_kv_heads": shape["num_heads"], "max_seq_len": seq_len, "has_tied_embeddings": False,
    }  # fmt: skip
    config = MixtureConfig(options.experts, options.top_k, ffn_dim, has_balance_bias=True)
    mixed = DecoderConfig(**common, feed_forward=config)
    dense = DecoderConfig(**common, ffn_dim=options.top_k * ffn_dim)

    # One micro-batch for each rank.
    options.micro_batch_size, options.micro_batches = options.rows // options.ranks, options.ranks
    ranks = str(options.ranks)

    def plan(decoder: DecoderConfig) -> Workload:
        return plan_workload(Recipe(decoder, seq_len, options.micro_batch_size), options, options.warmup_steps)

    def own(name: str, summary: str, decoder: DecoderConfig, *words: str) -> tuple[Contender, Workload]:
        return Contender(name, summary, WORKERS / "experts_loop.py", arguments=(ranks, *words)), plan(decoder)

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
        chosen.append((Contender(f"mixtral-{name}", summary, _PEER, arguments=(ranks, name)), plan(mixed)))
    return chosen


# ---- the report


def summarise(bursts: Mapping[str, Sequence[Burst]], burst_steps: int) -> dict[str, Result]:
    """Returns the result of each contender."""
    speeds = {name: [burst.tokens_per_second for burst in of_one] for name, of_one in bursts.items()}
    without = {
        name: [b.tokens / (b.seconds - burst_steps * b.figures["update_seconds"]) for b in of_one]
        for name, of_one in bursts.items()
    }
    return {
        name: Result(
            tokens_per_second=statistics.median(speeds[name]),
            speed_of_mixture=asdict(harness.compare_pairs(speeds[REFERENCE], speeds[name])),
            update_seconds=statistics.median(burst.figures["update_seconds"] for burst in of_one),
            speed_without_update=asdict(harness.compare_pairs(without[REFERENCE], without[name])),
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
    return [
        name,
        f"{result['tokens_per_second']:,.0f}",
        harness.format_ratio(result["speed_of_mixture"]),
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


def format_record(record: Mapping[str, Any]) -> str:
    """Returns a record as a page of Markdown."""
    notes = [
        f"work: {record['work']}; {record['threads']} threads each",
        f"{record['pairs']} rounds of {record['burst_steps']} steps each, in rotating order; ratios are medians of "
        "pairs within a round, above 1 where the mixture is faster. `even` and `shared-even` show the cost of "
        "imbalance. An update clips and changes all weights, those of experts that no token saw, too; `without "
        "updates` is the same ratio without that time.",
    ]
    rows = [_format_result(*item) for item in record["contenders"].items()]
    body = [*harness.format_table(_COLUMNS, rows), *format_contenders(record["contenders"])]
    return harness.format_page("A mixture of experts", record, notes, body)
