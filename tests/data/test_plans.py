import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from genesis.base.errors import UserError
from genesis.data import plans as plans_module
from genesis.data.corpus import Corpus, open_corpus
from genesis.data.packing import Packing, pack_documents
from genesis.data.plans import (
    PLANS_DIRECTORY,
    PlannedPacking,
    find_plan_fault,
    list_plans,
    measure_source,
    open_plan,
    write_plan,
)
from tests.data.corpora import make_documents, write_corpus

SEQ_LEN = 16
SOURCES = {"web": make_documents(60, 9, seed=1), "code": make_documents(25, 20, seed=2)}


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return open_corpus(write_corpus(tmp_path / "corpus", SOURCES, documents_per_shard=7))


def files_of(corpus: Corpus) -> dict[str, bytes]:
    paths = sorted(path for path in corpus.path.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(corpus.path)): path.read_bytes() for path in paths}


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_a_plan_read_back_is_the_packing_of_the_sources(corpus: Corpus, packing: PlannedPacking) -> None:
    write_plan(corpus, packing, SEQ_LEN)
    for plan, documents in zip(open_plan(corpus, packing, SEQ_LEN, "first_touch"), SOURCES.values(), strict=True):
        packed = pack_documents(np.cumsum([len(document) for document in documents]), SEQ_LEN, packing)
        assert plan.num_sequences == len(packed)
        ends = [0, *packed.sequence_ends.tolist()]
        for sequence, (first, last) in enumerate(pairwise(ends)):
            starts, lengths = plan.pieces(sequence)
            assert (starts.tolist(), lengths.tolist()) == (
                packed.starts[first:last].tolist(),
                packed.lengths[first:last].tolist(),
            )
            assert plan.num_tokens(np.array([sequence, sequence])) == 2 * lengths.sum()


def test_the_shards_stay_as_they_are_and_a_plan_that_fits_is_left_alone(corpus: Corpus) -> None:
    before = files_of(corpus)
    first = write_plan(corpus, "best_fit", SEQ_LEN)
    after = files_of(corpus)
    assert {path: data for path, data in after.items() if not path.startswith(PLANS_DIRECTORY)} == before
    inode = (corpus.path / "packing/best_fit-16/plan.json").stat().st_ino
    assert write_plan(corpus, "best_fit", SEQ_LEN) == first
    assert (corpus.path / "packing/best_fit-16/plan.json").stat().st_ino == inode
    write_plan(corpus, "pad", SEQ_LEN)
    write_plan(corpus, "best_fit", 8)
    assert [(plan.packing, plan.seq_len) for plan in list_plans(corpus.path)] == [
        ("best_fit", 16),
        ("best_fit", 8),
        ("pad", 16),
    ]


def test_blocks_of_documents_hold_the_same_pieces_in_bounded_memory(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measure_source(corpus.train[0], SEQ_LEN, "best_fit")
    monkeypatch.setattr(plans_module, "BLOCK_DOCUMENTS", 11)
    assert [len(ends) for _, ends in plans_module._blocks(corpus.train[0].document_ends())] == [11] * 5 + [5]
    in_blocks = measure_source(corpus.train[0], SEQ_LEN, "best_fit")
    assert (in_blocks.num_labels, in_blocks.num_valid_tokens) == (whole.num_labels, whole.num_valid_tokens)
    assert whole.num_sequences <= in_blocks.num_sequences < whole.num_sequences + 6
    write_plan(corpus, "best_fit", SEQ_LEN)
    plan = open_plan(corpus, "best_fit", SEQ_LEN, "first_touch")[0]
    pieces = [zip(*plan.pieces(sequence), strict=True) for sequence in range(plan.num_sequences)]
    found = sorted((int(start), int(length)) for sequence in pieces for start, length in sequence)
    packed = pack_documents(np.cumsum([len(document) for document in SOURCES["web"]]), SEQ_LEN, "pad")
    assert found == list(zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True))


@pytest.mark.parametrize("packing", ["chunk", "best_fit", "pad"])
def test_figures_do_not_depend_on_blocks_and_count_every_label(
    corpus: Corpus, packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source, documents in zip(corpus.train, SOURCES.values(), strict=True):
        figures = measure_source(source, SEQ_LEN, packing)
        assert figures.num_documents == len(documents)
        assert figures.num_labels == sum(len(document) - 1 for document in documents)
        if packing == "chunk":
            assert figures.num_labels - figures.num_valid_tokens <= SEQ_LEN
            monkeypatch.setattr(plans_module, "BLOCK_DOCUMENTS", 4)
            assert measure_source(source, SEQ_LEN, packing) == figures
        else:
            assert figures.num_valid_tokens == figures.num_labels


def test_a_missing_plan_is_one_line_with_the_command(corpus: Corpus) -> None:
    with pytest.raises(UserError) as error:
        open_plan(corpus, "best_fit", 32, "first_touch")
    assert str(error.value) == (
        f"{corpus.path} has no plan for best_fit at seq_len 32; "
        f"run `genesis data plan {corpus.path} --packing best_fit --seq_len 32`"
    )


def test_a_plan_of_other_shards_is_refused_and_made_again(corpus: Corpus) -> None:
    write_plan(corpus, "best_fit", SEQ_LEN)
    changed = {**SOURCES, "code": make_documents(25, 20, seed=3)}
    other = open_corpus(write_corpus(corpus.path, changed, documents_per_shard=7))
    with pytest.raises(UserError, match="was made for other shards of the source 'code'; run `genesis data plan"):
        open_plan(other, "best_fit", SEQ_LEN, "first_touch")
    write_plan(other, "best_fit", SEQ_LEN)
    open_plan(other, "best_fit", SEQ_LEN, "first_touch")
    fewer = open_corpus(write_corpus(corpus.path, {"web": SOURCES["web"]}, documents_per_shard=7))
    with pytest.raises(UserError, match="was made for the sources web, code, the corpus has web; run"):
        open_plan(fewer, "best_fit", SEQ_LEN, "first_touch")


@pytest.mark.parametrize("name", ["starts", "lengths", "ends", "tokens"])
def test_damage_is_named_at_the_first_reading_and_by_a_look_at_all(corpus: Corpus, name: str) -> None:
    plan = write_plan(corpus, "best_fit", SEQ_LEN)
    path = corpus.path / f"packing/best_fit-16/code.{name}"
    assert find_plan_fault(corpus, plan) is None
    flip_bit(path)
    assert f"{path} has hash" in str(find_plan_fault(corpus, plan))
    web, code = open_plan(corpus, "best_fit", SEQ_LEN, "first_touch")
    web.pieces(0)
    with pytest.raises(UserError, match=f"code.{name} has hash .* run `genesis data plan` again"):
        code.pieces(0)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(UserError, match=f"code.{name} has .* bytes, but its plan lists"):
        open_plan(corpus, "best_fit", SEQ_LEN, "never")[1].pieces(0)
    path.unlink()
    assert f"{path} is missing" in str(find_plan_fault(corpus, plan))


def test_a_damaged_index_makes_no_plan(corpus: Corpus) -> None:
    flip_bit(corpus.path / "train/web/00001.ds.index")
    with pytest.raises(UserError, match=r"00001.ds.index has hash"):
        write_plan(corpus, "best_fit", SEQ_LEN)
    assert list_plans(corpus.path) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"plan_version": 1}', '{"plan_version": 1, "sources": {"web": {}}}'])
def test_a_plan_that_cannot_be_read_is_one_line(corpus: Corpus, text: str) -> None:
    write_plan(corpus, "best_fit", SEQ_LEN)
    (corpus.path / "packing/best_fit-16/plan.json").write_text(text)
    with pytest.raises(UserError, match=r"plan.json is damaged .*; remove .* and run `genesis data plan` again"):
        open_plan(corpus, "best_fit", SEQ_LEN, "first_touch")


def test_a_plan_of_another_version_is_refused(corpus: Corpus) -> None:
    write_plan(corpus, "best_fit", SEQ_LEN)
    path = corpus.path / "packing/best_fit-16/plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "plan_version": 2}))
    with pytest.raises(UserError, match="is of another version of genesis"):
        open_plan(corpus, "best_fit", SEQ_LEN, "first_touch")


_WRITE_SLOWLY = """
import signal, sys
from pathlib import Path
from genesis.data import plans
from genesis.data.corpus import open_corpus

write_source = plans._write_source

def write_and_wait(*arguments):
    write_source(*arguments)
    Path(sys.argv[2]).touch()
    signal.pause()

plans._write_source = write_and_wait
plans.write_plan(open_corpus(Path(sys.argv[1])), "best_fit", 16)
"""


def test_a_killed_maker_leaves_no_plan_and_stands_in_nobodys_way(corpus: Corpus, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    maker = subprocess.Popen([sys.executable, "-c", _WRITE_SLOWLY, str(corpus.path), str(mark)])
    deadline = time.monotonic() + 100
    while not mark.exists() and maker.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert mark.exists()
    with pytest.raises(UserError, match="another process is writing a plan"):
        write_plan(corpus, "best_fit", SEQ_LEN)
    maker.kill()
    maker.wait()
    assert list_plans(corpus.path) == []
    with pytest.raises(UserError, match="has no plan"):
        open_plan(corpus, "best_fit", SEQ_LEN, "first_touch")
    write_plan(corpus, "best_fit", SEQ_LEN)
    assert [path.name for path in sorted((corpus.path / PLANS_DIRECTORY).iterdir())] == [".lock", "best_fit-16"]


def test_a_source_without_a_label_has_an_empty_plan(tmp_path: Path) -> None:
    corpus = open_corpus(write_corpus(tmp_path / "corpus", {"web": SOURCES["web"], "ends": [[3], [3]]}))
    write_plan(corpus, "best_fit", SEQ_LEN)
    _, ends = open_plan(corpus, "best_fit", SEQ_LEN, "first_touch")
    assert (ends.num_sequences, ends.num_tokens(np.empty(0, np.int64))) == (0, 0)
