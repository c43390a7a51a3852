"""Builds wheels of installed packages, so that an image can install the same code, released or not."""

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from genesis.base.errors import UserError

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""A fixed time, so that the same code gives the same bytes."""
_WHEEL_FILE = "Wheel-Version: 1.0\nGenerator: genesis-lm\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_METADATA_NAMES: Final = ("METADATA", "entry_points.txt")


def pack_wheel(name: str, package: str) -> tuple[str, bytes]:
    """Returns file name and content of a wheel of an installed distribution, also of an editable one.

    Args:
        name: The distribution's name.
        package: The distribution's package, pure Python.

    Raises:
        UserError: The package is not installed as a distribution.
    """
    found = distribution(name)
    stem = f"{name.replace('-', '_')}-{found.version}"
    content = dict(_iterate_package(package)) | {
        f"{stem}.dist-info/{file}": data for file, data in _iterate_metadata(found)
    }
    record = f"{stem}.dist-info/RECORD"
    content[record] = "".join(f"{path},{_hash(data)},{len(data)}\n" for path, data in content.items()).encode()
    content[record] += f"{record},,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in content.items():
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            wheel.writestr(entry, data)
    return f"{stem}-py3-none-any.whl", buffer.getvalue()


def pin_requirements(*names: str) -> dict[str, str]:
    """Returns the installed versions of distributions' dependencies, without extras and without themselves."""
    pins = {}
    for name in names:
        for line in distribution(name).requires or ():
            requirement = Requirement(line)
            if requirement.name not in names and (
                requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ):
                # The local label (torch's build for CPUs, for example) is not part of the version.
                pins[requirement.name] = distribution(requirement.name).version.partition("+")[0]
    return dict(sorted(pins.items()))


def _iterate_package(package: str) -> Iterator[tuple[str, bytes]]:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"{package}/{path.relative_to(root).as_posix()}", path.read_bytes()


def _iterate_metadata(found: Distribution) -> Iterator[tuple[str, bytes]]:
    yield "WHEEL", _WHEEL_FILE.encode()
    for name in _METADATA_NAMES:
        text = found.read_text(name)
        if text is not None:
            yield name, text.encode()
        elif name == "METADATA":
            raise UserError(f"{found.name} is not installed as a distribution: pip install it first")


def _hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
