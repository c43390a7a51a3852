"""`genesis model add-tokens`."""

from pathlib import Path

from genesis.base.arguments import Parser
from genesis.base.run_directory import RunDirectory
from genesis.chat.render import read_template
from genesis.export.add_tokens import AddTokensOptions, add_tokens
from genesis.export.staging import check_is_new
from genesis.generate.checkpoint_reference import find_checkpoint
from genesis.model.recipe import build_decoder_config
from genesis.tokenizer.addition import TokenAddition
from genesis_callbacks.checkpoint import list_committed, read_manifest

_DESCRIPTION = """Adds special tokens to a model: the tokenizer gets the next ids for them, and embedding and output
weight get a row for each, near the mean of the existing rows. The result is a run's directory like that of an import;
all other weights and ids stay as they are. Without a TOKEN, --eos makes an existing token the end of texts. Train the
new rows with all weights, or beside adapters by --model.adapter.also_train.
Example: genesis model add-tokens runs/llama runs/llama-chat '<|im_start|>' '<|im_end|>' --eos '<|im_end|>'"""


def main(argv: list[str]) -> int:
    """Runs `genesis model add-tokens` and returns its exit status."""
    arguments = _build_parser().parse_args(argv)
    check_is_new(arguments.out)
    template = None if arguments.chat_template is None else read_template(arguments.chat_template).text
    addition = TokenAddition(tokens=tuple(arguments.tokens), eos=arguments.eos, chat_template=template)
    options = AddTokensOptions(multiple_of=arguments.multiple_of, seed=arguments.seed, tokenizer=arguments.tokenizer)
    checkpoint = find_checkpoint(arguments.model)
    report = add_tokens(checkpoint, arguments.out, addition, options)
    rows = report["num_rows"]
    print(f"{arguments.out}: {checkpoint} with {len(report['added_tokens'])} more special tokens")
    for token, number in report["added_tokens"].items():
        print(f"{number:>8}  {token}")
    print(f"rows of the embedding: {rows['before']:,} -> {rows['after']:,}")
    if arguments.eos is not None:
        print(f"documents and texts end with {arguments.eos}")
    print(f"train all weights: genesis fit --config {RunDirectory(arguments.out).imported_recipe} --data.corpus CORPUS")
    print(f"or adapters and these rows: the same with --model.adapter.also_train '{list_trained(arguments.out)}'")
    return 0


def list_trained(out: Path) -> str:
    """Returns the value of `model.adapter.also_train` that trains tokens' rows of the run's newest checkpoint."""
    path, _ = list_committed(out)[-1]
    config = build_decoder_config(read_manifest(path).recipe["model"]["decoder"], where=str(path))
    return "[embedding]" if config.has_tied_embeddings else "[embedding, head]"


def _build_parser() -> Parser:
    parser = Parser(prog="genesis model add-tokens", description=_DESCRIPTION)
    add = parser.add_argument
    add("model", type=Path, help="a run (its newest checkpoint), RUN/best, RUN/STEP, or the path of a checkpoint")
    add("out", type=Path, help="the run's directory to create; it must not exist")
    add("tokens", nargs="*", metavar="TOKEN", help="the spelling of a new special token, such as '<|tool|>'")
    add("--eos", metavar="TOKEN", help="the token, new or not, that ends documents and generated text from now on")
    add("--chat_template", type=Path, help="file of a Jinja chat template that becomes the tokenizer's own")
    add("--multiple_of", type=int, default=1, help="round the number of rows up to a multiple of this (default 1)")
    add("--seed", type=int, default=0, help="seed of the new rows (default 0)")
    add("--tokenizer", type=Path, help="tokenizer file or directory; default: the checkpoint's own tokenizer")
    return parser
