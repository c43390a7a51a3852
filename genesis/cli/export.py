"""`genesis export`."""

from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from genesis.base.arguments import Parser, read_size
from genesis.base.errors import UserError, numbered
from genesis.export.adapter import AdapterExportOptions, export_adapter
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.proof import UNPROVED_TOKENIZER, Layout
from genesis.export.proof_size import WHOLE_LONG_TOKENS
from genesis.export.tensors import DTYPES, GGUF_KINDS
from genesis.generate.checkpoint_reference import BEST, read_reference
from genesis_callbacks.checkpoint import list_committed

_LAYOUT: Layout = "huggingface"
PROOFS = ("sampled", "full", "weights")
"""How much is compared, of an import, too."""

_DESCRIPTION = """Exports a checkpoint to a new directory that transformers loads: its family's layout, a fast
tokenizer with identical ids, a model card from the manifest. The checkpoint is verified first.
At the end a separate process loads the directory with transformers, compares weights, tokens, logits and greedy text,
and writes proof.json. Several checkpoints, or --average N, export the mean of their weights.
A checkpoint with adapters is exported with --adapter, in PEFT's format, or with --merge, as a whole model.
With --gguf, one file for llama.cpp is written instead, and llama.cpp proves it if xllamacpp is installed.
Example: genesis export runs/demo/run exports/demo --dtype bfloat16"""


def main(argv: list[str]) -> int:
    """Runs `genesis export` and returns its exit status."""
    arguments = _build_parser().parse_args(argv)
    check_can_prove("export")
    if arguments.adapter and arguments.gguf is None:
        return _export_adapter(arguments)
    if arguments.gguf is not None:
        return _export_gguf(arguments)
    if arguments.base_name is not None:
        raise UserError("--base_name is written into adapters in PEFT's format: give --adapter, too, or leave it out")
    options = _read_options(arguments, arguments.format, arguments.dtype)
    checkpoints = _find_all(arguments)
    proof = export_checkpoints(checkpoints, arguments.out, options)
    print(f"{arguments.out}: {', '.join(path.name for path in checkpoints)} in {arguments.dtype}")
    print_proof(proof)
    if arguments.proof == "weights":
        print("logits and greedy text: not compared")
    return 0


def _read_options(arguments: Namespace, layout: Layout, dtype: str) -> ExportOptions:
    return ExportOptions(
        layout=layout,
        dtype=dtype,
        max_file_bytes=arguments.max_file_bytes,
        tokenizer=arguments.tokenizer,
        may_be_unproved=arguments.allow_unproved_tokenizer,
        is_merged=arguments.merge,
        compares_models=arguments.proof != "weights",
        is_whole=arguments.proof == "full",
    )


def _find_all(arguments: Namespace) -> list[Path]:
    """Returns the checkpoints whose mean is exported, oldest first."""
    if arguments.average < 1:
        raise UserError(f"--average is {arguments.average}: it must be at least 1")
    if len(arguments.checkpoint) > 1 and (arguments.average > 1 or arguments.best):
        raise UserError("--average and --best take the checkpoints of one run: give one run, or name each checkpoint")
    checkpoints = [_find(path, is_best=arguments.best) for path in arguments.checkpoint]
    return _newest(checkpoints[0], arguments.average) if arguments.average > 1 else checkpoints


def _export_gguf(arguments: Namespace) -> int:
    """Exports a GGUF file and returns the exit status."""
    kind = arguments.gguf.lower()
    if kind not in GGUF_KINDS:
        name, file = arguments.gguf.upper(), f"{arguments.out}/{arguments.out.name}-F16.gguf"
        raise UserError(
            f"--gguf is {arguments.gguf}: it must be one of {', '.join(GGUF_KINDS)}; llama.cpp makes all other types: "
            f"give --gguf f16, then `llama-quantize {file} {arguments.out.name}-{name}.gguf {name}`"
        )
    refused = {
        "--format": arguments.format != _LAYOUT,
        "--dtype": arguments.dtype != ExportOptions.dtype,
        "--max_file_bytes": arguments.max_file_bytes != ExportOptions.max_file_bytes,
        "--adapter": arguments.adapter,
        "--base_name": arguments.base_name is not None,
    }
    if given := [name for name, is_given in refused.items() if is_given]:
        raise UserError(f"{', '.join(given)}: --gguf writes one file in the type that it names; leave out one of both")
    if find_spec("gguf") is None:
        raise UserError("`genesis export --gguf` needs gguf; pip install 'genesis-lm[gguf]'")
    export_gguf: Callable[..., dict[str, Any]] = import_module("genesis.export.gguf").export_gguf
    checkpoints = _find_all(arguments)
    proof = export_gguf(checkpoints, arguments.out, _read_options(arguments, "gguf", kind))
    print(f"{arguments.out}: {', '.join(path.name for path in checkpoints)} in {kind}")
    print_proof(proof)
    if proof["num_of_16_bits"] and kind != "f16":
        print(f"{numbered(proof['num_of_16_bits'], 'matrices')} in 16 bits: their rows are no multiple of 32 values")
    if proof["num_other_stops"]:
        print(f"stops: llama.cpp stops at all but {proof['num_other_stops']} of the tokens that end a text")
    _print_llama_cpp(proof, is_asked=arguments.proof != "weights")
    return 0


def _print_llama_cpp(proof: dict[str, Any], *, is_asked: bool) -> None:
    """Prints the comparisons with llama.cpp, one line each."""
    scored, chat = proof.get("llama_cpp"), proof.get("chat")
    if scored is None:
        why = "xllamacpp is not installed: pip install 'genesis-lm[gguf]'" if is_asked else "--proof weights"
        print(f"llama.cpp: has not loaded the file, and nothing but the weights was compared ({why})")
        return
    print(
        f"llama.cpp: the next token's probabilities differ by {scored['divergence']:.2g} nats "
        f"(allowed {scored['allowed_divergence']:.2g})"
    )
    print(
        f"loss of a text: {scored['loss']:.4f} in llama.cpp, {scored['loss_of_the_checkpoint']:.4f} of the checkpoint"
    )
    if chat is not None and chat["is_equal"]:
        print("chat: a conversation has the same ids in llama.cpp")
    elif chat is not None:
        print(f"chat: a conversation has other ids in llama.cpp ({chat.get('problem', 'proof.json has both')})")


def _export_adapter(arguments: Namespace) -> int:
    """Exports the adapters of one checkpoint and returns the exit status."""
    if arguments.merge:
        raise UserError("--adapter writes the adapters alone and --merge the whole model: give one of them")
    if len(arguments.checkpoint) > 1 or arguments.average > 1:
        raise UserError("--adapter takes one checkpoint: a mean of adapters is no adapter")
    if find_spec("peft") is None:
        raise UserError("`genesis export --adapter` needs peft; pip install 'genesis-lm[export]'")
    checkpoint = _find(arguments.checkpoint[0], is_best=arguments.best)
    options = AdapterExportOptions(
        dtype=arguments.dtype,
        base_name=arguments.base_name,
        compares_models=arguments.proof != "weights",
        tokenizer=arguments.tokenizer,
        may_be_unproved=arguments.allow_unproved_tokenizer,
        is_whole=arguments.proof == "full",
    )
    proof = export_adapter(checkpoint, arguments.out, options)
    print(f"{arguments.out}: the adapters of {checkpoint.name} in {arguments.dtype}")
    print_proof(proof)
    if arguments.proof == "weights":
        print("logits: not compared")
    base = proof["base"]
    if base["imported_as"] is not None:
        print(
            f"base: PEFT loads these adapters beside an export of the base (genesis export BASE DIR), of type "
            f"{base['model_type']}; beside the {base['imported_as']} model that the base was imported from, it leaves "
            "out some of them"
        )
    return 0


def check_can_prove(command: str) -> None:
    """Refuses to start if a requirement of the proof is missing. Importing it to find out would take seconds.

    Raises:
        UserError: The extra is not installed.
    """
    if find_spec("transformers") is None:
        raise UserError(f"`genesis {command}` needs transformers; pip install 'genesis-lm[export]'")


def print_proof(proof: dict[str, Any]) -> None:
    """Prints the results of the comparisons, one line each."""
    num_values, num_merged = proof["weights"]["num_values"], proof["weights"].get("num_merged", 0)
    merged = f", {numbered(num_merged, 'merged values')} equal to one rounding" if num_merged else ""
    num_quantised = proof["weights"].get("num_quantised", 0)
    quantised = f", the 4 bits of {numbered(num_quantised, 'values')} computed twice and equal" if num_quantised else ""
    print(f"weights: {numbered(num_values - num_merged - num_quantised, 'values')} bit-equal{merged}{quantised}")
    tokenizer, logits, generation = (proof.get(key) for key in ("tokenizer", "logits", "generation"))
    if tokenizer:
        num_texts = sum(tokenizer["num_texts"].values())
        print(f"tokenizer: {numbered(num_texts, 'texts')} with equal ids and equal decoded text")
    if proof.get("tokenizer_origin") == "none":
        print("tokenizer: none, the model was trained on tokens without a tokenizer")
    if proof.get("tokenizer_form") == "own":
        print("tokenizer: exported as its own files, transformers has no equivalent")
    if proof.get("tokenizer_origin") == "unproved":
        print(f"tokenizer: unproved, {UNPROVED_TOKENIZER}")
    if logits:
        print(f"logits: differ by at most {logits['largest_difference']:.2g} (allowed {logits['tolerance']:.2g})")
        if not logits.get("has_long_sequence", True):
            is_compared = logits.get("left_out_tokens", 0) <= WHOLE_LONG_TOKENS
            more = "--proof full compares one" if is_compared else f"a proof has at most {WHOLE_LONG_TOKENS:,} tokens"
            print(f"logits: no sequence was longer than the window or the unscaled context: {more}")
    if nf4 := proof.get("nf4"):
        print(
            f"nf4: logits differ from those of the model's own weights by up to {nf4['largest_difference']:.2g} "
            f"(largest logit {nf4['largest_logit']:.2g}), and the most likely next token after "
            f"{nf4['num_tokens'] - nf4['num_same_choice']:,} of {numbered(nf4['num_tokens'], 'tokens')}"
        )
    if adapters := proof.get("adapters"):
        allowed = f"(allowed {adapters['tolerance']:.2g})"
        print(f"merged: logits differ from the adapters' by at most {adapters['largest_difference']:.2g} {allowed}")
    if generation:
        equal = f"{generation['num_equal']} of {numbered(generation['num_tokens'], 'tokens')} equal"
        is_parted = generation["parted_at_a_tie"]
        print(f"greedy text: {equal}{', up to two that are equally likely by the proof' if is_parted else ''}")


def _find(path: Path, *, is_best: bool) -> Path:
    reference = read_reference(path)
    return (reference.select(BEST) if is_best else reference).find_checkpoint(level="quick")


def _newest(checkpoint: Path, number: int) -> list[Path]:
    """Returns the last `number` checkpoints of a run up to `checkpoint`, oldest first."""
    paths = [path for path, _ in list_committed(checkpoint.parent)]
    if checkpoint not in paths:
        raise UserError(f"--average needs a checkpoint of a run, but {checkpoint} is in none; name each checkpoint")
    paths = paths[: paths.index(checkpoint) + 1]
    if len(paths) < number:
        raise UserError(
            f"--average is {number}, but {checkpoint.parent} has {numbered(len(paths), 'checkpoints')} up to that one"
        )
    return paths[-number:]


def _build_parser() -> Parser:
    parser = Parser(prog="genesis export", description=_DESCRIPTION)
    add = parser.add_argument
    add("checkpoint", type=Path, nargs="+", help="a run (its newest checkpoint), RUN/best, RUN/STEP, or a path")
    add("out", type=Path, help="the directory to create; it must not exist")
    add("--best", action="store_true", help="export the best checkpoint of a run instead of the newest")
    add("--adapter", action="store_true", help="export only the adapters of the checkpoint, in PEFT's format")
    add("--base_name", metavar="NAME", help="with --adapter: the name or path by which PEFT finds the base model")
    add("--merge", action="store_true", help="merge the adapters of the checkpoint into the weights of their base")
    add("--average", type=int, default=1, metavar="N", help="export the mean of the last N checkpoints up to this one")
    add(
        "--gguf",
        metavar="TYPE",
        help=f"write one file for llama.cpp, with its matrices in TYPE: {', '.join(GGUF_KINDS)}",
    )
    add("--dtype", choices=tuple(DTYPES), default="float32", help="type of the exported weights; default float32")
    add(
        "--format",
        choices=(_LAYOUT, "safetensors"),
        default=_LAYOUT,
        help="layout; safetensors writes only the tensors, under genesis' own names",
    )
    add(
        "--max_file_bytes",
        type=read_size,
        default=ExportOptions.max_file_bytes,
        metavar="SIZE",
        help="size above which the weights are split into several files, as 5GB (the default) or 512MiB",
    )
    add(
        "--proof",
        choices=PROOFS,
        default=PROOFS[0],
        help="what is compared with the checkpoint: sampled compares all weights, and as many tokens, logits and words "
        "of greedy text as take about a minute on two cores; full leaves nothing out; both take 4 bytes of memory per "
        "parameter, 8 with --merge or --adapter; weights compares weights and tokens (default %(default)s)",
    )
    add("--tokenizer", type=Path, help="tokenizer file or directory; default: the checkpoint's own tokenizer")
    add(
        "--allow_unproved_tokenizer",
        action="store_true",
        help="accept a --tokenizer whose hash differs from the run's; proof.json and the card report it",
    )
    return parser
