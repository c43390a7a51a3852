"""Continues texts together; each text joins and leaves the batch at any step.

Every text has a row of one key-value cache. Running texts have the first rows and new texts the rows behind them, so
that each forward sees a slice of the cache and nothing is gathered. If a text leaves, the last text takes its row.

A step waits for the device once, for the sampled tokens: all other inputs are on the device or known on the host. The
forward of running texts has one shape as long as no text joins or leaves.

B  texts of a forward     V  vocabulary
"""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from genesis.base.device import is_out_of_memory, send
from genesis.base.errors import UserError, numbered
from genesis.generate.logit_changes import LogitChanges
from genesis.generate.prefix_store import BLOCK_TOKENS, PrefixStore, name_blocks
from genesis.generate.sample import RowSampler
from genesis.generate.sampling_options import SamplingOptions
from genesis.model.attend.metadata import mark_padding
from genesis.model.decoder import Decoder
from genesis.model.language_model import project

DEFAULT_NEW_TOKENS = 256
_NO_TOKEN = -1
"""Stands in for a token that could not be sampled."""


class Grammar(Protocol):
    """What a text must follow, and how far it has come."""

    def mask(self) -> NDArray[np.bool_]:
        """Returns for each token of the vocabulary whether it may come next.

        Raises:
            UserError: The grammar takes too much work.
        """

    def accept(self, token: int) -> bool:
        """Adds the next token, and returns whether the text is complete: nothing may follow.

        Raises:
            UserError: The grammar takes too much work.
        """


@dataclass(frozen=True)
class Request:
    """A text to continue.

    Args:
        prompt: The ids of the prompt, at least one.
        max_new_tokens: Upper bound of new tokens; None for 256 or the rest of the context, whichever is less.
        sampling: Which tokens may be sampled.
        seed: Seed of the random generator of this text.
        num_top_logprobs: Number of most likely tokens whose log-probabilities come with each new token.
        grammar: What the text must follow, at the beginning of this text; None for any text.
        scope: Only requests of the same scope use each other's beginnings of prompts.
    """

    prompt: Sequence[int]
    max_new_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    seed: int = 0
    num_top_logprobs: int = 0
    grammar: Grammar | None = None
    scope: str = ""


class OutOfMemoryError(UserError):
    """The memory was not enough for a text; the batch goes on."""

    def __init__(self) -> None:
        super().__init__("the memory is not enough for the text: shorten the prompt, or try again")


class NewToken(NamedTuple):
    """One new token.

    `log_prob` and `top_logprobs` (most likely first) are natural logarithms of the model's own distribution, before
    grammar, bias, penalties, temperature, min-p, top-k and top-p. If the model's logits are not finite, the text ends
    and `log_prob` is NaN.
    """

    request: int
    """The handle that `Batch.add` returned."""
    id: int
    log_prob: float
    top_logprobs: tuple[tuple[int, float], ...]
    is_last: bool
    is_complete: bool = False
    """Whether the text ends here because its grammar has no more to come."""
    num_stored: int = 0
    """With the first token of a text, the number of the prompt's tokens that were not computed again."""
    failure: UserError | None = None
    """Why the text cannot go on; then there is no token."""


@dataclass
class _Row:
    handle: int
    request: Request
    text: list[int]
    end: int
    """Number of tokens at which the text has to end."""
    generator: torch.Generator
    changes: LogitChanges | None
    num_read: int
    """The number of tokens that stay in the row's cache when the rest of the prompt is read."""
    num_stored: int = 0
    failure: UserError | None = None

    def draw_uniform(self) -> float:
        """Returns the next random number of the text's own generator; greedy texts use no random numbers."""
        if self.request.sampling.is_greedy:
            return 0.0
        return float(torch.rand((), dtype=torch.float64, generator=self.generator))


class Batch:
    """Continues up to `num_rows` texts together. Computes on the calling thread; only one thread may use it at a time.

    The tokens of a text depend on its request, not on the other texts, except for the rounding of other matrix shapes.

    Args:
        decoder: The model, in evaluation mode.
        num_rows: Maximum number of texts at a time.
        stop_ids: The tokens that end a text; the stop token itself is part of the output.
        num_slots: Number of tokens of the longest text, prompt included; None for the model's context.
        has_cache: Whether to keep keys and values; otherwise every new token computes its whole text again.
        prefix: Tokens with which every prompt begins, and after which every prompt has more; they are computed once.
            Needs the cache, and a decoder that keeps no states.
        read_tokens: Number of tokens of prompts that a forward reads, with padding; a longer prompt is read by itself.
            None to read all new prompts together.
        head: The head that computes logits, as `Decoder.forward` takes it.
        has_blocks: Whether whole blocks of a prompt are read one by one, as `PrefixStore` needs it; no model does so
            whose keys depend on the length of the text. New texts that the memory is not enough for then fail alone.
        store: The blocks that were computed before; None to compute all.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_rows: int,
        stop_ids: Set[int],
        *,
        num_slots: int | None = None,
        has_cache: bool = True,
        prefix: Sequence[int] = (),
        read_tokens: int | None = None,
        head: Callable[[Tensor, Tensor], Tensor] = project,
        has_blocks: bool = False,
        store: PrefixStore | None = None,
    ) -> None:
        assert not decoder.training, "dropout would be part of the text"
        assert has_cache or not (prefix or has_blocks), "without a cache every text is computed whole"
        assert has_blocks or store is None, "only blocks are stored"
        self._decoder, self._num_rows, self._stop_ids = decoder, num_rows, frozenset(stop_ids)
        self._num_slots = decoder.config.max_seq_len if num_slots is None else num_slots
        weight = decoder.output_weight
        self._device = weight.device
        self._cache = decoder.new_cache(num_rows, self._num_slots) if has_cache else None
        self._last_tokens: Int64[Tensor, " num_rows"] = torch.zeros(num_rows, dtype=torch.int64, device=weight.device)
        self._sampler: RowSampler | None = None  # valid for the current rows; None once a text has joined or left
        self._rows: list[_Row] = []
        self._newcomers: list[_Row] = []
        self._failed: list[NewToken] = []  # the ends of texts that no caller has seen yet
        self._num_added = 0
        self._prefix, self._read_tokens, self._head = list(prefix), read_tokens, head
        self._fails_alone, self._store = has_blocks, store
        self._has_blocks = has_blocks and not decoder.config.reads_length
        if prefix:
            self._read_prefix()

    @property
    def num_free(self) -> int:
        """The number of texts that can still be added."""
        return self._num_rows - len(self._rows) - len(self._newcomers)

    def add(self, request: Request) -> int:
        """Adds a text from the next step on and returns its handle. There must be a free row.

        Raises:
            UserError: The prompt is empty, or it and its new tokens are longer than the context.
        """
        assert self.num_free, "no row is free"
        start, prompt = len(self._prefix), list(request.prompt)
        assert not start or (prompt[:start] == self._prefix and len(prompt) > start), "not a prompt after the prefix"
        (budget,) = plan_budgets([len(request.prompt)], request.max_new_tokens, self._num_slots)
        generator = torch.Generator("cpu").manual_seed(request.seed)
        end = len(request.prompt) + budget
        changes = None
        if request.sampling.changes_logits:
            changes = LogitChanges(request.sampling, prompt, self._decoder.config.vocab_size, self._device)
        row = _Row(self._num_added, request, prompt, end, generator, changes, num_read=start)
        self._num_added += 1
        self._newcomers.append(row)
        return row.handle

    def remove(self, handle: int) -> None:
        """Removes a text that has not ended."""
        newcomers = [row for row in self._newcomers if row.handle != handle]
        if len(newcomers) < len(self._newcomers):
            self._newcomers = newcomers
        else:
            self._leave(next(index for index, row in enumerate(self._rows) if row.handle == handle))

    @torch.no_grad()
    def step(self) -> list[NewToken]:
        """Returns the next token of every text, and removes the texts that end with it."""
        # Two forwards: running texts give one token each, new ones a whole prompt, and padding the former to the
        # length of a prompt would cost far more than a second call.
        logits: list[Tensor] = []
        if self._rows:
            logits.append(self._continue())
        if self._newcomers:
            logits += self._join()
        if not logits:
            return self._take_failed()
        tokens = self._draw(logits[0] if len(logits) == 1 else torch.cat(logits))
        # From the end: a row that leaves is replaced by the last one, which has been visited by then.
        for index in reversed(range(len(tokens))):
            if tokens[index].is_last:
                self._leave(index, is_number=not math.isnan(tokens[index].log_prob))
        return tokens + self._take_failed()

    def _take_failed(self) -> list[NewToken]:
        failed, self._failed = self._failed, []
        return failed

    def _join(self) -> list[Tensor]:
        """Returns the logits after the prompts of the new texts; those that the memory fails end."""
        newcomers, self._newcomers, self._sampler = self._newcomers, [], None
        num_old = len(self._rows)
        for row in newcomers:
            self._rows.append(row)
            if self._has_blocks and not self._read_blocks(len(self._rows) - 1):
                self._end(len(self._rows) - 1)
        try:
            return [self._read(start, stop) for start, stop in self._plan_reads(num_old)]
        except (MemoryError, RuntimeError) as error:
            if not (self._fails_alone and is_out_of_memory(error)):
                raise
        self._end(num_old)  # behind the handler, which keeps the tensors of the failed forward
        return []

    def fail(self) -> list[NewToken]:
        """Ends all texts and drops the stored blocks, after a step for which the memory was not enough.

        All texts must end: their rows in the cache are half written.
        """
        self._rows += self._newcomers
        self._newcomers = []
        self._end(0)
        return self._take_failed()

    def _end(self, first: int) -> None:
        """Ends the texts from a row on for which the memory was not enough, and drops the stored blocks."""
        if self._store is not None:
            self._store.clear()
        for index in reversed(range(first, len(self._rows))):
            handle = self._rows[index].handle
            self._failed.append(NewToken(handle, _NO_TOKEN, math.nan, (), is_last=True, failure=OutOfMemoryError()))
            self._leave(index, is_number=False)

    def _leave(self, index: int, *, is_number: bool = True) -> None:
        last = self._rows.pop()
        self._sampler = None
        if index < len(self._rows):
            self._rows[index] = last
            self._last_tokens[index] = self._last_tokens[len(self._rows)]
            if self._cache is not None:
                if not is_number:
                    self._cache.free_row(index, is_number=False)
                self._cache.copy_row(len(self._rows), index)
                is_number = True
        if self._cache is not None:
            self._cache.free_row(len(self._rows), is_number=is_number)

    def _continue(self) -> Float[Tensor, "B V"]:
        """Returns the logits after the last token of the running texts."""
        if self._cache is None:
            return self._read(0, len(self._rows))
        cache = self._cache.view(0, len(self._rows))
        logits: Tensor = self._decoder(self._last_tokens[: len(self._rows)].unsqueeze(1), cache=cache, head=self._head)
        cache.advance(1)
        return logits.squeeze(1)

    @torch.no_grad()
    def _read_prefix(self) -> None:
        assert self._cache is not None
        first = self._cache.view(0, 1)
        prefix = torch.tensor([self._prefix])
        nothing = torch.empty(0, dtype=torch.int64)
        self._decoder(send(prefix, self._device), cache=first, logits_to_keep=send(nothing, self._device))
        first.advance(len(self._prefix))
        self._cache.share()

    def _read_blocks(self, index: int) -> bool:
        """Reads the whole blocks of a new row's prompt, or takes them from the store.

        Where memory ends, the store is dropped, and the prompt is read again without it.

        Returns:
            Whether the memory was enough.
        """
        assert self._cache is not None
        for has_store in (True, False):
            try:
                self._try_blocks(index, self._store if has_store else None)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            else:
                return True
            # Behind the handler, which keeps the tensors of the failed forward.
            if self._store is None:
                return False
            self._store.clear()
            self._cache.free_row(index, is_number=False)  # some layers may have written a block that others have not
        return False

    @torch.no_grad()
    def _try_blocks(self, index: int, store: PrefixStore | None) -> None:
        assert self._cache is not None
        row, cache = self._rows[index], self._cache.view(index, index + 1)
        names = name_blocks(row.text, row.request.scope)
        stored = [] if store is None else store.find(names)
        nothing = send(torch.empty(0, dtype=torch.int64), self._device)
        for number in range(len(names)):
            start, stop = number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS
            if number < len(stored):
                cache.put_slots(start, stop, stored[number])
            else:
                block = send(torch.tensor([row.text[start:stop]]), self._device)
                self._decoder(block, cache=cache, logits_to_keep=nothing)
                if store is not None and not store.add(names[: number + 1], cache.copy_slots(start, stop)):
                    store = None  # full of what is before this block
            cache.advance(BLOCK_TOKENS)
        row.num_read, row.num_stored = len(names) * BLOCK_TOKENS, len(stored) * BLOCK_TOKENS

    def _plan_reads(self, first: int) -> Iterator[tuple[int, int]]:
        """Yields the beginning and the end of each group of rows, from `first` on, whose texts one forward reads.

        All rows of a group begin at the same place: padding behind a longer one would need slots that it does not have.
        """
        start, longest = first, 0
        for index in range(first, len(self._rows)):
            row = self._rows[index]
            length = len(row.text) - row.num_read
            longest = max(longest, length)
            is_full = self._read_tokens is not None and (index + 1 - start) * longest > self._read_tokens
            if index > start and (is_full or row.num_read != self._rows[start].num_read):
                yield start, index
                start, longest = index, length
        if start < len(self._rows):
            yield start, len(self._rows)

    def _read(self, start: int, stop: int) -> Float[Tensor, "B V"]:
        """Returns the logits after the last token of whole texts, which are in the rows from `start` to `stop`."""
        texts = [row.text[row.num_read :] for row in self._rows[start:stop]]
        lengths = torch.tensor([len(text) for text in texts])
        input_ids = torch.zeros((len(texts), max(map(len, texts))), dtype=torch.int64)  # padding is never attended
        for line, text in zip(input_ids, texts, strict=True):
            line[: len(text)] = torch.tensor(text)
        last = torch.arange(len(texts)) * input_ids.shape[1] + lengths - 1
        cache = None if self._cache is None else self._cache.view(start, start + len(texts))
        documents = None
        if cache is not None:
            cache.expect(lengths)
        elif self._decoder.config.reads_length:
            documents = send(mark_padding(lengths.tolist()), self._device)
        logits: Tensor = self._decoder(
            send(input_ids, self._device),
            document_ids=documents,
            cache=cache,
            logits_to_keep=send(last, self._device),
            head=self._head,
        )
        if cache is not None:
            cache.advance(lengths)
        return logits

    def _draw(self, logits: Float[Tensor, "B V"]) -> list[NewToken]:
        """Returns the next token of each row, and stores it as the row's next input."""
        if self._sampler is None:
            options = [row.request.sampling for row in self._rows]
            self._sampler = RowSampler(options, logits.shape[1], self._device)
        uniforms = None
        if self._sampler.needs_uniforms:
            drawn = [row.draw_uniform() for row in self._rows]
            uniforms = send(torch.tensor(drawn, dtype=torch.float64), self._device)
        logits = logits.float()
        tokens = self._sampler.draw(self._change(logits), uniforms)
        for index, row in enumerate(self._rows):
            if row.changes is not None:
                row.changes.add(tokens[index : index + 1])
        self._last_tokens[: len(tokens)] = tokens
        num_top = min(max(row.request.num_top_logprobs for row in self._rows), logits.shape[1])
        figures = _gather_figures(logits, tokens, num_top).cpu().tolist()  # the step's only wait for the device
        return [self._describe(row, *of_row) for row, of_row in zip(self._rows, figures, strict=True)]

    def _change(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Returns the logits that tokens are sampled from, by each text's penalties, bias and grammar."""
        rows = [(index, row) for index, row in enumerate(self._rows) if row.changes or row.request.grammar]
        logits = logits.clone() if rows else logits
        for index, row in rows:
            if row.changes is not None:
                logits[index] = row.changes.apply(logits[index])
            if row.request.grammar is not None:
                try:
                    mask = row.request.grammar.mask()
                except UserError as error:  # of this text alone
                    row.failure = error
                else:
                    logits[index].masked_fill_(send(torch.from_numpy(~mask), self._device), -math.inf)
        return logits

    def _describe(self, row: _Row, token: float, log_prob: float, *top: float) -> NewToken:
        is_complete = False
        if row.failure is None and row.request.grammar is not None and not math.isnan(log_prob):
            try:
                is_complete = row.request.grammar.accept(int(token))
            except UserError as error:
                row.failure = error
        if row.failure is not None:
            return NewToken(row.handle, _NO_TOKEN, log_prob, (), is_last=True, failure=row.failure)
        if math.isnan(log_prob):  # no token can be sampled; the other texts continue
            return NewToken(row.handle, _NO_TOKEN, math.nan, (), is_last=True)
        row.text.append(int(token))
        ids, values = top[: len(top) // 2], top[len(top) // 2 :]
        asked = slice(row.request.num_top_logprobs)
        top_logprobs = tuple(zip(map(int, ids[asked]), values[asked], strict=True))
        is_last = is_complete or int(token) in self._stop_ids or len(row.text) == row.end
        num_stored, row.num_stored = row.num_stored, 0
        return NewToken(
            row.handle, int(token), log_prob, top_logprobs, is_last, is_complete=is_complete, num_stored=num_stored
        )


def _gather_figures(
    logits: Float[Tensor, "B V"], tokens: Int64[Tensor, " B"], num_top: int
) -> Float64[Tensor, "B 2+2*num_top"]:
    """Returns for each row its token, the token's log-probability, the most likely tokens, and theirs, in one tensor.

    The log-probability is NaN where a logit is not finite.
    """
    log_probs = logits.log_softmax(dim=1)
    is_number = log_probs.amin(dim=1, keepdim=True) > -math.inf  # also false for NaN, which any other infinity becomes
    chosen = torch.where(is_number, log_probs.gather(1, tokens.unsqueeze(1)), math.nan)
    figures = [tokens.unsqueeze(1).double(), chosen.double()]  # float64 holds both without rounding
    if num_top:
        values, ids = log_probs.topk(num_top, dim=1)
        figures += [ids.double(), values.double()]
    return torch.cat(figures, dim=1)


def check_is_number(token: NewToken) -> None:
    """Checks that a token could be sampled.

    Raises:
        UserError: The model's logits were not finite, or the grammar takes too much work.
    """
    if token.failure is not None:
        raise token.failure
    if math.isnan(token.log_prob):
        raise UserError("the model's logits are not numbers: its weights have diverged; use an earlier checkpoint")


def plan_budgets(prompt_lengths: Sequence[int], max_new_tokens: int | None, max_seq_len: int) -> list[int]:
    """Returns how many new tokens each prompt may get.

    Raises:
        UserError: There is no prompt, a prompt is empty, or the requested tokens do not fit the context.
    """
    if not prompt_lengths:
        raise UserError("no prompt to continue")
    budgets = []
    for index, length in enumerate(prompt_lengths, start=1):
        room = max_seq_len - length
        if length == 0:
            raise UserError(f"prompt {index} has no token; begin it with bos")
        if room < (max_new_tokens or 1):
            remedy = f"ask for at most {numbered(room, 'new tokens')}" if room > 0 else "shorten the prompt"
            raise UserError(
                f"prompt {index} has {numbered(length, 'tokens')}, and {max_new_tokens or 1:,} more exceed the model's "
                f"context of {max_seq_len:,}: {remedy}"
            )
        budgets.append(max_new_tokens or min(DEFAULT_NEW_TOKENS, room))
    return budgets
