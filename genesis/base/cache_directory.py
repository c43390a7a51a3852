"""Where Genesis keeps what it can make again: copies of remote files, and which proofs of kernels have held."""

import os
from pathlib import Path


def find_cache_directory() -> Path:
    """Returns GENESIS_CACHE_DIR, or `genesis` in the user's cache directory; the directory may not exist yet."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("GENESIS_CACHE_DIR") or caches / "genesis")
