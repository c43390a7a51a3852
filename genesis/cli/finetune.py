"""`genesis finetune`."""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Final, get_args

from genesis.base.arguments import Parser, respell
from genesis.base.errors import UserError, check_is_named
from genesis.cli.export import PROOFS, check_can_prove
from genesis.cli.option_names import check_names
from genesis.cli.plan import split_overrides
from genesis.data.prepare import MAX_VALIDATION_FRACTION
from genesis.operations.commands import StepFailedError
from genesis.operations.finetune import VALIDATION_FRACTION, YAML, Finetuning, Method, Request, name_directory
from genesis.recipe.resolved import list_overrides
from genesis.recipe.run_length import check_lengths

_DESCRIPTION = """Fine-tunes a model on your data: imports it, prepares the data, trains, measures the loss on held-out
data before and after, and exports. Each part is a command of Genesis, which is printed, so that you can run it
yourself. The same call continues after any interruption. Options of `genesis fit` change the training, those
without a dot in their name after --: --data.num_epochs 1.
Example: genesis finetune Qwen/Qwen3-0.6B chat.jsonl"""
_USAGE = "genesis finetune MODEL DATA [DATA ...] [--lora | --full | --nf4] [--out DIR] [-- OPTIONS OF FIT]"
_OWN: Final = (
    *("--run_dir", "--ckpt_path", "--config", "--fork", "--print_config", "--data.corpus", "--model.adapter.base"),
    "--checkpoint.run_dir",
)
_HELP: Final = {
    "lora": "train adapters of rank 16 (the default)",
    "full": "train all weights; a plan warns if the memory here will not suffice",
    "nf4": "train adapters beside a base in 4 bits a weight",
}


def main(argv: list[str]) -> int:
    """Runs `genesis finetune` and returns its exit status: that of the part that fails."""
    end = argv.index("--") if "--" in argv else len(argv)
    own, overrides = split_overrides(argv[:end])
    arguments = _build_parser().parse_args(own)
    options = (*(f"--{name}={value}" for name, value in overrides), *respell(argv[end + 1 :]))
    for word in options:
        if word.partition("=")[0] in _OWN:
            raise UserError(f"{word.partition('=')[0]} is set by `genesis finetune` itself: leave it out")
    check_names("fit", options)
    check_lengths(list_overrides(options))
    check_can_prove("finetune")
    method: Method = arguments.method or "lora"
    if method != "full" and find_spec("peft") is None:
        raise UserError("`genesis finetune` of adapters needs peft; pip install 'genesis-lm[export]'")
    check_is_named(arguments.model, "MODEL")
    data, fraction = tuple(arguments.data), arguments.validation_fraction
    is_described = any(path.endswith(YAML) for path in data)
    if is_described and (len(data) > 1 or fraction is not None):
        raise UserError("a YAML file names all data and what is held out: give it alone, without --validation_fraction")
    if fraction is None and not is_described:
        fraction = VALIDATION_FRACTION
    if fraction is not None and not 0 <= fraction <= MAX_VALIDATION_FRACTION:
        raise UserError(f"--validation_fraction is {fraction}: it must be from 0 to {MAX_VALIDATION_FRACTION}")
    request = Request(arguments.model, data, method, fraction, options)
    try:
        Finetuning(request, arguments.out or name_directory(request), arguments.proof).execute()
    except StepFailedError as error:
        if error.status < 0:
            raise
        return error.status  # the part has printed why
    return 0


def _build_parser() -> Parser:
    parser = Parser(
        "genesis finetune", usage=_USAGE, description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory in Hugging Face's layout, a model on the Hub, or an import")
    add(
        "data",
        metavar="DATA",
        nargs="+",
        help="files or directories of conversations, of preferred and rejected answers, or of text; or one YAML file\n"
        "for `genesis data prepare`, which describes them",
    )
    methods = parser.add_mutually_exclusive_group()
    for method in get_args(Method):
        methods.add_argument(f"--{method}", dest="method", action="store_const", const=method, help=_HELP[method])
    add("--out", type=Path, metavar="DIR", help="directory of all results (default runs/MODEL-DATA)")
    add(
        "--validation_fraction",
        type=float,
        help=f"share of the documents held out for the losses before and after (default {VALIDATION_FRACTION})",
    )
    add(
        "--proof",
        choices=PROOFS,
        default=PROOFS[0],
        help="what the import and the exports compare with transformers (default %(default)s)",
    )
    return parser
