"""The parts of the benchmark `session`: what is asked of a borrowed GPU, most important first, each with its limit."""

import importlib.util
import os
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.harness import ROOT
from genesis.base.device import is_host, read_properties
from genesis.model.attend.fa4 import find_version

OUT: Final = "{out}"
SCRATCH: Final = "{scratch}"
PYTEST: Final = "pytest"
USUAL_SECONDS: Final = 900.0
"""Time of a usual session. On an H200 with 16 cores, a process with a compiled billion begins its steps after 40 s."""
_MEMORY: Final = "/dev/shm"
_TINY: Final = "tiny"
_COMPILED: Final = ("cpu", "cuda", "xpu")
"""Kinds of devices for which torch.compile has a code generator."""
_MAX_TEST_WORKERS: Final = 8
_NO_PLUGINS: Final = ("-p", "no:cacheprovider", "-p", "no:benchmark")
"""pytest-benchmark warns under pytest-xdist, and warnings are errors."""


@dataclass(frozen=True)
class SessionPart:
    """One part of a session.

    Args:
        name: As the record has it.
        question: What it answers.
        words: Arguments of Python; `{out}` stands for the file into which the part writes its figures, `{scratch}` for
            a directory on the disk of the checkout.
        limit_seconds: How long it may run.
        needs: A module or a path, in the checkout if it is relative, without which the part does not apply.
    """

    name: str
    question: str
    words: tuple[str, ...]
    limit_seconds: float
    needs: str | None = None


def plan_session(kind: str, size: str) -> list[SessionPart]:
    """Returns the parts of a session, most important first.

    The limits of the parts up to `doctor` add up to the fifteen minutes of a usual session; the others run in a longer
    one, or when a second session continues the record.

    Args:
        kind: Kind of device.
        size: `full` for a GPU, `tiny` to try the session out.
    """
    parts = [
        *_plan_proofs(kind, size),
        *_plan_steps(kind, size),
        *_plan_tests(kind, size),
        *_plan_saves(kind, size),
        SessionPart("serving", "a server under load", _single("serving", kind, size), 90),
        *_plan_lora(kind, size),
        *_plan_float8(kind, size),
        *_plan_peers(kind, size),
        *_plan_small_cards(kind, size),
    ]
    # Tiny shapes are for a machine without a GPU, where imports take most of the time.
    return [replace(part, limit_seconds=5 * part.limit_seconds) for part in parts] if size == _TINY else parts


def _run(kind: str, *words: str) -> tuple[str, ...]:
    return ("-m", *words, "--device", kind)


def _single(part: str, kind: str, size: str) -> tuple[str, ...]:
    return ("-m", "benchmarks.device", part, "--device", kind, "--size", size, "--out", OUT)


def _step(kind: str, size: str, contenders: str, *words: str) -> tuple[str, ...]:
    is_tiny = size == _TINY
    model = ("--model", "tiny") if is_tiny else ("--config", str(ROOT / "configs/genesis-1b.yaml"))
    rounds = ("--pairs", "1", "--burst_steps", "2") if is_tiny else ("--pairs", "3", "--burst_steps", "4")
    chosen = ("--warmup_steps", "2" if is_tiny else "4", "--contenders", contenders)
    return _run(kind, "benchmarks", "step", *model, *rounds, *chosen, *words, "--out", OUT)


def _plan_proofs(kind: str, size: str) -> list[SessionPart]:
    """Returns what decides whether runs resume bit for bit, which comes first."""
    return [
        SessionPart("repeat", "are two runs equal bit for bit", _single("repeat", kind, size), 200),
        SessionPart("attention", "kernels of attention: speed, repeatability", _single("attention", kind, size), 60),
    ]


def _plan_steps(kind: str, size: str) -> list[SessionPart]:
    """Returns the step with each kernel, and without determinism. Three contenders lie in memory at once."""

    def part(name: str, question: str, *contenders: str) -> SessionPart:
        words = _step(kind, size, ",".join(contenders), *_large_batch(kind), *_compile(kind, size))
        return SessionPart(name, question, words, 120)

    free = "genesis-packed+trainer.deterministic=false"
    if kind != "cuda":
        return [part("step", "tokens per second as genesis fit trains", "genesis-packed", free)]
    kernels = ["flex", "flash"] if find_version() is None else ["fa4", "flex", "flash"]
    return [
        part("step", "MFU with each kernel", *(f"genesis-packed+model.attention={kernel}" for kernel in kernels)),
        part("step-free", "MFU without determinism, and of a bare loop", free, "bare"),
    ]


def _large_batch(kind: str) -> tuple[str, ...]:
    """Returns the sequences of a micro-batch with which three contenders fit the device: 8 take 37 GiB each."""
    properties = None if is_host(kind) else read_properties(kind)
    is_large = properties is not None and properties.total_memory > 120 * 2**30
    return ("--micro_batch_size", "8" if is_large else "2")


def _compile(kind: str, size: str) -> tuple[str, ...]:
    return ("--compile",) if kind in _COMPILED and size != _TINY else ()


def _plan_lora(kind: str, size: str) -> list[SessionPart]:
    """Returns adapters on a base of 8 billion parameters in 16 bits and in 4, with and without recomputed blocks."""
    adapted = "genesis-packed+model.adapter.rank=16"
    model = ("--model", "9m") if size == _TINY else ("--config", str(ROOT / "configs/finetune/qwen3-8b-nf4.yaml"))
    rounds = ("--pairs", "1", "--burst_steps", "2") if size == _TINY else ("--pairs", "3", "--burst_steps", "4")
    parts = []
    for name, recomputed in (("", ""), ("-recomputed", "+trainer.strategy.activation_checkpointing=block")):
        contenders = ",".join(f"{adapted}+base_dtype={base}{recomputed}" for base in ("bfloat16", "nf4"))
        given = (*model, *rounds, "--warmup_steps", "3", "--micro_batch_size", "2", "--contenders", contenders)
        words = _run(kind, "benchmarks", "step", *given, *_compile(kind, size), "--out", OUT)
        parts.append(SessionPart(f"step-lora-8b{name}", "tokens per second of LoRA on 8B, in bf16 and NF4", words, 120))
    return parts if kind == "cuda" or size == _TINY else []


def _plan_float8(kind: str, size: str) -> list[SessionPart]:
    contender = "genesis-packed+model.float8={}"
    words = _step(kind, size, contender, *_large_batch(kind), *_compile(kind, size))
    part = SessionPart("step-float8", "MFU with float8 products", words, 120, needs="torchao")
    return [part] if kind == "cuda" else []


def _plan_tests(kind: str, size: str) -> list[SessionPart]:
    """Returns the tests that need a GPU, and what the doctor asks beside them."""
    is_parallel = importlib.util.find_spec("xdist") is not None
    workers = ("-n", str(min(_MAX_TEST_WORKERS, os.cpu_count() or 1))) if is_parallel else ()
    tests = ("-m", PYTEST, "-v", "-rfE", *_NO_PLUGINS, *workers, "-m", "cuda", str(ROOT / "tests/cuda"))
    doctor = _run(kind, "genesis", "doctor", "--parts", "devices,proof,copies", "--out", OUT)
    return [
        SessionPart("tests", "the tests that need a GPU", tests, 300, needs="tests/cuda"),
        SessionPart("doctor", "does the device do what training needs", doctor, 90),
    ]


def _plan_saves(kind: str, size: str) -> list[SessionPart]:
    """Returns saves of 600 million parameters to memory and to the disk, and of adapters beside a billion others."""
    is_tiny = size == _TINY
    modes = ("--modes", "baseline,process" if is_tiny else "baseline,process-overlapped", "--pairs", "1")
    whole = ("--model", "tiny" if is_tiny else "600m", *modes)
    model = ("--model", "tiny") if is_tiny else ("--config", str(ROOT / "configs/genesis-1b.yaml"))
    lora = (*model, "--adapter_rank", "16", *modes)
    memory, disk = ("--dir", _MEMORY), ("--dir", SCRATCH)
    return [
        SessionPart(name, question, _run(kind, "benchmarks", "checkpoint", *words, "--out", OUT), seconds, needs=needs)
        for name, question, words, seconds, needs in (
            ("save-memory", "what a save to memory costs", (*whole, *memory), 60, _MEMORY),
            ("save-disk", "what a save to the disk costs", (*whole, *disk), 60, None),
            ("lora", "steps and saves of LoRA on a billion frozen parameters", (*lora, *memory), 90, _MEMORY),
        )
    ]


def _plan_peers(kind: str, size: str) -> list[SessionPart]:
    """Returns genesis beside trainers of others, as far as they are installed."""
    return [
        SessionPart(
            f"step-beside-{peer}",
            f"tokens per second beside {peer}",
            _step(kind, size, "genesis,bare", "--peers", peer, "--micro_batch_size", "2", *_compile(kind, size)),
            90,
            needs=package,
        )
        for peer, package in (("transformers", "accelerate"), ("litgpt", "litgpt"))
    ]


def _plan_small_cards(kind: str, size: str) -> list[SessionPart]:
    memory = () if is_host(kind) or read_properties(kind) is None else ("--memory_gib", "24")
    question = "tokens per second and memory on a card of 24 GB"
    return [
        SessionPart(
            f"step-micro-batch-{batch}{'-compiled' if compiled else ''}",
            question,
            _step(kind, size, "genesis", "--micro_batch_size", str(batch), *memory, *compiled),
            60,
        )
        for batch in (1, 2)
        for compiled in ((), ("--compile",))
        if not compiled or kind in _COMPILED
    ]
