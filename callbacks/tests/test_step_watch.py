import torch
from torch import nn

from genesis_callbacks._step_watch import StepWatch


def watch(*optimizers, **modules):
    names = {id(parameter): name for name, module in modules.items() for parameter in module.parameters()}
    return StepWatch(optimizers, before_step=None, has_scaler=False, names=names)


def test_an_optimizer_that_did_not_step_since_the_last_save_moved_nothing_whatever_gradients_it_has():
    """As in a GAN whose discriminator takes several steps, with `zero_grad` before each backward."""
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    first, second = torch.optim.SGD(generator.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
    steps = watch(first, second, generator=generator, critic=critic)
    critic(generator(torch.ones(1, 2))).sum().backward()
    first.step()
    assert steps.sample_moved(since_updates=0)() == {"generator"}
    second.zero_grad()
    critic(generator(torch.ones(1, 2))).sum().backward()
    second.step()
    assert all(parameter.grad is not None for parameter in generator.parameters())
    assert steps.sample_moved(since_updates=1)() == {"critic"}
    assert steps.sample_moved(since_updates=0)() == {"generator", "critic"}, (
        "a save that failed is none to compare with"
    )


def test_gradients_of_one_optimizer_say_nothing_of_anothers():
    moving, resting = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (moving, resting)]
    steps = watch(*optimizers, moving=moving, resting=resting)
    (moving(torch.ones(1, 2)).sum() + 0 * resting(torch.ones(1, 2)).sum()).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert steps.sample_moved(since_updates=0)() == {"moving"}


def test_what_moved_is_found_after_the_gradients_are_gone():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    steps = watch(optimizer, layer=layer)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    find = steps.sample_moved(since_updates=0)
    optimizer.zero_grad()
    assert find() == {"layer"}


def test_sparse_gradients_move_their_embedding():
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    steps = watch(optimizer, embedding=embedding)
    embedding(torch.tensor([1, 3, 3])).sum().backward()
    optimizer.step()
    assert steps.sample_moved(since_updates=0)() == {"embedding"}


def test_a_parameter_without_a_gradient_did_not_move_and_moves_again_with_one():
    layer, frozen = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*layer.parameters(), *frozen.parameters()], lr=0.1)
    steps = watch(optimizer, layer=layer, frozen=frozen)
    for is_frozen in (False, True, False):
        optimizer.zero_grad()
        frozen.requires_grad_(not is_frozen)
        frozen(layer(torch.ones(1, 2))).sum().backward()
        optimizer.step()
        assert steps.sample_moved(since_updates=0)() == ({"layer"} if is_frozen else {"layer", "frozen"})


def test_a_group_without_a_rate_did_not_move():
    layer, resting = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": [*layer.parameters()]}, {"params": [*resting.parameters()], "lr": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    steps = watch(optimizer, layer=layer, resting=resting)
    resting(layer(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    assert steps.sample_moved(since_updates=0)() == {"layer"}
    optimizer.param_groups[1]["lr"] = 0.1
    assert steps.sample_moved(since_updates=0)() == {"layer", "resting"}


def test_a_step_whose_outcome_nobody_knows_is_no_update():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    steps = watch(optimizer, layer=layer)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert (steps.num_steps, steps.num_updates, steps.sample_moved(since_updates=0)()) == (1, 0, frozenset())
