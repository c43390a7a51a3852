"""How many sequences an epoch of a recipe's corpus has, for its number of steps or its epochs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from genesis.data.manifest import MANIFEST_NAME, read_manifest
from genesis.data.packing import CUT_EVENLY, KEPT_WHOLE, count_train_sequences
from genesis.operations.plan.padding import PackingShare


@dataclass(frozen=True)
class Epoch:
    """An epoch of a corpus.

    Args:
        packing: The packing that the recipe trains with.
        num_sequences: Its sequences, of all sources.
        is_exact: Whether they are counted; otherwise they are the tokens divided by the length, without padding.
    """

    packing: str
    num_sequences: int
    is_exact: bool


def find_epoch(corpus: Path, packing: str | None, seq_len: int, planned: Sequence[PackingShare]) -> Epoch | None:
    """Returns an epoch of a corpus, in pairs if it has pairs of answers; None if the corpus is not here.

    Args:
        corpus: The directory of the corpus.
        packing: `data.packing`, or `answers` where each document is one; None for the default of the corpus.
        seq_len: Tokens of a sequence.
        planned: The packings of the corpus that are planned.
    """
    if not (corpus / MANIFEST_NAME).is_file():
        return None
    manifest = read_manifest(corpus)
    if manifest.is_paired:
        return Epoch("pairs", sum(source.num_documents for source in manifest.train) // 2, is_exact=True)
    if packing == "answers":
        return Epoch(packing, sum(source.num_documents for source in manifest.train), is_exact=True)
    chosen = packing or (CUT_EVENLY if manifest.chat is None else KEPT_WHOLE)
    tokens = [source.num_tokens for source in manifest.train]
    if chosen == CUT_EVENLY:
        return Epoch(chosen, sum(count_train_sequences(count, seq_len) for count in tokens), is_exact=True)
    plan = next((one for one in planned if (one.packing, one.seq_len) == (chosen, seq_len)), None)
    if plan is not None:
        return Epoch(chosen, plan.num_sequences, is_exact=True)
    num_documents = sum(source.num_documents for source in manifest.train)
    least = sum(-(-count // seq_len) for count in tokens)
    return Epoch(chosen, least if chosen == KEPT_WHOLE else max(least, num_documents), is_exact=False)
