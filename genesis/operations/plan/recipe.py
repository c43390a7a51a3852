"""What a plan needs of a resolved recipe of `genesis fit`."""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from genesis.base.determinism import check_deterministic
from genesis.base.errors import UserError, numbered
from genesis.data.sizes import resolve_recipe
from genesis.generate.checkpoint_reference import read_reference
from genesis.generate.load import find_decoder_config
from genesis.model.adapter import BASE_FORMATS, AdapterConfig, BaseFormat, attach_adapters
from genesis.model.attend.table import AUTO, FLASH, FLEX, KERNELS
from genesis.model.decoder import DecoderConfig, build_model
from genesis.model.float8 import check_float8
from genesis.model.precision import FULL, MIXED
from genesis.model.recipe import build_decoder_config, read_adapter_config, read_decoder_config, read_float8_options
from genesis.model.recomputation import check_checkpointing, check_groups
from genesis.objectives.find import find_objective
from genesis.objectives.objective import Objective
from genesis.objectives.teacher import RunningTeacher
from genesis.operations.plan.layout import FLOAT32_BYTES, HALF_BYTES, PRECISIONS, Layout, Workload
from genesis.optim.offload_share import read_cpu_offload, read_share
from genesis.optim.recipe import read_algorithm
from genesis.recipe.options import Options
from genesis.recipe.resolved import ResolvedRecipe
from genesis.recipe.run_length import count_steps_of_tokens
from genesis.train.adapter_base import find_adapter_base

_CPU: Final = "cpu"
_MOST_LAYERS: Final = 4096
MOST_RANKS: Final = 65_536
"""A plan counts the tensors of each rank, so that its time and memory grow with their number."""
_REPLICATED, _SHARDED = "genesis.strategies.Replicated", "genesis.strategies.Sharded"
_STRATEGY_NAMES: Final = {**dict.fromkeys(("auto", "replicated", "ddp"), _REPLICATED), "sharded": _SHARDED}
_NO_BYTES: Final = frozenset({"desync_seconds", "process_group_backend", "timeout_seconds"})
"""Options of strategies on which neither memory nor speed depends."""
_DEGREES: Final = ("expert_parallel", "tensor_parallel", "context_parallel", "pipeline_parallel", "stages_per_rank")
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


class IndivisibleError(UserError):
    """The degrees of the recipe's strategy do not divide a number of ranks."""


def read_recipe(
    recipe: ResolvedRecipe,
    *,
    num_ranks: int | None = None,
    base_dtype: str | None = None,
    teacher_file: Path | None = None,
    chooses: bool = False,
) -> Recipe:
    """Returns what a plan needs of a recipe.

    Args:
        recipe: The recipe; one with a decoder alone is trained by the defaults.
        num_ranks: Number of devices; None for the recipe's.
        base_dtype: The dtype of a frozen base; None to assume one.
        teacher_file: A recipe or a decoder's fields, for the shape of a teacher that is not here; None without.
        chooses: Whether a layout is to be chosen, so that ranks that the recipe's degrees do not divide are no mistake.

    Raises:
        UserError: A value is missing or invalid.
    """
    where = recipe.where
    assumptions: list[str] = []
    recipe.check_classes()
    decoder = build_decoder_config(recipe.get("model.decoder"), where=f"{where}: model.decoder")
    adapter = read_adapter_config(recipe.content, where)
    if decoder.body is not None:
        raise UserError(f"{where}: {_describe_body(decoder, adapter)}")
    if decoder.num_layers > _MOST_LAYERS:
        raise UserError(
            f"{where}: model.decoder: num_layers is {decoder.num_layers}: it must be at most {_MOST_LAYERS}"
        )
    check_choices(recipe, decoder)
    is_cpu = recipe.get("trainer.accelerator") == _CPU
    precision = _read_precision(recipe, assumptions, is_cpu=is_cpu)
    if adapter is None and base_dtype is not None:
        raise UserError(
            f"--base_dtype is {base_dtype}, but {where} has no adapters, so that no weights are frozen: leave it out"
        )
    base = BASE_FORMATS["float32"] if adapter is None else _choose_base(recipe, base_dtype, precision, assumptions)
    objective = find_objective(recipe.get("model.objective"))
    num_ranks = num_ranks or _read_devices(recipe, assumptions)
    if num_ranks > MOST_RANKS:
        raise UserError(
            f"trainer.devices and trainer.num_nodes make {numbered(num_ranks, 'ranks')}: a plan has at most "
            f"{MOST_RANKS}; lower them"
        )
    try:
        layout = _read_layout(recipe, num_ranks, assumptions)
    except IndivisibleError as error:
        if not chooses:
            raise
        assumptions.append(f"the recipe's layout is left out: {error}")
        layout = _read_layout(recipe, num_ranks, [], has_degrees=False)
    recipe = resolve_recipe(recipe, layout.data_ranks, objective.learns_from)
    seq_len = recipe.count("data.seq_len", decoder.max_seq_len)
    micro_batch_size = recipe.count("data.micro_batch_size", 1)
    global_batch_size = recipe.count("data.global_batch_size", layout.data_ranks * micro_batch_size)
    objective.check_micro_batch(micro_batch_size)
    num_rows = 0
    if objective.learns_from == "prompts":
        answers = recipe.count("data.prompts.group_size")
        num_rows = _count_answer_rows(recipe, global_batch_size * answers, layout.data_ranks)
        global_batch_size *= answers
        assumptions.append(f"a step trains {answers} answers to each prompt; a rank writes {num_rows} at a time")
    options = recipe.get("model.objective.init_args", {})
    running = objective.find_running_teacher(options)
    teacher, teacher_bytes = _read_teacher(objective, running, teacher_file, assumptions)
    workload = Workload(
        decoder=decoder,
        adapter=adapter,
        base=base,
        optimizer=read_algorithm(recipe.get("model.optimizer"), f"{where}: model.optimizer"),
        objective=objective,
        seq_len=seq_len,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        precision=precision,
        is_cpu=is_cpu,
        attention=_read_attention(recipe, assumptions, is_cpu=is_cpu),
        teacher=teacher,
        teacher_bytes=teacher_bytes,
        teacher_top_k=64 if running is None else running.top_k,
        reward_models=_find_reward_models(recipe, assumptions),
        num_answer_rows=num_rows,
        scores_without_adapters=adapter is not None and objective.scores_without_adapters(options),
    )
    if seq_len > decoder.max_seq_len:
        raise UserError(
            f"data.seq_len is {seq_len}, longer than model.decoder.max_seq_len {decoder.max_seq_len}: lower seq_len"
        )
    return Recipe(
        workload=workload,
        layout=layout,
        saves=SaveOptions(
            every_n_steps=recipe.optional_count("checkpoint.every_n_steps"),
            keep_last=recipe.optional_count("checkpoint.keep_last"),
            keep_every_n_steps=recipe.optional_count("checkpoint.keep_every_n_steps"),
            has_optimizer=recipe.get("checkpoint.save_optimizer") is not False,
        ),
        num_steps=_count_steps(recipe, seq_len, global_batch_size),
        num_epochs=_count_epochs(recipe),
        run_dir=str(recipe.get("run_dir")),
        corpus=recipe.get("data.corpus") if isinstance(recipe.get("data.corpus"), str) else None,
        packing="answers" if objective.learns_from == "answers" else recipe.get("data.packing"),
        prefetch_windows=recipe.count("data.prefetch_windows", least=0),
        assumptions=tuple(assumptions),
    )


def _choose_base(recipe: ResolvedRecipe, given: str | None, precision: str, assumptions: list[str]) -> BaseFormat:
    """Returns the format of the frozen base: as given, that of the checkpoint if it is here, or the usual one."""
    found = None if given is not None else _find_base_format(recipe)
    if found is not None:
        kind = "NF4" if found.is_nf4 else str(found.dtype).removeprefix("torch.")
        assumptions.append(f"the frozen base is in {kind}, as its checkpoint is; --base_dtype has the choice")
        return found
    if given is None:
        given = "bfloat16" if precision.startswith("bf16") else "float32"
        assumptions.append(f"the frozen base is in {given}; --base_dtype has the choice")
    return BASE_FORMATS[given]


def _find_base_format(recipe: ResolvedRecipe) -> BaseFormat | None:
    """Returns the format of the checkpoint of the base; None if it is not here."""
    named = [path for key in ("model.adapter.base", "ckpt_path") if isinstance(path := recipe.get(key), str)]
    for path in named:
        try:
            checkpoint = read_reference(path).find_checkpoint(level=None)
            return find_adapter_base(None, checkpoint).format
        except UserError:  # a plan may be made elsewhere than the training
            continue
    return None


def _describe_body(decoder: DecoderConfig, adapter: AdapterConfig | None) -> str:
    """Returns why a model of another library has no plan, and what is known of its memory."""
    with torch.device("meta"):
        model = build_model(decoder)
        if adapter is not None:
            attach_adapters(model, adapter)
    trained, frozen = (
        sum(one.numel() for one in model.parameters() if one.requires_grad == is_trained)
        for is_trained in (True, False)
    )
    return (
        f"the model is of another library ({type(decoder.body).__name__}), whose blocks a plan does not measure. "
        f"Weights, gradients and two moments of {numbered(trained, 'trained parameters')} take "
        f"{16e-9 * trained:.2f} GB in float32, and {numbered(frozen, 'frozen ones')} {4e-9 * frozen:.2f} GB, or half "
        "in bfloat16; activations are extra: train with --trainer.max_steps 3 and read memory/peak_bytes in metrics.csv"
    )


def _count_epochs(recipe: ResolvedRecipe) -> int | None:
    """Returns the epochs of a run, if its length is in epochs."""
    if recipe.optional_count("trainer.max_steps") is not None:
        return None
    return recipe.optional_count("data.num_epochs") or recipe.optional_count("trainer.max_epochs")


def _count_steps(recipe: ResolvedRecipe, seq_len: int, global_batch_size: int) -> int | None:
    """Returns the steps of a run, unless its length is in epochs."""
    if _count_epochs(recipe) is not None:
        return None
    num_tokens = recipe.optional_count("data.num_tokens")
    max_steps = recipe.optional_count("trainer.max_steps")
    if num_tokens and not max_steps:
        return count_steps_of_tokens(num_tokens, position=0, seq_len=seq_len, global_batch_size=global_batch_size)
    return max_steps or recipe.optional_count("schedule.total_updates")


def check_choices(recipe: ResolvedRecipe, decoder: DecoderConfig) -> None:
    """Refuses float8 and kernels that are no choice, of which a plan or a description needs no value.

    Raises:
        UserError: A value is invalid, or a pattern of float8 matches no layer.
    """
    check_deterministic(recipe.get("trainer.deterministic"))
    check_float8(decoder, read_float8_options(recipe.content, recipe.where))


def _read_precision(recipe: ResolvedRecipe, assumptions: list[str], *, is_cpu: bool) -> str:
    if recipe.get("model.float8") is not None:
        assumptions.append(
            "model.float8 is not counted: memory and speed are those of the precision; float8 keeps less and is faster"
        )
    given = recipe.get("trainer.precision", "auto")
    if given == "auto":
        found = FULL if is_cpu else MIXED
        assumptions.append(f"precision auto is {found} on this kind of device")
        return found
    spelled = {32: FULL, "32": FULL, "bf16": MIXED, 16: "16-mixed", "16": "16-mixed"}.get(given, given)
    if spelled not in PRECISIONS:
        raise UserError(f"trainer.precision is {given!r}: it must be one of {', '.join(PRECISIONS)}, auto")
    return str(spelled)


def _read_attention(recipe: ResolvedRecipe, assumptions: list[str], *, is_cpu: bool) -> str:
    given = recipe.get("model.attention")
    if given == AUTO:
        if is_cpu:
            return FLASH.name
        assumptions.append(f"attention auto is counted as {FLEX.name}, which GPUs since Ampere have")
        return FLEX.name
    if given not in KERNELS:
        raise UserError(f"model.attention is {given!r}: it must be {AUTO}, {', '.join(KERNELS)}")
    return str(given)


def _read_devices(recipe: ResolvedRecipe, assumptions: list[str]) -> int:
    devices = recipe.count_devices()
    if devices is None and recipe.get("trainer.accelerator") != _CPU:
        assumptions.append("one device; --gpus has the number")
    return (devices or 1) * recipe.count("trainer.num_nodes")


def _read_layout(recipe: ResolvedRecipe, num_ranks: int, assumptions: list[str], *, has_degrees: bool = True) -> Layout:
    choice = recipe.find_choice("trainer.strategy")
    path = _REPLICATED if choice is None else _STRATEGY_NAMES.get(choice.path, choice.path)
    if path not in (_REPLICATED, _SHARDED):
        raise UserError(f"trainer.strategy is {path!r}: a plan knows {_REPLICATED} and {_SHARDED}; choose one of them")
    defaults = {name: option.default for name, option in Options.read().classes[path].items()}
    options = {**defaults, **({} if choice is None else choice.options)}
    if not has_degrees:
        options |= {name: defaults[name] for name in (*_DEGREES, "layers_per_stage", "shard", "ranks_per_shard_group")}
    layout = _read_sharded(options, num_ranks) if path == _SHARDED else _read_replicated(options, num_ranks)
    if recipe.get("model.float8") is not None:
        for name in ("tensor_parallel", "pipeline_parallel"):
            if getattr(layout, name) > 1:
                raise UserError(
                    f"trainer.strategy.{name} is {getattr(layout, name)}, which does not train with model.float8: "
                    "leave out one of the two"
                )
    assumptions += [
        f"trainer.strategy.{name} {value} is not counted"
        for name, value in options.items()
        if name not in _NO_BYTES and value != defaults.get(name)
    ]
    return layout


def _read_replicated(options: dict[str, Any], num_ranks: int) -> Layout:
    """Returns the layout of a strategy, and removes the options that it has from `options`."""
    alone = _read_common(options, num_ranks)
    states = options.pop("optimizer_states")
    return alone if num_ranks == 1 else replace(alone, strategy="zero1" if states == "sharded" else "replicated")


def _read_sharded(options: dict[str, Any], num_ranks: int) -> Layout:
    """Returns the layout of a strategy, and removes the options that it has from `options`."""
    per_unit = _count(options, "blocks_per_unit")
    common = _read_common(options, num_ranks, per_unit)
    degrees: dict[str, Any] = {name: _count(options, name) for name in _DEGREES}
    per_stage, rest = divmod(num_ranks, degrees["pipeline_parallel"])
    if rest or not per_stage:
        raise IndivisibleError(
            f"trainer.strategy: pipeline_parallel {degrees['pipeline_parallel']} does not divide "
            f"{numbered(num_ranks, 'ranks')}: lower it, or change trainer.devices (--gpus)"
        )
    shard, group = options.pop("shard"), options.pop("ranks_per_shard_group")
    group = (group or min(per_stage, 8)) if shard == "hybrid" else per_stage
    if type(group) is not int or group < 1 or per_stage % group:
        raise IndivisibleError(f"ranks_per_shard_group {group} does not divide {per_stage} ranks")
    shared = prod(degrees[name] for name in ("tensor_parallel", "context_parallel", "pipeline_parallel"))
    if num_ranks % shared or group % (degrees["tensor_parallel"] * degrees["context_parallel"]):
        given = " * ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        groups = f" in shard groups of {group}" if shard == "hybrid" else ""
        raise IndivisibleError(
            f"trainer.strategy: {given} does not divide {numbered(num_ranks, 'ranks')}{groups}: lower a degree, or "
            "change trainer.devices (--gpus)"
        )
    gather, layers = options.pop("gather_dtype"), options.pop("layers_per_stage")
    if degrees["pipeline_parallel"] == 1 and (degrees["stages_per_rank"] > 1 or layers is not None):
        option = "layers_per_stage" if layers is not None else "stages_per_rank"
        raise UserError(f"{option} is given, and pipeline_parallel is 1: set it to 2 or more, or remove {option}")
    if layers is not None and not (isinstance(layers, list) and all(type(number) is int for number in layers)):
        raise UserError(f"trainer.strategy.layers_per_stage is {layers!r}: it must be a list of whole numbers")
    return replace(
        common,
        strategy=shard,
        ranks_per_shard_group=group,
        cpu_offload=read_cpu_offload(options.pop("cpu_offload")),
        blocks_per_unit=per_unit,
        max_gathers_in_flight=_count(options, "max_gathers_in_flight"),
        **degrees,
        layers_per_stage=None if layers is None else tuple(layers),
        gather_bytes=None if gather is None else _DTYPES[gather],
        reduce_bytes=_DTYPES[options.pop("reduce_dtype")],
        reduces_each=options.pop("gradient_reduction") == "micro_batch",
        keeps_gathered=options.pop("keep_gathered") is True,
    )


def _read_common(options: dict[str, Any], num_ranks: int, per_unit: int = 1) -> Layout:
    """Returns a layout with the options of every strategy, and removes them from `options`."""
    checkpointing, together = options.pop("activation_checkpointing"), _count(options, "blocks_per_recomputation")
    has_offload = options.pop("activation_offload") is True
    check_checkpointing(checkpointing)
    check_groups(checkpointing, together, per_unit, has_offload=has_offload)
    return Layout(
        num_ranks=num_ranks,
        activation_checkpointing=checkpointing,
        blocks_per_recomputation=together,
        activation_offload=has_offload,
        optimizer_offload=read_share("optimizer_offload", options.pop("optimizer_offload")),
        has_compiled_blocks=options.pop("compile_blocks") is True,
    )


def _count(options: dict[str, Any], name: str) -> int:
    value = options.pop(name)
    if type(value) is not int or value < 1:
        raise UserError(f"trainer.strategy.{name} is {value!r}: it must be a whole number of at least 1")
    return value


def _count_answer_rows(recipe: ResolvedRecipe, answers_per_step: int, num_ranks: int) -> int:
    """Returns the answers that a rank writes at the same time."""
    num_rows = recipe.count("data.prompts.num_rows")
    return min(num_rows, -(-answers_per_step * recipe.count("data.prompts.steps_per_rollout") // num_ranks))


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
        assumptions.append("the teacher's probabilities come from a cache or a server: no teacher runs here")
        return None, FLOAT32_BYTES
    found = _find_decoder(running.path) if file is None else read_decoder_config(file)
    if found is None:
        assumptions.append(
            f"the teacher {running.path} is not here, so that it is not counted; --teacher FILE gives its decoder"
        )
        return None, FLOAT32_BYTES
    if running.dtype is None:
        assumptions.append(
            "the teacher's weights are in float32; model.objective.init_args.teacher_dtype has the choice"
        )
    return found, FLOAT32_BYTES if running.dtype in (None, "float32") else HALF_BYTES


def _find_decoder(path: str) -> DecoderConfig | None:
    """Returns the shape of a model, as far as it is here: a plan may be made elsewhere than the training."""
    file = next((file for name in ("config.yaml", "recipe.yaml") if (file := Path(path) / name).is_file()), None)
    if file is not None:
        return read_decoder_config(file)
    try:
        return find_decoder_config(path)
    except UserError:
        return None


def _find_reward_models(recipe: ResolvedRecipe, assumptions: list[str]) -> tuple[DecoderConfig, ...]:
    """Returns the models that score answers, whose shapes are known; each is loaded once."""
    rewards = recipe.get("data.prompts.rewards") or []
    paths = dict.fromkeys(str(one["model"]) for one in rewards if one.get("model") is not None)
    found = {path: _find_decoder(path) for path in paths}
    assumptions += [
        f"the reward model {path} is not here, so that it is not counted"
        if decoder is None
        else f"the weights of the reward model {path} are in float32"
        for path, decoder in found.items()
    ]
    return tuple(decoder for decoder in found.values() if decoder is not None)
