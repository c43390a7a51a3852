"""A teacher's classes on disk: what the teacher gives, complete or absent, refused where they do not belong."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genesis.base.errors import UserError
from genesis.base.progress import Stage
from genesis.data.corpus import open_corpus
from genesis.data.loader import Ranks
from genesis.data.plans import write_plan
from genesis.generate.teacher import find_teacher
from genesis.objectives import teacher_cache
from genesis.objectives.teacher import LOG_PROBS, LOG_REST, find_classes
from genesis.objectives.teacher_cache import CACHE_NAME, open_cache, write_cache
from genesis_callbacks.testing import run_ranks
from tests.data.corpora import make_documents, write_corpus
from tests.data.corpus_support import watch_stage
from tests.objectives.teachers import TOP_K, identify, load, make_cache, make_teacher, open_data

BLOCK_BYTES = 1 << 14  # sixteen sequences of sixteen tokens


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_cache, "BLOCK_BYTES", BLOCK_BYTES)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher") / "run", tiny_corpus)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, teacher: Path, tiny_corpus: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_cache, "BLOCK_BYTES", BLOCK_BYTES)
        return make_cache(tmp_path_factory.mktemp("cache") / "cache", teacher, tiny_corpus)


@pytest.fixture
def cache(tmp_path: Path, made: Path) -> Path:
    shutil.copytree(made, tmp_path / "cache")
    return tmp_path / "cache"


def read_files(directory: Path) -> dict[str, bytes]:
    paths = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("packing", ["chunk", "best_fit"])
def test_training_reads_what_the_teacher_gives_bit_for_bit(
    tmp_path: Path, teacher: Path, tiny_corpus: Path, packing: Any
) -> None:
    corpus = shutil.copytree(tiny_corpus, tmp_path / "corpus")
    if packing != "chunk":
        write_plan(open_corpus(corpus), packing, 16)
    data = open_data(corpus, packing=packing)
    loaded = load(teacher, data)
    write_cache(tmp_path / "cache", identify(teacher, data), data.read_sequences, loaded.read, batch_size=2)
    data.columns = open_cache(tmp_path / "cache")
    data.open(Ranks())
    for position in (0, 8, 800):
        for micro_batch in data.window(position).micro_batches:
            cached = find_classes(micro_batch)
            assert cached is not None
            for one, other in zip(cached, loaded.read(micro_batch), strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)


def test_half_precision_has_the_stated_error_and_adds_up_to_one(
    tmp_path: Path, teacher: Path, tiny_corpus: Path, made: Path
) -> None:
    halves = open_cache(make_cache(tmp_path / "half", teacher, tiny_corpus, log_probs="float16"))
    sources, sequences = np.zeros(6, np.int64), np.arange(6) * 5
    half, whole = halves.read(sources, sequences), open_cache(made).read(sources, sequences)
    assert torch.equal(half["teacher_ids"], whole["teacher_ids"])
    total = half[LOG_PROBS].exp().sum(-1) + half[LOG_REST].exp()
    torch.testing.assert_close(total, torch.ones_like(total))
    difference = (half[LOG_PROBS] - whole[LOG_PROBS]).abs()
    assert (difference <= 2 * whole[LOG_PROBS].abs().amax() / 2048).all()
    assert (tmp_path / "half/web/00000.classes").stat().st_size < (made / "web/00000.classes").stat().st_size


def test_another_batch_size_gives_the_same_up_to_rounding(
    tmp_path: Path, teacher: Path, tiny_corpus: Path, made: Path
) -> None:
    other = open_cache(make_cache(tmp_path / "other", teacher, tiny_corpus, batch_size=3))
    sources, sequences = np.ones(6, np.int64), np.arange(6)
    ours, theirs = other.read(sources, sequences), open_cache(made).read(sources, sequences)
    torch.testing.assert_close(ours[LOG_REST], theirs[LOG_REST], rtol=1e-5, atol=1e-5)


def kill_after(number: int, directory: str, teacher: str, corpus: str) -> None:
    teacher_cache.BLOCK_BYTES = BLOCK_BYTES  # type: ignore[misc]  # as the fixture does in the test's process
    data = open_data(Path(corpus))
    calls = 0

    def count(shown: Stage) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)

    identity = identify(Path(teacher), data)
    watch_stage(pytest.MonkeyPatch(), "genesis.objectives.teacher_cache", count)
    write_cache(Path(directory), identity, data.read_sequences, load(Path(teacher), data).read, batch_size=2)


def test_a_killed_writer_is_continued_with_the_same_bytes(
    tmp_path: Path, teacher: Path, tiny_corpus: Path, made: Path
) -> None:
    directory = tmp_path / "killed"
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(kill_after, 1, 22, str(directory), str(teacher), str(tiny_corpus))
    left = read_files(directory)
    assert "web/00001.classes" in left
    assert len(left) < len(read_files(made))
    with pytest.raises(UserError, match=r"killed is not complete: run the same `genesis data distill` again"):
        open_cache(directory)
    before = {name: (directory / name).stat().st_mtime_ns for name in left if name.endswith(".classes")}
    make_cache(directory, teacher, tiny_corpus)
    assert read_files(directory) == read_files(made)
    assert before == {name: (directory / name).stat().st_mtime_ns for name in before}


def test_a_block_that_was_damaged_before_the_writer_continues_is_made_again(
    cache: Path, made: Path, teacher: Path, tiny_corpus: Path
) -> None:
    (cache / CACHE_NAME).unlink()
    flip(cache / "web/00001.classes")
    shutil.copy(cache / "web/00000.classes", cache / "web/00002.classes")
    make_cache(cache, teacher, tiny_corpus)
    assert read_files(cache) == read_files(made)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def read_all(cache: Path) -> None:
    opened = open_cache(cache)
    for number, count in enumerate(opened.identity.num_sequences.values()):
        opened.read(np.full(count, number), np.arange(count))


def test_a_complete_cache_is_left_alone(cache: Path, teacher: Path, tiny_corpus: Path) -> None:
    read_all(cache)
    data = open_data(tiny_corpus)
    assert not write_cache(cache, identify(teacher, data), data.read_sequences, load(teacher, data).read, batch_size=2)


def swap_blocks(cache: Path) -> None:
    one, other = cache / "web/00000.classes", cache / "web/00001.classes"
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


def forge(cache: Path, change: Any) -> None:
    content = json.loads((cache / CACHE_NAME).read_text())
    change(content)
    (cache / CACHE_NAME).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda cache: flip(cache / "code/00001.classes"), "code/00001.classes is damaged: remove"),
        (swap_blocks, "web/00000.classes is damaged: remove"),
        (lambda cache: os.truncate(cache / "web/00000.classes", 100), "has 100 bytes instead of"),
        (lambda cache: (cache / "web/00000.classes").unlink(), "cannot be read"),
        (lambda cache: (cache / CACHE_NAME).unlink(), "is not complete"),
        (lambda cache: os.truncate(cache / CACHE_NAME, 100), "is damaged"),
        (lambda cache: (cache / CACHE_NAME).write_text("[]"), "is no JSON object"),
        (lambda cache: forge(cache, lambda c: c.update(version=9)), "of another version"),
        (lambda cache: forge(cache, lambda c: c["made_for"].pop("top_k")), "does not say what"),
        (lambda cache: forge(cache, lambda c: c["made_for"].update(teacher="blake3:0")), "web/00000.classes is"),
        (lambda cache: forge(cache, lambda c: c["made_for"].update(temperature=1.0)), "web/00000.classes is"),
        (lambda cache: forge(cache, lambda c: c["made_for"].update(top_k=8.0)), "does not say what"),
        (lambda cache: forge(cache, lambda c: c["made_for"].update(top_k=4)), "does not list the blocks"),
        (lambda cache: forge(cache, lambda c: c["blocks"]["web"].pop()), "does not list the blocks"),
        (lambda cache: forge(cache, lambda c: c["blocks"]["web"].reverse()), "web/00000.classes is"),
        (lambda cache: forge(cache, lambda c: c.update(blocks=7)), "does not list the blocks"),
        (lambda cache: forge(cache, lambda c: c["blocks"].update(web=7)), "does not list the blocks"),
        (lambda cache: forge(cache, lambda c: c["made_for"].update(sequences=[])), "does not say what"),
    ],
)  # fmt: skip
def test_a_damaged_or_forged_cache_is_refused(cache: Path, spoil: Any, message: str) -> None:
    spoil(cache)
    with pytest.raises(UserError, match=message) as refused:
        read_all(cache)
    assert "\n" not in str(refused.value)


def test_a_block_that_changes_while_it_is_read_is_refused(cache: Path) -> None:
    opened = open_cache(cache)
    path = cache / "web/00000.classes"
    source = list(opened.identity.num_sequences).index("web")
    sequences = np.arange(16)
    opened.read(np.full(16, source), sequences)
    with path.open("r+b") as file:  # the same file, which is mapped
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    opened.read(np.full(15, source), sequences[1:])
    with pytest.raises(UserError, match=r"web/00000\.classes has changed since it was first read: remove"):
        opened.read(np.full(1, source), sequences[:1])


def test_a_cache_of_something_else_is_refused_with_both_values(
    cache: Path, teacher: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    data = open_data(tiny_corpus)
    wanted = identify(teacher, data)
    opened = open_cache(cache)
    opened.check(wanted)
    other = make_teacher(tmp_path / "other", tiny_corpus, seed=8)
    sources = {**wanted.sequences["sources"], "web": {**wanted.sequences["sources"]["web"], "shards": "00ff"}}
    for change, message in (
        ({"top_k": 9}, f"top_k {TOP_K}, and not 9"),
        ({"temperature": 1.0}, "temperature 2.0, and not 1.0"),
        ({"teacher": find_teacher(other).hash}, "teacher blake3:"),
        ({"sequences": {**wanted.sequences, "packing": "pad"}}, "sequences.packing chunk, and not pad"),
        ({"sequences": {**wanted.sequences, "seq_len": 8}}, "sequences.seq_len 16, and not 8"),
        ({"sequences": {**wanted.sequences, "sources": sources}}, "sequences.sources.web.shards"),
    ):
        changed = dataclasses.replace(wanted, **change)
        with pytest.raises(UserError, match=message):
            opened.check(changed)
        with pytest.raises(UserError, match=f"cache was begun with .*{message}"):
            write_cache(cache, changed, data.read_sequences, load(teacher, data).read, batch_size=2)


def test_a_directory_of_something_else_is_refused(tmp_path: Path, teacher: Path, tiny_corpus: Path) -> None:
    data = open_data(tiny_corpus)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty, and holds no cache"):
        write_cache(tmp_path, identify(teacher, data), data.read_sequences, load(teacher, data).read, batch_size=2)
    with pytest.raises(UserError, match="is a file"):
        write_cache(
            tmp_path / "thesis.txt",
            identify(teacher, data),
            data.read_sequences,
            lambda m: None,
            batch_size=2,
        )
    with pytest.raises(UserError, match="is no cache of a teacher"):
        open_cache(tmp_path)


def test_a_teacher_of_another_tokenizer_is_refused_with_both(tmp_path: Path, teacher: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", {"web": make_documents(20, 12, seed=1)})
    found, hash = find_teacher(teacher), open_data(corpus).identify_sequences()["tokenizer_hash"]
    with pytest.raises(
        UserError, match=f"has the tokenizer {found.tokenizer_hash[:16]}, and the corpus has {hash[:16]}"
    ):
        found.check_tokenizer(hash, "the corpus", corpus)
