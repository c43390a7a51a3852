"""The tokenizer in the identity of a fit's checkpoints: what it does decides, not how its files are written."""

from collections.abc import Mapping
from pathlib import Path

from genesis.base.errors import UserError
from genesis.generate.checkpoint_reference import Reference
from genesis.tokenizer.open import has_tokenizer
from genesis_callbacks.checkpoint import CheckpointError, read_manifest

_KEY = "tokenizer_hash"


def keep_tokenizer_hash(identity: Mapping[str, str], restored: Reference | None, path: str | None) -> dict[str, str]:
    """Returns the identity of a fit, with the hash that the checkpoint has if that one means the same tokenizer.

    A checkpoint of an earlier version has a hash of the files' bytes, and so has a corpus.

    Args:
        identity: The identity of the data of training.
        restored: The checkpoint from which the run continues.
        path: Where the run's tokenizer lies; None if it has none.
    """
    try:
        recorded = "" if restored is None else read_manifest(restored.find_checkpoint(level=None)).identity.get(_KEY)
        if path is not None and recorded and identity.get(_KEY) and has_tokenizer(Path(path), recorded):
            return {**identity, _KEY: recorded}
    except (UserError, CheckpointError, OSError):
        pass  # found out, and reported, when the run is restored
    return dict(identity)
