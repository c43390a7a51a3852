import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from genesis.base.errors import UserError
from genesis.data.corpus import Corpus, TokenSource, open_corpus
from genesis.data.manifest import MANIFEST_NAME, read_manifest, write_manifest
from tests.data.corpora import BOS, EOS, FAKE_TOKENIZER, make_documents, write_corpus
from tests.golden.files import GOLDEN

DOCUMENTS = make_documents(20, 8)
STREAM = [token for document in DOCUMENTS for token in document]
SHARD = "train/text/00001.ds"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", {"text": DOCUMENTS})


def read(source: TokenSource, start: int, count: int) -> list[int]:
    out = np.empty(count, np.uint16)
    source.read(start, out)
    tokens: list[int] = out.tolist()
    return tokens


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@settings(max_examples=60)
@given(data=st.data())
def test_a_source_reads_as_one_stream_across_its_shards(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "stream"
    if not path.exists():
        write_corpus(path, {"text": DOCUMENTS})
    (source,) = open_corpus(path).train
    start = data.draw(st.integers(0, len(STREAM)))
    stop = data.draw(st.integers(start, len(STREAM)))
    assert source.num_tokens == len(STREAM)
    assert read(source, start, stop - start) == STREAM[start:stop]


@pytest.mark.parametrize("token_dtype", ["uint16", "uint32"])
def test_both_token_widths_read_the_same(tmp_path: Path, token_dtype: str) -> None:
    (source,) = open_corpus(write_corpus(tmp_path, {"text": DOCUMENTS}, token_dtype=token_dtype)).train
    assert read(source, 0, len(STREAM)) == STREAM


def test_reading_beyond_the_end_is_our_mistake(corpus: Path) -> None:
    (source,) = open_corpus(corpus).train
    with pytest.raises(AssertionError, match="beyond the end"):
        read(source, len(STREAM) - 3, 4)


def open_limited(corpus: Path, most: int) -> Corpus:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("genesis.data.corpus.MAX_OPEN_MAPS", most)
        return open_corpus(corpus)


def test_maps_stay_within_their_limit_and_reads_stay_right(corpus: Path) -> None:
    opened = open_limited(corpus, 2)
    (source,) = opened.train
    rng = np.random.default_rng(0)
    for start in rng.integers(0, len(STREAM) - 30, 200).tolist():
        assert read(source, start, 30) == STREAM[start : start + 30]
        assert len(source._maps._open) <= 2


def test_no_shard_is_mapped_before_it_is_read(corpus: Path) -> None:
    (source,) = open_corpus(corpus).train
    assert len(source._maps._open) == 0
    read(source, 0, 1)
    assert len(source._maps._open) == 1


def test_a_flipped_bit_is_refused_when_its_shard_is_first_read(corpus: Path) -> None:
    data = bytearray((corpus / SHARD).read_bytes())
    data[5] ^= 4
    (corpus / SHARD).write_bytes(data)
    (source,) = open_corpus(corpus).train
    read(source, 0, 1)
    with pytest.raises(UserError) as error:
        read(source, 0, len(STREAM))
    message = one_line(error)
    assert SHARD in message
    assert blake3(data).hexdigest()[:16] in message
    assert "genesis data prepare" in message
    (trusting,) = open_corpus(corpus, verify_hashes="never").train
    assert len(read(trusting, 0, len(STREAM))) == len(STREAM)


def test_a_shard_of_another_size_is_refused_at_open(corpus: Path) -> None:
    data = (corpus / SHARD).read_bytes()
    (corpus / SHARD).write_bytes(data[:-2])
    with pytest.raises(UserError) as error:
        open_corpus(corpus)
    assert f"{SHARD} has {len(data) - 2} bytes, but the manifest lists {len(data)}" in one_line(error)


@pytest.mark.parametrize("change", [-2, -8, 8])
def test_an_index_of_another_size_is_refused_when_it_is_read(corpus: Path, change: int) -> None:
    index = corpus / f"{SHARD}.index"
    data = index.read_bytes()
    index.write_bytes((data + bytes(8))[: len(data) + change])
    (source,) = open_corpus(corpus).train
    with pytest.raises(UserError) as error:
        list(source.document_ends())
    assert f"{SHARD}.index has {len(data) + change} bytes, but the manifest lists {len(data)}" in one_line(error)


def test_documents_ends_are_those_of_the_documents_in_the_stream(corpus: Path) -> None:
    (source,) = open_corpus(corpus).train
    ends = np.concatenate(list(source.document_ends()))
    assert ends.tolist() == np.cumsum([len(document) for document in DOCUMENTS]).tolist()


def test_of_many_shards_the_one_that_is_missing_is_named(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", {"text": [[BOS, EOS]] * 2_500}, documents_per_shard=1)
    (source,) = open_corpus(corpus).train
    assert (source.num_shards, source.num_tokens) == (2_500, 5_000)
    (corpus / "train/text/02345.ds").unlink()
    with pytest.raises(UserError, match=r"train/text/02345\.ds cannot be read"):
        open_corpus(corpus)


def test_a_shard_that_vanishes_or_is_cut_in_mid_run_is_named(corpus: Path) -> None:
    (source,) = open_limited(corpus, 1).train
    data = (corpus / SHARD).read_bytes()
    (corpus / SHARD).write_bytes(data[:4])
    with pytest.raises(UserError) as error:
        read(source, 0, len(STREAM))
    assert f"{SHARD} is truncated: it has 4 of {len(data)} bytes" in one_line(error)
    (corpus / SHARD).unlink()
    with pytest.raises(UserError) as error:
        read(source, 0, len(STREAM))
    assert f"{SHARD} cannot be read (No such file or directory)" in one_line(error)


def test_a_shard_that_changes_in_mid_run_is_refused_when_it_is_mapped_again(corpus: Path) -> None:
    (source,) = open_limited(corpus, 1).train
    assert read(source, 0, len(STREAM)) == STREAM
    before = (corpus / SHARD).stat().st_mtime_ns
    data = bytearray((corpus / SHARD).read_bytes())
    data[5] ^= 4
    (corpus / SHARD).write_bytes(data)
    os.utime(corpus / SHARD, ns=(before + 1, before + 1))
    with pytest.raises(UserError, match=f"{SHARD} has hash"):
        read(source, 0, len(STREAM))


def test_a_corpus_of_schema_1_reads_as_it_did() -> None:
    corpus = open_corpus(GOLDEN / "corpus-schema-1")
    web, code = corpus.train
    (held_out,) = corpus.validation
    for source, documents in (
        (web, make_documents(5, 4)),
        (code, make_documents(4, 3, seed=1)),
        (held_out, make_documents(2, 4, seed=2)),
    ):
        assert read(source, 0, source.num_tokens) == [token for document in documents for token in document]
        assert np.concatenate(list(source.document_ends())).tolist() == np.cumsum(list(map(len, documents))).tolist()
    assert (web.weight, code.weight) == (3, 1)


def test_a_manifest_comes_back_as_it_was_written(corpus: Path) -> None:
    manifest = read_manifest(corpus)
    first = replace(manifest.train[0].shards[0], path="/data/a.bin", dtype="int32", byte_offset=1024, num_added=2)
    source = replace(manifest.train[0], shards=(first, *manifest.train[0].shards[1:]))
    changed = replace(manifest, train=(source,), bos_id=None)
    write_manifest(corpus, changed)
    assert read_manifest(corpus) == changed != manifest


def test_a_missing_shard_is_refused_at_open(corpus: Path) -> None:
    (corpus / SHARD).unlink()
    with pytest.raises(UserError) as error:
        open_corpus(corpus)
    assert f"{SHARD} cannot be read (No such file or directory)" in one_line(error)


def test_a_directory_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="genesis data prepare"):
        open_corpus(tmp_path)


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a FIFO"), (os.mkdir, "a directory")])
def test_a_manifest_that_is_no_file_is_refused_without_waiting(
    make: Callable[[Path], None], kind: str, tmp_path: Path
) -> None:
    make(tmp_path / "manifest.json")
    with pytest.raises(UserError, match=f"manifest.json is {kind}, but must be a file; remove it"):
        open_corpus(tmp_path)


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "", "..", "con", "a\0b", None, 5])
def test_a_source_whose_name_would_lead_elsewhere_is_refused(corpus: Path, name: object) -> None:
    """Plans and caches write files of this name."""
    manifest = json.loads((corpus / "manifest.json").read_text())
    manifest["train"][0]["name"] = name
    (corpus / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="is not usable for a directory"):
        open_corpus(corpus)


@pytest.mark.parametrize(
    ("column", "name"),
    [("path", "../x/00000.ds"), ("path", "~/00000.ds"), ("path", "a//b.ds"), ("index", "/etc/hosts")],
)
def test_a_shard_that_lies_elsewhere_is_refused_by_name(corpus: Path, column: str, name: str) -> None:
    manifest = json.loads((corpus / "manifest.json").read_text())
    shards = manifest["train"][0]["shards"]
    shards[column] = [name] * len(shards["path"])
    (corpus / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json lists"):
        read(open_corpus(corpus).train[0], 0, 1)


def test_a_shard_behind_a_link_that_leads_out_of_the_corpus_is_refused(corpus: Path) -> None:
    shard = corpus / json.loads((corpus / "manifest.json").read_text())["train"][0]["shards"]["path"][0]
    shard.rename(corpus.parent / "outside.ds")
    shard.symlink_to(corpus.parent / "outside.ds")
    with pytest.raises(UserError, match=r"lists .* which leads out of .* through a link"):
        read(open_corpus(corpus).train[0], 0, 1)


def test_a_tokenizer_that_is_not_the_runs_is_refused(corpus: Path) -> None:
    open_corpus(corpus, tokenizer_hash=blake3(FAKE_TOKENIZER).hexdigest())
    with pytest.raises(UserError) as error:
        open_corpus(corpus, tokenizer_hash="f" * 64)
    assert (
        f"made with the tokenizer {blake3(FAKE_TOKENIZER).hexdigest()[:16]}, but this run's is {'f' * 16}"
        in one_line(error)
    )


def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(corpus: Path) -> None:
    (corpus / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(UserError) as error:
        open_corpus(corpus)
    assert "has another tokenizer than " in one_line(error)
    (corpus / "tokenizer.model").unlink()
    with pytest.raises(UserError, match="lacks its tokenizer"):
        open_corpus(corpus)


def test_hashes_of_an_unknown_kind_and_a_manifest_that_contradicts_itself_are_refused(corpus: Path) -> None:
    manifest = json.loads((corpus / MANIFEST_NAME).read_text())
    manifest["train"][0]["shards"]["num_tokens"][0] += 1
    (corpus / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="lists 39 tokens of 2 bytes but 76 bytes for"):
        open_corpus(corpus)
    manifest["hash_algorithm"] = "crc32"
    (corpus / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="'crc32'"):
        open_corpus(corpus)


@pytest.mark.parametrize(
    "change",
    [
        lambda shards: shards["num_tokens"].pop(),
        lambda shards: shards.pop("hash"),
        lambda shards: shards.update(size=shards["num_tokens"]),
    ],
)
def test_a_table_of_shards_with_a_hole_is_damaged(
    corpus: Path, change: Callable[[dict[str, list[int]]], object]
) -> None:
    manifest = json.loads((corpus / MANIFEST_NAME).read_text())
    change(manifest["train"][0]["shards"])
    (corpus / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json is damaged \(shards have columns"):
        open_corpus(corpus)
