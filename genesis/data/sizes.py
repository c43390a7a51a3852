"""The length of sequences and the size of batches where a recipe leaves them to the corpus: `auto`.

A step learns from half the square root of the number of conversations, at most 32: 8 of 300, 15 of 1,000, 32 of 4,096
and more. So three epochs of a small corpus are a hundred steps, and a step of a large one is what people train on with
TRL, Axolotl, LLaMA-Factory and unsloth (8 to 32 conversations). A fixed number of tokens does neither: 300 short
conversations are nine sequences of 2,048 tokens, and three epochs of these teach nothing.

Sequences are as long as the longest conversation needs, and as the conversations of a step need, up to a limit. Where
the limit is reached, a step has several sequences. Of text, a step has half the square root of the number of sequences.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from genesis.base.errors import numbered
from genesis.data.corpus import Corpus, open_corpus
from genesis.data.manifest import MANIFEST_NAME
from genesis.data.packing import CUT_EVENLY, KEPT_WHOLE
from genesis.recipe.resolved import ResolvedRecipe

AUTO: Final = "auto"
Size = int | Literal["auto"]
"""A number of tokens or sequences, or `auto`."""
SEQ_LEN: Final = "seq_len"
BATCH: Final = "global_batch_size"
_MOST_TOKENS: Final = 2048
_BLOCK_TOKENS: Final = 128
"""Kernels of attention work in blocks of this size, of which sequences are multiples."""
_MOST_AT_ONCE: Final = 32
_UNCOUNTED: Final = 8
"""Sequences of a step where nobody has counted the data, as of a stream."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run's sequences and batches.

    Attributes:
        seq_len: Tokens of a sequence.
        global_batch_size: Sequences of a step.
        reason: What `auto` follows from; empty if neither size is `auto`.
    """

    seq_len: int
    global_batch_size: int
    reason: str = ""

    @property
    def options(self) -> dict[str, int]:
        """The sizes as options of a recipe."""
        return {f"data.{SEQ_LEN}": self.seq_len, f"data.{BATCH}": self.global_batch_size}


@dataclass(frozen=True)
class Documents:
    """What a choice needs to know of the documents of a corpus, or of its pairs of answers.

    Attributes:
        what: The plural of what they are.
        number: How many there are.
        num_tokens: Of all.
        longest: Tokens of the longest one; 0 if their lengths do not matter, as of text that is cut evenly.
        has_own_rows: Whether each has a sequence of its own.
        shortest_source: Tokens of the shortest source of text, which is longer than a sequence; None if that is no
            matter.
    """

    what: str
    number: int
    num_tokens: int
    longest: int
    has_own_rows: bool = False
    shortest_source: int | None = None


def resolve_sizes(recipe: ResolvedRecipe, num_ranks: int, learns_from: str) -> Sizes | None:
    """Returns the sizes of a recipe of which one is `auto`; None if neither is.

    Args:
        recipe: The recipe.
        num_ranks: Number of ranks, over which a batch is divided.
        learns_from: The kind of data of the recipe's objective (`Objective.learns_from`).

    Raises:
        UserError: The corpus cannot be read.
    """
    seq_len, batch = (recipe.get(f"data.{name}") for name in (SEQ_LEN, BATCH))
    if AUTO not in (seq_len, batch):
        return None
    path, others = recipe.get("data.corpus"), (recipe.get("data.stream"), recipe.get("data.prompts"))
    documents = None
    if path and not any(others) and (Path(path) / MANIFEST_NAME).is_file():
        corpus, packing = open_corpus(Path(path), verify_hashes="never"), recipe.get("data.packing")
        documents = describe_documents(corpus, packing, are_answers=learns_from == "answers")
    most = min(_MOST_TOKENS, recipe.count("model.decoder.max_seq_len"))
    chosen = choose_sizes(documents, most, None if seq_len == AUTO else seq_len, None if batch == AUTO else batch)
    multiple = num_ranks * (recipe.get("data.micro_batch_size") or 1) if batch == AUTO else 1
    return replace(chosen, global_batch_size=-(-chosen.global_batch_size // multiple) * multiple)


def resolve_recipe(recipe: ResolvedRecipe, num_ranks: int, learns_from: str) -> ResolvedRecipe:
    """Returns a recipe with numbers in the place of `auto`, for commands that train nothing."""
    sizes = resolve_sizes(recipe, num_ranks, learns_from)
    return recipe if sizes is None else recipe.complete_by(sizes.options)


def describe_documents(corpus: Corpus, packing: str | None, *, are_answers: bool = False) -> Documents:
    """Returns what a choice needs to know of the training set of a corpus.

    Args:
        corpus: The corpus, open.
        packing: `data.packing`; None for the default of the corpus.
        are_answers: Whether each document is a single answer with a value, in a sequence of its own.
    """
    manifest = corpus.manifest
    num_tokens = sum(source.num_tokens for source in corpus.train)
    default = CUT_EVENLY if manifest.chat is None else KEPT_WHOLE
    if (packing or default) == CUT_EVENLY and not manifest.is_paired and not are_answers:
        shortest = min((source.num_tokens for source in corpus.train), default=None)
        return Documents("text", 0, num_tokens, 0, shortest_source=shortest)
    number = sum(source.num_documents for source in corpus.train)
    longest = max((_find_longest(source.document_ends()) for source in corpus.train), default=0)
    if manifest.is_paired:
        return Documents("pairs", number // 2, num_tokens, longest, has_own_rows=True)
    if are_answers:
        return Documents("answers", number, num_tokens, longest, has_own_rows=True)
    what = "documents" if manifest.chat is None else "conversations"
    return Documents(what, number, num_tokens, longest, has_own_rows=packing == "pad")


def _find_longest(ends_of_shards: Iterable[Any]) -> int:
    longest = start = 0
    for ends in ends_of_shards:
        if len(ends):
            longest = max(longest, int(np.diff(ends, prepend=start).max()))
            start = int(ends[-1])
    return longest


def choose_sizes(documents: Documents | None, most_tokens: int, seq_len: int | None, batch: int | None) -> Sizes:
    """Returns the sizes that follow from documents, for one rank. Pure.

    Args:
        documents: The documents; None if nobody has counted them.
        most_tokens: The longest sequence that is chosen.
        seq_len: The length of sequences, if it is given.
        batch: Number of sequences of a step, if it is given.

    Example:
        >>> choose_sizes(Documents("pairs", 300, 18_000, 377, has_own_rows=True), 2048, None, None).reason
        'a step learns from about 8 of all 300 pairs, of at most 377 tokens'
        >>> choose_sizes(Documents("conversations", 50_000, 30_000_000, 9_000), 2048, None, None).global_batch_size
        9
    """
    if documents is None:
        return Sizes(seq_len or most_tokens, batch or _UNCOUNTED, "the data are not counted")
    if not documents.longest:
        most = min(most_tokens, (documents.shortest_source or most_tokens + 1) - 1)
        length = seq_len or max(1, most - most % _BLOCK_TOKENS if most > _BLOCK_TOKENS and most < most_tokens else most)
        chosen = batch or _count_at_once(documents.num_tokens // length)
        return Sizes(
            length, chosen, f"a step learns from {chosen * length:,} of {numbered(documents.num_tokens, 'tokens')}"
        )
    at_once = _count_at_once(documents.number)
    tokens_at_once = at_once * documents.num_tokens / max(1, documents.number)
    needed = documents.longest if documents.has_own_rows else max(documents.longest, tokens_at_once)
    length = seq_len or min(most_tokens, _BLOCK_TOKENS * math.ceil(needed / _BLOCK_TOKENS))
    chosen = batch or (at_once if documents.has_own_rows else max(1, round(tokens_at_once / length)))
    num_documents = chosen if documents.has_own_rows else chosen * length * documents.number / documents.num_tokens
    return Sizes(
        length,
        chosen,
        f"a step learns from about {min(documents.number, round(num_documents)):,} of all {documents.number:,} "
        f"{documents.what}, of at most {numbered(documents.longest, 'tokens')}",
    )


def _count_at_once(number: int) -> int:
    return max(1, min(_MOST_AT_ONCE, int(math.sqrt(number) / 2)))
