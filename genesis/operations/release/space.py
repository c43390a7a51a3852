"""The page of `genesis serve` as a folder that runs as a Space of the Hub: model, wheels and a Dockerfile."""

import re
from typing import Final

from huggingface_hub import SpaceCardData

from genesis.base.errors import UserError
from genesis.huggingface.directory import CARD_NAME
from genesis.operations.release.card import LICENSE_NAME
from genesis.operations.release.folder import Folder
from genesis.operations.release.options import ReleaseOptions
from genesis.operations.release.wheels import pack_wheel, pin_requirements

PORT: Final = 7860
"""The port on which the Hub expects the page of a Space."""
_MODELS_NAME = "models"
"""The directory that contains the model's directory, whose name is the model's id for clients."""
_DISTRIBUTIONS: Final = {"genesis-callbacks": "genesis_callbacks", "genesis-lm": "genesis"}

# torch first, so that later installations keep the chosen build. A Space runs as user 1000.
_DOCKERFILE = """FROM python:3.11-slim
RUN useradd --create-home --uid 1000 user
WORKDIR /app
COPY constraints.txt ./
RUN pip install --no-cache-dir {torch}
COPY wheels wheels
RUN pip install --no-cache-dir --constraint constraints.txt wheels/*.whl
COPY --chown=user {models} {models}
USER user
EXPOSE {port}
CMD {command}
"""
_CARD = """
# {name}

The page of `genesis serve` for [{repo}](https://huggingface.co/{repo}), version {version}: a prompt, tokens as they
come, their probabilities, and OpenAI's `/v1/completions`. The Dockerfile installs the wheels in this folder and serves
`{models}/{name}`, which is the release itself.

    docker build --tag {tag} . && docker run --publish {port}:{port} {tag}
"""


def serve_command(options: ReleaseOptions) -> list[str]:
    """Returns the command that the image runs."""
    model = f"{_MODELS_NAME}/{options.name}"
    return ["genesis", "serve", model, "--host", "0.0.0.0", "--port", str(PORT), "--public"]


def plan_space(release: Folder, options: ReleaseOptions, torch: str | None = None) -> Folder:
    """Returns the folder of the Space.

    Args:
        release: The folder of the release.
        options: The options of the release.
        torch: pip's requirement for torch, as in the Makefile's TORCH; None for the installed version, of which pip
            takes the build for CUDA. It works without a GPU, but is many times as large as the build for CPUs.

    Raises:
        UserError: `torch` is not a requirement for the installed version of torch.
    """
    head = SpaceCardData(
        title=options.name, sdk="docker", app_port=PORT, license=options.license, models=[options.repo], pinned=False
    )
    pins = pin_requirements(*_DISTRIBUTIONS)
    installed = f"torch=={pins['torch']}"
    if torch is not None and not re.fullmatch(re.escape(installed) + r"( --(extra-)?index-url [\w./:-]+)?", torch):
        raise UserError(f"--torch is {torch!r}: give '{installed} --index-url ADDRESS'")
    place = f"{_MODELS_NAME}/{options.name}"
    folder = Folder(taken={f"{place}/{name}": file for name, file in release.taken.items()})
    folder.texts = {
        **{f"{place}/{name}": data for name, data in release.texts.items()},
        CARD_NAME: f"---\n{head}\n---\n{_write_card(options)}".encode(),
        "Dockerfile": _write_dockerfile(torch or installed, options).encode(),
        "constraints.txt": "".join(f"{name}=={version}\n" for name, version in pins.items()).encode(),
        **{f"wheels/{file}": data for file, data in (pack_wheel(*names) for names in _DISTRIBUTIONS.items())},
    }
    if LICENSE_NAME in release.texts:
        folder.texts[LICENSE_NAME] = release.texts[LICENSE_NAME]
    folder.add_sums()
    return folder


def _write_card(options: ReleaseOptions) -> str:
    return _CARD.format(
        name=options.name,
        repo=options.repo,
        version=options.version,
        models=_MODELS_NAME,
        tag=options.name.lower(),
        port=PORT,
    )


def _write_dockerfile(torch: str, options: ReleaseOptions) -> str:
    command = "[" + ", ".join(f'"{word}"' for word in serve_command(options)) + "]"
    return _DOCKERFILE.format(torch=torch, models=_MODELS_NAME, port=PORT, command=command)
