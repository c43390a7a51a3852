"""Gloo groups whose ranks find one another on several nodes.

Gloo advertises the address that the host's own name resolves to, unless `GLOO_SOCKET_IFNAME` names an interface. On
Debian and Ubuntu that address is 127.0.1.1, which no other node can reach. If the ranks are on several nodes and the
variable is not set, a group is therefore made on the interface from which this node reaches `MASTER_ADDR`.
"""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import torch.distributed as dist

from .base.errors import RunEndedError

VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_IPV6_INTERFACES = Path("/proc/net/if_inet6")
_ANY_PORT = 9
# Addresses of the blocks for documentation (RFC 5737, RFC 3849): no host has them, so their route is the default
# route. Nothing is sent to them.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")


class GlooGroupError(RunEndedError):
    """A gloo group could not be made; the message names the interface and how to choose another."""


def new_gloo_group(ranks: Sequence[int] | None = None, *, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Returns a new gloo group of all ranks, or of some, as `torch.distributed.new_group` does. Collective.

    Args:
        ranks: Those of the group; by default all.
        timeout: The limit of a collective; by default that of the default group, and at least gloo's usual one.

    Raises:
        GlooGroupError: The ranks do not reach one another; the message names the interface.
    """
    interface = choose_interface(os.environ)
    try:
        with _interface_set(interface):
            group: dist.ProcessGroup = dist.new_group(
                None if ranks is None else list(ranks), backend="gloo", timeout=timeout or _choose_timeout()
            )
    except RuntimeError as error:
        used = interface or os.environ.get(VARIABLE) or "of the address of this host's name"
        raise GlooGroupError(
            f"the ranks cannot connect by gloo, on this node by interface {used}: set {VARIABLE} to the "
            f"interface (as `ip -brief address` lists it) that connects the nodes: {error}"
        ) from error
    return group


def _choose_timeout() -> timedelta:
    """Returns how long our ranks wait for one another: no shorter than the collectives of training."""
    world = dist.group.WORLD
    assert world is not None
    limits = [dist.default_pg_timeout]
    for device in world._device_types:
        # Torch has no public way to read the limit of a group; a backend without one has no such options.
        limit = getattr(getattr(world._get_backend(device), "options", None), "_timeout", None)
        limits += [limit] if isinstance(limit, timedelta) else []
    return max(limits)


def choose_interface(environment: Mapping[str, str]) -> str | None:
    """Returns the interface that gloo is to use on this node, or None to leave the choice to gloo.

    Args:
        environment: Of this process, as a launcher (torchrun, Lightning, a cluster's) has set it.
    """
    if environment.get(VARIABLE) or not _has_several_nodes(environment):
        return None
    for host in (environment.get("MASTER_ADDR", ""), *_ELSEWHERE):
        address = find_own_address(host)
        # On the master's node MASTER_ADDR may be the node's own name, which resolves to loopback there.
        if address is not None and not ip_address(address).is_loopback:
            name = find_interface(address)
            if name is not None:
                return name
    return None


def _has_several_nodes(environment: Mapping[str, str]) -> bool:
    """Returns whether ranks are on other nodes: by the launcher's variables, or else by the rendezvous's address."""
    local, world = environment.get("LOCAL_WORLD_SIZE", ""), environment.get("WORLD_SIZE", "")
    if local.isdigit() and world.isdigit():
        return int(local) < int(world)
    host = environment.get("MASTER_ADDR", "")
    address = find_own_address(host) if host else None
    return address is not None and not ip_address(address).is_loopback


def find_own_address(host: str) -> str | None:
    """Returns the address of this node from which it would reach `host`, or None without a route. Sends nothing."""
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM) if host else []
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: it asks the routing table, and no more
            return str(probe.getsockname()[0]).partition("%")[0]
    return None


def find_interface(address: str) -> str | None:
    """Returns the name of the network interface that has this address of this node, or None."""
    if isinstance(ip_address(address), IPv6Address):
        return _find_ipv6_interface(IPv6Address(address))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _find_ipv6_interface(address: IPv6Address) -> str | None:
    try:
        lines = _IPV6_INTERFACES.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    names = {fields[0]: fields[-1] for fields in map(str.split, lines) if fields}
    return names.get(f"{int(address):032x}")


@contextlib.contextmanager
def _interface_set(interface: str | None) -> Iterator[None]:
    """Sets the variable while a group is made, and no longer: groups of other libraries choose for themselves."""
    if interface is None:
        yield
        return
    os.environ[VARIABLE] = interface
    try:
        yield
    finally:
        del os.environ[VARIABLE]
