"""The bandwidths of a machine: measured by `genesis doctor --device`, given by the user, or assumed."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from genesis.base.errors import UserError
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import read_text

LINKS: Final = {"pcie": 12e9, "nvlink": 50e9, "nvswitch": 300e9}
"""Assumed bytes per second in each direction of collectives: PCIe 4.0 x16 through the host's memory, the bridge of two
workstation cards, and the switch of a server with eight."""
NETWORKS: Final = {"ethernet": 1.2e9, "roce": 10e9, "infiniband": 40e9}
"""Assumed bytes per second of a device in each direction to another node: 10 and 100 Gb/s for a node of one device, and
a card of 400 Gb/s for each device."""
DEVICES_PER_NODE: Final = 8
_BETWEEN: Final = re.compile(r"(\w+) \d+ to \1 \d+")
_TO_DEVICE: Final = re.compile(r"host to \w+ \d+, (pinned|pageable)")
_TO_HOST: Final = re.compile(r"\w+ \d+ to host, (pinned|pageable)")
_TO_DISK: Final = re.compile(r"write, with fsync")
_UNIT: Final = "GB/s"


@dataclass(frozen=True)
class Bandwidth:
    """One bandwidth.

    Args:
        bytes_per_second: In one direction.
        source: Where it comes from.
        is_measured: Whether it was measured.
    """

    bytes_per_second: float
    source: str = "assumed"
    is_measured: bool = False


class Link(NamedTuple):
    """What a collective over the ranks of an axis takes."""

    bytes_per_second: float
    latency_seconds: float

    def time(self, num_bytes: float) -> float:
        """Returns the seconds of one collective in which each rank receives so many bytes."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Bandwidths:
    """What moves how fast.

    Args:
        between_devices: Between two devices of a node, for collectives.
        to_device: From the host's memory to a device.
        to_host: From a device to the host's memory.
        to_disk: To the disk of the checkpoints, flushed at the end.
        between_nodes: From a device to one of another node.
        devices_per_node: Devices of a node.
        latency_in_node_seconds: What a collective in a node takes beside its bytes; assumed.
        latency_between_nodes_seconds: What a collective between nodes takes beside its bytes; assumed.
    """

    between_devices: Bandwidth = Bandwidth(LINKS["pcie"], "assumed: pcie")
    to_device: Bandwidth = Bandwidth(LINKS["pcie"])
    to_host: Bandwidth = Bandwidth(5e9)
    to_disk: Bandwidth = Bandwidth(1e9)
    between_nodes: Bandwidth = Bandwidth(NETWORKS["infiniband"], "assumed: infiniband")
    devices_per_node: int = DEVICES_PER_NODE
    latency_in_node_seconds: float = 10e-6
    latency_between_nodes_seconds: float = 30e-6

    def named(self) -> dict[str, Bandwidth]:
        """Returns each by its name in tables."""
        found = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}
        return {name: one for name, one in found.items() if isinstance(one, Bandwidth)}

    def link(self, *, is_in_node: bool) -> Link:
        """Returns the link of ranks in one node, or in several."""
        if is_in_node:
            return Link(self.between_devices.bytes_per_second, self.latency_in_node_seconds)
        return Link(self.between_nodes.bytes_per_second, self.latency_between_nodes_seconds)


def read_report(path: Path) -> Mapping[str, Any]:
    """Returns the content of a report of `genesis doctor --device` or of a record of a benchmark.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        content = load_json(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"cannot read --rates {path}: {reason}") from None
    except (ValueError, RecursionError):
        raise UserError(
            f"--rates {path} is not JSON: give a report of `genesis doctor --device --out FILE`, or a record of the "
            "benchmark `step`"
        ) from None
    return content if isinstance(content, Mapping) else {}


def find_bandwidths(content: Mapping[str, Any], source: str) -> Bandwidths:
    """Returns the bandwidths that a report has; the others are the assumed ones.

    Of several devices the slowest counts, and of copies with the host those of pinned memory, if there are any.

    Args:
        content: The report.
        source: Its name.
    """
    found = Bandwidths()
    rates = _list_rates(content)
    for name, pattern in (
        ("between_devices", _BETWEEN),
        ("to_device", _TO_DEVICE),
        ("to_host", _TO_HOST),
        ("to_disk", _TO_DISK),
    ):
        matches = [(label, rate) for label, rate in rates if pattern.fullmatch(label)]
        pinned = [rate for label, rate in matches if label.endswith("pinned")]
        chosen = pinned or [rate for _, rate in matches]
        if chosen:
            measured: Any = {name: Bandwidth(min(chosen) * 1e9, f"measured: {source}", is_measured=True)}
            found = replace(found, **measured)
    return found


def _list_rates(content: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Returns the figures of a report that are rates, by name; none if the file is something else."""
    try:
        figures = [figure for part in content.get("parts", ()) for figure in part.get("figures", ())]
        rates = [(str(one["name"]), float(one["value"])) for one in figures if one.get("unit") == _UNIT]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
    return [(name, rate) for name, rate in rates if math.isfinite(rate) and rate > 0.0]
