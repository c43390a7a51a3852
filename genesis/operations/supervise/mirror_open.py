"""Opens the second place of a mirror by its path or URL."""

from pathlib import Path

from genesis.base.errors import UserError
from genesis.data.remote import strip_local
from genesis.data.store import StoreOptions, is_url
from genesis.operations.supervise.mirror_directory import DirectoryPlace
from genesis.operations.supervise.mirror_place import Place
from genesis.operations.supervise.mirror_store import StorePlace


def open_place(url: str) -> Place:
    """Returns the place at a path or URL.

    Raises:
        StoreError: The store does not respond.
        UserError: The value is empty, or the store is unknown or refuses access.
    """
    if not url.strip():
        raise UserError(f"the mirror is {url!r}: give a directory, or a URL such as s3://bucket/runs/NAME")
    return StorePlace(url, StoreOptions.from_environment()) if is_url(url) else DirectoryPlace(Path(strip_local(url)))
