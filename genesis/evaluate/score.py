"""Computes exact log-likelihoods of continuations: runs the rows that `plan.py` plans on a decoder.

B  rows of a forward     D  model width     V  vocabulary
P  positions of a row whose logits are needed     T  targets (tokens to score at these positions)
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from genesis.base.device import send
from genesis.base.errors import UserError
from genesis.evaluate.plan import (
    Context,
    Head,
    Request,
    Row,
    batch_by_size,
    find_heads,
    gather_contexts,
    keep_apart,
    plan_branches,
    plan_context,
    plan_whole,
)
from genesis.model.attend.metadata import mark_padding
from genesis.model.decoder import Decoder
from genesis.model.kv_cache import KVCache
from genesis.model.language_model import LanguageModel
from genesis.model.loss import bound_logits, chunk_tokens

BATCH_TOKENS_OF_THREAD, _BATCH_TOKENS_CUDA = 1024, 32_768
_LEAST_PLACES: Final = 512
"""Minimum number of positions whose logits are computed at one time: smaller matrix products are inefficient."""
_BLOCK_TOKENS: Final = 1024
"""Tokens of the vocabulary whose logits exist at one time on a CPU."""
_BATCHES_IN_GROUP: Final = 4
"""Batches of contexts that share a cache: keys and values take far less memory than a forward."""


def default_batch_tokens(device_type: str) -> int:
    """Returns the number of tokens that a forward feeds and keeps; on a CPU, about as many as fit the cores' caches."""
    return _BATCH_TOKENS_CUDA if device_type == "cuda" else BATCH_TOKENS_OF_THREAD * torch.get_num_threads()


class Score(NamedTuple):
    """The log-likelihood of a continuation in nats, and whether each of its tokens was the most likely."""

    log_likelihood: float
    is_greedy: bool


class Scorer:
    """Scores requests with one decoder, in batches of limited size. Deterministic; not thread-safe.

    Args:
        decoder: The model, in evaluation mode. One of another library has no cache: each row has all of its tokens.
        batch_tokens: Tokens that a forward feeds plus the tokens of the cache that it reuses, with padding; None
            chooses a size that suits the device.

    Raises:
        UserError: `batch_tokens` is below 1.
    """

    def __init__(self, decoder: LanguageModel, batch_tokens: int | None = None) -> None:
        assert not decoder.training, "dropout would be part of the scores"
        if batch_tokens is not None and batch_tokens < 1:
            raise UserError(f"batch_tokens is {batch_tokens}: it must be at least 1")
        self.decoder = decoder
        self.batch_tokens = batch_tokens or default_batch_tokens(decoder.output_weight.device.type)

    @torch.inference_mode()
    def score(self, requests: Sequence[Request], on_progress: Callable[[int], None] = lambda _: None) -> list[Score]:
        """Returns the score of each request; equal requests are computed once.

        Args:
            requests: The requests. Each has at most one token more than the decoder's context, because the last token
                is never fed.
            on_progress: Called with the number of distinct requests that were scored since the last call.
        """
        numbers = {request: number for number, request in enumerate(dict.fromkeys(requests))}
        self._sums = torch.zeros(len(numbers), dtype=torch.float64)
        self._is_greedy = torch.ones(len(numbers), dtype=torch.bool)
        if not isinstance(self.decoder, Decoder):
            self._score_whole(gather_contexts(list(numbers)), on_progress)
            plain, heads = Head((), ()), []
        elif self.decoder.config.can_share_beginnings:
            plain, *heads = find_heads(gather_contexts(list(numbers)))
        else:  # a state cannot go back to an earlier token, where another continuation begins
            plain, heads = Head((), keep_apart(list(numbers))), []
        self._score_contexts([plain], None, on_progress)
        for batch in batch_by_size(heads, lambda head: (len(head.tokens), 0), self.batch_tokens):
            rows = [Row(0, 0, head.tokens) for head in batch]
            cache = self._branch(rows, None)
            self._feed(rows, cache)
            cache.advance(torch.tensor([len(row.tokens) for row in rows]))
            self._score_contexts(batch, cache, on_progress)
        if bool(self._sums.isnan().any()):
            raise UserError("the model's log-likelihoods are not numbers: its weights have diverged")
        scores = [Score(*both) for both in zip(self._sums.tolist(), self._is_greedy.tolist(), strict=True)]
        return [scores[numbers[request]] for request in requests]

    def _score_whole(self, contexts: Sequence[Context], on_progress: Callable[[int], None]) -> None:
        rows = [row for context in contexts for row in plan_whole(context)]
        begun: set[int] = set()
        for batch in batch_by_size(rows, _size, self.batch_tokens):
            self._feed(batch, None)
            num_before = len(begun)
            begun.update(target.request for row in batch for target in row.targets)
            on_progress(len(begun) - num_before)

    def _score_contexts(
        self, heads: Sequence[Head], parents: KVCache | None, on_progress: Callable[[int], None]
    ) -> None:
        """Scores all continuations after heads, whose keys and values are the rows of `parents`."""
        planned = [
            (plan_context(context, row, len(head.tokens)), context)
            for row, head in enumerate(heads)
            for context in head.contexts
        ]
        # Several batches of contexts share a cache, so that their branches can be batched by length.
        for group in batch_by_size(planned, lambda item: _size(item[0]), self.batch_tokens * _BATCHES_IN_GROUP):
            rows = [row for row, _ in group]
            branches = list(chain.from_iterable(plan_branches(item[1], row) for row, item in enumerate(group)))
            cache = None
            if branches or parents is not None:  # with room for a branch, so that a copy of a row also has room
                cache = self._branch(rows, parents, spare=max((len(row.tokens) for row in branches), default=0))
            num_fed = 0
            for batch in batch_by_size(rows, _size, self.batch_tokens):  # the rows already have this order
                self._feed(batch, None if cache is None else cache.view(num_fed, num_fed + len(batch)))
                num_fed += len(batch)
            for batch in batch_by_size(branches, _size, self.batch_tokens):
                self._feed(batch, self._branch(batch, cache))
            on_progress(sum(len(context.continuations) for _, context in group))

    def _branch(self, rows: Sequence[Row], parents: KVCache | None, spare: int = 0) -> KVCache:
        """Returns a cache for `rows`, each with the tokens kept from its parent and room for its own plus `spare`."""
        num_slots = max(row.start for row in rows) + max(len(row.tokens) for row in rows) + spare
        if parents is None:
            assert isinstance(self.decoder, Decoder), "others have no cache"
            return self.decoder.new_cache(len(rows), num_slots)
        return parents.branch([row.parent for row in rows], [row.start for row in rows], num_slots)

    def _feed(self, rows: Sequence[Row], cache: KVCache | None) -> None:
        """Feeds rows after their tokens in the cache, and adds up the log-probabilities of their targets."""
        device = self.decoder.output_weight.device
        longest = max(len(row.tokens) for row in rows)
        input_ids = torch.zeros((len(rows), longest), dtype=torch.int64)  # right padding, which no token attends to
        for padded, row in zip(input_ids, rows, strict=True):
            padded[: len(row.tokens)] = torch.tensor(row.tokens)
        targets = torch.tensor(
            [
                (index * longest + position, token, request)
                for index, row in enumerate(rows)
                for position, token, request in row.targets
            ],
            dtype=torch.int64,
        ).view(-1, 3)
        positions, tokens, requests = targets.unbind(1)
        unique, which = torch.unique_consecutive(positions, return_inverse=True)  # on the host, without a wait
        head = partial(score_targets, which=which, tokens=send(tokens, device), softcap=self.decoder.softcap)
        input_ids, unique = send(input_ids, device), send(unique, device)
        if isinstance(self.decoder, Decoder):
            documents = None
            if self.decoder.config.reads_length:
                assert cache is None, "texts whose keys depend on their length are computed whole"
                documents = send(mark_padding([len(row.tokens) for row in rows]), device)
            found = self.decoder(input_ids, document_ids=documents, cache=cache, logits_to_keep=unique, head=head)
        else:
            found = self.decoder(input_ids, head=lambda hidden, weight: head(hidden.flatten(0, 1)[unique], weight))
        logprobs, is_most_likely = found
        if not len(targets):  # only the keys and values are needed
            return
        logprobs, is_most_likely = torch.stack((logprobs, is_most_likely.float())).cpu()  # the forward's only wait
        self._sums.index_add_(0, requests, logprobs.double())
        self._is_greedy[requests[is_most_likely == 0]] = False


def score_targets(
    hidden: Float[Tensor, "P D"],
    weight: Float[Tensor, "V D"],
    which: Int64[Tensor, " T"],
    tokens: Int64[Tensor, " T"],
    softcap: float | None = None,
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """Returns the log-probability of each target in float32, and whether no token is more likely at its position.

    Args:
        hidden: The input of the decoder's head, at the positions of the targets.
        weight: The output weight.
        which: Index into `hidden` of each target, ascending, on the host.
        tokens: The id of each target.
        softcap: The bound of logits, as in `LanguageModel`; None without one.
    """
    logprobs = torch.empty(len(tokens), dtype=torch.float32, device=hidden.device)
    is_most_likely = torch.empty(len(tokens), dtype=torch.bool, device=hidden.device)
    step = max(_LEAST_PLACES, chunk_tokens(weight.shape[0], weight.device))
    score = _score_in_blocks if hidden.device.type == "cpu" else _score_at_once
    first = 0
    for start in range(0, len(hidden), step):  # all logits at one time would need more memory than the model
        end = int(torch.searchsorted(which, start + step))
        rows, asked = send(which[first:end] - start, hidden.device), tokens[first:end]
        logprobs[first:end], is_most_likely[first:end] = score(
            hidden[start : start + step], weight, rows, asked, softcap
        )
        first = end
    return logprobs, is_most_likely


def _score_at_once(
    hidden: Tensor, weight: Tensor, rows: Tensor, asked: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logits = bound_logits(multiply_in_float32(hidden, weight), softcap)
    logprobs = logits.log_softmax(dim=1, dtype=torch.float32)[rows, asked]
    return logprobs, logits[rows, asked] == logits.amax(dim=1)[rows]  # cheaper than argmax


def _score_in_blocks(
    hidden: Tensor, weight: Tensor, rows: Tensor, asked: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Goes through the vocabulary in blocks whose logits stay in a CPU's caches; they are never all written."""
    largest = torch.full((len(hidden),), -math.inf)
    sums, found = torch.zeros(len(hidden)), torch.empty(len(asked))
    order = asked.argsort()
    ids, of_row = asked[order], rows[order]
    for start in range(0, len(weight), _BLOCK_TOKENS):
        logits = bound_logits(multiply_in_float32(hidden, weight[start : start + _BLOCK_TOKENS]), softcap)
        first, end = torch.searchsorted(ids, torch.tensor([start, start + logits.shape[1]])).tolist()
        found[order[first:end]] = logits[of_row[first:end], ids[first:end] - start]
        raised = torch.maximum(largest, logits.amax(dim=1))
        added = logits.sub_(raised.unsqueeze(1)).exp_().sum(dim=1)
        sums.mul_(largest.sub_(raised).exp_()).add_(added)
        largest = raised
    return found - largest[rows] - sums.log()[rows], found == largest[rows]


def multiply_in_float32(hidden: Float[Tensor, "P D"], weight: Float[Tensor, "V D"]) -> Float32[Tensor, "P V"]:
    """Returns logits in float32: in bfloat16 the two most likely tokens often tie, and both would count as greedy."""
    if hidden.dtype == torch.float32:
        return hidden @ weight.t()
    if hidden.device.type == "cuda":
        logits: Tensor = torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # avoids a float32 copy of the weight
        return logits
    return hidden.float() @ weight.float().t()


def _size(row: Row) -> tuple[int, int]:
    return len(row.tokens), row.start
