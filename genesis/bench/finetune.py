"""Compares fine-tuning with TRL and PEFT: speed, memory and losses, of adapters, of all weights, and of DPO on pairs.

Each contender is a process that trains the same model on the same packed rows, or on the same pairs of answers without
padding, with the same optimizer, from the same adapters. Its first steps are short, and their losses are compared with
those of a plain loop with transformers and PEFT. Then the contenders train longer steps one after another, in a
rotating order (`genesis.bench.pairs`).
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.errors import UserError
from genesis.bench.contenders import Contender, Worker, find_peer
from genesis.bench.demo_files import find_conversations, find_model
from genesis.bench.pairs import compare_pairs, rotate_order
from genesis.bench.record import anonymise, describe_hardware, write_record
from genesis.bench.workers.finetune_protocol import IGNORE_INDEX, FinetuneWorkload, Kind, Row, write_rows
from genesis.bench.workers.protocol import Burst, Ready
from genesis.chat.conversation import read_conversation
from genesis.chat.options import ChatOptions
from genesis.chat.render import RenderedChat, open_renderer
from genesis.huggingface.peft import CONFIG_NAME, WEIGHTS_NAME, build_adapter_config, name_adapter_tensor
from genesis.huggingface.shape import read_shape
from genesis.model.adapter import AdapterConfig, attach_adapters, init_adapters
from genesis.model.decoder import Decoder
from genesis.tokenizer.open import open_tokenizer

OURS, TRL, REFERENCE = "genesis", "trl", "reference"
_WORKERS = Path(__file__).resolve().parent / "workers"
_LOSS_TOLERANCE: Final = 1e-4
_MEMORY_GOAL: Final = 0.7
_MAX_GRAD_NORM = 1.0
_PAUSE_SECONDS = 0.1  # a contender's threads spin for a moment after their last work


@dataclass(frozen=True)
class KindOptions:
    """What distinguishes a kind of fine-tuning.

    Args:
        summary: A description of one line.
        lr: The learning rate, which is constant.
        goal: The speed over TRL's that we want to reach.
        has_adapter: Whether adapters are trained.
        has_pairs: Whether the rows are pairs of answers.
    """

    summary: str
    lr: float
    goal: float
    has_adapter: bool = False
    has_pairs: bool = False


KINDS: Final[dict[Kind, KindOptions]] = {
    "lora": KindOptions("adapters on all linear layers of the blocks", lr=2e-4, goal=1.4, has_adapter=True),
    "full": KindOptions("all weights", lr=2e-5, goal=1.25),
    "dpo": KindOptions("adapters by DPO on pairs of answers", lr=5e-5, goal=1.25, has_adapter=True, has_pairs=True),
}


def main(argv: list[str]) -> int:
    """Measures, prints the record and writes it to the path of `--out`; returns 1 if losses are not the reference's."""
    options = _parse(argv)
    console = Console(stderr=True)
    trl, reference = find_peer("trl_worker.py"), find_peer("finetune_reference_worker.py")
    contenders = {
        OURS: Contender(OURS, "our trainer as `genesis fit` sets it up", _WORKERS / "genesis_finetuner.py"),
        TRL: Contender(
            TRL, "TRL's SFTTrainer, padding-free, or DPOTrainer, with PEFT; fused AdamW, nothing recomputed", trl
        ),
        REFERENCE: Contender(REFERENCE, "a plain loop with transformers and PEFT", reference),
    }
    record: dict[str, Any] = {
        "what": "fine-tuning beside TRL with PEFT, in interleaved bursts",
        "command": f"genesis bench finetune {shlex.join(anonymise(argv))}".rstrip(),
        "date": date.today().isoformat(),
        "hardware": describe_hardware("cpu"),
        "python": platform.python_version(),
        "options": {name: getattr(options, name) for name in _COUNTS},
        "contenders": {name: contender.summary for name, contender in contenders.items()},
        "kinds": {},
    }
    model = find_model(options.model, console)
    conversations = find_conversations(options.conversations)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        # One step warms up, and one is never trained: a worker waits before it when its last burst ends.
        num_long = 2 + options.pairs * options.burst_steps
        lengths = [options.loss_tokens] * options.loss_steps + [options.seq_len] * num_long
        chats = render_conversations(model, conversations)
        record["num_conversations"] = len(chats)
        row_lengths = [length for length in lengths for _ in range(options.batch_size)]
        kinds: list[Kind] = options.kinds.split(",")
        files = {has_pairs: directory / f"rows-{has_pairs}.jsonl" for has_pairs in (False, True)}
        if any(not KINDS[kind].has_pairs for kind in kinds):
            write_rows(list(pack_rows(chats, row_lengths)), files[False])
        if any(KINDS[kind].has_pairs for kind in kinds):
            write_rows(list(pair_rows(chats, row_lengths[::2])), files[True])
        write_adapter(model, AdapterConfig(rank=options.rank, alpha=2.0 * options.rank), directory / "adapter")
        for kind in kinds:
            console.print(f"{kind}: {KINDS[kind].summary}", highlight=False)
            workload = FinetuneWorkload(
                kind=kind,
                model=str(model),
                adapter=str(directory / "adapter") if KINDS[kind].has_adapter else None,
                rows=str(files[KINDS[kind].has_pairs]),
                losses="",
                optimizer={"lr": KINDS[kind].lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
                max_grad_norm=_MAX_GRAD_NORM,
                batch_size=options.batch_size,
                tokens_per_window=options.batch_size * options.seq_len,
                num_threads=options.threads,
                num_warmup_steps=options.loss_steps + 1,
                num_steps=len(lengths),
            )
            record["kinds"][kind] = _measure(contenders, workload, options, directory, console)
    record["load_average_after"] = round(os.getloadavg()[0], 1)
    page = format_page(record)
    print(page, end="")
    if options.out is not None:
        write_record(record, page, options.out)
    differences = [kind["largest_loss_difference"] for kind in record["kinds"].values()]
    # TRL does not decide: transformers gives the pad token's embedding no gradient, which is SmolLM2's end of a turn.
    return 1 if any(of_one[REFERENCE] > _LOSS_TOLERANCE for of_one in differences) else 0


_COUNTS = ("batch_size", "seq_len", "rank", "loss_steps", "loss_tokens", "pairs", "burst_steps", "threads")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="genesis bench finetune", description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--kinds", default=",".join(KINDS), help="kinds of fine-tuning to compare (default %(default)s)")
    add(
        "--model",
        type=Path,
        help="directory of a chat model in Hugging Face's layout (default: SmolLM2-135M-Instruct, downloaded)",
    )
    add("--conversations", type=Path, help="JSONL file of conversations (default: 300 Alpaca rows, downloaded)")
    add("--batch_size", type=int, default=2, help="rows of a step; DPO has two for each pair (default %(default)s)")
    add("--seq_len", type=int, default=512, help="tokens of a row in the timed steps (default %(default)s)")
    add("--rank", type=int, default=32, help="rank of the adapters (default %(default)s)")
    add("--loss_steps", type=int, default=20, help="first steps, whose losses are compared (default %(default)s)")
    add("--loss_tokens", type=int, default=64, help="tokens of a row in these steps (default %(default)s)")
    add("--pairs", type=int, default=6, help="number of rounds (default %(default)s)")
    add("--burst_steps", type=int, default=1, help="steps of each contender per round (default %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all cores)")
    add(
        "--out",
        type=Path,
        help="file for the record, such as benchmarks/records/finetune.json; also writes an .md page",
    )
    options = parser.parse_args(argv)
    for name in _COUNTS:
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(options, name)}: it must be at least 1")
    for kind in options.kinds.split(","):
        if kind not in KINDS:
            raise UserError(f"--kinds has {kind!r}; there are {', '.join(KINDS)}")
        if KINDS[kind].has_pairs and options.batch_size % 2:
            raise UserError(f"--batch_size is {options.batch_size}: {kind} has pairs of rows; give an even number")
    for name in ("model", "conversations"):
        path = getattr(options, name)
        if path is not None and not path.exists():
            raise UserError(f"--{name} is {path}, which does not exist")
    return options


# ---- the work


def render_conversations(model: Path, conversations: Path) -> list[RenderedChat]:
    """Returns the conversations of a JSONL file, rendered with the model's own template."""
    renderer = open_renderer(open_tokenizer(model), ChatOptions())
    lines = conversations.read_text(encoding="utf-8").splitlines()
    return [renderer.render_conversation(read_conversation(json.loads(line))) for line in lines]


def pack_rows(chats: Sequence[RenderedChat], lengths: Sequence[int]) -> Iterator[Row]:
    """Yields rows of these lengths: conversations in their order, again and again, cut where a row ends."""
    number, start = 0, 0
    for length in lengths:
        row = Row([], [], [])
        while len(row.input_ids) < length:
            chat = chats[number % len(chats)]
            end = min(len(chat.ids), start + length - len(row.input_ids))
            ids, trained = chat.ids[start:end].tolist(), chat.trained[start:end].tolist()
            row.input_ids.extend(ids)
            row.labels.extend(
                token if is_learned else IGNORE_INDEX for token, is_learned in zip(ids, trained, strict=True)
            )
            row.seq_lengths.append(end - start)
            number, start = (number + 1, 0) if end == len(chat.ids) else (number, end)
        yield row


def pair_rows(chats: Sequence[RenderedChat], lengths: Sequence[int]) -> Iterator[Row]:
    """Yields the chosen and the rejected row of pairs, both of the pair's length, so that nobody pads.

    The prompt is that of a conversation, cut to half of the row. The chosen row goes on with this conversation's answer
    and those of the next ones, the rejected row with those of the conversations half the file away.
    """
    for number, length in enumerate(lengths):
        chat = chats[number % len(chats)]
        prompt = chat.ids[: int(chat.trained.argmax())][: length // 2].tolist()
        for first in (number, number + max(1, len(chats) // 2)):
            answer: list[int] = []
            index = first
            while len(answer) < length - len(prompt):
                other = chats[index % len(chats)]
                answer += other.ids[other.trained].tolist()
                index += 1
            answer = answer[: length - len(prompt)]
            yield Row(prompt + answer, [IGNORE_INDEX] * len(prompt) + answer, [length])


def write_adapter(model: Path, config: AdapterConfig, out: Path) -> None:
    """Writes new adapters in PEFT's format, from which every contender starts."""
    family, shape = read_shape(model)
    with torch.device("meta"):
        decoder = Decoder(shape)
    layers = attach_adapters(decoder, config)
    for layer in layers.values():
        for name in ("lora_A", "lora_B"):
            setattr(layer, name, torch.nn.Parameter(torch.empty_like(getattr(layer, name), device="cpu")))
    init_adapters(decoder, seed=0)
    tensors = {
        name_adapter_tensor(name, family): parameter.detach()
        for name, parameter in decoder.named_parameters()
        if parameter.requires_grad
    }
    content = build_adapter_config(
        config, family, layers=layers, linears=layers, is_tied=shape.has_tied_embeddings, base_name=None
    )
    out.mkdir()
    (out / CONFIG_NAME).write_text(json.dumps(content), encoding="utf-8")
    save_file(tensors, out / WEIGHTS_NAME)


def _measure(
    contenders: Mapping[str, Contender],
    workload: FinetuneWorkload,
    options: argparse.Namespace,
    directory: Path,
    console: Console,
) -> dict[str, Any]:
    """Returns the results of a kind in plain types."""
    files = {name: directory / f"losses-{workload.kind}-{name}" for name in contenders}

    def start(name: str, num_warmup_steps: int) -> Worker:
        console.print(f"starting {name}: {contenders[name].summary}", highlight=False)
        own = replace(workload, losses=str(files[name]), num_warmup_steps=num_warmup_steps)
        return Worker(contenders[name], own, directory / f"log-{workload.kind}-{name}")

    with start(REFERENCE, options.loss_steps) as worker:
        readies = {REFERENCE: worker.wait_until_ready()}
        worker.stop()
    bursts: dict[str, list[Burst]] = {OURS: [], TRL: []}
    with start(OURS, workload.num_warmup_steps) as ours:
        readies[OURS] = ours.wait_until_ready()
        with start(TRL, workload.num_warmup_steps) as theirs:
            readies[TRL] = theirs.wait_until_ready()
            for round_index in range(options.pairs):
                for worker in rotate_order([ours, theirs], round_index):
                    time.sleep(_PAUSE_SECONDS)
                    bursts[worker.contender.name].append(worker.run_burst(options.burst_steps))
                speeds = ", ".join(f"{name} {b[-1].tokens / b[-1].seconds:,.1f}" for name, b in bursts.items())
                console.print(f"round {round_index + 1}/{options.pairs}, tokens/s: {speeds}", highlight=False)
            theirs.stop()
        ours.stop()
    losses = {name: [float(line) for line in file.read_text().split()] for name, file in files.items()}
    return summarise(bursts, {name: values[: options.loss_steps] for name, values in losses.items()}, readies)


# ---- the report


def summarise(
    bursts: Mapping[str, Sequence[Burst]], losses: Mapping[str, Sequence[float]], readies: Mapping[str, Ready]
) -> dict[str, Any]:
    """Returns the speeds, the memory and the losses of a kind in plain types."""
    speeds = {name: [burst.tokens / burst.seconds for burst in of_one] for name, of_one in bursts.items()}
    cpu_speeds = {name: [burst.tokens / burst.cpu_seconds for burst in of_one] for name, of_one in bursts.items()}
    peaks = {name: max(burst.peak_resident_bytes for burst in of_one) for name, of_one in bursts.items()}
    return {
        "versions": {name: ready.versions for name, ready in readies.items()},
        "tokens_per_second": {name: round(statistics.median(values), 1) for name, values in speeds.items()},
        "tokens_per_second_by_round": {name: [round(v, 1) for v in values] for name, values in speeds.items()},
        "speed_over_trl": asdict(compare_pairs(speeds[OURS], speeds[TRL])),
        "speed_over_trl_by_cpu_time": asdict(compare_pairs(cpu_speeds[OURS], cpu_speeds[TRL])),
        "peak_resident_bytes": peaks,
        "memory_over_trl": peaks[OURS] / peaks[TRL],
        "losses": {name: list(values) for name, values in losses.items()},
        "largest_loss_difference": {
            name: max(abs(a - b) for a, b in zip(losses[OURS], values, strict=True))
            for name, values in losses.items()
            if name != OURS
        },
    }


def format_page(record: Mapping[str, Any]) -> str:
    """Returns the record as a page of Markdown."""
    options = record["options"]
    lines = [
        "# Fine-tuning beside TRL",
        "",
        f"- command: `{record['command']}`",
        f"- date: {record['date']}",
        f"- hardware: {record['hardware']}; load average at the end {record['load_average_after']}, its own included",
        f"- work: rows of {record['num_conversations']} conversations, {options['batch_size']} x {options['seq_len']} "
        f"tokens a step, float32, {options['threads']} threads; adapters of rank {options['rank']}. In DPO a pair is "
        "two rows of one prompt, without padding; the reference is the base",
        f"- {options['pairs']} rounds of {options['burst_steps']} steps each, in rotating order; ratios are medians of "
        "pairs within a round, with an interval of 95%. By CPU time, threads that wait for one another count, too",
        f"- losses: the largest difference of ours over the first {options['loss_steps']} steps, of "
        f"{options['batch_size']} x {options['loss_tokens']} tokens, in nats per learned token, of DPO per pair",
        "",
        "| kind | genesis tokens/s | TRL tokens/s | speed over TRL (goal) | by CPU time | genesis MiB | TRL MiB | "
        f"memory over TRL (goal {_MEMORY_GOAL}) | losses: reference | TRL |",
        "|" + "---|" * 10,
    ]
    for kind, result in record["kinds"].items():
        speed, peak, differences = (
            result[name] for name in ("tokens_per_second", "peak_resident_bytes", "largest_loss_difference")
        )
        cells = [
            kind,
            f"{speed[OURS]:,.1f}",
            f"{speed[TRL]:,.1f}",
            f"{_format_ratio(result['speed_over_trl'])} ({KINDS[kind].goal})",
            _format_ratio(result["speed_over_trl_by_cpu_time"]),
            f"{peak[OURS] / 2**20:,.0f}",
            f"{peak[TRL] / 2**20:,.0f}",
            f"{result['memory_over_trl']:.2f}",
            f"{differences[REFERENCE]:.1e}",
            f"{differences[TRL]:.1e}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    versions: dict[str, dict[str, str]] = next(iter(record["kinds"].values()))["versions"]
    for name, summary in record["contenders"].items():
        packages = ", ".join(f"{package} {number}" for package, number in versions[name].items())
        lines.append(f"- **{name}**: {summary}. {packages}.")
    return "\n".join(lines) + "\n"


def _format_ratio(ratio: Mapping[str, Any]) -> str:
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"{ratio['median']:.2f}{interval}"
