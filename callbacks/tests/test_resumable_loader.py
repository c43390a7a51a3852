"""The loader whose position is saved: the same batches from any position on, whatever made them."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from genesis_callbacks import ResumableLoader
from genesis_callbacks.base.errors import UserError


class Augmented:
    """Samples with noise of all three generators, as augmentation draws it."""

    def __init__(self, num_samples: int = 10) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int):
        return index, torch.rand(()).item(), random.random(), np.random.random()


def collate(samples):
    """Also draws, as a collator that masks tokens does."""
    return [*samples, torch.rand(()).item()]


def build(num_samples: int = 10, **options) -> ResumableLoader:
    options = {"batch_size": 3, "shuffle": True, "seed": 3, "collate_fn": collate, **options}
    return ResumableLoader(Augmented(num_samples), **options)


def read_indices(batches) -> list[list[int]]:
    return [[sample[0] for sample in batch[:-1]] for batch in batches]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_from_every_position_the_same_batches_follow(num_workers):
    """The straight run has no workers: what makes a batch does not change it. Two epochs, stopped after each batch.

    Asked for in Lightning-AI/pytorch-lightning#19764 and ecmwf/anemoi-training#200.
    """
    straight = build()
    expected = [batch for _ in range(2) for batch in straight]
    assert len(expected) == 2 * len(straight) == 8
    assert read_indices(expected[:4]) != read_indices(expected[4:])
    for num_given in range(1, 8) if num_workers == 0 else (2, 5):
        first = build(num_workers=num_workers)
        given = list(itertools.islice(itertools.chain.from_iterable(itertools.repeat(first)), num_given))
        assert given == expected[:num_given]
        second = build(num_workers=num_workers)
        second.load_state_dict(first.state_dict())
        # The state of an epoch's end continues with nothing of it, and the next iteration is the next epoch.
        assert list(second) == expected[num_given : (num_given + 3) // 4 * 4]
        if num_given <= 4:
            assert list(second) == expected[4:]


def test_making_batches_draws_nothing_from_the_generators_of_training():
    def draw():
        return torch.rand(()).item(), random.random(), np.random.random()

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = [draw() for _ in range(4)]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert [draw() for _ in build()] == expected


def test_each_epoch_has_each_sample_once():
    loader = build()
    for _ in range(3):
        assert sorted(itertools.chain(*read_indices(loader))) == list(range(10))


def test_ranks_share_each_batch_of_the_run_on_one_rank_and_read_on_there():
    """Half the batch on twice the ranks: the order, and so the state, is that of the run and not that of a rank.

    A position that is restored within another order is reported as huggingface/accelerate#4195.
    """
    alone = build(12, batch_size=4)
    expected = read_indices(itertools.chain(alone, alone))
    ranks = [build(12, batch_size=2, num_replicas=2, rank=rank) for rank in range(2)]
    stopped = build(12, batch_size=4)
    next(iter(stopped))
    for rank in ranks:
        rank.load_state_dict(stopped.state_dict())
    shared = [sorted(one + other) for one, other in zip(*(read_indices(rank) for rank in ranks), strict=True)]
    assert shared == [sorted(batch) for batch in expected[1:3]]
    for rank in ranks:
        assert rank.state_dict() == {**stopped.state_dict(), "batch": 3}


@pytest.mark.parametrize(("drop_last", "num_batches"), [(False, 2), (True, 1)])
def test_ranks_have_equally_many_batches_and_what_is_left_out_or_repeated_is_as_documented(drop_last, num_batches):
    ranks = [build(11, batch_size=4, drop_last=drop_last, num_replicas=2, rank=rank) for rank in range(2)]
    batches = [read_indices(rank) for rank in ranks]
    assert [len(own) for own in batches] == [num_batches] * 2 == [len(rank) for rank in ranks]
    seen = list(itertools.chain(*batches[0], *batches[1]))
    assert len(seen) == (8 if drop_last else 12)
    assert len(set(seen)) == (8 if drop_last else 11)


def test_an_iterator_that_was_left_does_not_move_the_position():
    loader = build()
    left = iter(loader)
    next(left)
    current = iter(loader)
    next(current)
    next(left)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 1)


@pytest.mark.parametrize("change", [{"batch_size": 5}, {"seed": 4}, {"shuffle": False}, {"num_samples": 9}])
def test_a_state_of_another_order_is_not_taken_and_the_difference_is_named(change):
    first, second = build(), build(**change)
    next(iter(first))
    (name,) = change
    with pytest.warns(UserWarning, match=f"not restored: .*{name} is "):
        second.load_state_dict(first.state_dict())
    assert second.state_dict()["batch"] == 0


def test_it_gives_what_torchs_loader_gives_of_a_dataset_of_tensors():
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    for ours, theirs in zip(ResumableLoader(data, 4), DataLoader(data, 4), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_what_it_cannot_continue_is_refused_with_the_remedy():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(UserError, match=r"Endless has no length .*StatefulDataLoader"):
        ResumableLoader(Endless())
    with pytest.raises(TypeError, match=r"no argument 'sampler'.*StatefulDataLoader"):
        ResumableLoader(Augmented(), sampler=[1])
    with pytest.raises(UserError, match="batch_size is 0"):
        ResumableLoader(Augmented(), 0)
    with pytest.raises(UserError, match="rank is 2 and num_replicas 1"):
        len(ResumableLoader(Augmented(), rank=2))
