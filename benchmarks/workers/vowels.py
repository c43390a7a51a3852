"""The reward function of the benchmark `finetune`, as a file of a user."""

from typing import Any

from benchmarks.workers.finetune_protocol import score_text


def reward(messages: Any, text: str, columns: Any) -> float:
    """Returns the share of vowels."""
    return score_text(text)
