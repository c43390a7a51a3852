"""The way to the Hub: repository, files in one commit, tag."""

import hashlib
from pathlib import Path
from typing import Final, Literal

from huggingface_hub import HfApi, errors, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile

from genesis.errors import UserError
from genesis.release.folder import SUMS_NAME
from genesis.release.options import ReleaseOptions

_HTTP_ERROR: type[Exception] = vars(errors)["HTTPError"]
"""Of httpx or of its successor: which of them it uses, huggingface_hub alone knows."""
_REPLACED: Final = ["*.safetensors", "*.json", "*.model", "*.whl"]
"""What an older version has of these and this one has not would be loaded or installed: the commit deletes it."""


def check_can_upload(what: Path) -> None:
    """Refuses to begin without a token.

    Raises:
        UserError: There is none.
    """
    if get_token() is None:
        raise UserError(
            f"there is no token of the Hub, so {what} stays here: `hf auth login`, or set HF_TOKEN, and give the same "
            "command again"
        )


def upload(folder: Path, options: ReleaseOptions, repo_type: Literal["model", "space"], *, is_private: bool) -> str:
    """Uploads a finished folder and returns its address; what is there already, under this tag, is left as it is.

    Args:
        folder: What is uploaded, whole.
        options: Repository and version.
        repo_type: A space runs the Dockerfile in it.
        is_private: Of a repository that is not there yet.

    Raises:
        UserError: The Hub cannot be reached or refuses, or has another folder under this tag. Ours stays as it is.
    """
    check_can_upload(folder)
    api, message = HfApi(library_name="genesis-lm"), f"Version {options.version}"
    try:
        sdk = "docker" if repo_type == "space" else None
        url = api.create_repo(options.repo, repo_type=repo_type, private=is_private, exist_ok=True, space_sdk=sdk)
        if options.tag in {tag.name for tag in api.list_repo_refs(options.repo, repo_type=repo_type).tags}:
            if not _holds(api, folder, options, repo_type):
                raise UserError(f"{url} has another version {options.version} already: give another by --version")
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
    except (HfHubHTTPError, ValueError) as error:  # a ValueError is about the card's head
        reason = getattr(error, "server_message", None) or str(error)
        raise UserError(_explain(api, folder, f"refuses: {_one_line(reason)}")) from None
    except (_HTTP_ERROR, OSError, RuntimeError) as error:  # a RuntimeError is what a file's own upload ends with
        reason = f"{error} {error.__cause__ or ''}"
        raise UserError(_explain(api, folder, f"cannot be reached: {_one_line(reason)}")) from None
    return str(url)


def _holds(api: HfApi, folder: Path, options: ReleaseOptions, repo_type: str) -> bool:
    """Says whether the repository has this folder under the tag: the same list of hashes, by git's hash of it."""
    sums = (folder / SUMS_NAME).read_bytes()
    blob_id = hashlib.sha1(b"blob %d\0" % len(sums) + sums, usedforsecurity=False).hexdigest()
    found = api.get_paths_info(options.repo, [SUMS_NAME], revision=options.tag, repo_type=repo_type)
    return [file.blob_id for file in found if isinstance(file, RepoFile)] == [blob_id]


def _explain(api: HfApi, folder: Path, reason: str) -> str:
    return f"{api.endpoint} {reason}; {folder} is whole, and the same command goes on with it"


def _one_line(text: str) -> str:
    return " ".join(text.split())
