"""The sizes that `auto` stands for: steps of small and large corpora, and sequences that cut no conversation."""

from dataclasses import replace
from pathlib import Path

import pytest

from genesis.data.corpus import open_corpus
from genesis.data.sizes import Documents, Sizes, choose_sizes, resolve_sizes
from genesis.recipe.resolved import ResolvedRecipe
from tests.outside.test_kto import prepare_answers

CHAT = Documents("conversations", 300, 17_640, 123)
TEXT = Documents("text", 0, 10_000_000, 0)


def complete(max_seq_len: int, **data: object) -> ResolvedRecipe:
    return ResolvedRecipe.complete({"data": data, "model": {"decoder": {"max_seq_len": max_seq_len}}}, "the recipe")


def count_steps(documents: Documents, sizes: Sizes) -> float:
    return documents.num_tokens / sizes.seq_len / sizes.global_batch_size


@pytest.mark.parametrize(
    ("documents", "seq_len", "batch"),
    [
        (CHAT, 512, 1),
        (replace(CHAT, longest=1_500), 1536, 1),  # one long conversation is not cut
        (replace(CHAT, longest=9_000), 2048, 1),
        (replace(CHAT, number=30, num_tokens=1_764), 128, 1),
        (Documents("conversations", 1, 40, 40), 128, 1),
        (Documents("conversations", 50_000, 10_000_000, 1_200), 2048, 3),
        (Documents("conversations", 50_000, 60_000_000, 9_000), 2048, 19),
        (replace(CHAT, has_own_rows=True), 128, 8),
        (TEXT, 2048, 32),
        (replace(TEXT, num_tokens=40_000), 2048, 2),
        (replace(TEXT, num_tokens=900, shortest_source=900), 896, 1),
        (replace(TEXT, num_tokens=60, shortest_source=60), 59, 1),
        (None, 2048, 8),
    ],
)
def test_a_step_follows_the_corpus_and_no_conversation_is_cut_that_fits(
    documents: Documents | None, seq_len: int, batch: int
) -> None:
    sizes = choose_sizes(documents, 2048, None, None)
    assert (sizes.seq_len, sizes.global_batch_size) == (seq_len, batch)


def test_three_epochs_of_few_conversations_are_about_a_hundred_steps() -> None:
    for number in (200, 300, 600):
        documents = replace(CHAT, number=number, num_tokens=59 * number)
        assert 65 <= 3 * count_steps(documents, choose_sizes(documents, 2048, None, None)) <= 150


def test_a_size_that_is_given_stays_and_the_other_follows_from_it() -> None:
    assert choose_sizes(CHAT, 2048, 256, None).global_batch_size == 2
    assert choose_sizes(CHAT, 2048, None, 16).seq_len == 512
    given = {"global_batch_size": 3, "micro_batch_size": 2}
    assert resolve_sizes(complete(4096, **given, seq_len=256), 8, "text") is None
    sizes = resolve_sizes(complete(1000, **given, seq_len="auto"), 8, "text")
    assert sizes is not None
    assert (sizes.seq_len, sizes.global_batch_size) == (1000, 3)  # a number of the user's, which the fit judges


def test_a_step_of_single_answers_counts_them_as_conversations_are_counted(tmp_path: Path) -> None:
    corpus = prepare_answers(tmp_path)
    recipe = complete(512, corpus=str(corpus), seq_len="auto", global_batch_size="auto")
    sizes = resolve_sizes(recipe, 1, "answers")
    number = sum(source.num_documents for source in open_corpus(corpus, verify_hashes="never").train)
    assert sizes is not None
    assert sizes.global_batch_size == max(1, int(number**0.5 / 2))
    assert f"of all {number} answers" in sizes.reason


def test_a_batch_is_divided_over_ranks_and_micro_batches() -> None:
    sizes = resolve_sizes(complete(512, seq_len="auto", global_batch_size="auto", micro_batch_size=3), 4, "text")
    assert sizes is not None
    assert (sizes.seq_len, sizes.global_batch_size) == (512, 12)
