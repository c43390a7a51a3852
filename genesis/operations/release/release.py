"""Turns an export into a versioned folder for the Hub: its proved files, a card with licence and proof, and hashes."""

from pathlib import Path

from genesis.base.errors import UserError
from genesis.huggingface.directory import CARD_NAME, PROOF_NAME, check_files, read_json
from genesis.operations.release.card import LICENSE_NAME, write_release_card
from genesis.operations.release.folder import Folder
from genesis.operations.release.options import ReleaseOptions
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES, read_file, read_text


def plan_release(export: Path, options: ReleaseOptions) -> Folder:
    """Returns the folder of a release, which contains only the export's proved files.

    Args:
        export: A directory that `genesis export` wrote; every file is compared with its hash in the proof.
        options: The options of the release.

    Raises:
        UserError: The directory is not an export or has changed since its proof, or a file cannot be read.
    """
    if not export.is_dir():
        raise UserError(f"no such directory: {export}; give one that `genesis export` wrote")
    proved = check_files(export)
    proof = read_json(export / PROOF_NAME)
    folder = Folder(taken={name: (export / name, record["sha256"]) for name, record in proved.items()})
    folder.texts[PROOF_NAME] = read_file(export / PROOF_NAME, MAX_DOCUMENT_BYTES)
    folder.texts[CARD_NAME] = write_release_card(_read(export / CARD_NAME), proof, options).encode()
    if options.license_file is not None:
        folder.texts[LICENSE_NAME] = _read(options.license_file).encode()
    folder.add_sums()
    return folder


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read {path}: {reason}") from None
