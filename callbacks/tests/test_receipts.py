"""Receipts are numbers in the plan's order: what they hold is compared with the plan, and they stay small."""

import dataclasses
import math
import os
import pickle
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

from genesis_callbacks.base.checkpoint_errors import SaveFailedError
from genesis_callbacks.base.local_shards import TensorShard, local_shards
from genesis_callbacks.base.manifest import FileRecord, Manifest, read_manifest
from genesis_callbacks.base.run_directory import MANIFEST_NAME
from genesis_callbacks.checkpoint import Ranks, Retention, SaveTarget, Snapshot
from genesis_callbacks.checkpoint.job import (
    CommitOrder,
    RankReceipt,
    WriteJob,
    _decode_receipt,
    _gather,
    _leave_receipt,
    _read_note,
    _receipt_path,
    commit_save,
)
from genesis_callbacks.checkpoint.one_save import Progress
from genesis_callbacks.checkpoint.pipeline import SavePipeline
from genesis_callbacks.checkpoint.plan import SavePlan, merge_digests, plan_save
from genesis_callbacks.checkpoint.tiling import check_tiling
from genesis_callbacks.testing import run_ranks

_ARCHIVE_BYTES = 600  # what `torch.save` adds to the elements of a chunk


def cut_rows(name: str, num_rows: int, ranks: int, rank: int, kind: str = "parameter") -> TensorShard:
    rows = num_rows // ranks
    return TensorShard(name, kind, (num_rows, 8), torch.float32, (rank * rows, 0), (rows, 8))


def whole(name: str, kind: str = "parameter") -> TensorShard:
    return TensorShard(name, kind, (), torch.float32, (), ())


def write_rank(staging: Path, plan: SavePlan, rank: int, states: tuple[TensorShard, ...] = ()) -> RankReceipt:
    """Returns a rank's receipt: its shard is a hole of the right size, and its digests are the blocks' numbers."""
    own = [part.num_bytes for part in states]
    num_bytes = np.concatenate([plan.count_bytes(plan.blocks_of(rank)), own]).astype(np.int64) + _ARCHIVE_BYTES
    ends = np.cumsum(num_bytes)
    path = staging / f"__{rank}_0.distcp"
    path.touch()
    os.truncate(path, ends[-1])
    places = np.stack([ends - num_bytes, num_bytes, ends - num_bytes + _ARCHIVE_BYTES], axis=1)
    digests = np.concatenate([plan.held[rank], np.full(len(states), 7)]).astype(np.uint64)
    return RankReceipt(FileRecord(path.name, int(ends[-1]), "0" * 64, rank), states, digests, places, {"rank": rank})


def order_commit(plan: SavePlan) -> CommitOrder:
    header = Manifest(1, 1, {}, len(plan.held), {}, {}, {}, {}, None)
    return CommitOrder(header, plan, Retention(), 0, frozenset())


def make_staging(directory: Path) -> Path:
    staging = directory / "step-00000001.staging-x"
    staging.mkdir()
    return staging


@pytest.fixture
def plan() -> SavePlan:
    """Two ranks share the rows of two tensors, and hold a third one both."""
    return plan_save(
        [[cut_rows("a", 4, 2, rank), cut_rows("b", 6, 2, rank), whole("c")] for rank in range(2)],
    )


def spoil(receipt: RankReceipt, fault: str) -> RankReceipt:
    assert receipt.file is not None
    places = receipt.places.copy()
    if fault == "a digest less":
        return dataclasses.replace(receipt, digests=receipt.digests[:-1])
    if fault == "a chunk less":
        return dataclasses.replace(receipt, places=places[:-1])
    if fault == "another file":
        return dataclasses.replace(receipt, file=dataclasses.replace(receipt.file, name="__0_0.distcp"))
    if fault == "more bytes than on the disk":
        return dataclasses.replace(receipt, file=dataclasses.replace(receipt.file, num_bytes=1 << 20))
    if fault == "no file":
        return dataclasses.replace(receipt, file=None)
    if fault == "one chunk twice":
        places[1] = places[0]
    elif fault == "a chunk beyond the file":
        places[-1, 1] += 1
    elif fault == "elements before their chunk":
        places[0, 2] = -1
    else:
        assert fault == "fewer bytes than the elements"
        places[0, 2] += 1
    return dataclasses.replace(receipt, places=places)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("a digest less", "wrote 2 chunks and has digests of 2 tensors, but 2 and 3 were planned"),
        ("a chunk less", "wrote 1 chunk and has digests of 3 tensors"),
        ("another file", "wrote __0_0.distcp, which is not its shard"),
        ("more bytes than on the disk", "__1_0.distcp has 1360 of 1048576 bytes"),
        ("no file", "the chunks that it reports are not its tensors"),
        ("one chunk twice", "the chunks that it reports are not its tensors"),
        ("a chunk beyond the file", "the chunks that it reports are not its tensors"),
        ("elements before their chunk", "the chunks that it reports are not its tensors"),
        ("fewer bytes than the elements", "the chunks that it reports are not its tensors"),
    ],
)
def test_a_receipt_that_is_not_what_was_planned_fails_the_save_and_names_the_rank(
    tmp_path: Path, plan: SavePlan, fault: str, message: str
) -> None:
    staging = make_staging(tmp_path)
    good = [write_rank(staging, plan, rank) for rank in range(2)]
    with pytest.raises(SaveFailedError, match=f"rank 1: {message}"):
        commit_save(staging, order_commit(plan), [good[0], spoil(good[1], fault)], may_retain=lambda: False)
    assert [path.name for path in tmp_path.iterdir()] == [staging.name]
    assert commit_save(staging, order_commit(plan), good, may_retain=lambda: False).kind == "committed"


def test_a_receipt_comes_back_as_it_was_and_no_part_of_it_is_taken_for_it(tmp_path: Path, plan: SavePlan) -> None:
    states = (whole("state.1.rng", "state"),)
    receipt = write_rank(tmp_path, plan, 1, states)
    _leave_receipt(tmp_path, 1, receipt)
    note = _read_note(_receipt_path(tmp_path, 1))
    assert note is not None
    back = _decode_receipt(*note)
    assert (back.file, back.states, back.section) == (receipt.file, states, {"rank": 1})
    assert np.array_equal(back.digests, receipt.digests)
    assert np.array_equal(back.places, receipt.places)
    data = _receipt_path(tmp_path, 1).read_bytes()
    for num_bytes in range(len(data)):
        (tmp_path / "receipt-2").write_bytes(data[:num_bytes])
        assert _read_note(tmp_path / "receipt-2") is None


@given(st.data())
def test_a_tensors_digest_is_the_sum_of_its_blocks_whoever_holds_them(data: st.DataObject) -> None:
    num_ranks, num_copies = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    reports = [
        data.draw(st.permutations([cut_rows("a", 12, num_ranks, rank), whole("b"), whole("c", "buffer")]))
        for _ in range(num_copies)
        for rank in range(num_ranks)
    ]
    plan = plan_save(reports)
    value = {part: data.draw(st.integers(0, (1 << 64) - 1)) for report in reports for part in report}
    digests = [np.array([value[part] for part in report], dtype=np.uint64) for report in reports]
    expected = {name: sum(number for part, number in value.items() if part.name == name) % 2**64 for name in "abc"}
    assert merge_digests(plan, digests) == expected
    last = len(reports) - 1
    buffer, other = (reports[last].index(part) for part in (whole("c", "buffer"), whole("b")))
    digests[last][buffer] ^= np.uint64(last > 0)
    assert merge_digests(plan, digests) == expected, "rank 0's buffer counts"
    if last > 0:
        digests[last][other] ^= np.uint64(1)
        with pytest.raises(SaveFailedError, match=f"b: rank {last} holds other values than rank 0"):
            merge_digests(plan, digests)


def plan_what_cannot_be(directory: Path) -> tuple[str, int]:
    tensor = torch.ones(4 + dist.get_rank())
    try:
        SavePipeline(SaveTarget(directory, Ranks()), mode="sync").begin(
            1, lambda: Snapshot(1, {}, local_shards("model.x", tensor, "parameter"), {}), Progress(lambda: 0)
        )
    except SaveFailedError as error:
        return str(error), error.ends_all_ranks
    return "", False


def test_a_plan_that_cannot_be_made_is_refused_on_every_rank_in_the_same_words(tmp_path: Path) -> None:
    (message, ends_all), other = run_ranks(plan_what_cannot_be, 2, tmp_path)
    assert message.startswith(
        "reporting the tensors to save: rank 0: model.x: the ranks disagree about it (rank 0: torch.float32"
    )
    assert (message, ends_all) == other == (message, True)


def count_chunks_as_dcp_does(path: Path) -> tuple[int, int]:
    """Returns how many tensors and chunks DCP finds, after comparing where it finds each with the manifest."""
    metadata = FileSystemReader(path).read_metadata()
    for name, record in read_manifest(path).tensors.items():
        for chunk in record.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            assert (place.relative_path, place.offset, place.length) == (chunk.file, chunk.byte_offset, chunk.num_bytes)
    return len(metadata.state_dict_metadata), sum(len(it.chunks) for it in metadata.state_dict_metadata.values())


@pytest.mark.slow
def test_a_thousand_ranks_commit_from_receipts_of_a_few_bytes_for_each_part(tmp_path: Path) -> None:
    # Fully sharded on 256 ranks in 4 copies of what tensor parallelism cuts, as AdamW's state is, and scalars of all.
    data_ranks, copies, num_tensors, num_scalars = 256, 4, 90, 30
    reports = [
        [
            *(cut_rows(f"m.{number}.{copy}", 512, data_ranks, rank, "optimizer") for number in range(num_tensors)),
            *(whole(f"s.{number}") for number in range(num_scalars)),
        ]
        for rank in range(data_ranks)
        for copy in range(copies)
    ]
    num_parts = sum(map(len, reports))
    plan = plan_save(reports)
    # What goes to rank 0's writer with every save.
    assert len(pickle.dumps(plan)) < 64 * num_parts
    staging = make_staging(tmp_path)
    receipts = [write_rank(staging, plan, rank) for rank in range(len(reports))]
    for rank, receipt in enumerate(receipts[1:], 1):
        _leave_receipt(staging, rank, receipt)
    num_bytes = sum(_receipt_path(staging, rank).stat().st_size for rank in range(1, len(reports)))
    assert num_bytes < 8 * num_parts + 24 * len(plan.tensor_of) + 512 * len(reports)
    job = WriteJob(staging, 0, (), {}, {}, "blake3", 60.0, order_commit(plan))
    found = _gather(job, receipts[0], len(reports), lambda: False)
    for rank in range(1, len(reports)):
        _receipt_path(staging, rank).unlink()
    commit_save(staging, order_commit(plan), found, may_retain=lambda: False)
    path = tmp_path / "step-00000001"
    # So small that a model of many times the tensors could be saved as well, and read by DCP.
    assert (path / MANIFEST_NAME).stat().st_size < 100 * len(plan.tensor_of) + 512 * len(reports)
    loaded = run_ranks(count_chunks_as_dcp_does, 1, path)
    assert loaded == [(len(plan.tensors), len(plan.tensor_of))]
    manifest = read_manifest(path)
    assert len(manifest.files) == len(reports) + 2
    numbers = {part.name: 0 for part in plan.tensors}
    for number, tensor in enumerate(plan.tensor_of.tolist()):
        numbers[plan.tensors[tensor].name] += number
    assert {name: record.digest for name, record in manifest.tensors.items()} == numbers
    for name, record in manifest.tensors.items():
        check_tiling(name, record.shape, [(chunk.offsets, chunk.sizes) for chunk in record.chunks])
        assert all(chunk.num_bytes == math.prod(chunk.sizes) * 4 + _ARCHIVE_BYTES for chunk in record.chunks)
