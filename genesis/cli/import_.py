"""`genesis import`."""

import argparse
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from genesis.base.arguments import Parser
from genesis.base.errors import UserError, check_is_named, numbered
from genesis.base.run_directory import RUNS_NAME, RunDirectory
from genesis.chat.learned import find_stop_ids
from genesis.chat.stops import describe_ends
from genesis.cli.add_tokens import list_trained
from genesis.cli.export import PROOFS, check_can_prove, print_proof
from genesis.export.hub import Download, download_model, read_hub_model
from genesis.export.importing import import_directory
from genesis.export.staging import check_is_new
from genesis.generate.checkpoint_reference import find_export
from genesis.huggingface.directory import describe_code
from genesis.tokenizer.losses import describe_losses
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer

_DESCRIPTION = """Converts a model in Hugging Face's layout into a run's directory with one committed checkpoint:
Llama, Mistral, Ministral, Mixtral, Qwen2, Qwen3, Qwen3-Next, Qwen3.5, Gemma 3, Phi-3, Phi-4, Granite,
OLMo 2, OLMo 3, OLMoE, ERNIE 4.5, GLM-4.5, GPT-OSS, dots.llm1, SmolLM2, SmolLM3,
DeepSeek-V2 or DeepSeek-V3 (and Moonlight).
Features that the decoder cannot represent are refused by name. The result is proved like an export, in
proof.json. A model on the Hub is downloaded first. `genesis generate` loads the directory; the recipe in the
directory trains from its weights in a new run.
Example: genesis import Qwen/Qwen3-0.6B runs/qwen
         genesis import exports/demo runs/old
         genesis fit --config runs/old/recipe.yaml --data.corpus corpora/demo"""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NF4 = "nf4"
_STORED = "stored"
_TRANSFORMERS, _REWARD_MODEL = "transformers", "reward_model"


def main(argv: list[str]) -> int:
    """Runs `genesis import` and returns its exit status."""
    arguments = _build_parser().parse_args(argv)
    check_can_prove("import")
    check_is_named(arguments.model, "the model")
    check_is_new(arguments.out)
    if arguments.kind == _TRANSFORMERS:
        _check_foreign(arguments)
    download = _find_download(arguments.model)
    directory = find_export(arguments.model) if download is None else download.directory
    options: dict[str, Any] = {
        "has_tokenizer": not arguments.no_tokenizer,
        "dtype": None if arguments.dtype == _STORED else _DTYPES.get(arguments.dtype, torch.float32),
        "download": download,
    }
    if arguments.kind != _TRANSFORMERS:
        options |= {"has_new_head": arguments.kind == _REWARD_MODEL, "is_nf4": arguments.dtype == _NF4}
        compared = {"compares_models": arguments.proof != "weights", "is_whole": arguments.proof == "full"}
        proof = import_directory(directory, arguments.out, **options, **compared)
    else:
        proof = import_module("genesis.export.foreign").import_foreign(directory, arguments.out, **options)
    print(f"{arguments.out}: a checkpoint of {arguments.model}")
    _print_kind(arguments.kind, proof)
    code = describe_code(directory)
    if code is not None:
        print(f"code of the model was not run: {code}; only the classes of Genesis and transformers were used")
    for start, number in proof.get("left_out", {}).items():
        print(
            f"left out: {numbered(number, 'tensors')} whose names begin with {start!r}: layers that predict further "
            "tokens, and models of other kinds beside the text model, are not imported"
        )
    if proof.get("is_dequantised"):
        print("dequantised: weights in FP8 or MXFP4 became bfloat16, and the proof is about these")
    print_proof(proof)
    if not arguments.no_tokenizer:
        tokenizer = open_tokenizer(arguments.out)
        lost = describe_losses(tokenizer)
        if lost is not None:
            print(lost)
        _print_turn_ends(tokenizer)
        _print_alike_stops(tokenizer, proof.get("alike_stops", {}), arguments)
    if arguments.proof == "weights":
        print("logits and greedy text: not compared")
    adapter = " --model.adapter.rank 16" if arguments.dtype == _NF4 else ""
    recipe = RunDirectory(arguments.out).imported_recipe
    print(f"train on: genesis fit --config {recipe} --data.corpus CORPUS{adapter}")
    return 0


def _check_foreign(arguments: argparse.Namespace) -> None:
    """Refuses options of imports into the decoder of Genesis, before a model is downloaded."""
    if arguments.proof != PROOFS[0]:
        raise UserError("--proof is of imports into the decoder of Genesis: leave it out beside --as transformers")
    if arguments.dtype in (_NF4, _STORED):
        raise UserError(
            f"--dtype {arguments.dtype} is for the decoder of Genesis: give bfloat16 beside --as transformers"
        )


def _print_kind(kind: str | None, proof: Mapping[str, Any]) -> None:
    """Prints what a model of another kind has of its own."""
    if proof.get("documents") == "rows":
        print("documents: each gets a padded row of its own, since this model does not keep packed ones apart")
    if kind == _REWARD_MODEL:
        print(
            "scores: the score head, one row in the place of the output weight, starts from random: train it (beside "
            "adapters by --model.adapter.also_train '[head]')"
        )


def _print_turn_ends(tokenizer: Tokenizer) -> None:
    """Prints what closes the assistant's turns if the model's own settings do not stop there."""
    added = sorted(find_stop_ids(tokenizer, None) - tokenizer.stop_ids)
    if added:
        own = describe_ends(sorted(tokenizer.stop_ids), tokenizer) or "nothing"
        print(
            f"the chat template ends the assistant's turns with {describe_ends(added, tokenizer)}, and the model's own "
            f"settings stop at {own} alone: generate, serve, training on prompts and export stop at both"
        )


def _print_alike_stops(tokenizer: Tokenizer, alike: Mapping[str, int], arguments: argparse.Namespace) -> None:
    """Prints which stops adapters cannot learn to write, because other control symbols have the same output weights."""
    for token, number in alike.items():
        others = numbered(number, "other control tokens")
        print(
            f"{describe_ends([int(token)], tokenizer)} and {others} have the same output weights, which were "
            "never trained: adapters alone cannot teach the model to end its answers; "
            + ("" if arguments.dtype == "float32" else "import it with --dtype float32, and ")
            + f"beside adapters, give --model.adapter.also_train '{list_trained(arguments.out)}'"
        )


def _find_download(model: str) -> Download | None:
    """Downloads a model that is named by its id on the Hub; None if the word names a directory, or nothing."""
    named = None if any(place.exists() for place in (Path(model), Path(RUNS_NAME, model))) else read_hub_model(model)
    return None if named is None else download_model(named, print)


def _build_parser() -> Parser:
    parser = Parser(
        prog="genesis import", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model",
        help="a directory with config.json, safetensors files and a tokenizer, or a model on the Hub: ORG/NAME, or "
        "ORG/NAME@REVISION with a branch, a tag or a commit",
    )
    parser.add_argument("out", type=Path, help="the run's directory to create; it must not exist")
    parser.add_argument(
        "--as",
        dest="kind",
        choices=(_TRANSFORMERS, _REWARD_MODEL),
        help="transformers: train the model by transformers' own classes, whatever its family; it can be trained and "
        "exported, but not served here. reward_model: begin a reward model, whose score head starts from random "
        "(default: the model as it is, by the decoder of Genesis)",
    )
    parser.add_argument("--no_tokenizer", action="store_true", help="import only the weights, not the tokenizer")
    parser.add_argument(
        "--dtype",
        choices=(*_DTYPES, _STORED, _NF4),
        default="float32",
        help="type of the checkpoint's weights: float32 to train all of them; bfloat16, if they are in it, for a base "
        "beside adapters, in half the memory; stored for the one of these that the files have; nf4 for a base "
        "whose linear layers have 4 bits a weight, which changes the model (default %(default)s)",
    )
    parser.add_argument(
        "--proof",
        choices=PROOFS,
        default=PROOFS[0],
        help="what is compared with transformers: sampled compares all weights, and as many tokens, logits and words "
        "of greedy text as take about a minute on two cores; full leaves nothing out; both take 4 bytes of memory per "
        "parameter; weights compares weights and tokens (default %(default)s)",
    )
    return parser
