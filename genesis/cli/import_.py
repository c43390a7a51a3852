"""`genesis import`."""

from pathlib import Path

from genesis.arguments import Parser
from genesis.checkpoint_reference import find_export
from genesis.cli.export import check_can_prove, print_proof
from genesis.export.importing import import_directory
from genesis.run_directory import RunDirectory

_DESCRIPTION = """Converts a model in Hugging Face's layout into a run's directory with one committed checkpoint:
Llama, Mistral, Qwen2, Qwen3, OLMo 2, SmolLM2 or SmolLM3. Features that the decoder cannot represent are refused
by name. The result is proved like an export, in proof.json.
`genesis generate` loads the directory; the recipe in the directory trains from its weights in a new run.
Example: genesis import exports/demo runs/old
         genesis fit --config runs/old/recipe.yaml --data.corpus corpora/demo"""


def main(argv: list[str]) -> int:
    """Runs `genesis import` and returns its exit status."""
    arguments = _build_parser().parse_args(argv)
    check_can_prove("import")
    directory = find_export(arguments.directory)
    proof = import_directory(directory, arguments.out, has_tokenizer=not arguments.no_tokenizer)
    print(f"{arguments.out}: a checkpoint of {arguments.directory}")
    print_proof(proof)
    print(f"train on: genesis fit --config {RunDirectory(arguments.out).imported_recipe} --data.corpus CORPUS")
    return 0


def _build_parser() -> Parser:
    parser = Parser(prog="genesis import", description=_DESCRIPTION)
    parser.add_argument("directory", type=Path, help="a directory with config.json, safetensors files and a tokenizer")
    parser.add_argument("out", type=Path, help="the run's directory to create; it must not exist")
    parser.add_argument("--no_tokenizer", action="store_true", help="import only the weights, not the tokenizer")
    return parser
