"""Compares the training step with a bare PyTorch loop, other projects' trainers and the machine's matmul rate.

Each contender is a process that trains the same shape on the same random tokens. The contenders train in short bursts,
one after another, in a rotating order; speeds are compared by ratios within a round.
"""

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks import harness
from benchmarks.processes import WORKERS, Contender, parse_peers, run_bursts
from benchmarks.workers.protocol import Burst, Ready, Workload
from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.device import CPU, check_available
from genesis.base.errors import UserError
from genesis.model.decoder import DecoderConfig
from genesis.model.describe import count_flops_per_token
from genesis.model.precision import AUTO, choose_precision
from genesis.model.recipe import dump_decoder_config, read_decoder_config
from genesis.optim import AdamW
from genesis.optim.recipe import read_algorithm
from genesis.recipe.resolved import ResolvedRecipe
from genesis_callbacks.device_peaks import PeakType, compute_mfu, read_peak_flops

REFERENCE: Final = "genesis"
PEAK: Final = "matmul"

_PEAK_TYPES: dict[str, PeakType] = {"32-true": "tfloat32", "bf16-mixed": "bfloat16"}
"""The type of peak for each precision; `genesis fit` allows TF32 for products of float32 matrices."""
_ADAPTER: Final = "model.adapter"
_ADAMW: Final = ("lr", "betas", "eps", "weight_decay")

_TRAINER: Final = Contender(
    REFERENCE,
    "our trainer as `genesis fit` sets it up (strategy replicated)",
    WORKERS / "genesis_trainer.py",
    arguments=("replicated",),
)
OWN: Final = (
    _TRAINER,
    replace(
        _TRAINER,
        name="genesis-auto",
        summary="the same under Lightning's own strategy for one device",
        arguments=("auto",),
    ),
    replace(
        _TRAINER,
        name="genesis-packed",
        summary="genesis on about four documents per row, which attention does not cross",
        documents="packed",
    ),
    Contender("bare", "a PyTorch loop of the same model, loss, optimizer and clip", WORKERS / "bare_loop.py"),
    Contender(PEAK, "the peak: the same number of operations, all in large matmuls", WORKERS / "matmul.py"),
)
PEERS: Final = {
    "transformers": "transformers.Trainer with LlamaForCausalLM, fused AdamW",
    "litgpt": "litgpt.pretrain.fit with litgpt's GPT under Fabric, fused AdamW",
    "olmo_core": "OLMo-core's Trainer and TransformerTrainModule, fused AdamW",
}


@dataclass(frozen=True)
class Recipe:
    """The part of a training recipe that a step's speed depends on; AdamW has its usual options."""

    decoder: DecoderConfig
    seq_len: int
    micro_batch_size: int
    precision: str = "32-true"
    optimizer: AdamW = field(default_factory=AdamW)


def build_recipe(
    seq_len: int, micro_batch_size: int, precision: str = "32-true", *, is_tied: bool = False, **shape: Any
) -> Recipe:
    """Returns a shape with as many heads of keys as of queries, unless it says otherwise."""
    heads: dict[str, Any] = {"num_kv_heads": shape["num_heads"], "max_seq_len": seq_len, **shape}
    return Recipe(DecoderConfig(**heads, has_tied_embeddings=is_tied), seq_len, micro_batch_size, precision)


MODELS: Final = {
    # Untied, because not every peer can tie its embeddings.
    "9m": build_recipe(256, 8, vocab_size=8192, dim=256, num_layers=6, num_heads=4, ffn_dim=768),
    "tiny": build_recipe(32, 2, vocab_size=128, dim=32, num_layers=2, num_heads=4, ffn_dim=48),
}


def choose_contenders(own: str, peers: str) -> list[Contender]:
    """Returns the contenders of a run.

    Args:
        own: Names of `OWN`, separated by commas. Options of `genesis fit` may follow a name of ours:
            `genesis+model.attention=flex+trainer.deterministic=false`.
        peers: `NAME` or `NAME=PYTHON` of `PEERS`, separated by commas; may be empty.

    Raises:
        UserError: A name is unknown, or the interpreter of a contender does not exist.
    """
    known = {contender.name: contender for contender in OWN}
    chosen = []
    for text in own.split(","):
        name, *options = text.split("+")
        harness.check_choices("--contenders", [name], list(known))
        contender = known[name]
        if options and not contender.arguments:
            raise UserError(f"--contenders has {text!r}, but {name} is no fit of genesis and takes no options")
        chosen.append(replace(contender, name=text, arguments=(*contender.arguments, *options)))
    found = parse_peers(peers, list(PEERS), "_worker", own_python=True)
    return [*chosen, *(Contender(name, PEERS[name], script, python) for name, (script, python) in found.items())]


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
    speed_of_genesis: dict[str, Any] | None
    speed_of_genesis_by_cpu_time: dict[str, Any] | None
    share_of_peak: dict[str, Any] | None
    mfu: float | None
    peak_resident_bytes: int
    peak_device_bytes: int | None
    loss: float | None


def main(argv: list[str]) -> int:
    """Measures, prints the page and writes the record to the path of `--out`."""
    options = _parse(argv)
    recipe = read_recipe(options.config) if options.config else MODELS[options.model]
    workload = plan_workload(recipe, options, options.warmup_steps)
    contenders = choose_contenders(options.contenders, options.peers)
    own = [part for part in recipe.decoder.parts._fields if getattr(recipe.decoder, part) is not None]
    if own and options.peers:
        raise UserError(f"the recipe has its own configuration {own[0]}, which no peer can build: give no --peers")
    readies, bursts = run_bursts([(one, workload) for one in contenders], options.pairs, options.burst_steps)
    device_name = next(iter(readies.values())).device_name
    peak_flops = read_peak_flops(device_name, _PEAK_TYPES[workload.precision])
    if peak_flops is None:
        Console(stderr=True).print(f"the peak of {device_name} is not known: no MFU", highlight=False)
    results = summarise(bursts, workload, peak_flops)
    record = harness.begin_record(
        "step", "tokens per second of training steps, in interleaved bursts", argv, device_name=device_name
    )
    record |= {"workload": asdict(workload), "pairs": options.pairs, "burst_steps": options.burst_steps}
    if PEAK in results:
        record["matmul_flops_per_second"] = round(results[PEAK].tokens_per_second * workload.flops_per_token)
    record["contenders"] = {
        one.name: {
            "documents": one.documents,
            **describe_contender(one, readies[one.name], asdict(results[one.name]), bursts[one.name]),
        }
        for one in contenders
    }
    harness.finish(record, format_record, options.out)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.build_parser("step", __doc__)
    add = parser.add_argument
    add_shape_options(parser, MODELS, "9m")
    add(
        "--contenders",
        default=",".join(contender.name for contender in OWN),
        help="contenders of genesis to compare (default %(default)s); options of `genesis fit` may follow a name: "
        "genesis+model.attention=flex+trainer.deterministic=false",
    )
    add("--peers", default="", help="trainers of other projects: transformers,litgpt=PYTHON,olmo_core=PYTHON")
    add("--memory_gib", type=float, help="memory of the GPU that a contender may use (default: all)")
    add_burst_options(parser)
    options = parser.parse_args(argv)
    harness.check_counts(options, "pairs", "burst_steps", "warmup_steps", "micro_batches", "threads")
    check_available(options.device)
    if options.memory_gib is not None and (options.memory_gib <= 0 or options.device == CPU):
        raise UserError(f"--memory_gib is {options.memory_gib}: it must be above 0, and limits a GPU's memory alone")
    return options


def add_shape_options(parser: Parser, models: Mapping[str, Recipe], default: str) -> None:
    """Adds the options of a shape, and how it is trained."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", choices=models, default=default, help="name of a model shape (default %(default)s)")
    what.add_argument("--config", type=Path, help="recipe file, such as configs/genesis-1b.yaml")
    add = parser.add_argument
    add("--micro_batch_size", type=int, help="sequences per micro-batch (default: the recipe's)")
    add("--micro_batches", type=int, default=1, help="micro-batches per window (default %(default)s)")
    add("--device", default=CPU, help="cpu, cuda or another kind that torch finds (default %(default)s)")
    add("--precision", choices=tuple(_PEAK_TYPES), help="training precision (default: the recipe's)")
    add("--compile", action="store_true", help="compile every contender's model")


def add_burst_options(parser: Parser) -> None:
    """Adds the numbers of rounds, of steps and of threads."""
    harness.add_counts(
        parser,
        pairs=(10, "number of rounds"),
        burst_steps=(5, "windows of each contender per round"),
        warmup_steps=(4, "windows before the first round"),
        threads=(os.cpu_count() or 1, "CPU threads"),
    )


# ---- the work


def read_recipe(path: Path) -> Recipe:
    """Returns the settings of a recipe of `genesis fit` that affect the step; AdamW replaces any other optimizer.

    Raises:
        UserError: The file is not a recipe.
    """
    decoder = read_decoder_config(path)
    recipe = ResolvedRecipe.read([path])
    given = read_algorithm(recipe.get("model.optimizer"), "model.optimizer")
    optimizer = next((one for one in given.parts if isinstance(one, AdamW)), AdamW())
    seq_len, micro_batch_size = recipe.count("data.seq_len"), recipe.count("data.micro_batch_size")
    return Recipe(decoder, seq_len, micro_batch_size, recipe.get("trainer.precision", AUTO), optimizer)


def plan_workload(recipe: Recipe, options: argparse.Namespace, num_warmup_steps: int) -> Workload:
    """Returns the work of a contender, from the recipe and the options that all benchmarks of training share."""
    precision: Any = getattr(options, "precision", None) or recipe.precision
    device = getattr(options, "device", CPU)
    memory_gib = getattr(options, "memory_gib", None)
    if precision == AUTO:
        precision = choose_precision(device)
    return Workload(
        decoder=dump_decoder_config(recipe.decoder),
        optimizer={name: getattr(recipe.optimizer, name) for name in _ADAMW},
        seq_len=recipe.seq_len,
        micro_batch_size=getattr(options, "micro_batch_size", None) or recipe.micro_batch_size,
        num_micro_batches=getattr(options, "micro_batches", 1),
        documents="one_per_row",
        flops_per_token=count_flops_per_token(recipe.decoder, recipe.seq_len),
        device=device,
        precision=precision,
        is_compiled=getattr(options, "compile", False),
        num_threads=options.threads,
        num_warmup_steps=num_warmup_steps,
        memory_bytes=int(memory_gib * 2**30) if memory_gib else None,
    )


# ---- the report


def summarise(
    bursts: Mapping[str, Sequence[Burst]], workload: Workload, peak_flops: float | None = None
) -> dict[str, Result]:
    """Returns the result of each contender."""
    speeds = {name: [burst.tokens_per_second for burst in of_one] for name, of_one in bursts.items()}
    cpu_speeds = {name: [burst.tokens / burst.cpu_seconds for burst in of_one] for name, of_one in bursts.items()}
    is_cpu_time_telling = workload.device == CPU and workload.num_threads == 1

    def compare(of: Mapping[str, Sequence[float]], one: str, other: str) -> dict[str, Any] | None:
        return asdict(harness.compare_pairs(of[one], of[other])) if {one, other} <= of.keys() else None

    return {
        name: Result(
            tokens_per_second=statistics.median(speeds[name]),
            speed_of_genesis=compare(speeds, REFERENCE, name),
            speed_of_genesis_by_cpu_time=compare(cpu_speeds, REFERENCE, name) if is_cpu_time_telling else None,
            share_of_peak=compare(speeds, name, PEAK),
            mfu=None
            # The operations are those of training all weights.
            if peak_flops is None or name == PEAK or _ADAPTER in name
            else compute_mfu(statistics.median(speeds[name]), workload.flops_per_token, peak_flops),
            peak_resident_bytes=max(burst.peak_resident_bytes for burst in of_one),
            peak_device_bytes=of_one[-1].peak_device_bytes,
            loss=of_one[-1].loss,
        )
        for name, of_one in bursts.items()
    }


def describe_contender(
    contender: Contender, ready: Ready, result: Mapping[str, Any], bursts: Sequence[Burst]
) -> dict[str, Any]:
    """Returns a contender's entry in a record."""
    rounds = [round(burst.tokens_per_second, 1) for burst in bursts]
    start = {"summary": contender.summary, "versions": ready.versions}
    return {**start, **result, "tokens_per_second_by_round": rounds}


_COLUMNS: Final = (
    *("contender", "tokens/s (median)", "speed of genesis / contender (95%)", "same by CPU time (95%)"),
    *("share of matmul peak", "MFU", "peak memory MiB", "loss"),
)


def _format_result(name: str, result: Mapping[str, Any]) -> list[str]:
    """Returns the cells of one contender's row, from its result in plain types."""
    share, device_bytes = result["share_of_peak"], result["peak_device_bytes"]
    resident = f"{result['peak_resident_bytes'] / 2**20:,.0f}"
    is_trainer = name != PEAK
    return [
        name,
        f"{result['tokens_per_second']:,.0f}",
        harness.format_ratio(result["speed_of_genesis"]) if is_trainer else "",
        harness.format_ratio(result["speed_of_genesis_by_cpu_time"]) if is_trainer else "",
        f"{share['median']:.3f}" if share is not None and is_trainer else "",
        "" if result["mfu"] is None else f"{result['mfu']:.3f}",
        resident if device_bytes is None else f"{resident}, on the GPU {device_bytes / 2**20:,.0f}",
        "" if result["loss"] is None else f"{result['loss']:.2f}",
    ]


def describe_workload(workload: Mapping[str, Any]) -> str:
    """Returns a line about a workload in plain types."""
    decoder = workload["decoder"]
    heads = decoder.get("attention") or decoder
    return (
        f"vocabulary {decoder['vocab_size']:,}, dim {decoder['dim']}, {decoder['num_layers']} layers, "
        f"{heads['num_heads']} heads ({heads['num_kv_heads']} kv), ffn {decoder['ffn_dim']}, "
        f"seq {workload['seq_len']}; micro-batch {workload['micro_batch_size']} x {workload['num_micro_batches']}, "
        f"{workload['precision']}, {'compiled' if workload['is_compiled'] else 'not compiled'}, {workload['device']}"
    )


def format_contenders(contenders: Mapping[str, Any]) -> list[str]:
    """Returns a line for each contender, with its summary and versions."""
    return [
        f"- **{name}**: {one['summary']}. {harness.format_versions(one['versions'])}."
        for name, one in contenders.items()
    ]


def format_record(record: Mapping[str, Any]) -> str:
    """Returns a record as a page of Markdown."""
    flops = record.get("matmul_flops_per_second")
    notes = [
        f"work: {describe_workload(record['workload'])}; {record['workload']['num_threads']} threads each",
        f"{record['pairs']} rounds of {record['burst_steps']} windows each, in rotating order; ratios are medians of "
        "pairs within a round, above 1 where genesis is faster",
        *([] if flops is None else [f"matmul peak of the same run: {flops / 1e9:,.0f} GFLOP/s (median)"]),
    ]
    rows = [_format_result(*item) for item in record["contenders"].items()]
    body = [*harness.format_table(_COLUMNS, rows), *format_contenders(record["contenders"])]
    return harness.format_page("The training step", record, notes, body)
