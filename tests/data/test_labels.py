"""The column that says which tokens have labels: written, read in every packing, counted, shown and verified."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from genesis.base.errors import UserError
from genesis.cli.data import inspect_main, verify_main
from genesis.data.corpus import Corpus, open_corpus
from genesis.data.loader import Ranks, SequenceFormat, TrainWindows
from genesis.data.manifest import CorpusManifest, ShardRecord, SourceRecord, read_manifest, write_manifest
from genesis.data.order import build_order
from genesis.data.packing import Packing, PackingFigures
from genesis.data.plans import measure_source, open_plan, write_plan
from genesis.data.shards import EncodedDocuments, ShardWriter, labels_path, publish_shard
from genesis.data.validation_windows import ValidationWindows
from tests.data.corpora import BOS, EOS, FIRST_PIECE
from tests.data.stream.streams import count_pairs, rows_of

SEQ_LEN = 16
VOCAB_SIZE = 4_000

Documents = list[tuple[list[int], list[bool]]]


def make_documents(num_documents: int, first_piece: int, seed: int) -> Documents:
    """Each token is another, so that a pair names its place; about half of the tokens have labels."""
    rng = np.random.default_rng(seed)
    documents, piece = [], first_piece
    for length in rng.integers(0, 40, num_documents).tolist():
        tokens = [BOS, *range(piece, piece + length), EOS]
        documents.append((tokens, (rng.random(len(tokens)) < 0.5).tolist()))
        piece += length
    assert piece < VOCAB_SIZE
    return documents


CHAT = make_documents(50, FIRST_PIECE, seed=1)
PLAIN = [(tokens, [True] * len(tokens)) for tokens, _ in make_documents(30, 2_000, seed=2)]
HELD_OUT = make_documents(9, 3_000, seed=3)


def encode(documents: Documents, *, has_column: bool) -> EncodedDocuments:
    labels = np.array([label for _, of_document in documents for label in of_document], np.bool_)
    return EncodedDocuments(
        tokens=np.array([token for tokens, _ in documents for token in tokens], np.int32),
        lengths=np.array([len(tokens) for tokens, _ in documents]),
        num_text_bytes=0,
        has_label=labels if has_column else None,
    )


def write_source(corpus: Path, split: str, name: str, documents: Documents, *, has_column: bool) -> SourceRecord:
    half = len(documents) // 2
    shards: list[ShardRecord] = []
    for number, part in enumerate((documents[:half], documents[half:])):
        relative = f"{split}/{name}/{number:05d}.ds"
        staged = corpus / relative.replace("/", "-")
        writer = ShardWriter(staged, "uint16", "none", EOS)
        writer.append(encode(part, has_column=has_column))
        shards.append(writer.finish(relative))
        publish_shard(staged, corpus / relative)
    num_tokens = sum(shard.num_tokens for shard in shards)
    return SourceRecord(name, 1, len(documents), 0, num_tokens, tuple(shards))


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """A corpus of a source with the column and one without."""
    manifest = CorpusManifest(
        name="labelled",
        hash_algorithm="blake3",
        tokenizer_hash="",
        vocab_size=VOCAB_SIZE,
        bos_id=BOS,
        eos_id=EOS,
        token_dtype="uint16",
        train=(
            write_source(tmp_path, "train", "chat", CHAT, has_column=True),
            write_source(tmp_path, "train", "plain", PLAIN, has_column=False),
        ),
        validation=(write_source(tmp_path, "validation", "chat", HELD_OUT, has_column=True),),
    )
    write_manifest(tmp_path, manifest)
    return open_corpus(tmp_path)


def labelled_pairs(documents: Documents) -> Counter[tuple[int, int]]:
    """Each token that has a label, after the token before it in its document."""
    return Counter(
        (first, second)
        for tokens, labels in documents
        for (first, second), has_label in zip(pairwise(tokens), labels[1:], strict=True)
        if has_label
    )


SEQUENCE_FORMAT = SequenceFormat(SEQ_LEN, EOS, np.ones(VOCAB_SIZE, np.int32), np.dtype("<u2"))


def read_pairs(corpus: Corpus, packing: Packing) -> Counter[tuple[int, int]]:
    plans = None
    if packing == "chunk":
        counts = {source.name: (source.num_tokens - 1) // SEQ_LEN for source in corpus.train}
    else:
        write_plan(corpus, packing, SEQ_LEN)
        plans = open_plan(corpus, packing, SEQ_LEN, "first_touch")
        counts = {source.name: plan.num_sequences for source, plan in zip(corpus.train, plans, strict=True)}
    order = build_order(counts, dict.fromkeys(counts, 1), seed=0, max_epochs=dict.fromkeys(counts, 1))
    windows = TrainWindows(order, corpus.train, SEQUENCE_FORMAT, 1, 1, Ranks(), plans)
    return count_pairs([row for position in range(order.end) for row in rows_of(windows.window(position))])


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_every_label_of_a_packed_corpus_counts_once_and_nothing_else(corpus: Corpus, packing: Packing) -> None:
    found = read_pairs(corpus, packing)
    assert found == labelled_pairs(CHAT) + labelled_pairs(PLAIN)
    for source, documents in zip(corpus.train, (CHAT, PLAIN), strict=True):
        figures = measure_source(source, SEQ_LEN, packing)
        assert figures.num_labels == figures.num_valid_tokens == labelled_pairs(documents).total()


def test_chunks_hold_the_labels_that_the_figures_say(corpus: Corpus) -> None:
    figures = sum((measure_source(source, SEQ_LEN, "chunk") for source in corpus.train), PackingFigures())
    found = read_pairs(corpus, "chunk")
    assert found <= labelled_pairs(CHAT) + labelled_pairs(PLAIN)
    assert found.total() == figures.num_valid_tokens
    assert figures.num_labels == (labelled_pairs(CHAT) + labelled_pairs(PLAIN)).total()


def test_validation_counts_the_labels_of_the_column(corpus: Corpus) -> None:
    windows = ValidationWindows(corpus.validation, SEQUENCE_FORMAT, 2, Ranks())
    rows = [row for index in range(len(windows)) for row in rows_of(windows.window(index))]
    assert count_pairs(rows) == labelled_pairs(HELD_OUT)


def test_validation_keeps_conversations_whole_and_counts_the_same_labels(corpus: Corpus) -> None:
    (source,) = corpus.validation
    source.has_conversations = True
    windows = ValidationWindows(corpus.validation, SEQUENCE_FORMAT, 2, Ranks())
    found = [windows.window(index) for index in range(len(windows))]
    assert count_pairs([row for window in found for row in rows_of(window)]) == labelled_pairs(HELD_OUT)
    rows = [row.tolist() for window in found for batch in window.micro_batches for row in batch.input_ids]
    for tokens, _ in HELD_OUT:
        holders = [row for row in rows if set(tokens[1:-1]) & set(row)]
        assert len(holders) == max(len(tokens) > 2, -(-(len(tokens) - 1) // SEQ_LEN) if len(tokens) > 2 else 0)
        if len(holders) == 1:  # with its beginning
            start = holders[0].index(tokens[1])
            assert holders[0][start - 1 : start + len(tokens) - 2] == tokens[:-1]


def test_labels_begin_within_a_shard_and_all_tokens_before_have_them(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.ds", "uint16", "none", EOS)
    writer.append(encode(PLAIN[:2], has_column=False))
    writer.append(encode(CHAT[:2], has_column=True))
    writer.append(encode(PLAIN[2:3], has_column=False))
    record = writer.finish("a.ds")
    wanted = [label for _, labels in (*PLAIN[:2], *CHAT[:2], PLAIN[2]) for label in labels]
    content = labels_path(tmp_path / "a.ds").read_bytes()
    assert content == bytes(wanted)
    assert (record.labels_hash, record.num_labels) == (blake3(content).hexdigest(), sum(wanted))


def test_a_corpus_without_the_column_is_one_that_earlier_versions_read(tmp_path: Path, corpus: Corpus) -> None:
    assert json.loads((corpus.path / "manifest.json").read_text())["schema_version"] == 3
    plain = tmp_path / "plain"
    plain.mkdir()
    record = write_source(plain, "train", "plain", PLAIN, has_column=False)
    write_manifest(plain, CorpusManifest("plain", "blake3", "", VOCAB_SIZE, BOS, EOS, "uint16", (record,), ()))
    raw = json.loads((plain / "manifest.json").read_text())
    assert raw["schema_version"] == 2
    assert raw["train"][0]["shards"].keys() == {
        *("path", "num_tokens", "num_documents", "num_text_bytes", "file_bytes", "hash", "index_hash")
    }
    assert not list(plain.rglob("*.loss"))
    assert read_manifest(plain).train[0].table.column("labels_hash") == ["", ""]


def test_a_plan_is_refused_where_labels_are_others(corpus: Corpus) -> None:
    write_plan(corpus, "best_fit", SEQ_LEN)
    path = corpus.path / "manifest.json"
    path.write_text(path.read_text().replace(corpus.manifest.train[0].shards[0].labels_hash, "f" * 64))
    with pytest.raises(UserError, match="other shards of the source 'chat'"):
        open_plan(open_corpus(corpus.path), "best_fit", SEQ_LEN, "never")


@pytest.mark.parametrize("damage", ["flipped", "cut short", "gone"])
def test_damaged_labels_are_found_by_verify_and_at_the_first_touch(
    corpus: Corpus, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_main([str(corpus.path)]) == 0
    path = corpus.path / "train/chat/00001.ds.loss"
    content = path.read_bytes()
    changed = {"flipped": bytes([content[0] ^ 1]) + content[1:], "cut short": content[:-1], "gone": b""}[damage]
    path.write_bytes(changed) if changed else path.unlink()
    assert verify_main([str(corpus.path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "00001.ds.loss" in line
    with pytest.raises(UserError, match=r"00001\.ds\.loss"):
        read_pairs(open_corpus(corpus.path), "chunk")


def test_inspect_shows_the_share_of_labels_and_those_of_its_samples(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_main([str(corpus.path), "--num_samples", "40", "--sample_tokens", "60", "--seq_len", "16"]) == 0
    page = capsys.readouterr().out
    share = sum(sum(labels) for _, labels in CHAT) / sum(len(labels) for _, labels in CHAT)
    assert f"{share:.2%}" in page
    assert "with labels" in page
    assert "labels" in page.split("bytes/token")[0]
