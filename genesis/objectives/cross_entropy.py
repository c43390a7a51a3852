"""The default objective: the mean of -log p over the valid tokens."""

import math
from types import MappingProxyType
from typing import Any

import torch

from genesis.data.window import MicroBatch
from genesis.objectives.objective import BYTES, TOKENS, Head, HeadResult, Objective, ObjectiveSums
from genesis.objectives.vocabulary import Vocabulary


class CrossEntropy(Objective):
    """Next-token prediction: nats per valid token."""

    label_options = MappingProxyType[str, Any]({})
    head_memory = "fused"
    bounds_logits = True
    trains_under = frozenset({"tensor", "context", "pipeline"})

    def head(self, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Head:
        """Returns the head whose only term is the sum over labels."""
        labels = micro_batch.labels
        return lambda hidden, weight: HeadResult({TOKENS: vocabulary.sum_cross_entropy(hidden, weight, labels)}, {})

    def measure(self, sums: ObjectiveSums) -> dict[str, float]:
        """Returns the loss in nats per token, the perplexity, and the bits per byte of text (NaN without bytes)."""
        loss_sum, num_bytes = sums.terms[TOKENS], sums.counts[BYTES]
        loss = loss_sum / sums.counts[TOKENS]
        return {
            "loss": loss,
            "perplexity": float(torch.tensor(loss, dtype=torch.float64).exp()),  # infinite instead of an error
            "bits_per_byte": loss_sum / num_bytes / math.log(2) if num_bytes else math.nan,
        }
