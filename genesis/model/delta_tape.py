"""What the gated delta rule in chunks holds in memory (`genesis.model.delta_rule.chunked`), for `genesis.model.tape`.

Every `apply` is one line of `chunked`, in its order and with its names. Kernels of flash-linear-attention hold less:
they keep no pairs of tokens and compute the states again in the backward.
"""

from typing import Final

from genesis.model.delta_rule import CHUNK_TOKENS
from genesis.model.tape import FLOAT32_BYTES, Tape, Value

KERNEL_NOTE: Final = "linear layers are counted in chunks; the kernels of flash-linear-attention keep less"


def record_rule(tape: Tape, mixed: Value, decay: Value, beta: Value, heads: tuple[int, int, int, int]) -> Value:
    """Records the rule and returns what tokens read from the state, in float32.

    Args:
        tape: The tape.
        mixed: Queries, keys and values of all tokens.
        decay: The logarithm of the decay of each head and token.
        beta: The share that is written, of each head and token.
        heads: Key heads, value heads, the width of a key, and the width of a value.
    """
    key_heads, value_heads, key_dim, value_dim = heads
    setting = tape.setting
    num_chunks = setting.batch_size * -(-setting.seq_len // CHUNK_TOKENS)
    num_heads = num_chunks * CHUNK_TOKENS * value_heads
    keys, values, num_pairs = num_heads * key_dim, num_heads * value_dim, num_heads * CHUNK_TOKENS
    narrow = num_chunks * CHUNK_TOKENS * key_heads * key_dim

    def make(
        inputs: tuple[Value, ...],
        num_elements: int,
        saved: tuple[Value, ...] = (),
        *,
        forward: int = 0,
        backward: int = 0,
    ) -> Value:
        return tape.apply(
            inputs, num_elements, FLOAT32_BYTES, saved=saved, forward_bytes=forward, backward_bytes=backward
        )

    # The kernels do not take float32.
    if not setting.is_cpu and mixed.element_bytes < FLOAT32_BYTES and KERNEL_NOTE not in tape.notes:
        tape.notes.append(KERNEL_NOTE)
    raw = tape.cast(mixed, FLOAT32_BYTES)
    query, key = (make((raw,), narrow, (raw,), backward=2 * raw.num_bytes) for _ in range(2))
    if value_heads > key_heads:
        query, key = (make((part,), keys) for part in (query, key))
    query = make((query,), keys)
    pairs = tape.apply(
        (decay,), num_pairs, FLOAT32_BYTES, saves_output=True,
        forward_bytes=num_pairs * FLOAT32_BYTES, backward_bytes=num_pairs * FLOAT32_BYTES,
    )  # fmt: skip
    weighted = make((key, beta), keys, (key, beta))
    operands = (weighted, key)
    if value_heads == key_heads:  # heads lie between tokens, so that the product copies its operands
        operands = (tape.value(keys, FLOAT32_BYTES), tape.value(keys, FLOAT32_BYTES))
    product = make((weighted, key), num_pairs, operands)
    system = make((product, pairs), num_pairs, (product, pairs))
    given = make((raw, beta, weighted), values + keys, (raw, beta, weighted),
                 forward=(values + keys) * FLOAT32_BYTES)  # fmt: skip
    solved = tape.apply(
        (system, given), values + keys, FLOAT32_BYTES, saved=(system,), saves_output=True,
        forward_bytes=num_pairs * FLOAT32_BYTES, backward_bytes=num_pairs * FLOAT32_BYTES,
    )  # fmt: skip
    product = make((query, key), num_pairs, (query, key))
    within = make((product, pairs), num_pairs, (product, pairs))
    reading = make((query,), keys, (query,))
    writing = make((key,), keys, (key,))
    states = num_chunks * value_heads * key_dim * value_dim
    kept = (tape.value(states, FLOAT32_BYTES), tape.value(values, FLOAT32_BYTES))
    # The gradient of a chunk of a tensor is one of the whole tensor, with zeros elsewhere.
    read = make((solved, within, reading, writing), values, (solved, within, reading, writing, *kept),
                backward=2 * (values + keys) * FLOAT32_BYTES)  # fmt: skip
    return tape.apply((read,), values, FLOAT32_BYTES, passes_gradient=True)
