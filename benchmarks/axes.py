"""Compares tensor, context and pipeline parallelism on two ranks with one process, and with what a plan predicts.

Each contender is our trainer with the strategy `Sharded`; all train the same sequences, on the same number of threads a
rank. A contender `NAME-1` has the degree 1 of an axis, beside `one`, which is given no degree. One contender times the
exchanges of two ranks; from them and the speed of one process, the plan's order of all layouts follows.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from benchmarks import harness
from benchmarks.processes import WORKERS, Contender, run_bursts
from benchmarks.step import add_burst_options, build_recipe, describe_contender, plan_workload
from benchmarks.workers.axes_trainer import LINK
from benchmarks.workers.protocol import Burst, Workload
from genesis.model.recipe import build_decoder_config
from genesis.operations.plan import layout as plan
from genesis.operations.plan.bandwidths import Bandwidth, Bandwidths
from genesis.operations.plan.speed import Rate, time_step

REFERENCE: Final = "one"
MODELS: Final = {
    "4m": build_recipe(256, 2, vocab_size=1024, dim=256, num_layers=4, num_heads=4, ffn_dim=768),
    "tiny": build_recipe(32, 1, vocab_size=128, dim=32, num_layers=4, num_heads=4, ffn_dim=48),
}
LAYOUTS: Final[dict[str, tuple[int, dict[str, int]]]] = {
    REFERENCE: (1, {}),
    "tensor-1": (1, {"tensor_parallel": 1}),
    "context-1": (1, {"context_parallel": 1}),
    "pipeline-1": (1, {"pipeline_parallel": 1}),
    "data": (2, {}),
    "tensor": (2, {"tensor_parallel": 2}),
    "context": (2, {"context_parallel": 2}),
    "pipeline": (2, {"pipeline_parallel": 2}),
    "pipeline-x2": (2, {"pipeline_parallel": 2, "stages_per_rank": 2}),
}
_SCRIPT: Final = WORKERS / "axes_trainer.py"
_SLEEP_SECONDS: Final = 0.02


def main(argv: list[str]) -> int:
    """Measures, prints the page and writes the record to the path of `--out`."""
    options = _parse(argv)
    names = harness.read_list(options.contenders)
    workload = plan_workload(MODELS[options.model], options, options.warmup_steps)
    contenders = {name: _build(name, *layout) for name, layout in LAYOUTS.items() if name in names}
    # Blocks that sleep need no core: how long ranks wait is decided by the schedule alone.
    asleep = {
        f"{name}-asleep": _build(f"{name}-asleep", ranks, {**given, "sleep_seconds": _SLEEP_SECONDS})
        for name, (ranks, given) in LAYOUTS.items()
        if name in contenders and given.get("pipeline_parallel", 1) > 1
    }
    of_sleeping = plan_workload(MODELS["tiny"], options, options.warmup_steps)
    work = [(one, workload) for one in contenders.values()] + [(one, of_sleeping) for one in asleep.values()]
    work.append((Contender(LINK, "exchanges of two ranks", _SCRIPT, arguments=("2", LINK)), of_sleeping))
    readies, bursts = run_bursts(work, options.pairs, options.burst_steps)
    what = "tokens per second of training steps of axes on two ranks and at degree 1, in interleaved bursts"
    record = harness.begin_record("axes", what, argv, ["torch", "lightning"])
    record |= {name: getattr(options, name) for name in ("model", "threads", "pairs", "burst_steps", "micro_batches")}
    record["link"] = link = take_medians(bursts[LINK])
    record["bubbles"] = {name: take_medians(bursts[name]) for name in asleep}
    results = summarise({name: bursts[name] for name in contenders}, workload, link)
    record["contenders"] = {
        name: describe_contender(one, readies[name], results[name], bursts[name]) for name, one in contenders.items()
    }
    harness.finish(record, format_record, options.out)
    return 0


def _build(name: str, num_ranks: int, options: Mapping[str, float]) -> Contender:
    shown = ", ".join(f"{option}={value}" for option, value in options.items())
    arguments = (str(num_ranks), json.dumps(options))
    return Contender(name, f"{num_ranks} x Sharded({shown})", _SCRIPT, arguments=arguments)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.build_parser("axes", __doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="4m", help="the shape (default %(default)s)")
    parser.add_argument("--contenders", default=",".join(LAYOUTS), help="which to measure (default %(default)s)")
    harness.add_counts(parser, micro_batches=(4, "micro-batches of a step"))
    add_burst_options(parser)
    parser.set_defaults(threads=1)
    options = parser.parse_args(argv)
    harness.check_counts(options, "pairs", "burst_steps", "warmup_steps", "threads")
    harness.check_counts(options, "micro_batches", least=2)
    harness.check_choices("--contenders", harness.read_list(options.contenders), tuple(LAYOUTS))
    return options


def take_medians(bursts: Sequence[Burst]) -> dict[str, float]:
    """Returns the median of each figure of a contender."""
    return {name: statistics.median(burst.figures[name] for burst in bursts) for name in bursts[0].figures}


def summarise(
    bursts: Mapping[str, Sequence[Burst]], workload: Workload, link: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Returns the figures of each layout; `speed` is relative to one process."""
    speeds = {name: [burst.tokens_per_second for burst in of_one] for name, of_one in bursts.items()}
    # Of the first rank: other work on the machine hardly changes it.
    cpu_speeds = {name: [burst.tokens / burst.cpu_seconds for burst in bursts[name]] for name in speeds}
    reference = statistics.median(speeds[REFERENCE]) if REFERENCE in speeds else None
    found = {}
    for name, of_one in speeds.items():
        result: dict[str, Any] = {
            "tokens_per_second": statistics.median(of_one),
            "step_seconds": workload.tokens_per_window / statistics.median(of_one),
            "loss": bursts[name][-1].loss,
            "peak_resident_bytes": max(burst.peak_resident_bytes for burst in bursts[name]),
        }
        if reference is not None:
            result["speed"] = asdict(harness.compare_pairs(of_one, speeds[REFERENCE]))
            result["cpu_speed"] = asdict(harness.compare_pairs(cpu_speeds[name], cpu_speeds[REFERENCE]))
            result["predicted_step_seconds"] = predict(name, workload, reference, link)
        found[name] = result
    return found


def predict(name: str, workload: Workload, tokens_per_second: float, link: Mapping[str, float]) -> float:
    """Returns the seconds of a step of a layout by the plan, from the speed of one process and the link.

    Args:
        name: The layout.
        workload: The work.
        tokens_per_second: Of one process.
        link: Latency and bandwidth of an exchange between two ranks.
    """
    num_ranks, options = LAYOUTS[name]
    decoder = build_decoder_config(workload.decoder, "the workload")
    planned = plan.Workload(
        decoder,
        seq_len=workload.seq_len,
        micro_batch_size=workload.micro_batch_size,
        global_batch_size=workload.sequences_per_window,
        precision=workload.precision,
        is_cpu=True,
        has_documents=False,
    )
    given: dict[str, Any] = {name: degree for name, degree in options.items() if degree > 1}
    num_shards = num_ranks // given.get("pipeline_parallel", 1)
    rate = Rate(tokens_per_second * workload.flops_per_token, "measured", is_assumed=False)
    measured = Bandwidths(Bandwidth(link["bytes_per_second"]), latency_in_node_seconds=link["latency_seconds"])
    return time_step(planned, plan.Layout("full", num_ranks, num_shards, **given), rate, measured).seconds


# ---- the report


_COLUMNS: Final = (
    *("layout", "tokens/s (median)", "speed beside one process (95%)", "by CPU time of its first rank (95%)"),
    *("step ms", "predicted ms", "loss"),
)


def _format_result(name: str, result: Mapping[str, Any]) -> list[str]:
    has_reference = "speed" in result
    return [
        name,
        f"{result['tokens_per_second']:,.0f}",
        harness.format_ratio(result.get("speed")),
        harness.format_ratio(result.get("cpu_speed")),
        f"{1e3 * result['step_seconds']:.0f}",
        f"{1e3 * result['predicted_step_seconds']:.0f}" if has_reference else "",
        "" if result["loss"] is None else f"{result['loss']:.4f}",
    ]


def order(contenders: Mapping[str, Mapping[str, Any]], key: str) -> list[str]:
    """Returns the layouts of two ranks and one process by a time, the shortest first."""
    names = [name for name in contenders if not name.endswith("-1")]
    return sorted(names, key=lambda name: float(contenders[name][key]))


def format_record(record: Mapping[str, Any]) -> str:
    """Returns a record as a page of Markdown."""
    contenders, link = record["contenders"], record["link"]
    recipe = MODELS[record["model"]]
    shape = recipe.decoder
    notes = [
        f"work: vocabulary {shape.vocab_size:,}, dim {shape.dim}, {shape.num_layers} layers, {shape.num_heads} heads; "
        f"micro-batches: {record['micro_batches']} of {recipe.micro_batch_size} x {shape.max_seq_len} tokens, float32, "
        f"AdamW; threads of each rank: {record['threads']}",
        f"{record['pairs']} rounds of {record['burst_steps']} steps each, in rotating order; ratios are medians of "
        "pairs within a round, above 1 where the layout is faster than one process",
        f"link of two ranks: {1e6 * link['latency_seconds']:,.0f} µs and {link['bytes_per_second'] / 1e9:.2f} GB/s",
    ]
    notes += [
        f"bubble of {name.removesuffix('-asleep')}, whose blocks sleep: {found['bubble_share']:.3f}, by the formula "
        f"{found['bubble_share_ideal']:.3f}"
        for name, found in record["bubbles"].items()
    ]
    if all("speed" in result for result in contenders.values()):
        measured, predicted = (order(contenders, key) for key in ("step_seconds", "predicted_step_seconds"))
        if len(measured) > 1:
            notes += [f"measured order: {', '.join(measured)}", f"order by the plan: {', '.join(predicted)}"]
    rows = [_format_result(*item) for item in contenders.items()]
    body = [*harness.format_table(_COLUMNS, rows)]
    body += [f"- **{name}**: {one['summary']}." for name, one in contenders.items()]
    return harness.format_page("Axes of parallelism", record, notes, body)
