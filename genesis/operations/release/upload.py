"""Uploads a folder to the Hub: repository, files in one commit, tag."""

import hashlib
from pathlib import Path
from typing import Final, Literal

from huggingface_hub import HfApi, errors, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile

from genesis.base.errors import UserError
from genesis.operations.release.folder import SUMS_NAME
from genesis.operations.release.options import ReleaseOptions
from genesis_callbacks.base.untrusted import read_file

_HTTP_ERROR: type[Exception] = vars(errors)["HTTPError"]
"""The base class of HTTP errors: of httpx or its successor, depending on the version of huggingface_hub."""
_REPLACED: Final = ["*.safetensors", "*.json", "*.model", "*.whl"]
"""Files of an earlier version that would still be loaded or installed: the commit deletes those that are not new."""


def check_can_upload(what: Path) -> None:
    """Checks that there is a token for the Hub.

    Raises:
        UserError: There is no token.
    """
    if get_token() is None:
        raise UserError(
            f"no token for the Hub was found, so {what} was not uploaded: run `hf auth login`, or set HF_TOKEN, and "
            "run the same command again"
        )


def upload(folder: Path, options: ReleaseOptions, repo_type: Literal["model", "space"], *, is_private: bool) -> str:
    """Uploads a finished folder and returns its address; an equal folder under the same tag is not changed.

    Args:
        folder: The folder to upload.
        options: Repository and version.
        repo_type: The type of the repository; a space runs the Dockerfile in the folder.
        is_private: Whether a new repository is private.

    Raises:
        UserError: The Hub cannot be reached or refuses the upload, or has another folder under this tag. The local
            folder is not changed.
    """
    check_can_upload(folder)
    api, message = HfApi(library_name="genesis-lm"), f"Version {options.version}"
    try:
        sdk = "docker" if repo_type == "space" else None
        url = api.create_repo(options.repo, repo_type=repo_type, private=is_private, exist_ok=True, space_sdk=sdk)
        if options.tag in {tag.name for tag in api.list_repo_refs(options.repo, repo_type=repo_type).tags}:
            if not _holds(api, folder, options, repo_type):
                raise UserError(
                    f"{url} already has a different version {options.version}: give another one by --version"
                )
            return str(url)
        commit = api.upload_folder(
            repo_id=options.repo,
            repo_type=repo_type,
            folder_path=folder,
            commit_message=message,
            delete_patterns=_REPLACED,
        )
        api.create_tag(options.repo, repo_type=repo_type, tag=options.tag, revision=commit.oid, tag_message=message)
    except UserError:
        raise
    except (HfHubHTTPError, ValueError) as error:  # a ValueError reports an invalid card
        reason = getattr(error, "server_message", None) or str(error)
        raise UserError(_explain(api, folder, f"refuses: {_one_line(reason)}")) from None
    except (_HTTP_ERROR, OSError, RuntimeError) as error:  # the upload of a single file fails with a RuntimeError
        reason = f"{error} {error.__cause__ or ''}"
        raise UserError(_explain(api, folder, f"cannot be reached: {_one_line(reason)}")) from None
    return str(url)


def _holds(api: HfApi, folder: Path, options: ReleaseOptions, repo_type: str) -> bool:
    """Returns whether the repository has this folder under the tag, by git's hash of the list of hashes."""
    sums = read_file(folder / SUMS_NAME)
    blob_id = hashlib.sha1(b"blob %d\0" % len(sums) + sums, usedforsecurity=False).hexdigest()
    found = api.get_paths_info(options.repo, [SUMS_NAME], revision=options.tag, repo_type=repo_type)
    return [file.blob_id for file in found if isinstance(file, RepoFile)] == [blob_id]


def _explain(api: HfApi, folder: Path, reason: str) -> str:
    return f"{api.endpoint} {reason}; {folder} is complete: run the same command again to continue"


def _one_line(text: str) -> str:
    return " ".join(text.split())
