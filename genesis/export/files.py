"""The names of what lies in an exported directory, and its tensors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from safetensors import safe_open
from torch import Tensor

DECODER_PREFIX: Final = "model.decoder."
"""Of the decoder's tensors in a checkpoint."""
CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_DERIVED_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints of transformers have it beside the weights; it follows from rope_theta."""
CARD_NAME = "README.md"
PROOF_NAME = "proof.json"


def read_file_names(directory: Path) -> dict[str, str]:
    """Returns each tensor's file, as transformers finds it."""
    index = directory / INDEX_NAME
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        return weight_map
    with safe_open(directory / WEIGHTS_NAME, framework="pt") as file:
        return dict.fromkeys(file.keys(), WEIGHTS_NAME)


def iterate_tensors(directory: Path, names: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a directory of safetensors files, file by file, but for what follows from the shape."""
    for file_name in sorted(set(names.values())):
        with safe_open(directory / file_name, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if not name.endswith(_DERIVED_SUFFIX):
                    yield name, file.get_tensor(name)
