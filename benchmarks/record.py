"""Describes the machine in every record, without paths or the host name of this machine."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def describe_hardware(device_name: str) -> str:
    """Returns a line with cores, memory and GPU; `device_name` is the GPU's name, or "cpu"."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = "" if device_name == "cpu" else f", {device_name}"
    return f"{os.cpu_count()}-core {platform.machine()}, {memory_gib:.0f} GiB{gpu}"


def anonymise(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with each path replaced by its file name, also in lists of NAME=PATH."""
    words = []
    for word in argv:
        peers = [peer.partition("=") for peer in word.split(",")]
        words.append(",".join(name + equals + (equals and Path(path).name) for name, equals, path in peers))
    return [Path(word).name if Path(word).is_absolute() else word for word in words]


def write_record(record: dict[str, Any], page: str, out: Path) -> None:
    """Writes a record to `out` with the suffix .json, and its page with the suffix .md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(page, encoding="utf-8")
