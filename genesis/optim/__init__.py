"""One optimizer for a model: AdamW with decay groups, or Muon for matrices with AdamW for the rest."""

from genesis.optim.build import OptimizerOptions, build_optimizer
from genesis.optim.optimizer import GroupedOptimizer

__all__ = ["GroupedOptimizer", "OptimizerOptions", "build_optimizer"]
