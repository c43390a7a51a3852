"""The log-probabilities that a reference model gives to the answers of all pairs, computed once and kept in a file.

    32 bytes    a digest of the rest, whose key follows from `ReferenceIdentity`
    the rest    float32, little-endian: for each pair of the corpus that of the chosen and of the rejected answer

A file that another reference, corpus or precision made has another key, so that its digest never verifies.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from jaxtyping import Float32, Int64
from torch import Tensor

from genesis.base.errors import UserError, find_remedy
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.untrusted import read_file

_VERSION: Final = 1
_DIGEST_BYTES: Final = 32
_NAME_DIGITS: Final = 16


@dataclass(frozen=True)
class ReferenceIdentity:
    """What decides the log-probabilities, up to a device's rounding.

    Args:
        weights: The hash of the manifest of the reference's checkpoint.
        corpus: `CorpusManifest.tokens_hash` of the corpus of pairs.
        precision: The precision of the run.
        num_pairs: Number of pairs of the corpus, with its validation set.
    """

    weights: str
    corpus: str
    precision: str
    num_pairs: int

    @property
    def key(self) -> bytes:
        """The key of a file's digest."""
        return blake3(json.dumps([_VERSION, asdict(self)], sort_keys=True).encode()).digest()

    @property
    def file_name(self) -> str:
        """The name of the file."""
        return f"{self.key.hex()[:_NAME_DIGITS]}.log_probs"


class ReferenceLogProbs:
    """The log-probabilities of all pairs. Deterministic; no communication.

    Args:
        table: A row for each pair: that of the chosen and of the rejected answer.
    """

    def __init__(self, table: Float32[Tensor, "pairs 2"]) -> None:
        self._table = table

    def read(self, pairs: Int64[Tensor, " P"]) -> Float32[Tensor, " 2P"]:
        """Returns those of some pairs, chosen and rejected in turn; any numbers for pairs below 0."""
        if self._table.device != pairs.device:
            self._table = self._table.to(pairs.device)
        return self._table[pairs.clamp_min(0)].flatten()


def write_log_probs(path: Path, identity: ReferenceIdentity, table: Float32[Tensor, "pairs 2"]) -> None:
    """Writes a file atomically.

    Raises:
        UserError: The disk refuses the file.
    """
    data = table.cpu().numpy().astype("<f4").tobytes()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, blake3(data, key=identity.key).digest() + data)
    except OSError as error:
        raise UserError(
            f"cannot write the reference's log-probabilities to {path} ({error.strerror}); "
            f"{find_remedy(error) or 'fix the disk'}, and start again"
        ) from None


def read_log_probs(path: Path, identity: ReferenceIdentity) -> Float32[Tensor, "pairs 2"] | str:
    """Returns the log-probabilities in a file, or a line about why they cannot be used."""
    try:
        data = read_file(path, _DIGEST_BYTES + 8 * identity.num_pairs)
    except FileNotFoundError:
        return f"{path} does not exist"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    digest, values = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if len(values) != 8 * identity.num_pairs or blake3(values, key=identity.key).digest() != digest:
        return f"{path} is damaged, or was made with another reference, corpus or precision"
    return torch.from_numpy(np.frombuffer(values, "<f4").astype(np.float32).reshape(-1, 2))
