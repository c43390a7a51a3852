"""Reads what a plan needs of the content of a recipe of `genesis fit`, without Lightning."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import UserError
from genesis.data.sizes import resolve_recipe
from genesis.model.attend.table import AUTO, FLASH, FLEX, KERNELS
from genesis.model.decoder import DecoderConfig
from genesis.model.precision import FULL, MIXED
from genesis.model.recipe import build_decoder_config, read_adapter_config, read_decoder_config
from genesis.model.recomputation import check_checkpointing, check_groups
from genesis.objectives.find import find_objective
from genesis.objectives.objective import Objective
from genesis.objectives.teacher import RunningTeacher
from genesis.operations.plan.choices import check_choices
from genesis.operations.plan.layout import FLOAT32_BYTES, HALF_BYTES, PRECISIONS, Layout, Workload
from genesis.operations.plan.reader import Reader
from genesis.optim.offload_share import read_cpu_offload, read_share
from genesis.optim.recipe import read_algorithm
from genesis.recipe.run_length import count_steps_of_tokens

_CPU: Final = "cpu"
_MOST_LAYERS: Final = 4096
MOST_RANKS: Final = 65_536
"""A plan counts the tensors of each rank, so that its time and memory grow with their number."""
_STRATEGY_NAMES: Final = {
    **dict.fromkeys(("auto", "Replicated", "replicated", "ddp"), "replicated"),
    **dict.fromkeys(("Sharded", "sharded"), "sharded"),
}
_DTYPES: Final = {"float32": FLOAT32_BYTES, "bfloat16": HALF_BYTES}


@dataclass(frozen=True)
class SaveOptions:
    """Which checkpoints a run writes and keeps.

    Args:
        every_n_steps: Steps between two saves; None for none by steps.
        keep_last: Number of the newest that stay; None for all.
        keep_every_n_steps: Those at multiples stay, too.
        has_optimizer: Whether the optimizer's states are saved.
    """

    every_n_steps: int | None
    keep_last: int | None
    keep_every_n_steps: int | None
    has_optimizer: bool


@dataclass(frozen=True)
class Recipe:
    """What a plan needs of a recipe.

    Args:
        workload: What is trained.
        layout: Its own strategy.
        saves: Its checkpoints.
        num_steps: Steps of the run; None if only the data or the user end it.
        num_epochs: Epochs of the run, if they say how long it is; None otherwise.
        run_dir: The run's directory.
        corpus: The corpus, if it trains on one.
        packing: How documents are packed; None for the default of the corpus.
        prefetch_windows: Windows that are prepared ahead.
        assumptions: What the recipe does not tell.
    """

    workload: Workload
    layout: Layout
    saves: SaveOptions
    num_steps: int | None
    num_epochs: int | None
    run_dir: str
    corpus: str | None
    packing: str | None
    prefetch_windows: int
    assumptions: tuple[str, ...]


def read_recipe(
    content: Mapping[str, Any],
    where: str,
    *,
    num_ranks: int | None = None,
    base_dtype: str | None = None,
    teacher_file: Path | None = None,
) -> Recipe:
    """Returns what a plan needs of a recipe's content.

    Args:
        content: The merged content; a decoder's fields alone are a recipe of defaults.
        where: The files' names, for messages.
        num_ranks: Number of devices; None for the recipe's.
        base_dtype: The dtype of a frozen base; None to assume one.
        teacher_file: A recipe or a decoder's fields, for the shape of a teacher that is not here; None without.

    Raises:
        UserError: A value is missing or invalid.
    """
    if "model" not in content and "dim" in content:
        content = {"model": {"decoder": content}}
    read = Reader(content, where)
    assumptions: list[str] = []
    decoder_content = read.get("model.decoder")
    decoder = build_decoder_config(decoder_content, where=f"{where}: model.decoder")
    if decoder.num_layers > _MOST_LAYERS:
        raise UserError(
            f"{where}: model.decoder: num_layers is {decoder.num_layers}: it must be at most {_MOST_LAYERS}"
        )
    check_choices(content, decoder, where)
    adapter = read_adapter_config(content, where)
    is_cpu = read.get("trainer.accelerator", "auto") == _CPU
    precision = _read_precision(read, assumptions, is_cpu=is_cpu)
    base_bytes = FLOAT32_BYTES
    if adapter is not None:
        if base_dtype is None:
            base_dtype = "bfloat16" if precision.startswith("bf16") else "float32"
            assumptions.append(f"the frozen base is in {base_dtype}; --base_dtype has the choice")
        base_bytes = _DTYPES[base_dtype]
    elif base_dtype is not None:
        raise UserError(
            f"--base_dtype is {base_dtype}, but {where} has no adapters, so that no weights are frozen: leave it out"
        )
    objective = find_objective(read.get("model.objective"))
    num_ranks = num_ranks or _read_devices(read, assumptions)
    if num_ranks > MOST_RANKS:
        raise UserError(
            f"trainer.devices and trainer.num_nodes make {num_ranks} ranks: a plan has at most {MOST_RANKS}; lower them"
        )
    layout = _read_layout(read, num_ranks)
    read = Reader(resolve_recipe(content, decoder.max_seq_len, num_ranks), where)
    seq_len = read.count("data.seq_len", decoder.max_seq_len)
    micro_batch_size = read.count("data.micro_batch_size", 1)
    global_batch_size = read.count("data.global_batch_size", layout.num_ranks * micro_batch_size)
    num_rows = 0
    if objective.learns_from == "prompts":
        answers = read.count("data.prompts.group_size", 8)
        num_rows = _count_answer_rows(read, global_batch_size * answers, num_ranks)
        global_batch_size *= answers
        assumptions.append(f"a step trains {answers} answers to each prompt; a rank writes {num_rows} at a time")
    options = read.get("model.objective.init_args", {})
    running = objective.find_running_teacher(options)
    teacher, teacher_bytes = _read_teacher(objective, running, teacher_file, assumptions)
    workload = Workload(
        decoder=decoder,
        adapter=adapter,
        base_bytes=base_bytes,
        optimizer=read_algorithm(read.get("model.optimizer"), f"{where}: model.optimizer"),
        objective=objective,
        seq_len=seq_len,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        precision=precision,
        is_cpu=is_cpu,
        attention=_read_attention(read, assumptions, is_cpu=is_cpu),
        teacher=teacher,
        teacher_bytes=teacher_bytes,
        teacher_top_k=64 if running is None else running.top_k,
        num_answer_rows=num_rows,
    )
    if seq_len > decoder.max_seq_len:
        raise UserError(
            f"data.seq_len is {seq_len}, longer than model.decoder.max_seq_len {decoder.max_seq_len}: lower seq_len"
        )
    return Recipe(
        workload=workload,
        layout=layout,
        saves=SaveOptions(
            every_n_steps=read.optional_count("checkpoint.every_n_steps"),
            keep_last=read.optional_count("checkpoint.keep_last"),
            keep_every_n_steps=read.optional_count("checkpoint.keep_every_n_steps"),
            has_optimizer=read.get("checkpoint.save_optimizer", True) is not False,
        ),
        num_steps=_count_steps(read, seq_len, global_batch_size),
        num_epochs=_count_epochs(read),
        run_dir=str(read.get("run_dir", "runs/default")),
        corpus=read.get("data.corpus") if isinstance(read.get("data.corpus"), str) else None,
        packing=read.get("data.packing"),
        prefetch_windows=read.count("data.prefetch_windows", 2, least=0),
        assumptions=tuple(assumptions),
    )


def _count_epochs(read: "Reader") -> int | None:
    """Returns the epochs of a run, if its length is in epochs."""
    if read.optional_count("trainer.max_steps") is not None:
        return None
    return read.optional_count("data.num_epochs") or read.optional_count("trainer.max_epochs")


def _count_steps(read: "Reader", seq_len: int, global_batch_size: int) -> int | None:
    """Returns the steps of a run, unless its length is in epochs."""
    if _count_epochs(read) is not None:
        return None
    num_tokens = read.optional_count("data.num_tokens")
    max_steps = read.optional_count("trainer.max_steps")
    if num_tokens and not max_steps:
        return count_steps_of_tokens(num_tokens, position=0, seq_len=seq_len, global_batch_size=global_batch_size)
    return max_steps or read.optional_count("schedule.total_updates")


def _class_name(value: Any) -> str | None:
    path = value.get("class_path") if isinstance(value, Mapping) else value
    return path.rpartition(".")[2] if isinstance(path, str) else None


def _read_precision(read: Reader, assumptions: list[str], *, is_cpu: bool) -> str:
    if read.get("model.float8") is not None:
        assumptions.append(
            "model.float8 is not counted: memory and speed are those of the precision; float8 keeps less and is faster"
        )
    given = read.get("trainer.precision", FULL)
    if given == "auto":
        found = FULL if is_cpu else MIXED
        assumptions.append(f"precision auto is {found} on this kind of device")
        return found
    spelled = {32: FULL, "32": FULL, "bf16": MIXED, 16: "16-mixed", "16": "16-mixed"}.get(given, given)
    if spelled not in PRECISIONS:
        raise UserError(f"trainer.precision is {given!r}: it must be one of {', '.join(PRECISIONS)}, auto")
    return str(spelled)


def _read_attention(read: Reader, assumptions: list[str], *, is_cpu: bool) -> str:
    given = read.get("model.attention", AUTO)
    if given == AUTO:
        if is_cpu:
            return FLASH.name
        assumptions.append(f"attention auto is counted as {FLEX.name}, which GPUs since Ampere have")
        return FLEX.name
    if given not in KERNELS:
        raise UserError(f"model.attention is {given!r}: it must be {AUTO}, {', '.join(KERNELS)}")
    return str(given)


def _read_devices(read: Reader, assumptions: list[str]) -> int:
    devices = read.get("trainer.devices", "auto")
    nodes = read.count("trainer.num_nodes", 1)
    named = devices if isinstance(devices, list) else [part.strip() for part in str(devices).split(",")]
    if isinstance(devices, list) or len(named) > 1:
        if not named or not all(str(part).isdecimal() for part in named):
            raise UserError(
                f"trainer.devices is {devices!r}: give a number of at least 1, auto, or indices such as 0,1"
            )
        return len(named) * nodes
    if named[0].isdecimal() and int(named[0]) > 0:
        return int(named[0]) * nodes
    if named[0] not in ("auto", "-1"):
        raise UserError(
            f"trainer.devices is {devices!r}: give a number of at least 1, auto, or indices such as 0,1; --gpus "
            "compares several numbers"
        )
    if read.get("trainer.accelerator", "auto") != _CPU:
        assumptions.append("one device; --gpus has the number")
    return nodes


def _read_common(read: Reader, options: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Returns the fields of a layout that every strategy has."""
    checkpointing = options.get("activation_checkpointing", "none")
    check_checkpointing(checkpointing)
    together = read.count("trainer.strategy.init_args.blocks_per_recomputation", 1)
    has_offload = options.get("activation_offload") is True
    check_groups(checkpointing, together, has_offload=has_offload)
    share = read_share("optimizer_offload", options.get("optimizer_offload", 0.0))
    return {
        "num_ranks": num_ranks,
        "activation_checkpointing": checkpointing,
        "blocks_per_recomputation": together,
        "activation_offload": has_offload,
        "optimizer_offload": share,
        "has_compiled_blocks": options.get("compile_blocks") is True,
    }


def _read_layout(read: Reader, num_ranks: int) -> Layout:
    given = _class_name(read.get("trainer.strategy")) or "auto"
    name = _STRATEGY_NAMES.get(given)
    if name is None:
        raise UserError(
            f"trainer.strategy is {given!r}: a plan knows genesis.strategies.Replicated and "
            "genesis.strategies.Sharded; choose one of them"
        )
    options = read.get("trainer.strategy.init_args", {})
    if not isinstance(options, Mapping):
        raise UserError(f"trainer.strategy.init_args is {options!r}: it must be a mapping of options")
    for option in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
        degree = read.count(f"trainer.strategy.init_args.{option}", 1)
        if degree > 1:
            raise UserError(f"{option} is {degree}, and a plan knows data and expert parallelism alone: set it to 1")
    common = _read_common(read, options, num_ranks)
    if name == "replicated":
        is_zero = options.get("optimizer_states") == "sharded"
        alone = Layout("one device", **common)
        return alone if num_ranks == 1 else replace(alone, strategy="zero1" if is_zero else "replicated")
    shard = options.get("shard", "full")
    if shard not in ("full", "grad_op", "hybrid"):
        raise UserError(f"trainer.strategy.init_args.shard is {shard!r}: it must be full, grad_op or hybrid")
    group = num_ranks
    if shard == "hybrid":
        group = options.get("ranks_per_shard_group") or min(num_ranks, 8)
        if type(group) is not int or group < 1 or num_ranks % group:
            raise UserError(f"ranks_per_shard_group {group} does not divide {num_ranks} ranks")
    gather = options.get("gather_dtype")
    per_unit = read.count("trainer.strategy.init_args.blocks_per_unit", 1)
    check_groups(
        common["activation_checkpointing"],
        common["blocks_per_recomputation"],
        per_unit,
        has_offload=common["activation_offload"],
    )
    return Layout(
        shard,
        ranks_per_shard_group=group,
        cpu_offload=read_cpu_offload(options.get("cpu_offload", False)),
        blocks_per_unit=per_unit,
        max_gathers_in_flight=read.count("trainer.strategy.init_args.max_gathers_in_flight", 2),
        expert_parallel=read.count("trainer.strategy.init_args.expert_parallel", 1),
        gather_bytes=None if gather is None else _DTYPES.get(gather, FLOAT32_BYTES),
        reduce_bytes=_DTYPES.get(options.get("reduce_dtype", "float32"), FLOAT32_BYTES),
        reduces_each=options.get("gradient_reduction") == "micro_batch",
        keeps_gathered=options.get("keep_gathered") is True,
        **common,
    )


def _count_answer_rows(read: Reader, answers_per_step: int, num_ranks: int) -> int:
    """Returns the answers that a rank writes at the same time."""
    num_rows = read.count("data.prompts.num_rows", 64)
    return min(num_rows, -(-answers_per_step * read.count("data.prompts.steps_per_rollout", 4) // num_ranks))


def _read_teacher(
    objective: type[Objective], running: RunningTeacher | None, file: Path | None, assumptions: list[str]
) -> tuple[DecoderConfig | None, int]:
    """Returns a teacher that runs, if its shape is known, and the bytes of an element of its weights."""
    if not objective.has_teacher:
        if file is not None:
            raise UserError(
                f"--teacher is {file}, but the objective is {objective.__name__}, which has no teacher: leave it out"
            )
        return None, FLOAT32_BYTES
    if running is None:
        assumptions.append("the teacher's probabilities come from a cache: no teacher runs")
        return None, FLOAT32_BYTES
    files = [Path(running.path) / name for name in ("config.yaml", "recipe.yaml")] if file is None else [file]
    found = next((path for path in files if file is not None or path.is_file()), None)
    if found is None:
        assumptions.append(
            f"the teacher {running.path} is not here, so that it is not counted; --teacher FILE gives its decoder"
        )
        return None, FLOAT32_BYTES
    if running.dtype is None:
        assumptions.append(
            "the teacher's weights are in float32; model.objective.init_args.teacher_dtype has the choice"
        )
    return read_decoder_config(found), FLOAT32_BYTES if running.dtype in (None, "float32") else HALF_BYTES
