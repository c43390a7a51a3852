import warnings

import numpy as np
import pytest
from blake3 import blake3
from datatrove.pipeline.tokens.merger import load_doc_ends
from datatrove.utils.dataset import DatatroveFileDataset, DatatroveFolderDataset

from genesis.data.shards import (
    EncodedDocuments,
    ShardWriter,
    hash_file,
    publish_shard,
    shard_files,
    token_dtype,
)
from tests.data.corpus_support import read_shard

DOCUMENTS = [[2, 40, 41, 3], [2, 3], [2, *range(100, 160), 3], [2, 7, 3]]


def encode(documents):
    return EncodedDocuments(
        tokens=np.array([token for document in documents for token in document], dtype=np.int32),
        lengths=np.array([len(document) for document in documents]),
        num_text_bytes=10 * len(documents),
    )


def write_shard(path, dtype):
    writer = ShardWriter(path, dtype, "genesis-abc", 3)
    writer.append(encode(DOCUMENTS[:2]))
    writer.append(encode(DOCUMENTS[2:]))
    return writer.finish("train/web/00000.ds")


@pytest.mark.parametrize(("dtype", "token_bytes"), [("uint16", 2), ("uint32", 4)])
def test_datatroves_own_reader_gives_tokens_and_positions(tmp_path, dtype, token_bytes):
    write_shard(tmp_path / "00000.ds", dtype)
    seq_len = 10
    dataset = DatatroveFileDataset(str(tmp_path / "00000.ds"), seq_len, token_size=token_bytes, return_positions=True)
    tokens = np.concatenate(DOCUMENTS)
    positions = np.concatenate([np.arange(len(document)) for document in DOCUMENTS])
    for item in range(len(dataset)):
        window = slice(item * (seq_len + 1), (item + 1) * (seq_len + 1))
        assert dataset._get_input_ids(item).tolist() == tokens[window].tolist()
    assert dataset[0]["positions"].tolist() == positions[: seq_len + 1].tolist()
    assert load_doc_ends((tmp_path / "00000.ds.index").open("rb")).tolist() == [4, 6, 68, 71]
    assert (tmp_path / "00000.ds.metadata").read_text().split("\n") == [f"genesis-abc|{token_bytes}", "71", "71 T"]


def test_datatroves_folder_reader_finds_the_shards(tmp_path):
    for name in ("00000.ds", "00000_001.ds", "00001.ds"):
        write_shard(tmp_path / name, "uint16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        dataset = DatatroveFolderDataset(str(tmp_path), seq_len=7, filename_pattern="*.ds", token_size=2)
    assert len(dataset) == 3 * (71 // 8)
    assert dataset[0]["input_ids"].tolist() == [2, 40, 41, 3, 2, 3, 2, 100]


def test_the_record_counts_and_hashes_what_is_on_disk(tmp_path):
    record = write_shard(tmp_path / "a.ds", "uint16")
    assert (record.num_tokens, record.num_documents, record.num_text_bytes, record.file_bytes) == (71, 4, 40, 142)
    assert (tmp_path / "a.ds").stat().st_size == 142
    assert record.hash == hash_file(tmp_path / "a.ds")
    assert record.index_hash == hash_file(tmp_path / "a.ds.index")
    assert record.path == "train/web/00000.ds"


def test_documents_come_back_in_order(tmp_path):
    write_shard(tmp_path / "a.ds", "uint32")
    assert read_shard(tmp_path / "a.ds", "uint32") == DOCUMENTS


def test_publishing_moves_all_three_files(tmp_path):
    write_shard(tmp_path / "staged.ds", "uint16")
    data = [path.read_bytes() for path in shard_files(tmp_path / "staged.ds")]
    publish_shard(tmp_path / "staged.ds", tmp_path / "train/web/00000.ds")
    assert [path.read_bytes() for path in shard_files(tmp_path / "train/web/00000.ds")] == data
    assert not list(tmp_path.glob("staged*"))


@pytest.mark.parametrize("num_bytes", [0, 1000, 3 << 20])
def test_a_file_is_hashed_as_its_bytes_whatever_its_size(tmp_path, num_bytes):
    (tmp_path / "file").write_bytes(b"x" * num_bytes)
    assert hash_file(tmp_path / "file") == blake3(b"x" * num_bytes).hexdigest()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_token_type_is_the_narrowest_that_holds_the_vocabulary(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype
    assert np.dtype(dtype).type(vocab_size - 1) == vocab_size - 1
