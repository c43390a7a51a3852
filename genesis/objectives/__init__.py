"""What training minimises: the objectives of a step."""

from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.distillation import Distillation
from genesis.objectives.grpo import GRPO
from genesis.objectives.gspo import GSPO
from genesis.objectives.kto import KTO
from genesis.objectives.on_policy import OnPolicyDistillation
from genesis.objectives.preference import CPO, DPO, ORPO, SimPO
from genesis.objectives.reward_model import RewardModel

__all__ = [
    "CPO",
    "DPO",
    "GRPO",
    "GSPO",
    "KTO",
    "ORPO",
    "CrossEntropy",
    "Distillation",
    "OnPolicyDistillation",
    "RewardModel",
    "SimPO",
]
