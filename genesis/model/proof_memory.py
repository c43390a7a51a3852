"""A memory of proofs of kernels that have held on this machine.

It is for proofs that take much longer than a start should:

    CACHE/proofs/NAME-KEY.json      what was proved: the device, and every version that the result depends on

KEY is a hash of the content. Another card, driver, kernel package, torch or Genesis has another file, and its proof
runs. Only a proof that held is remembered: a failure may have a cause that passes, such as a full device or a missing
compiler, so that the next start tries again.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import torch

from genesis import __version__
from genesis.base.cache_directory import find_cache_directory
from genesis.base.device import name_device, read_capability
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.untrusted import read_file

_DRIVERS: Final = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
_log = logging.getLogger(__name__)


def prove_once(name: str, kernels: str, prove: Callable[[torch.device], None], device: torch.device) -> None:
    """Runs a proof, unless it has held on this machine before; whatever the proof raises passes on.

    Args:
        name: Name of the operation that is proved.
        kernels: The package of the kernels, with its version.
        prove: The proof.
        device: The device of the kernels.
    """
    facts = _describe(kernels, device)
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = find_cache_directory() / "proofs" / f"{name}-{digest}.json"
    if _holds(path, text):
        return
    prove(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        _log.warning("%s cannot be written (%s): the next start proves %s again", path, error.strerror, kernels)


def _describe(kernels: str, device: torch.device) -> Mapping[str, str]:
    index = 0 if device.index is None else device.index
    return {
        "kernels": kernels,
        "device": f"{device.type}: {name_device(device.type, index)}",
        "capability": str(read_capability(device)),
        "driver": next((path.read_text(encoding="utf-8") for path in _DRIVERS if path.is_file()), ""),
        "torch": torch.__version__,
        # Without measurements Triton takes other forms of the kernels.
        "choice": "first" if torch.are_deterministic_algorithms_enabled() else "fastest",
        "triton": _find_version("triton"),
        "genesis": __version__,
    }


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _holds(path: Path, text: str) -> bool:
    try:
        found = read_file(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        _log.warning("%s cannot be read (%s): its proof runs again", path, error.strerror)
        return False
    if found != text.encode():
        _log.warning("%s is damaged: its proof runs again", path)
        return False
    return True
