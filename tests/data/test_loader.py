from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from genesis.base.errors import UserError
from genesis.data.corpus import Corpus, open_corpus
from genesis.data.loader import (
    Ranks,
    SequenceFormat,
    TrainWindows,
    WindowLoader,
    build_window,
    compute_ahead,
    plan_micro_batches,
)
from genesis.data.order import build_order
from genesis.data.packing import Packing, count_train_sequences
from genesis.data.plans import SourcePlan, measure_source, open_plan, write_plan
from genesis.data.validation_windows import ValidationWindows
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.model.attend.metadata import document_offsets
from tests.data.corpora import BOS, EOS, VOCAB_SIZE, Documents, make_documents, write_corpus

SEQ_LEN = 12
GLOBAL_BATCH = 8
SOURCES = {"web": make_documents(60, 9, seed=1), "code": make_documents(25, 20, seed=2)}
VALIDATION = {"web": make_documents(11, 9, seed=3), "code": make_documents(7, 5, seed=4), "empty": []}
TOKEN_NUM_BYTES = np.random.default_rng(0).integers(1, 9, VOCAB_SIZE, dtype=np.int32)
TOKEN_NUM_BYTES[:16] = 0
FORMAT = SequenceFormat(SEQ_LEN, EOS, TOKEN_NUM_BYTES, np.dtype("<u2"))

PACKINGS: tuple[Packing, ...] = ("chunk", "best_fit", "pad")

Row = tuple[list[int], list[int], list[int]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    corpus = open_corpus(write_corpus(tmp_path_factory.mktemp("corpus"), SOURCES, VALIDATION, documents_per_shard=7))
    write_plan(corpus, "best_fit", SEQ_LEN)
    write_plan(corpus, "pad", SEQ_LEN)
    return corpus


def train_windows(
    corpus: Corpus, micro_batch_size: int = 2, rank: int = 0, world_size: int = 1, packing: Packing = "chunk"
) -> TrainWindows:
    plans = None if packing == "chunk" else open_plan(corpus, packing, SEQ_LEN, "first_touch")
    order = build_order(count_sequences(corpus, SEQ_LEN, plans), {"web": 2, "code": 1}, seed=3)
    ranks = Ranks(rank, world_size)
    return TrainWindows(order, corpus.train, FORMAT, GLOBAL_BATCH, micro_batch_size, ranks, plans)


def count_sequences(corpus: Corpus, seq_len: int, plans: Sequence[SourcePlan] | None) -> dict[str, int]:
    if plans is None:
        return {source.name: count_train_sequences(source.num_tokens, seq_len) for source in corpus.train}
    return {source.name: plan.num_sequences for source, plan in zip(corpus.train, plans, strict=True)}


def rows_of(window: AccumulationWindow) -> list[Row]:
    return [
        (inputs.tolist(), labels.tolist(), documents.tolist())
        for micro_batch in window.micro_batches
        for inputs, labels, documents in zip(
            micro_batch.input_ids, micro_batch.labels, micro_batch.document_ids, strict=True
        )
    ]


def labelled_tokens(documents: Documents) -> list[tuple[int, int, int]]:
    """(token, label, number of its document) of each token in a stream, the slow obvious way."""
    found = []
    for number, document in enumerate(documents):
        found += [(token, following, number) for token, following in pairwise(document)]
        found.append((document[-1], IGNORE_INDEX, number))
    return found


def reference_row(documents: Documents, sequence: int) -> Row:
    part = labelled_tokens(documents)[sequence * SEQ_LEN : (sequence + 1) * SEQ_LEN]
    first = part[0][2]
    return [token for token, _, _ in part], [label for _, label, _ in part], [number - first for _, _, number in part]


def equal_windows(one: AccumulationWindow, two: AccumulationWindow) -> bool:
    return (one.data_position, one.num_valid_tokens, one.num_bytes, rows_of(one)) == (
        two.data_position,
        two.num_valid_tokens,
        two.num_bytes,
        rows_of(two),
    )


def test_rows_are_the_documents_tokens_labels_and_numbers(corpus: Corpus) -> None:
    windows = train_windows(corpus)
    names = windows.order.names
    for position in range(0, 25 * GLOBAL_BATCH, GLOBAL_BATCH):
        sources, sequences = windows.order.sequences(position, GLOBAL_BATCH)
        window = windows.window(position)
        expected = [
            reference_row(SOURCES[names[source]], sequence)
            for source, sequence in zip(sources.tolist(), sequences.tolist(), strict=True)
        ]
        assert rows_of(window) == expected
        labels = [label for _, row, _ in expected for label in row if label != IGNORE_INDEX]
        assert window.num_valid_tokens == len(labels)
        assert window.num_bytes == sum(int(TOKEN_NUM_BYTES[label]) for label in labels)
        assert window.data_position == position + GLOBAL_BATCH


def test_tensors_have_the_types_and_shapes_of_the_contract(corpus: Corpus) -> None:
    window = train_windows(corpus, micro_batch_size=4).window(0)
    assert len(window.micro_batches) == 2
    for micro_batch in window.micro_batches:
        assert micro_batch.input_ids.shape == micro_batch.labels.shape == micro_batch.document_ids.shape == (4, SEQ_LEN)
        assert (micro_batch.input_ids.dtype, micro_batch.labels.dtype) == (torch.int64, torch.int64)
        assert micro_batch.document_ids.dtype == torch.int32
        assert micro_batch.input_ids.is_contiguous()
        assert micro_batch.labels.is_contiguous()


def test_sequences_of_a_source_tile_its_stream(corpus: Corpus) -> None:
    """In one epoch every token of a source is an input once, but for a rest shorter than a sequence."""
    (web, _) = corpus.train
    length = count_train_sequences(web.num_tokens, SEQ_LEN)
    order = build_order({"web": length}, {"web": 1}, seed=0)
    windows = TrainWindows(order, [web], FORMAT, 1, 1, Ranks())
    seen = {int(order.sequences(position, 1)[1][0]): windows.window(position) for position in range(length)}
    inputs = [token for sequence in range(length) for token in rows_of(seen[sequence])[0][0]]
    stream = [token for document in SOURCES["web"] for token in document]
    assert inputs == stream[: length * SEQ_LEN]
    assert len(stream) - len(inputs) <= SEQ_LEN


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_a_global_batch_and_each_micro_batch_are_the_same_on_any_number_of_ranks(
    corpus: Corpus, world_size: int, micro_batch_size: int, packing: Packing
) -> None:
    alone = train_windows(corpus, micro_batch_size, packing=packing)
    ranks = [train_windows(corpus, micro_batch_size, rank, world_size, packing) for rank in range(world_size)]
    for position in range(0, 10 * GLOBAL_BATCH, GLOBAL_BATCH):
        whole, parts = alone.window(position), [rank.window(position) for rank in ranks]
        assert [row for part in parts for row in rows_of(part)] == rows_of(whole)
        micro_batches = [micro_batch for part in parts for micro_batch in part.micro_batches]
        for one, two in zip(micro_batches, whole.micro_batches, strict=True):
            assert torch.equal(one.input_ids, two.input_ids)
        assert sum(part.num_valid_tokens for part in parts) == whole.num_valid_tokens
        assert sum(part.num_bytes for part in parts) == whole.num_bytes
        assert {part.data_position for part in parts} == {whole.data_position}


@settings(max_examples=30)
@given(position=st.integers(0, 10_000), world_size=st.sampled_from([1, 2, 4, 8]))
def test_a_window_depends_on_its_position_alone(corpus: Corpus, position: int, world_size: int) -> None:
    rank = position % world_size
    windows, fresh = (train_windows(corpus, 1, rank, world_size) for _ in range(2))
    windows.window(position // 2)
    assert equal_windows(windows.window(position), fresh.window(position))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("prefetch_windows", [0, 1, 3])
def test_a_resume_at_every_step_equals_going_straight(corpus: Corpus, prefetch_windows: int, packing: Packing) -> None:
    windows = train_windows(corpus, packing=packing)
    position = 0

    def loader() -> WindowLoader:
        return WindowLoader(
            windows.window,
            lambda: range(position, position + 12 * GLOBAL_BATCH, GLOBAL_BATCH),
            12,
            prefetch_windows,
            pin_memory=False,
        )

    straight = list(loader())
    assert len(straight) == len(loader()) == 12
    resumed = []
    for _ in range(12):
        stream = iter(loader())
        window = next(stream)
        stream.close()  # type: ignore[attr-defined]  # a generator: what it read ahead is thrown away
        resumed.append(window)
        position = window.data_position
    assert all(equal_windows(one, two) for one, two in zip(straight, resumed, strict=True))


def test_an_iteration_begins_where_the_position_is_when_its_first_window_is_asked_for() -> None:
    position = 0
    loader = WindowLoader(
        partial(AccumulationWindow, (), 0, 0),
        lambda: range(position, position + 3),
        3,
        prefetch_windows=2,
        pin_memory=False,
    )
    stream = iter(loader)
    position = 40
    assert [window.data_position for window in stream] == [40, 41, 42]


def test_an_error_in_the_thread_reaches_the_reader_at_its_place() -> None:
    def fail_at_2(index: int) -> int:
        if index == 2:
            raise UserError("the shard is damaged")
        return index

    stream = compute_ahead(fail_at_2, range(9), depth=4)
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(UserError, match="damaged"):
        next(stream)


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "world_size", "words"),
    [
        (8, 2, 3, "8 is not divisible into micro-batches of 2 on 3 ranks; use one of these world sizes: 1, 2, 4"),
        (8, 3, 2, "micro-batches of 3 on 2 ranks; set data.micro_batch_size to one of 1, 2, 4"),
        (7, 2, 2, "set it to a multiple of 4"),
        (0, 2, 2, "data.global_batch_size is 0"),
        (8, -1, 2, "data.micro_batch_size is -1"),
    ],
)
def test_a_window_that_does_not_divide_is_refused_with_what_does(
    global_batch_size: int, micro_batch_size: int, world_size: int, words: str
) -> None:
    with pytest.raises(UserError) as error:
        plan_micro_batches(global_batch_size, micro_batch_size, world_size)
    assert words in str(error.value)


def test_a_window_that_divides_is_planned() -> None:
    assert plan_micro_batches(48, 4, 3) == 4


def pairs_of(windows: Iterable[AccumulationWindow]) -> Counter[tuple[int, int]]:
    """How often each token with the label after it counts."""
    rows = (row for window in windows for row in rows_of(window))
    return Counter(
        (token, label)
        for inputs, labels, _ in rows
        for token, label in zip(inputs, labels, strict=True)
        if label != IGNORE_INDEX
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(
    lengths=st.lists(st.lists(st.integers(2, 50), min_size=1, max_size=12), min_size=1, max_size=3),
    seq_len=st.integers(1, 20),
    packing=st.sampled_from(["chunk", "best_fit", "pad"]),
    seed=st.integers(0, 2**20),
)
def test_one_epoch_of_any_documents_holds_every_label_once_on_any_number_of_ranks(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], seq_len: int, packing: Packing, seed: int
) -> None:
    """But for what `chunk` leaves at a source's end, which its figures count."""
    rng = np.random.default_rng(seed)
    documents = {
        f"s{number}": [[BOS, *rng.integers(16, VOCAB_SIZE, length - 2).tolist(), EOS] for length in of_source]
        for number, of_source in enumerate(lengths)
    }
    corpus = open_corpus(write_corpus(tmp_path_factory.mktemp("any"), documents))
    plans = None
    if packing != "chunk":
        write_plan(corpus, packing, seq_len)
        plans = open_plan(corpus, packing, seq_len, "first_touch")
    counts = count_sequences(corpus, seq_len, plans)
    assume(any(counts.values()))
    weights = {name: 1 + number for number, (name, count) in enumerate(counts.items()) if count}
    order = build_order(counts, weights, seed, dict.fromkeys(weights, 1))
    assert order.end == sum(counts.values())
    sequence_format = replace(FORMAT, seq_len=seq_len)
    last = order.end - order.end % 4
    by_world_size = [
        [
            TrainWindows(order, corpus.train, sequence_format, 4, 1, Ranks(rank, world_size), plans).window(position)
            for position in range(0, last, 4)
            for rank in range(world_size)
        ]
        for world_size in (1, 2, 4)
    ]
    rows = [[row for window in windows for row in rows_of(window)] for windows in by_world_size]
    assert rows[0] == rows[1] == rows[2]
    single = TrainWindows(order, corpus.train, sequence_format, 1, 1, Ranks(), plans)
    rest = [single.window(position) for position in range(last, order.end)]
    expected: Counter[tuple[int, int]] = Counter()
    for source, of_source in zip(corpus.train, documents.values(), strict=True):
        own = Counter((token, label) for document in of_source for token, label in pairwise(document))
        if packing == "chunk":
            stream = [token for document in of_source for token in document][counts[source.name] * seq_len :]
            lost = Counter(pair for pair in pairwise(stream) if pair[0] != EOS)
            figures = measure_source(source, seq_len, "chunk")
            assert lost.total() == figures.num_labels - figures.num_valid_tokens
            own -= lost
        expected += own
    assert pairs_of([*by_world_size[0], *rest]) == expected


# ---- labels


def test_labels_are_masked_apart_from_inputs_and_documents(corpus: Corpus) -> None:
    """Nothing else in a window follows from labels; those that a row's length leaves out stay out."""
    rng = np.random.default_rng(0)
    rows = np.stack([rng.permutation([BOS, EOS, *range(20, 20 + SEQ_LEN - 1)]) for _ in range(8)])
    lengths, has_label = rng.integers(0, SEQ_LEN + 1, 8), rng.random((8, SEQ_LEN + 1)) < 0.5
    ends = (rows[:, :-1] == EOS) & (np.arange(SEQ_LEN) < lengths[:, None])
    plain = build_window(rows, FORMAT, 2, 0, ends, lengths)
    masked = build_window(rows, FORMAT, 2, 0, ends, lengths, has_label)
    for number, (one, other) in enumerate(zip(plain.micro_batches, masked.micro_batches, strict=True)):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.document_ids, other.document_ids)
        kept = torch.from_numpy(has_label[2 * number : 2 * number + 2, 1:])
        assert torch.equal(other.labels, one.labels.where(kept, IGNORE_INDEX))
    labels = torch.cat([batch.labels for batch in masked.micro_batches])
    valid = labels[labels != IGNORE_INDEX]
    assert 0 < len(valid) < plain.num_valid_tokens
    assert (masked.num_valid_tokens, masked.num_bytes) == (len(valid), int(TOKEN_NUM_BYTES[valid.numpy()].sum()))


# ---- validation


def validation_rows(corpus: Corpus, micro_batch_size: int, world_size: int, limit: int | None = None) -> list[Row]:
    """All ranks' rows, window by window, in the order of the set; every rank has equally many windows."""
    ranks = [
        ValidationWindows(corpus.validation, FORMAT, micro_batch_size, Ranks(rank, world_size), limit)
        for rank in range(world_size)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    return [row for index in range(len(ranks[0])) for rank in ranks for row in rows_of(rank.window(index))]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 50])
def test_every_label_of_the_validation_set_counts_once_on_any_number_of_ranks(
    corpus: Corpus, world_size: int, micro_batch_size: int
) -> None:
    rows = validation_rows(corpus, micro_batch_size, world_size)
    found = [
        (token, label)
        for inputs, labels, _ in rows
        for token, label in zip(inputs, labels, strict=True)
        if label != IGNORE_INDEX
    ]
    expected = [
        (token, label)
        for documents in VALIDATION.values()
        for token, label, _ in labelled_tokens(documents)
        if label != IGNORE_INDEX
    ]
    assert found == expected


def test_validation_counts_are_those_of_its_rows(corpus: Corpus) -> None:
    windows = ValidationWindows(corpus.validation, FORMAT, 4, Ranks())
    for index in range(len(windows)):
        window = windows.window(index)
        labels = [label for _, row, _ in rows_of(window) for label in row if label != IGNORE_INDEX]
        assert window.num_valid_tokens == len(labels)
        assert window.num_bytes == sum(int(TOKEN_NUM_BYTES[label]) for label in labels)
        assert len(window.micro_batches) == 1
    assert window.data_position == windows.num_sequences


def test_padding_is_ignored_and_at_most_one_document_more(corpus: Corpus) -> None:
    rows = validation_rows(corpus, 50, 1)
    padded = [row for row in rows if row[0][-2:] == [EOS, EOS]]
    assert len(padded) >= 3
    for inputs, labels, documents in padded:
        first = next(column for column in range(SEQ_LEN) if all(token == EOS for token in inputs[column:]))
        assert set(labels[first:]) == {IGNORE_INDEX}
        assert len(set(documents[first + 1 :])) == 1
        assert documents == sorted(documents)
        assert max(documents) - documents[first] <= 1


@pytest.mark.parametrize("limit", [1, 5, 10_000])
def test_a_limit_takes_sequences_from_all_over_the_set(corpus: Corpus, limit: int) -> None:
    everything = [row for row in validation_rows(corpus, 1, 1) if row[0][0] != EOS or set(row[1]) != {IGNORE_INDEX}]
    limited = validation_rows(corpus, 1, 1, limit)
    assert len(limited) == min(limit, len(everything))
    chosen = [everything.index(row) for row in limited]
    assert chosen == [index * len(everything) // len(limited) for index in range(len(limited))]


def test_documents_begin_with_bos_where_a_document_id_changes(corpus: Corpus) -> None:
    for inputs, _, documents in rows_of(train_windows(corpus).window(80)):
        changes = [column for column in range(1, SEQ_LEN) if documents[column] != documents[column - 1]]
        assert changes == [column for column in range(1, SEQ_LEN) if inputs[column] == BOS]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_loader_says_where_documents_begin_as_the_model_would_find_it(corpus: Corpus, packing: Packing) -> None:
    for micro_batch in train_windows(corpus, packing=packing).window(8).micro_batches:
        offsets = micro_batch.document_offsets
        assert offsets is not None
        assert offsets.dtype == torch.int32
        assert torch.equal(offsets, document_offsets(micro_batch.document_ids))


def test_a_pinned_window_is_copied_at_once_for_each_type(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    window = train_windows(corpus).window(0)
    copied = window.pin_memory().to(torch.device("meta"))
    assert [tensor.dtype for tensor in pinned] == [torch.int64, torch.int32]
    assert copied.packed is None
    again = window.pin_memory().to(torch.device("cpu"))
    for one, other in zip(window.micro_batches, again.micro_batches, strict=True):
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


class CountCopies(TorchDispatchMode):
    """Counts the tensors that are copied to another device."""

    num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_copies += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_a_pinned_window_goes_to_the_device_by_one_copy_for_each_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: tensor
    )  # without an accelerator torch refuses to pin
    micro_batches = tuple(
        MicroBatch(ids, ids + 1, ids.int(), torch.tensor([0, 8], dtype=torch.int32))
        for ids in torch.arange(5 * 8).view(5, 1, 8)
    )
    with CountCopies() as mode:
        moved = AccumulationWindow(micro_batches, 40, 40, 5).pin_memory().to(torch.device("meta"))
    assert mode.num_copies == 2  # int64 and int32, whatever the number of micro-batches
    assert [m.labels.shape for m in moved.micro_batches] == [(1, 8)] * 5
