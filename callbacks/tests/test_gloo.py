"""On several nodes gloo takes the interface by which the nodes reach one another, and an error names it."""

import os

import pytest
import torch.distributed as dist

from genesis_callbacks import _gloo
from genesis_callbacks._gloo import VARIABLE, choose_interface, find_interface, find_own_address
from genesis_callbacks.checkpoint import Ranks
from genesis_callbacks.host_group import HostGroup
from genesis_callbacks.testing import run_ranks

NODES = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node0"}


@pytest.fixture
def network(monkeypatch):
    """A node that reaches `node0` by `ib0`, and anything else by `eth0`; its own name is loopback, as on Debian."""
    own = {"node0": "10.1.0.7", "this-node": "127.0.1.1", "127.0.0.1": "127.0.0.1", "192.0.2.1": "10.0.0.7"}
    names = {"10.1.0.7": "ib0", "10.0.0.7": "eth0", "127.0.1.1": "lo", "127.0.0.1": "lo"}
    monkeypatch.setattr(_gloo, "find_own_address", own.get)
    monkeypatch.setattr(_gloo, "find_interface", names.get)


@pytest.mark.parametrize(
    ("environment", "interface"),
    [
        (NODES, "ib0"),
        ({**NODES, "MASTER_ADDR": "this-node"}, "eth0"),  # on the node of rank 0
        ({**NODES, VARIABLE: "bond0"}, None),  # the user has chosen
        ({**NODES, "LOCAL_WORLD_SIZE": "4"}, None),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "node0"}, "ib0"),  # a launcher that does not say how many ranks are here
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, None),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "unknown"}, None),
        ({}, None),
    ],
)
def test_the_interface_is_that_by_which_the_first_node_is_reached(network, environment, interface):
    assert choose_interface(environment) == interface


def test_addresses_and_interfaces_of_this_machine_are_found_without_a_network():
    assert find_own_address("127.0.0.1") == "127.0.0.1"
    assert find_own_address("no such host") is None
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("203.0.113.77") is None
    assert find_interface("2001:db8::77") is None


def reduce_over(interface: str) -> tuple[str | None, str | None, tuple[int, ...]]:
    used = []
    original = dist.new_group

    def new_group(*arguments, **keywords):
        used.append(os.environ.get(VARIABLE))
        return original(*arguments, **keywords)

    dist.new_group = new_group
    _gloo.choose_interface = lambda environment: interface
    Ranks().gather(None)
    total = HostGroup().sum([1]).wait()
    assert used[0] == used[-1]
    return used[0], os.environ.get(VARIABLE), total


def test_groups_are_made_on_it_and_the_variable_is_as_it_was_afterwards():
    assert run_ranks(reduce_over, 2, "lo") == [("lo", None, (2,))] * 2


def test_an_interface_that_does_not_serve_is_named_with_the_remedy():
    with pytest.raises(AssertionError) as failure:
        run_ranks(reduce_over, 2, "no0")
    assert "on this node by interface no0: set GLOO_SOCKET_IFNAME to the interface" in str(failure.value)
