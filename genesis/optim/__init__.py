"""One optimizer for a model, by the algorithm of a recipe: AdamW, AdamW8bit, Muon, or a class of the user's."""

from genesis.optim.adamw import AdamW
from genesis.optim.adamw8bit import AdamW8bit
from genesis.optim.algorithm import Algorithm, Form, Parts
from genesis.optim.build import build_optimizer
from genesis.optim.muon import Muon
from genesis.optim.optimizer import GroupedOptimizer

__all__ = ["AdamW", "AdamW8bit", "Algorithm", "Form", "GroupedOptimizer", "Muon", "Parts", "build_optimizer"]
