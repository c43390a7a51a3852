"""Downloads a model from the Hub, for `genesis import ORG/NAME`.

`config.json` is read before the weights are downloaded: a model that the decoder cannot represent costs a few
kilobytes. Of several formats in one repository only the safetensors files that transformers would load are downloaded.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from genesis.base.errors import UserError
from genesis.huggingface.directory import CONFIG_NAME, DATA_SUFFIXES, INDEX_NAME, WEIGHTS_NAME, explain_other_formats
from genesis.huggingface.shape import read_shape
from genesis.huggingface.weights import read_index

_NAME: Final = r"[A-Za-z0-9][\w.-]*"
_REFERENCE: Final = re.compile(rf"(?P<repository>{_NAME}/{_NAME})(?:@(?P<revision>[\w./-]+))?")
_ADAPTER_NAME: Final = "adapter_config.json"

T = TypeVar("T")


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub.

    Attributes:
        repository: Such as `Qwen/Qwen3-0.6B`.
        revision: A branch, a tag or a commit; None for the main branch.
    """

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


@dataclass(frozen=True)
class Download:
    """A downloaded model.

    Attributes:
        directory: The directory in Hugging Face's layout, in the cache of huggingface_hub.
        repository: The repository.
        commit: The commit of the repository, which does not change as a branch or a tag may.
    """

    directory: Path
    repository: str
    commit: str


def read_hub_model(text: str) -> HubModel | None:
    """Returns the model on the Hub that a string may name; None if the string has another form.

    Example:
        >>> read_hub_model("Qwen/Qwen3-0.6B@main")
        HubModel(repository='Qwen/Qwen3-0.6B', revision='main')
        >>> read_hub_model("runs/demo/run") is None
        True
    """
    found = _REFERENCE.fullmatch(text)
    return None if found is None else HubModel(found["repository"], found["revision"])


def download_model(model: HubModel, say: Callable[[str], None]) -> Download:
    """Downloads the files that an import needs into the cache of huggingface_hub (`HF_HOME`).

    Args:
        model: The model.
        say: Receives one line of text before the weights are downloaded.

    Raises:
        UserError: The Hub cannot be reached or refuses, the repository has no safetensors files, or the decoder cannot
            represent the model.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download  # noqa: PLC0415 - takes a second

    info = _ask(model, lambda: HfApi().model_info(model.repository, revision=model.revision, files_metadata=True))
    commit, sizes = str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if _ADAPTER_NAME in sizes and CONFIG_NAME not in sizes:
        raise UserError(f"{model} is an adapter ({_ADAPTER_NAME}), not a model: import its base model")

    def fetch(name: str) -> Path:
        return Path(_ask(model, lambda: hf_hub_download(model.repository, name, revision=commit)))

    if WEIGHTS_NAME not in sizes and INDEX_NAME not in sizes:
        raise UserError(
            f"{model} has neither {WEIGHTS_NAME} nor {INDEX_NAME}{explain_other_formats(sizes, model.repository)}"
        )
    if CONFIG_NAME not in sizes:
        raise UserError(f"{model} has no {CONFIG_NAME}")
    directory = fetch(CONFIG_NAME).parent
    read_shape(directory)
    if WEIGHTS_NAME in sizes:
        weights = {WEIGHTS_NAME}
    else:
        fetch(INDEX_NAME)
        try:
            weights = set(read_index(directory).values())
        except ValueError as error:
            raise UserError(f"{model}: {error}") from None
    is_small = [suffix for suffix in DATA_SUFFIXES if suffix != Path(WEIGHTS_NAME).suffix]
    small = {name for name in sizes if name.endswith(tuple(is_small)) and "/" not in name}
    num_bytes = sum(sizes.get(name, 0) for name in weights)
    say(f"downloading {model} at commit {commit[:12]}: {num_bytes / 1e6:,.0f} MB of weights")
    patterns = sorted(small | weights)
    found = _ask(model, lambda: snapshot_download(model.repository, revision=commit, allow_patterns=patterns))
    return Download(Path(found), model.repository, commit)


def _ask(model: HubModel, request: Callable[[], T]) -> T:
    """Returns the result of a request to the Hub.

    Raises:
        UserError: The Hub cannot be reached, or refuses; the message has the reason and the remedy.
    """
    from huggingface_hub import constants, errors  # noqa: PLC0415 - takes a second

    http_error: type[Exception] = vars(errors)["HTTPError"]  # of httpx or its successor
    try:
        return request()
    except errors.GatedRepoError:
        reason = f"its owner gives access on request: ask for it at {constants.ENDPOINT}/{model.repository}, then run "
        raise UserError(f"{model} cannot be downloaded: {reason}`hf auth login`, or set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise UserError(
            f"{model.repository} has no revision {model.revision}: give a branch, a tag or a commit"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{model} is neither a directory nor a model at {constants.ENDPOINT}; a private model needs "
            "`hf auth login` or HF_TOKEN"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise UserError(
            f"there is no directory {model}, and a model of that name cannot be downloaded: HF_HUB_OFFLINE is set"
        ) from None
    except (http_error, errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise UserError(
            f"there is no directory {model}, and a model of that name cannot be downloaded from {constants.ENDPOINT}: "
            f"{reason}"
        ) from None


def describe_source(download: Download | None) -> dict[str, Any]:
    """Returns the entry of the proof that names where an imported model comes from; empty for a local directory."""
    return {} if download is None else {"source": {"repository": download.repository, "commit": download.commit}}
