"""How much of a model the proof compares: what takes about a minute on two cores, or everything.

Every weight is always compared. Texts for tokenizers, sequences for logits and new tokens of greedy text are limited by
the model's size, purely, so that the same model gets the same proof on every machine.
"""

from dataclasses import dataclass
from typing import Final

_FLOPS: Final = 3e12
"""For the logits of both models: 20 s of two cores that do 75 GFLOP/s each."""
_READ_BYTES: Final = 2.4e11
"""For greedy text, which reads all weights for each token: 20 s at 12 GB/s."""
SEQUENCE_TOKENS: Final = 128
"""The length of a short sequence."""
_MIN_SEQUENCE_TOKENS: Final = 16
_NUM_SEQUENCES: Final = 8
_NEW_TOKENS: Final = 64
_MIN_NEW_TOKENS: Final = 4
_NUM_PIECES: Final = 16_384
_NUM_RUNS: Final = 4_096
_NUM_SIDES: Final = 2
_LONG_TOKENS: Final = 8_448
"""The longest sequence: that of Llama 3.1. Masks and scores of attention have its square in memory."""
WHOLE_LONG_TOKENS: Final = 2 * _LONG_TOKENS
"""The longest one of a proof that leaves nothing else out."""


@dataclass(frozen=True)
class ProofSize:
    """The size of a proof.

    Attributes:
        num_sequences: Number of short sequences whose logits are compared.
        sequence_tokens: Their length.
        has_long_sequence: Whether a sequence is compared that exceeds the window of attention and the context before
            rotary scaling, in models that have one of them.
        num_new_tokens: Number of tokens of greedy text.
        num_pieces: Number of the tokenizer's pieces that are compared one by one, spread evenly; None for all.
        num_runs: Number of runs of one character; None for all.
    """

    num_sequences: int = _NUM_SEQUENCES
    sequence_tokens: int = SEQUENCE_TOKENS
    has_long_sequence: bool = True
    num_new_tokens: int = _NEW_TOKENS
    num_pieces: int | None = None
    num_runs: int | None = None


def plan_proof(num_parameters: int, long_tokens: int, *, is_whole: bool) -> ProofSize:
    """Returns the size of the proof of a model.

    Args:
        num_parameters: Of the model, of which each token uses all.
        long_tokens: Length of the long sequence, 0 for a model that needs none.
        is_whole: Whether nothing is left out but a sequence that no machine has the memory for.

    Example:
        >>> plan_proof(135_000_000, 0, is_whole=False).num_sequences
        8
        >>> plan_proof(8_000_000_000, 8320, is_whole=False)
        ProofSize(num_sequences=1, sequence_tokens=93, has_long_sequence=False, num_new_tokens=4, num_pieces=16384, \
num_runs=4096)
    """
    if is_whole:
        return ProofSize(has_long_sequence=long_tokens <= WHOLE_LONG_TOKENS)
    num_tokens = int(_FLOPS / (_NUM_SIDES * 2 * max(1, num_parameters)))
    num_new = int(_READ_BYTES / (_NUM_SIDES * 4 * max(1, num_parameters)))
    fits = num_tokens if long_tokens <= _LONG_TOKENS else 0
    num_sequences = min(_NUM_SEQUENCES, max(1, num_tokens // SEQUENCE_TOKENS))
    return ProofSize(
        num_sequences=num_sequences,
        sequence_tokens=min(SEQUENCE_TOKENS, max(_MIN_SEQUENCE_TOKENS, num_tokens)),
        has_long_sequence=long_tokens == 0 or num_sequences * SEQUENCE_TOKENS + long_tokens <= fits,
        num_new_tokens=min(_NEW_TOKENS, max(_MIN_NEW_TOKENS, num_new)),
        num_pieces=_NUM_PIECES,
        num_runs=_NUM_RUNS,
    )
