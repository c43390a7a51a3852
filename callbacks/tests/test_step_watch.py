import torch
from torch import nn

from genesis_callbacks._step_watch import StepWatch


def watch(*optimizers):
    return StepWatch(optimizers, before_step=None, has_scaler=False)


def names_of(**modules):
    return {id(parameter): name for name, module in modules.items() for parameter in module.parameters()}


def test_an_optimizer_that_did_not_step_since_the_last_save_moved_nothing_whatever_gradients_it_has():
    """As in a GAN whose discriminator takes several steps, with `zero_grad` before each backward."""
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    names = names_of(generator=generator, critic=critic)
    first, second = torch.optim.SGD(generator.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
    steps = watch(first, second)
    critic(generator(torch.ones(1, 2))).sum().backward()
    first.step()
    assert steps.moved(names, since_updates=0) == {"generator"}
    second.zero_grad()
    critic(generator(torch.ones(1, 2))).sum().backward()
    second.step()
    assert all(parameter.grad is not None for parameter in generator.parameters())
    assert steps.moved(names, since_updates=1) == {"critic"}
    assert steps.moved(names, since_updates=0) == {"generator", "critic"}, "a save that failed is none to compare with"


def test_gradients_of_one_optimizer_say_nothing_of_anothers():
    moving, resting = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (moving, resting)]
    steps = watch(*optimizers)
    (moving(torch.ones(1, 2)).sum() + 0 * resting(torch.ones(1, 2)).sum()).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert steps.moved(names_of(moving=moving, resting=resting), since_updates=0) == {"moving"}


def test_sparse_gradients_move_their_embedding():
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    steps = watch(optimizer)
    embedding(torch.tensor([1, 3, 3])).sum().backward()
    optimizer.step()
    assert steps.moved(names_of(embedding=embedding), since_updates=0) == {"embedding"}
