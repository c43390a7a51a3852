"""What a corpus's packings hold: the share of positions with a label, by the packings that were planned."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genesis.data.plans import PLANS_DIRECTORY
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import read_file


@dataclass(frozen=True)
class PackingShare:
    """A planned packing.

    Args:
        packing: Its name.
        seq_len: Tokens of a sequence.
        num_sequences: Sequences of an epoch.
        valid_share: Share of the positions whose labels count; the others are padding, or tokens that are only read.
    """

    packing: str
    seq_len: int
    num_sequences: int
    valid_share: float


def read_packings(corpus: Path) -> list[PackingShare]:
    """Returns the packings of a corpus, by name and length; empty if there is no corpus or none is planned."""
    found = []
    for path in sorted(corpus.glob(f"{PLANS_DIRECTORY}/*/plan.json")):
        share = _read_share(path)
        if share is not None:
            found.append(share)
    return found


def _read_share(path: Path) -> PackingShare | None:
    """Returns the figures of a plan over its sources; None if the file is not a whole plan, which `fit` reports."""
    try:
        content: Mapping[str, Any] = load_json(read_file(path))
        figures = [source["figures"] for source in content["sources"].values()]
        num_sequences = sum(int(one["num_sequences"]) for one in figures)
        num_valid = sum(int(one["num_valid_tokens"]) for one in figures)
        positions = num_sequences * int(content["seq_len"])
        return PackingShare(
            str(content["packing"]), int(content["seq_len"]), num_sequences, num_valid / positions if positions else 0.0
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
