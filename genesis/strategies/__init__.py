"""Lightning strategies: the placement of parameters on ranks, and the reduction of gradients.

Importing this package makes the names `replicated` and `sharded` known to `Trainer(strategy=...)`.
"""

from lightning.pytorch.strategies import StrategyRegistry

from genesis.strategies.replicated import Replicated
from genesis.strategies.sharded import Sharded

__all__ = ["Replicated", "Sharded"]

for _name, _strategy in (("replicated", Replicated), ("sharded", Sharded)):
    StrategyRegistry.register(_name, _strategy, description=(_strategy.__doc__ or "").splitlines()[0], override=True)
