"""One optimizer for a model, by an algorithm that a recipe chooses: AdamW, Muon, or a class of the user's."""

from genesis.optim.adamw import AdamW
from genesis.optim.algorithm import Algorithm, Parts
from genesis.optim.build import build_optimizer
from genesis.optim.muon import Muon
from genesis.optim.optimizer import GroupedOptimizer

__all__ = ["AdamW", "Algorithm", "GroupedOptimizer", "Muon", "Parts", "build_optimizer"]
