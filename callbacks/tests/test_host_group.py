"""Sums and maxima of integers over ranks."""

import gc
import weakref

import torch
import torch.distributed as dist

from genesis_callbacks.host_group import HostGroup
from genesis_callbacks.testing import run_ranks


def test_alone_a_sum_is_the_value_itself_and_needs_no_process_group() -> None:
    group = HostGroup()
    group.join()
    assert not dist.is_initialized()
    assert group.world_size == 1
    assert group.sum((3, 2**60)).wait() == (3, 2**60)
    assert group.max([-7]).wait() == (-7,)


def _reduce_on_rank() -> tuple[tuple[int, ...], tuple[int, ...], bool, bool]:
    rank = dist.get_rank()
    group, other = HostGroup(), HostGroup()
    group.join()
    first, second = group.sum((rank + 1, 2**55)), other.max((rank, -rank))
    maxima = second.wait()
    sums = first.wait()
    shared = group._group() is other._group()
    return sums, maxima, shared, group._group() is dist.group.WORLD


def test_ranks_agree_on_exact_sums_and_maxima_waited_for_in_any_order() -> None:
    for sums, maxima, is_shared, is_default in run_ranks(_reduce_on_rank, 2):
        assert sums == (3, 2**56)
        assert maxima == (1, 0)
        assert is_shared
        assert not is_default


def _reduce_in_two_worlds(store: str) -> list[tuple[int, ...]]:
    rank = dist.get_rank()
    group = HostGroup()
    answers = [group.sum((rank,)).wait()]
    former = weakref.ref(group._group())
    dist.destroy_process_group()
    gc.collect()
    assert former() is None, "the gloo group outlived its world"
    assert group.sum((rank,)).wait() == (rank,)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    answers.append(group.sum((rank + 10,)).wait())
    assert torch.equal(torch.tensor(answers[0]), torch.tensor((1,)))
    return answers


def test_the_group_is_forgotten_with_its_world_and_made_again_in_the_next(tmp_path: object) -> None:
    for answers in run_ranks(_reduce_in_two_worlds, 2, f"{tmp_path}/store"):
        assert answers == [(1,), (21,)]


def _reduce_in_parts() -> tuple[tuple[int, ...], tuple[float, ...], int, bool]:
    rank = dist.get_rank()
    parts, same, whole = HostGroup([(0, 2), (1, 3)]), HostGroup([[0, 2], [1, 3]]), HostGroup([range(4)])
    answer = parts.sum((rank, 1)).wait(), whole.sum_floats((rank / 2,)).wait(), parts.world_size
    assert parts._group() is same._group()
    return *answer, whole._group() is HostGroup()._group()


def test_a_partition_sums_over_the_own_part_and_all_ranks_in_one_part_are_the_whole_group() -> None:
    answers = run_ranks(_reduce_in_parts, 4)
    assert [sums for sums, _, _, _ in answers] == [(2, 2), (4, 2), (2, 2), (4, 2)]
    assert all(answer[1:] == ((3.0,), 2, True) for answer in answers)
