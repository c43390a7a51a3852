"""The gated delta rule, which turns a sequence into another with a state of fixed size: in chunks, and token by token.

For each token t of a document and each head, with the state S = 0 before the document:

    S_t = exp(g_t) S_{t-1} + k_t (x) beta_t (v_t - exp(g_t) S_{t-1}^T k_t)        output_t = S_t^T q_t

Keys and queries have length 1, and queries are divided by sqrt(E). Both forms compute in float32 and are equal up to
rounding: `chunked` has few large products for training and prompts, `step` is for one new token.

B  sequences of a micro-batch     S  tokens of a sequence     N  chunks of a sequence      C  tokens of a chunk
K  key and query heads            H  value heads              E  width of a key            F  width of a value

References:
    Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv:2412.06464, equation 10 and section 3.3.
    Yang et al., Parallelizing Linear Transformers with the Delta Rule, arXiv:2406.06484, section 3.2.
"""

from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from genesis.base.device import kind_of

CHUNK_TOKENS: Final = 64
_EPS: Final = 1e-6
"""Added to the squared length of keys and queries, as in flash-linear-attention."""


class DeltaInputs(NamedTuple):
    """The inputs of the rule, of any floating-point type."""

    query: Float[Tensor, "B S K E"]
    key: Float[Tensor, "B S K E"]
    value: Float[Tensor, "B S H F"]
    decay: Float[Tensor, "B S H"]
    """The logarithm of the factor of the state, at most 0."""
    beta: Float[Tensor, "B S H"]
    """The share of the difference that is written, between 0 and 1; 0 leaves the state as it decays."""


def chunked(
    inputs: DeltaInputs,
    is_start: Bool[Tensor, "B S"] | None = None,
    state: Float[Tensor, "B H E F"] | None = None,
) -> tuple[Float[Tensor, "B S H F"], Float[Tensor, "B H E F"]]:
    """Returns the outputs in float32 and the state after the last token.

    Args:
        inputs: Queries, keys, values, decays, betas.
        is_start: Which tokens begin a document; their state is zero. None if rows are one document each.
        state: The state before the first token; None for zeros.
    """
    query, key, value, decay, beta = _prepare(inputs)
    seq_len = value.shape[2]
    query, key, value, decay, beta = (_split_chunks(part) for part in (query, key, value, decay, beta))
    same = torch.ones((CHUNK_TOKENS, CHUNK_TOKENS), dtype=torch.bool, device=value.device).tril()
    # B H N C: the logarithm of what has decayed since the chunk began. CUDA's cumsum adds in any order, and torch
    # refuses it in a run whose kernels repeat.
    passed = decay.cumsum(dim=-1) if kind_of(decay.device) == "cpu" else sum_to_each(decay, same)
    reads_state, is_kept = passed.exp(), (passed[..., -1:] - passed).exp()
    chunk_decay = passed[..., -1].exp()
    if is_start is not None:
        document = _split_chunks(is_start.unsqueeze(1)).cumsum(dim=-1)  # B 1 N C: counted within the chunk
        same = same & (document.unsqueeze(-1) == document.unsqueeze(-2))
        reads_state = reads_state * (document == 0)
        is_kept = is_kept * (document == document[..., -1:])
        chunk_decay = chunk_decay * (document[..., -1] == 0)
    # Masked before the exponential: after the token the difference is positive and may overflow.
    pairs = (passed.unsqueeze(-1) - passed.unsqueeze(-2)).masked_fill(~same, -torch.inf).exp()
    weighted = key * beta.unsqueeze(-1)
    # What the tokens of a chunk write depends on what earlier ones of it wrote: a triangular system.
    system = (weighted @ key.mT) * pairs
    given = torch.cat((value * beta.unsqueeze(-1), weighted * reads_state.unsqueeze(-1)), dim=-1)
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    writes, corrections = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    within = (query @ key.mT) * pairs
    query, key = query * reads_state.unsqueeze(-1), key * is_kept.unsqueeze(-1)
    if state is None:
        state = value.new_zeros((*value.shape[:2], key.shape[-1], value.shape[-1]))
    outputs = []
    for chunk in range(value.shape[2]):
        new = writes[:, :, chunk] - corrections[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + within[:, :, chunk] @ new)
        state = state * chunk_decay[:, :, chunk, None, None] + key[:, :, chunk].mT @ new
    return torch.cat(outputs, dim=2)[:, :, :seq_len].transpose(1, 2), state


def sum_to_each(decay: Float[Tensor, "B H N C"], same: Bool[Tensor, "C C"]) -> Float[Tensor, "B H N C"]:
    """Returns the cumulative sum of each chunk as sums of a fixed order; `same` is true up to each token itself."""
    return decay.unsqueeze(-2).masked_fill(~same, 0.0).sum(-1)


def step(
    inputs: DeltaInputs, state: Float[Tensor, "B H E F"]
) -> tuple[Float[Tensor, "B 1 H F"], Float[Tensor, "B H E F"]]:
    """Returns the output of one token of each row in float32, and the state after it."""
    query, key, value, decay, beta = (part.squeeze(2) for part in _prepare(inputs))
    state = state * decay.exp()[..., None, None]
    held = (key.unsqueeze(-2) @ state).squeeze(-2)
    state = state + key.unsqueeze(-1) * ((value - held) * beta.unsqueeze(-1)).unsqueeze(-2)
    return (query.unsqueeze(-2) @ state).transpose(1, 2), state


def _prepare(inputs: DeltaInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the inputs in float32, heads first, with a key and query for each value head."""
    query, key, value, decay, beta = (part.float().transpose(1, 2) for part in inputs)
    query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _EPS) for part in (query, key))
    groups = value.shape[1] // key.shape[1]
    if groups > 1:
        query, key = (part.repeat_interleave(groups, dim=1) for part in (query, key))
    return query * query.shape[-1] ** -0.5, key, value, decay, beta


def _split_chunks(part: Tensor) -> Tensor:
    """Returns dimension 2 in chunks; tokens of zeros fill up the last one and change no state."""
    missing = -part.shape[2] % CHUNK_TOKENS
    if missing:
        part = pad(part, (*(0, 0) * (part.ndim - 3), 0, missing))
    return part.reshape(*part.shape[:2], -1, CHUNK_TOKENS, *part.shape[3:])
