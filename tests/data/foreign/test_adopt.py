"""Each format beside the same text prepared by genesis, and beside the reader that its users have."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from datatrove.utils.dataset import DatatroveFileDataset
from hypothesis import given
from hypothesis import strategies as st

from genesis.base.errors import UserError
from genesis.cli.main import main
from genesis.data.corpus import Corpus, StoredTokens, TokenSource, find_fault, open_corpus
from genesis.data.foreign import adopt
from genesis.data.foreign.adopt import Adoption, AdoptOptions, ForeignSource, adopt_corpus
from genesis.data.inspect import draw_samples
from genesis.data.loader import Ranks, SequenceFormat, TrainWindows
from genesis.data.manifest import SPLITS
from genesis.data.order import build_order
from genesis.data.plans import PlannedPacking, write_plan
from genesis.data.prepare import prepare_corpus
from genesis.data.shards import little_endian
from genesis.data.sources import SourceOptions
from genesis.data.window import AccumulationWindow
from genesis.tokenizer.open import open_tokenizer
from genesis.train.data_module import CorpusDataModule
from tests.data.corpus_support import make_options, make_texts, watch_stage, write_jsonl
from tests.data.foreign.files import (
    flatten,
    write_bin,
    write_dataset,
    write_datatrove,
    write_datatrove_file,
    write_llmc,
    write_megatron,
    write_npy,
)

SEQ_LEN = 16
VOCAB_SIZE = 320
GLOBAL_BATCH = 4

Write = Callable[[Path, list[list[int]]], Path]


@dataclass(frozen=True)
class Prepared:
    """Text prepared by genesis, and its documents' ids."""

    corpus: Corpus
    documents: list[list[int]]

    @property
    def eos_id(self) -> int:
        return self.corpus.manifest.eos_id


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    directory = tmp_path_factory.mktemp("prepared")
    options = make_options(directory, validation_fraction=0.0, num_workers=1)
    write_jsonl(directory / "one.jsonl", make_texts(60, seed=5))
    prepare_corpus(replace(options, sources=(SourceOptions("web", (str(directory / "one.jsonl"),)),)))
    corpus = open_corpus(options.corpus)
    (source,) = corpus.train
    ends = np.concatenate(list(source.document_ends())).tolist()
    stream = read_all(source)
    return Prepared(corpus, [stream[start:end] for start, end in zip([0, *ends], ends, strict=False)])


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt, "SHARD_TOKENS", 300)
    monkeypatch.setattr(datasets.config, "DEFAULT_MAX_BATCH_SIZE", 7)


def read_all(source: TokenSource) -> list[int]:
    out = np.empty(source.num_tokens, np.int64)
    source.read(0, out)
    tokens: list[int] = out.tolist()
    return tokens


def adopted(prepared: Prepared, path: Path, *, validation: Path | None = None, **changes: object) -> Adoption:
    """Adopts what is at `path` with the tokenizer that prepared the text; changes go to the source and the options."""
    of_source = {key: changes.pop(key) for key in ("documents", "dtype", "column", "format") if key in changes}
    validation_paths = () if validation is None else (str(validation),)
    source = ForeignSource("web", (str(path),), validation_paths, **of_source)  # type: ignore[arg-type]
    options = AdoptOptions("adopted", (source,), path.parent / "corpora", tokenizer=prepared.corpus.path)
    return adopt_corpus(replace(options, **changes))  # type: ignore[arg-type]


def open_adopted(path: Path) -> Corpus:
    return open_corpus(path.parent / "corpora" / "adopted")


def all_windows(corpus: Corpus, ranks: Ranks) -> Iterator[AccumulationWindow]:
    (source,) = corpus.train
    windows = TrainWindows(
        build_order({source.name: (source.num_tokens - 1) // SEQ_LEN}, {source.name: 1}, seed=3),
        corpus.train,
        SequenceFormat(
            SEQ_LEN, corpus.manifest.eos_id, corpus.token_num_bytes(), little_endian(corpus.manifest.token_dtype)
        ),
        GLOBAL_BATCH,
        GLOBAL_BATCH // ranks.world_size,
        ranks,
    )
    for position in range(0, source.num_tokens // SEQ_LEN, GLOBAL_BATCH):
        yield windows.window(position)


def assert_equal_windows(one: Iterator[AccumulationWindow], two: Iterator[AccumulationWindow]) -> None:
    num_windows = 0
    for left, right in zip(one, two, strict=True):
        assert (left.num_valid_tokens, left.num_bytes) == (right.num_valid_tokens, right.num_bytes)
        for a, b in zip(left.micro_batches, right.micro_batches, strict=True):
            assert torch.equal(a.input_ids, b.input_ids)
            assert torch.equal(a.labels, b.labels)
            assert torch.equal(a.document_ids, b.document_ids)
        num_windows += 1
    assert num_windows > 20


FORMATS: dict[str, tuple[Write, dict[str, object]]] = {
    "datatrove": (lambda path, documents: write_datatrove(path / "tokens", documents, VOCAB_SIZE), {}),
    "datatrove-4-bytes": (lambda path, documents: write_datatrove_file(path / "a.ds", documents, 4), {}),
    "megatron": (lambda path, documents: write_megatron(path / "text_document", documents), {}),
    "megatron-int32": (lambda path, documents: write_megatron(path / "text", documents, 4, sequence_tokens=9), {}),
    "npy": (lambda path, documents: write_npy(path / "tokens.npy", documents), {}),
    "npy-int64": (lambda path, documents: write_npy(path / "tokens.npy", documents, "int64"), {}),
    "bin": (lambda path, documents: write_bin(path / "train.bin", documents), {"dtype": "uint16"}),
    "llm.c": (lambda path, documents: write_llmc(path / "train_000001.bin", documents, 20240520, "H"), {}),
    "llm.c-llama-3": (lambda path, documents: write_llmc(path / "train.bin", documents, 20240801, "I"), {}),
    "huggingface": (lambda path, documents: write_dataset(path / "dataset", documents), {}),
    "huggingface-int64": (lambda path, documents: write_dataset(path / "dataset", documents, "int64"), {}),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_sequence_equals_that_of_the_same_text_prepared(prepared: Prepared, tmp_path: Path, kind: str) -> None:
    write, settings = FORMATS[kind]
    path = write(tmp_path, prepared.documents)
    adoption = adopted(prepared, path, **settings)
    corpus = open_adopted(path)
    (source,), (expected,) = corpus.train, prepared.corpus.train
    assert source.num_shards > 3
    for ranks in (Ranks(), Ranks(0, 2), Ranks(1, 2), Ranks(3, 4)):
        assert_equal_windows(all_windows(corpus, ranks), all_windows(prepared.corpus, ranks))
    assert np.array_equal(np.concatenate(list(source.document_ends())), np.concatenate(list(expected.document_ends())))
    (record,), (expected_record,) = adoption.manifest.train, prepared.corpus.manifest.train
    for count in ("num_documents", "num_tokens", "num_text_bytes"):
        assert getattr(record, count) == getattr(expected_record, count)
    assert [find_fault(corpus.path, corpus.manifest, shard) for shard in record.shards] == [None] * len(record.shards)
    assert (adoption.num_added, adoption.num_unfinished) == (0, 0)


def test_no_token_is_copied(prepared: Prepared, tmp_path: Path) -> None:
    path = write_bin(tmp_path / "train.bin", prepared.documents * 50)
    adopted(prepared, path, dtype="uint16", tokenizer=None, vocab_size=VOCAB_SIZE, eos_id=prepared.eos_id)
    corpus = open_adopted(path)
    assert {shard.path for shard in corpus.manifest.train[0].shards} == {str(path)}
    num_index_bytes = 8 * corpus.manifest.train[0].num_documents
    indices = sum(
        file.stat().st_size for file in corpus.path.rglob("*") if file.name != "manifest.json" and file.is_file()
    )
    assert indices == num_index_bytes < path.stat().st_size / 5


def test_the_stream_is_what_the_formats_own_readers_read(prepared: Prepared, tmp_path: Path) -> None:
    stream = flatten(prepared.documents)
    ds = write_datatrove_file(tmp_path / "a" / "a.ds", prepared.documents, 2)
    saved = write_dataset(tmp_path / "b" / "dataset", prepared.documents)
    dataset = DatatroveFileDataset(str(ds), 9, token_size=2)
    by_datatrove = flatten([dataset._get_input_ids(item).tolist() for item in range(len(dataset))])
    by_datasets = flatten(datasets.load_from_disk(str(saved))["input_ids"])
    for path, expected in ((ds, by_datatrove), (saved, by_datasets)):
        adopted(prepared, path)
        found = read_all(open_adopted(path).train[0])
        assert found[: len(expected)] == expected
        assert len(found) == len(stream)
        assert len(stream) - len(expected) < 10  # datatrove drops what fills no row


@pytest.mark.parametrize("kind", ["datatrove", "megatron", "huggingface", "bin"])
def test_a_resume_at_every_step_gives_the_same_stream_at_any_world_size(
    prepared: Prepared, tmp_path: Path, kind: str
) -> None:
    write, settings = FORMATS[kind]
    path = write(tmp_path, prepared.documents)
    adopted(prepared, path, **settings)
    here = str(path.parent / "corpora" / "adopted")
    there = CorpusDataModule(
        str(prepared.corpus.path), seq_len=SEQ_LEN, micro_batch_size=2, global_batch_size=GLOBAL_BATCH, seed=3
    )
    straight = list(there.train_dataloader())[:12]
    for step in range(1, 12):
        data = CorpusDataModule(here, seq_len=SEQ_LEN, micro_batch_size=2, global_batch_size=GLOBAL_BATCH, seed=3)
        for _, window in zip(range(step), data.train_dataloader(), strict=False):
            data.training.advance(window)
        resumed = CorpusDataModule(here, seq_len=SEQ_LEN, micro_batch_size=2, global_batch_size=GLOBAL_BATCH, seed=3)
        resumed.load_state_dict(data.state_dict())
        window = next(iter(resumed.train_dataloader()))
        assert window.data_position == straight[step].data_position
        for a, b in zip(window.micro_batches, straight[step].micro_batches, strict=True):
            assert torch.equal(a.input_ids, b.input_ids)


@pytest.mark.parametrize("kind", ["megatron", "huggingface", "datatrove-4-bytes"])
def test_documents_that_lack_their_end_get_it_where_they_are_read(
    prepared: Prepared, tmp_path: Path, kind: str
) -> None:
    some_lack_it = [doc[:-1] if number % 3 else doc for number, doc in enumerate(prepared.documents)]
    write, settings = FORMATS[kind]
    path = write(tmp_path, some_lack_it)
    num_lacking = sum(number % 3 > 0 for number in range(len(some_lack_it)))
    with pytest.raises(UserError, match=r"documents that do not end with eos_id \d+ \(.*adopt with add_eos"):
        adopted(prepared, path, **settings)
    adoption = adopted(prepared, path, add_eos=True, **settings)
    assert adoption.num_added == num_lacking
    corpus = open_adopted(path)
    assert_equal_windows(all_windows(corpus, Ranks()), all_windows(prepared.corpus, Ranks()))
    assert flatten([ends.tolist() for ends in corpus.train[0].document_ends()]) == flatten(
        [ends.tolist() for ends in prepared.corpus.train[0].document_ends()]
    )


@given(st.data())
def test_added_ends_are_read_as_if_they_were_stored(data: st.DataObject) -> None:
    is_added = np.array(data.draw(st.lists(st.booleans(), min_size=1, max_size=30)))
    whole = np.where(is_added, 9, np.arange(len(is_added)) % 9)
    tokens = StoredTokens(whole[~is_added], np.flatnonzero(is_added), 9)
    start = data.draw(st.integers(0, len(whole)))
    out = np.empty(data.draw(st.integers(0, len(whole) - start)), np.int64)
    tokens.read(start, out)
    assert out.tolist() == whole[start : start + len(out)].tolist()


@pytest.mark.parametrize("cut", [5, 16])
def test_rows_that_are_blocks_of_a_stream_are_read_across_rows_and_files(
    prepared: Prepared, tmp_path: Path, cut: int
) -> None:
    stream = flatten(prepared.documents)
    blocks = [stream[start : start + cut] for start in range(0, len(stream), cut)]
    path = write_dataset(tmp_path / "dataset", blocks)
    with pytest.raises(UserError, match="documents that do not end with eos_id"):
        adopted(prepared, path)
    adopted(prepared, path, documents="eos")
    corpus = open_adopted(path)
    assert_equal_windows(all_windows(corpus, Ranks()), all_windows(prepared.corpus, Ranks()))
    ends = flatten([ends.tolist() for ends in corpus.train[0].document_ends()])
    assert ends == np.cumsum([len(document) for document in prepared.documents]).tolist()


def test_a_file_that_ends_within_a_document_goes_on_in_the_next(prepared: Prepared, tmp_path: Path) -> None:
    stream = flatten(prepared.documents)
    middle = len(stream) // 2 + (stream[len(stream) // 2 - 1] == prepared.eos_id)
    write_bin(tmp_path / "shards" / "a.bin", [stream[:middle]])
    write_bin(tmp_path / "shards" / "b.bin", [stream[middle:-1]])
    path = tmp_path / "shards"
    adoption = adopted(prepared, path, dtype="uint16")
    assert (adoption.num_unfinished, adoption.num_added) == (1, 1)
    (source,) = open_adopted(path).train
    assert read_all(source) == stream  # the last document of all gets its end: a stream never breaks off
    ends = flatten([ends.tolist() for ends in source.document_ends()])
    assert ends == np.cumsum([len(document) for document in prepared.documents]).tolist()


def test_documents_without_tokens_are_left_out(prepared: Prepared, tmp_path: Path) -> None:
    documents = [[], *prepared.documents[:20], [], [], *prepared.documents[20:], []]
    for kind in ("megatron", "huggingface", "datatrove-4-bytes"):
        write, settings = FORMATS[kind]
        path = write(tmp_path / kind, documents)
        adopted(prepared, path, **settings)
        assert open_adopted(path).train[0].num_documents == len(prepared.documents)
        assert read_all(open_adopted(path).train[0]) == flatten(prepared.documents)


def test_an_id_only_corpus_reads_and_knows_no_bytes(prepared: Prepared, tmp_path: Path) -> None:
    path = write_npy(tmp_path / "tokens.npy", prepared.documents)
    adopted(prepared, path, tokenizer=None, vocab_size=VOCAB_SIZE, eos_id=prepared.eos_id)
    corpus = open_adopted(path)
    assert (corpus.manifest.tokenizer_hash, corpus.manifest.bos_id) == ("", None)
    assert corpus.manifest.train[0].num_text_bytes == 0
    assert not corpus.token_num_bytes().any()
    data = CorpusDataModule(
        str(corpus.path), seq_len=SEQ_LEN, micro_batch_size=2, global_batch_size=GLOBAL_BATCH, seed=3
    )
    window = next(iter(data.train_dataloader()))
    assert (window.num_valid_tokens > 0, window.num_bytes) == (True, 0)
    with pytest.raises(UserError, match="has ids of an unknown tokenizer, but this run's is ffff"):
        open_corpus(corpus.path, tokenizer_hash="f" * 64)


def test_several_sources_and_a_validation_set_make_one_corpus(prepared: Prepared, tmp_path: Path) -> None:
    docs = prepared.documents
    web, code = write_bin(tmp_path / "web.bin", docs[:30]), write_megatron(tmp_path / "code", docs[30:50])
    held_out = write_npy(tmp_path / "held_out.npy", docs[50:])
    sources = (
        ForeignSource("web", (str(web),), (str(held_out),), weight=3, dtype="uint16"),
        ForeignSource("code", (str(code),)),
    )
    adopt_corpus(AdoptOptions("mixed", sources, tmp_path / "corpora", tokenizer=prepared.corpus.path))
    corpus = open_corpus(tmp_path / "corpora" / "mixed")
    assert [(source.name, source.weight, read_all(source)) for source in corpus.train] == [
        ("web", 3, flatten(docs[:30])),
        ("code", 1, flatten(docs[30:50])),
    ]
    assert [read_all(source) for source in corpus.validation] == [flatten(docs[50:])]
    assert {split for split in SPLITS if (corpus.path / split).is_dir()} == set(SPLITS)


# Files that change, and checks that wait


def test_a_file_that_changed_after_its_adoption_is_named(prepared: Prepared, tmp_path: Path) -> None:
    path = write_npy(tmp_path / "tokens.npy", prepared.documents)
    adopted(prepared, path)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    corpus = open_adopted(path)
    with pytest.raises(UserError, match=r"tokens\.npy has hash .*`genesis data adopt` again"):
        read_all(corpus.train[0])
    assert "has hash" in str(find_fault(corpus.path, corpus.manifest, corpus.manifest.train[0].shards[-1]))
    path.write_bytes(data[:-2])
    with pytest.raises(
        UserError, match=r"tokens\.npy has \d+ bytes, but the manifest lists \d+; restore the original file"
    ):
        open_adopted(path)
    path.unlink()
    with pytest.raises(UserError, match=r"tokens\.npy cannot be read"):
        open_adopted(path)


def test_a_file_that_is_written_while_it_is_adopted_is_refused(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_npy(tmp_path / "tokens.npy", prepared.documents)
    options = AdoptOptions("adopted", (ForeignSource("web", (str(path),)),), tmp_path, prepared.corpus.path)
    watch_stage(monkeypatch, "genesis.data.foreign.adopt", lambda shown: os.utime(path, ns=(0, shown.done)))
    with pytest.raises(UserError, match=r"tokens\.npy changed while it was read"):
        adopt_corpus(options)
    assert [file.name for file in tmp_path.iterdir()] == ["tokens.npy"]


def test_sizes_alone_are_checked_where_that_is_asked_and_the_rest_when_it_is_read(
    prepared: Prepared, tmp_path: Path
) -> None:
    path = write_megatron(tmp_path / "good" / "text", prepared.documents)
    adopted(prepared, path, check="sizes")
    corpus = open_adopted(path)
    assert {shard.hash for shard in corpus.manifest.train[0].shards} == {""}
    assert_equal_windows(all_windows(corpus, Ranks()), all_windows(prepared.corpus, Ranks()))
    assert find_fault(corpus.path, corpus.manifest, corpus.manifest.train[0].shards[0]) is None

    status = path.with_suffix(".bin").stat()
    os.utime(path.with_suffix(".bin"), ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(UserError, match="has changed since it was adopted"):
        open_adopted(path)

    for name, documents, message in (
        ("large", [*prepared.documents, [VOCAB_SIZE, prepared.eos_id]], f"holds the id {VOCAB_SIZE} "),
        ("lacking", [*prepared.documents, [5, 6]], r"documents that do not end with eos_id \d+ \(1 of"),
    ):
        path = write_megatron(tmp_path / name / "text", documents)
        adopted(prepared, path, check="sizes")
        with pytest.raises(UserError, match=message):
            read_all(open_adopted(path).train[0])


@pytest.mark.parametrize("changes", [{"add_eos": True}, {"documents": "eos"}])
def test_what_needs_the_tokens_can_not_be_done_by_sizes(
    prepared: Prepared, tmp_path: Path, changes: dict[str, object]
) -> None:
    path = write_megatron(tmp_path / "text", prepared.documents)
    with pytest.raises(UserError, match=r"check (to )?all"):
        adopted(prepared, path, check="sizes", **changes)


def test_a_failed_adoption_leaves_nothing_and_a_finished_one_is_not_overwritten(
    prepared: Prepared, tmp_path: Path
) -> None:
    good, bad = write_npy(tmp_path / "good.npy", prepared.documents), write_npy(tmp_path / "bad.npy", [[400, 3]])
    with pytest.raises(UserError, match="holds the id 400"):
        adopted(prepared, bad)
    assert not list((tmp_path / "corpora").iterdir())
    adopted(prepared, good)
    with pytest.raises(UserError, match="adopted is not empty; choose another name"):
        adopted(prepared, good)
    assert [file.name for file in (tmp_path / "corpora").iterdir()] == ["adopted"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": None, "eos_id": 3}, "vocab_size is unknown"),
        ({"tokenizer": None, "vocab_size": 320}, "eos_id is unknown"),
        ({"tokenizer": None, "vocab_size": 320, "eos_id": 320}, "eos_id 320 is not below vocab_size 320"),
        ({"eos_id": 7}, "eos_id is 7, but the tokenizer's is"),
        ({"tokenizer": None, "vocab_size": 321, "eos_id": 320}, "has no eos_id 320"),
        ({"documents": "index"}, "has no index of documents"),
        ({"format": "datatrove"}, "has no tokens.npy.index"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(
    prepared: Prepared, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = write_npy(tmp_path / "tokens.npy", prepared.documents)
    with pytest.raises(UserError, match=message) as error:
        adopted(prepared, path, **changes)
    assert "\n" not in str(error.value)


# What comes after: packing, inspection, verification


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_packed_sequences_are_those_of_the_same_text_prepared(
    prepared: Prepared, tmp_path: Path, packing: PlannedPacking
) -> None:
    path = write_dataset(tmp_path / "dataset", [document[:-1] for document in prepared.documents])
    adopted(prepared, path, add_eos=True)
    windows = []
    for corpus in (open_adopted(path), prepared.corpus):
        write_plan(corpus, packing, SEQ_LEN)
        data = CorpusDataModule(
            str(corpus.path),
            seq_len=SEQ_LEN,
            micro_batch_size=2,
            global_batch_size=GLOBAL_BATCH,
            seed=3,
            packing=packing,
        )
        windows.append(iter(data.train_dataloader()))
    assert_equal_windows(*windows)


def test_samples_are_documents_from_their_beginning_and_ids_where_no_tokenizer_is_known(
    prepared: Prepared, tmp_path: Path
) -> None:
    path = write_bin(tmp_path / "train.bin", prepared.documents)
    tokenizer = open_tokenizer(prepared.corpus.path)
    texts = [tokenizer.decode(document) for document in prepared.documents]
    ids = [" ".join(map(str, document)) for document in prepared.documents]
    adopted(prepared, path, dtype="uint16")
    for sample in draw_samples(open_adopted(path), "train", 20, 10_000, seed=1):
        assert len(sample.texts) > 0
        assert all(text in texts for text in sample.texts)
        assert not sample.is_cut
    shutil.rmtree(path.parent / "corpora")
    adopted(prepared, path, dtype="uint16", tokenizer=None, vocab_size=VOCAB_SIZE, eos_id=prepared.eos_id)
    for sample in draw_samples(open_adopted(path), "train", 20, 10_000, seed=1):
        assert all(text in ids for text in sample.texts)


def test_the_commands_adopt_inspect_and_verify(
    prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write_bin(tmp_path / "train.bin", prepared.documents[:40])
    held_out = write_bin(tmp_path / "val.bin", prepared.documents[40:])
    command = ["data", "adopt", str(train), "--validation_paths", str(held_out), "--name", "mine", "--dtype", "uint16"]
    command += ["--out", str(tmp_path), "--vocab_size", str(VOCAB_SIZE), "--eos_id", str(prepared.eos_id)]
    assert main(command) == 0
    page = capsys.readouterr().out
    assert "mine: 2 files read in place" in page
    assert "train tokens: " in page
    assert "there are no bits per byte" in page
    assert main(["data", "inspect", str(tmp_path / "mine"), "--seq_len", "16", "--num_samples", "1"]) == 0
    page = capsys.readouterr().out
    assert "tokenizer unknown" in page
    assert page.count("unknown") >= 5
    assert "best_fit" in page
    assert main(["data", "verify", str(tmp_path / "mine")]) == 0
    num_bytes = train.stat().st_size + held_out.stat().st_size
    assert f"{num_bytes:,} bytes, all as in the manifest" in capsys.readouterr().out
    data = bytearray(held_out.read_bytes())
    data[7] ^= 1
    held_out.write_bytes(data)
    assert main(["data", "verify", str(tmp_path / "mine")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "val.bin has hash" in line
    assert line.endswith("restore the original files, or adopt them again")


def test_sources_come_from_a_yaml_file_too(
    prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web, code = write_npy(tmp_path / "web.npy", prepared.documents), write_megatron(tmp_path / "x", prepared.documents)
    (tmp_path / "adopt.yaml").write_text(
        f"name: mixed\nout: {tmp_path}\ntokenizer: {prepared.corpus.path}\nsources:\n"
        f"  - {{name: web, paths: [{web}], weight: 3}}\n  - {{name: code, paths: [{code}]}}\n"
    )
    assert main(["data", "adopt", "--config", str(tmp_path / "adopt.yaml")]) == 0
    sources = open_corpus(tmp_path / "mixed").train
    assert [(source.name, source.weight) for source in sources] == [("web", 3), ("code", 1)]
    capsys.readouterr()
    assert main(["data", "adopt", str(web), "--config", str(tmp_path / "adopt.yaml")]) == 2
    assert "give either paths or sources" in capsys.readouterr().err
