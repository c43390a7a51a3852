"""`genesis model describe`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.table import Table

from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.errors import UserError, numbered
from genesis.cli.options import PLAIN_WIDTH
from genesis.cli.quiet import warned_in_one_line
from genesis.huggingface.shape import find_family
from genesis.model.adapter import BASE_FORMATS
from genesis.model.describe import (
    Description,
    TrainingMemory,
    build_without_memory,
    describe,
    describe_training,
)
from genesis.model.recipe import build_decoder_config, dump_decoder_config, read_adapter_config
from genesis.operations.plan.recipe import check_choices
from genesis.optim.build import count_moment_bytes
from genesis.optim.recipe import read_algorithm
from genesis.recipe.resolved import ResolvedRecipe

_DESCRIPTION = """Prints the parameters of a model by part, its FLOPs per token and its memory, without building it.
Example: genesis model describe --config configs/genesis-1b.yaml"""


def describe_main(argv: list[str]) -> int:
    """Runs `genesis model describe` and returns its exit status."""
    parser = Parser(prog="genesis model describe", description=_DESCRIPTION)
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        required=True,
        help="YAML file: a recipe of `genesis fit`, or a decoder's fields alone; several are merged",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--base_dtype",
        choices=tuple(BASE_FORMATS),
        default="float32",
        help="type of the frozen weights, if the recipe has adapters (default %(default)s)",
    )
    arguments = parser.parse_args(argv)
    with warned_in_one_line():
        recipe = ResolvedRecipe.read(arguments.config)
    recipe.check_classes()
    decoder = build_decoder_config(recipe.get("model.decoder"), where=recipe.where)
    check_choices(recipe, decoder)
    description, adapter = describe(decoder), read_adapter_config(recipe.content, recipe.where)
    algorithm = read_algorithm(recipe.get("model.optimizer"), f"{recipe.where}: model.optimizer")
    try:
        family, obstacle = find_family(description.config).model_type, None
    except UserError as error:
        family, obstacle = None, str(error)
    base = BASE_FORMATS[arguments.base_dtype]
    memory = describe_training(decoder, adapter, base)
    optimizer_bytes = count_moment_bytes(build_without_memory(decoder, adapter, base), algorithm)
    if arguments.json:
        shown = {**asdict(description), "config": dump_decoder_config(description.config)}
        shown["num_parameters"] = description.num_parameters
        shown["exported_as"] = family
        if shown.pop("num_inactive_parameters"):
            shown["num_active_parameters"] = description.num_active_parameters
        if adapter is None:
            shown |= {"gradients_bytes": memory.gradients_bytes, "optimizer_bytes": optimizer_bytes}
        else:
            shown["adapter"] = {**asdict(memory), "optimizer_bytes": optimizer_bytes}
            shown["adapter"]["base_dtype"] = arguments.base_dtype
        print(json.dumps(shown, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
        table = _table_of(description, recipe.where)
        _add_training(table, description, memory, None if adapter is None else arguments.base_dtype)
        algorithms = " and ".join(type(one).__name__ for one in algorithm.parts)
        types = "float32" if algorithm.find_row_block(adapter) == 1 else "8 bits and float32"
        table.add_row("moments", _gib(optimizer_bytes), f"{types}; of {algorithms}")
        trained = memory.frozen_bytes + memory.weights_bytes + memory.gradients_bytes + optimizer_bytes
        table.add_row("training state", _gib(trained), "without activations; divided by the ranks that shard it")
        if decoder.body is None:
            cache = f"{description.kv_cache_bytes_per_token:,} B"
            table.add_row("key-value cache", cache, "per token of context, bfloat16")
            note = "for transformers" if family else "not for transformers"
            table.add_row("exported as", family or "safetensors", note)
        console.print(table)
        if obstacle is not None:
            print(obstacle)
    return 0


def _table_of(description: Description, title: str) -> Table:
    config, total = description.config, description.num_parameters
    table = Table(box=box.SIMPLE, title=title, title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("")
    for part, count in description.parameters.items():
        if not count:  # a model of another library has other parts
            continue
        note = "tied to the embedding" if part == "output" and config.has_tied_embeddings else f"{count / total:.1%}"
        table.add_row(f"parameters: {part.replace('_', '-')}", f"{count:,}", note)
    table.add_row("parameters", f"{total:,}", f"{total / 1e6:,.0f}M" if total >= 1e7 else f"{total / 1e6:.1f}M")
    if description.num_inactive_parameters:
        active = description.num_active_parameters
        table.add_row("  active", f"{active:,}", f"{active / total:.1%}; a token sees only some of the experts")
    table.add_section()
    attention = description.attention_flops_per_token
    table.add_row("FLOPs per token", f"{description.flops_per_token:.3e}", "forward and backward, without attention")
    table.add_row(
        "  with attention",
        f"{description.flops_per_token + attention:.3e}",
        f"at {numbered(config.max_seq_len, 'tokens')}",
    )
    table.add_section()
    return table


def _add_training(table: Table, description: Description, memory: TrainingMemory, base_dtype: str | None) -> None:
    """Adds the rows of weights and gradients; `base_dtype` is None without adapters."""
    if base_dtype is None:
        table.add_row("weights", _gib(description.weights_bytes), "float32; half of it in bfloat16")
    else:
        share = memory.num_trained / description.num_parameters
        table.add_row("trained parameters", f"{memory.num_trained:,}", f"{share:.2%} of the model's")
        table.add_row("frozen weights", _gib(memory.frozen_bytes), f"{base_dtype}; see --base_dtype")
        table.add_row("adapters, trained weights", _gib(memory.weights_bytes), "float32")
    table.add_row("gradients", _gib(memory.gradients_bytes), "float32")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
