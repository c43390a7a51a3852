"""The options of a supervisor that shares its run with those of other nodes. Imports no torch."""

import re
import socket
from dataclasses import dataclass, field
from typing import Final

from genesis.base.errors import UserError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ENDPOINT: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+):(\d{1,5})")


@dataclass(frozen=True)
class NodeOptions:
    """How a node meets the others.

    Args:
        min_nodes: The run continues with so many nodes.
        max_nodes: No more nodes than these take part.
        host: The machine at which the nodes meet: one of them.
        port: The port there.
        name: The node's name; no two nodes of a run have the same.
        join_seconds: How long to wait for the others.
        last_call_seconds: How long to wait for more nodes once the least number is there.
        peer_seconds: A node that is silent for so long is lost.
    """

    min_nodes: int
    max_nodes: int
    host: str
    port: int
    name: str = field(default_factory=socket.gethostname)
    join_seconds: float = 600.0
    last_call_seconds: float = 10.0
    peer_seconds: float = 20.0

    @property
    def endpoint(self) -> str:
        """HOST:PORT, for people."""
        return f"{self.host}:{self.port}"

    @property
    def size(self) -> str:
        """The number of nodes as the option gives it."""
        return str(self.min_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"


def read_nodes(
    nodes: str | None, rdzv: str | None, name: str | None, join_seconds: float, last_call_seconds: float
) -> NodeOptions | None:
    """Returns the options of several nodes; None if neither `--nodes` nor `--rdzv` is given.

    Raises:
        UserError: One of the two is missing, or a value is wrong.

    Example:
        >>> read_nodes("1:2", "10.0.0.1:29400", "a", 600.0, 10.0).size
        '1:2'
    """
    if nodes is None and rdzv is None:
        return None
    if nodes is None or rdzv is None:
        raise UserError("--nodes and --rdzv belong together: give both, the same on each node")
    least, colon, most = nodes.partition(":")
    if not (least.isdecimal() and (most.isdecimal() or not colon)) or len(nodes) > 12:
        raise UserError(f"--nodes {nodes}: give a number of nodes, such as 2, or a range, such as 1:2")
    min_nodes, max_nodes = int(least), int(most or least)
    if not 1 <= min_nodes <= max_nodes:
        raise UserError(f"--nodes {nodes}: the least number must be at least 1 and not above the largest, such as 1:2")
    found = _ENDPOINT.fullmatch(rdzv)
    if found is None or not 0 < int(found[2]) < 1 << 16:
        raise UserError(f"--rdzv {rdzv}: give HOST:PORT, the same on each node, such as node0:29400")
    name = socket.gethostname() if name is None else name
    if _NAME.fullmatch(name) is None:
        raise UserError(f"--node_name {name}: give letters, digits, dots, dashes and underscores, at most 100")
    host = found[1].strip("[]")
    return NodeOptions(min_nodes, max_nodes, host, int(found[2]), name, join_seconds, last_call_seconds)
