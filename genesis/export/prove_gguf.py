"""The proof of a GGUF file without llama.cpp: a separate process that reads it and compares it with the checkpoint.

weights      every tensor of the file has the bytes that the checkpoint's (average) tensor gives in its type
"""

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf import GGUFReader

from genesis.base.errors import UserError
from genesis.base.progress import sent_as_lines, stage
from genesis.export.gguf import iterate_stored, plan_file
from genesis.export.gguf_layout import StoredTensor
from genesis.export.proof import answer_request
from genesis.export.tensors import Source
from genesis.huggingface.shape import find_family
from genesis.model.decoder import DecoderConfig
from genesis.model.recipe import build_decoder_config
from genesis_callbacks.checkpoint import read_manifest

_PACKAGES = ("genesis-lm", "genesis-callbacks", "torch", "gguf")


class Proved(NamedTuple):
    """A file, and the model that it must hold.

    Attributes:
        path: The file.
        planned: The tensors that it must have.
        sources: The checkpoints.
        config: The model's shape.
    """

    path: Path
    planned: Sequence[StoredTensor]
    sources: Sequence[Source]
    config: DecoderConfig


def main(argv: Sequence[str]) -> int:
    """Runs the proof for the request, JSON in the first argument; prints the results as one line of JSON."""
    with sent_as_lines():
        return answer_request(argv, _prove)


def _prove(request: dict[str, Any]) -> dict[str, Any]:
    return {"weights": prove_weights(request)[1], "versions": list_versions()}


def list_versions(*packages: str) -> dict[str, str]:
    """Returns the versions of Python, of the packages that write the file, and of others."""
    return {"python": platform.python_version()} | {name: version(name) for name in (*_PACKAGES, *packages)}


def prove_weights(request: dict[str, Any]) -> tuple[Proved, dict[str, Any]]:
    """Compares the bytes of every tensor with those that the checkpoint gives, computed again.

    Raises:
        UserError: They differ.
    """
    paths = [Path(checkpoint) for checkpoint in request["checkpoints"]]
    sources = [Source(path, read_manifest(path), request["scaling"]) for path in paths]
    config = build_decoder_config(sources[0].manifest.recipe["model"]["decoder"], where=str(paths[0]))
    proved = Proved(
        Path(request["file"]), plan_file(sources, find_family(config), config, request["kind"]), sources, config
    )
    held = {tensor.name: tensor for tensor in GGUFReader(proved.path).tensors}
    if held.keys() != {stored.name for stored in proved.planned}:
        raise UserError("the file has other tensors than the checkpoint")
    num_values = 0
    with stage("comparing the weights", len(held), "tensors") as shown:
        for stored in shown.each(proved.planned):
            found = held[stored.name]
            ours = torch.cat([torch.from_numpy(block) for block in iterate_stored(stored, sources, config)])
            theirs = torch.from_numpy(found.data.reshape(-1).view("uint8").copy())
            if found.tensor_type != stored.kind or not torch.equal(ours, theirs):
                raise UserError(f"the values of {stored.name} differ from the checkpoint's")
            num_values += int(found.n_elements)
    return proved, {"compared": "every byte, from the checkpoint again", "num_values": num_values, "num_different": 0}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
