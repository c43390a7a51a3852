"""Compares fine-tuning with TRL and PEFT: speed, memory and losses, on conversations and on pairs of answers.

Each contender is a process that trains the same model on the same packed rows, or on the same pairs of answers without
padding, with the same optimizer, from the same adapters. Its first steps are short, and their losses are compared with
those of a plain loop with transformers and PEFT. Then the contenders train longer steps one after another, in a
rotating order.
"""

import argparse
import json
import os
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from benchmarks import harness
from benchmarks.demo_files import add_demo_options, find_conversations, find_model
from benchmarks.processes import PEERS, WORKERS, Contender, WorkerProcess, ask_burst, keeping_logs
from benchmarks.step import format_contenders
from benchmarks.workers.finetune_protocol import (
    GROUP_SIZE,
    IGNORE_INDEX,
    FinetuneWorkload,
    Kind,
    Row,
    write_rows,
)
from benchmarks.workers.protocol import Burst, Ready
from genesis.base.console import Console
from genesis.base.errors import UserError
from genesis.chat.conversation import read_conversation
from genesis.chat.options import ChatOptions
from genesis.chat.render import RenderedChat, open_renderer
from genesis.huggingface.peft import CONFIG_NAME, WEIGHTS_NAME, build_adapter_config, name_adapter_tensor
from genesis.huggingface.shape import read_shape
from genesis.model.adapter import AdapterConfig, attach_adapters, init_adapters
from genesis.model.decoder import Decoder
from genesis.tokenizer.open import open_tokenizer

OURS, TRL, REFERENCE = "genesis", "trl", "reference"
_LOSS_TOLERANCE: Final = 1e-4
_MEMORY_GOAL: Final = 0.7
_MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class KindOptions:
    """What distinguishes a kind of fine-tuning.

    Args:
        summary: A description of one line.
        lr: The learning rate, which is constant.
        goal: The speed over TRL's that we want to reach.
        has_adapter: Whether adapters are trained.
        has_pairs: Whether the rows are pairs of answers.
        has_prompts: Whether the contenders write the answers, which are random, so that losses are not compared.
    """

    summary: str
    lr: float
    goal: float
    has_adapter: bool = False
    has_pairs: bool = False
    has_prompts: bool = False


KINDS: Final[dict[Kind, KindOptions]] = {
    "lora": KindOptions("adapters on all linear layers of the blocks", lr=2e-4, goal=1.4, has_adapter=True),
    "full": KindOptions("all weights", lr=2e-5, goal=1.25),
    "dpo": KindOptions("adapters by DPO on pairs of answers", lr=5e-5, goal=1.25, has_adapter=True, has_pairs=True),
    "kto": KindOptions("adapters by KTO on single answers", lr=5e-5, goal=1.25, has_adapter=True, has_pairs=True),
    "reward": KindOptions("adapters and score of a reward model", lr=5e-5, goal=1.25, has_adapter=True, has_pairs=True),
    "grpo": KindOptions("adapters by GRPO on own answers", lr=5e-5, goal=1.25, has_adapter=True, has_prompts=True),
}


CONTENDERS: Final = {
    one.name: one
    for one in (
        Contender(OURS, "our trainer as `genesis fit` sets it up", WORKERS / "genesis_finetuner.py"),
        Contender(
            TRL,
            "TRL's trainer of the kind, with PEFT; SFTTrainer padding-free, fused AdamW, nothing recomputed",
            PEERS / "trl_worker.py",
        ),
        Contender(REFERENCE, "a plain loop with transformers and PEFT", PEERS / "finetune_reference_worker.py"),
    )
}
_COUNTS: Final = {
    "batch_size": (2, "rows of a step; of pairs two for each; prompts, with 4 answers each"),
    "seq_len": (512, "tokens of a row in the timed steps"),
    "answer_tokens": (64, "tokens of an answer that a contender writes"),
    "rank": (32, "rank of the adapters"),
    "loss_steps": (20, "first steps, whose losses are compared"),
    "loss_tokens": (64, "tokens of a row in these steps"),
    "pairs": (6, "number of rounds"),
    "burst_steps": (1, "steps of each contender per round"),
    "threads": (os.cpu_count() or 1, "CPU threads"),
}


def main(argv: list[str]) -> int:
    """Measures, prints the record and writes it to the path of `--out`; returns 1 if losses are not the reference's."""
    options = _parse(argv)
    console = Console(stderr=True)
    record = harness.begin_record("finetune", "fine-tuning beside TRL with PEFT, in interleaved bursts", argv)
    record |= {"options": {name: getattr(options, name) for name in _COUNTS}, "kinds": {}}
    model = find_model(options.model, console)
    chats = render_conversations(model, find_conversations(options.conversations))
    record["num_conversations"] = len(chats)
    with keeping_logs() as (_, directory):
        workload = _prepare(options, model, chats, directory)
        for kind in options.kinds:
            console.print(f"{kind}: {KINDS[kind].summary}", highlight=False)
            own = replace(
                workload,
                kind=kind,
                adapter=workload.adapter if KINDS[kind].has_adapter else None,
                rows=str(_name_rows(directory, KINDS[kind].has_pairs)),
                optimizer={"lr": KINDS[kind].lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
            )
            if kind == "reward":
                scorer = write_scorer(model, directory / "adapter", directory)
                own = replace(own, model=str(scorer), adapter=str(scorer / "adapter"))
            if KINDS[kind].has_prompts:
                own = ask_prompts(own, options, directory)
            record["kinds"][kind] = _measure(own, options, directory)
    harness.finish(record, format_record, options.out)
    differences = [kind["largest_loss_difference"] for kind in record["kinds"].values()]
    # TRL does not decide: transformers gives the pad token's embedding no gradient, which is SmolLM2's end of a turn.
    return 1 if any(of_one.get(REFERENCE, 0.0) > _LOSS_TOLERANCE for of_one in differences) else 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.build_parser("finetune", __doc__)
    parser.add_argument("--kinds", type=harness.read_list, default=list(KINDS), help="kinds to compare (default: all)")
    add_demo_options(parser)
    harness.add_counts(parser, **_COUNTS)
    options = parser.parse_args(argv)
    harness.check_counts(options, *_COUNTS)
    harness.check_choices("--kinds", options.kinds, list(KINDS))
    for kind in options.kinds:
        if KINDS[kind].has_pairs and options.batch_size % 2:
            raise UserError(f"--batch_size is {options.batch_size}: {kind} has pairs of rows; give an even number")
    return options


# ---- the work


def _name_rows(directory: Path, has_pairs: bool) -> Path:
    return directory / f"rows-{has_pairs}.jsonl"


def _prepare(
    options: argparse.Namespace, model: Path, chats: Sequence[RenderedChat], directory: Path
) -> FinetuneWorkload:
    """Writes the rows and the adapters that all contenders train, and returns the work that all kinds share."""
    # One step warms up, and one is never trained: a worker waits before it when its last burst ends.
    num_long = 2 + options.pairs * options.burst_steps
    lengths = [options.loss_tokens] * options.loss_steps + [options.seq_len] * num_long
    row_lengths = [length for length in lengths for _ in range(options.batch_size)]
    if any(not KINDS[kind].has_pairs for kind in options.kinds):
        write_rows(list(pack_rows(chats, row_lengths)), _name_rows(directory, has_pairs=False))
    if any(KINDS[kind].has_pairs for kind in options.kinds):
        write_rows(list(pair_rows(chats, row_lengths[::2])), _name_rows(directory, has_pairs=True))
    adapter = directory / "adapter"
    write_adapter(model, AdapterConfig(rank=options.rank, alpha=2.0 * options.rank), adapter)
    return FinetuneWorkload(
        kind="lora",
        model=str(model),
        adapter=str(adapter),
        rows="",
        losses="",
        optimizer={},
        max_grad_norm=_MAX_GRAD_NORM,
        batch_size=options.batch_size,
        tokens_per_window=options.batch_size * options.seq_len,
        num_threads=options.threads,
        num_warmup_steps=options.loss_steps + 1,
        num_steps=len(lengths),
    )


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


def ask_prompts(workload: FinetuneWorkload, options: argparse.Namespace, directory: Path) -> FinetuneWorkload:
    """Writes the prompt of all steps, and returns the work of a kind whose answers the contenders write.

    It is one prompt again and again, so that all steps have equally many tokens.
    """
    rows = directory / "prompts.jsonl"
    messages = [{"role": "user", "content": "Write a short story about a lighthouse, a storm and an old friend."}]
    num_steps = 2 + options.pairs * options.burst_steps + 1
    rows.write_text(f"{json.dumps({'messages': messages})}\n" * num_steps * options.batch_size, encoding="utf-8")
    prompt = open_renderer(open_tokenizer(Path(workload.model)), ChatOptions()).render_prompt(messages)
    answers = options.batch_size * GROUP_SIZE
    return replace(
        workload,
        rows=str(rows),
        batch_size=answers,
        answer_tokens=options.answer_tokens,
        tokens_per_window=answers * (len(prompt) + options.answer_tokens),
        num_warmup_steps=1,
        num_steps=num_steps,
    )


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


def write_scorer(model: Path, adapter: Path, directory: Path) -> Path:
    """Writes the model with a new head of one score, and the adapters with that head, as PEFT needs it.

    Returns the directory of both, of which `adapter` is one inside.
    """
    out = directory / "scorer"
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    scorer.save_pretrained(out)
    for file in model.glob("*tok*"):
        shutil.copy(file, out)
    (out / "adapter").mkdir()
    tensors = load_file(adapter / WEIGHTS_NAME) | {"base_model.model.score.weight": scorer.score.weight.detach()}
    save_file(tensors, out / "adapter" / WEIGHTS_NAME)
    content = json.loads((adapter / CONFIG_NAME).read_text()) | {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    (out / "adapter" / CONFIG_NAME).write_text(json.dumps(content), encoding="utf-8")
    return out


def _measure(workload: FinetuneWorkload, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Returns the results of a kind in plain types. The reference trains alone, for its losses."""
    files = {name: directory / f"losses-{workload.kind}-{name}" for name in CONTENDERS}
    readies: dict[str, Ready] = {}

    def start(stack: ExitStack, name: str, num_warmup_steps: int) -> WorkerProcess:
        own = replace(workload, losses=str(files[name]), num_warmup_steps=num_warmup_steps)
        worker = stack.enter_context(CONTENDERS[name].start(own, directory / f"log-{workload.kind}-{name}"))
        readies[name] = Ready(**worker.receive())
        return worker

    if not KINDS[workload.kind].has_prompts:
        with ExitStack() as stack:
            start(stack, REFERENCE, options.loss_steps).stop()
    with ExitStack() as stack:
        workers = {name: start(stack, name, workload.num_warmup_steps) for name in (OURS, TRL)}
        ask = ask_burst(options.burst_steps)
        bursts = harness.take_rounds(workers, options.pairs, ask, lambda one: one.tokens_per_second, "tokens/s")
        for worker in workers.values():
            worker.stop()
    compared = {} if KINDS[workload.kind].has_prompts else files
    losses = {name: [float(line) for line in file.read_text().split()] for name, file in compared.items()}
    return summarise(bursts, {name: values[: options.loss_steps] for name, values in losses.items()}, readies)


# ---- the report


def summarise(
    bursts: Mapping[str, Sequence[Burst]], losses: Mapping[str, Sequence[float]], readies: Mapping[str, Ready]
) -> dict[str, Any]:
    """Returns the speeds, the memory and the losses of a kind in plain types."""
    speeds = {name: [burst.tokens_per_second for burst in of_one] for name, of_one in bursts.items()}
    cpu_speeds = {name: [burst.tokens / burst.cpu_seconds for burst in of_one] for name, of_one in bursts.items()}
    peaks = {name: max(burst.peak_resident_bytes for burst in of_one) for name, of_one in bursts.items()}
    return {
        "versions": {name: ready.versions for name, ready in readies.items()},
        "tokens_per_second": {name: round(statistics.median(values), 1) for name, values in speeds.items()},
        "tokens_per_second_by_round": {name: [round(v, 1) for v in values] for name, values in speeds.items()},
        "speed_over_trl": asdict(harness.compare_pairs(speeds[OURS], speeds[TRL])),
        "speed_over_trl_by_cpu_time": asdict(harness.compare_pairs(cpu_speeds[OURS], cpu_speeds[TRL])),
        "peak_resident_bytes": peaks,
        "memory_over_trl": peaks[OURS] / peaks[TRL],
        "losses": {name: list(values) for name, values in losses.items()},
        "largest_loss_difference": {
            name: max(abs(a - b) for a, b in zip(losses[OURS], values, strict=True))
            for name, values in losses.items()
            if name != OURS
        },
    }


_COLUMNS: Final = (
    *("kind", "genesis tokens/s", "TRL tokens/s", "speed over TRL (goal)", "by CPU time", "genesis MiB", "TRL MiB"),
    *(f"memory over TRL (goal {_MEMORY_GOAL})", "losses: reference", "TRL"),
)


def format_record(record: Mapping[str, Any]) -> str:
    """Returns the record as a page of Markdown."""
    options = record["options"]
    notes = [
        f"work: rows of {record['num_conversations']} conversations, {options['batch_size']} x {options['seq_len']} "
        f"tokens a step, float32, {options['threads']} threads; adapters of rank {options['rank']}. A pair is two "
        "rows of one prompt, without padding; the reference is the base. KTO takes them as single answers, each the "
        f"mismatched one of the other. In GRPO {GROUP_SIZE} answers of {options['answer_tokens']} tokens to each of "
        f"{options['batch_size']} prompts are written and trained in a step; tokens are those of prompts and answers",
        f"{options['pairs']} rounds of {options['burst_steps']} steps each, in rotating order; ratios are medians of "
        "pairs within a round, with an interval of 95%. By CPU time, threads that wait for one another count, too",
        f"losses: the largest difference of ours over the first {options['loss_steps']} steps, of "
        f"{options['batch_size']} x {options['loss_tokens']} tokens, in nats per learned token, of pairs per pair, "
        "of KTO per answer",
    ]
    rows = []
    for kind, result in record["kinds"].items():
        speed, peak, differences = (
            result[name] for name in ("tokens_per_second", "peak_resident_bytes", "largest_loss_difference")
        )
        rows.append(
            [
                kind,
                *(f"{speed[name]:,.1f}" for name in (OURS, TRL)),
                f"{harness.format_ratio(result['speed_over_trl'], 2)} ({KINDS[kind].goal})",
                harness.format_ratio(result["speed_over_trl_by_cpu_time"], 2),
                *(f"{peak[name] / 2**20:,.0f}" for name in (OURS, TRL)),
                f"{result['memory_over_trl']:.2f}",
                *(f"{differences[name]:.1e}" if differences else "-" for name in (REFERENCE, TRL)),
            ]
        )
    versions = next(iter(record["kinds"].values()))["versions"]
    contenders = {name: {"summary": one.summary, "versions": versions[name]} for name, one in CONTENDERS.items()}
    return harness.format_page(
        "Fine-tuning beside TRL", record, notes, [*harness.format_table(_COLUMNS, rows), *format_contenders(contenders)]
    )
