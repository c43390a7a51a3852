"""A packing plan is made by one process at a time, whether or not nodes share the corpus and locks reach the others."""

import contextlib
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from genesis.base.errors import QuietExit, UserError
from genesis.data import plans
from genesis.data.corpus_data import CorpusData
from genesis.data.prepare import PrepareOptions, prepare_corpus
from genesis.data.sources import SourceOptions
from genesis.data.training_data import TrainingOptions
from genesis.train.data_module import make_plan_in_turn
from genesis_callbacks.testing import run_ranks
from tests.chat.support import write_tokenizer
from tests.cli.test_chat import make_chats

OPTIONS = TrainingOptions(seq_len=96, micro_batch_size=1, global_batch_size=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chats")
    write_tokenizer(directory / "tokenizer")
    (directory / "chat.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in make_chats(20, seed=1)))
    sources = (SourceOptions("chat", (str(directory / "chat.jsonl"),), chat="auto"),)
    prepare_corpus(PrepareOptions("corpus", directory / "tokenizer", sources, out=directory, num_workers=1))
    return directory / "corpus"


def make_plan(paths: list[str], record: str) -> tuple[str, int]:
    """Makes the plan of this rank's corpus, as if each rank were a node, and returns how that ended."""

    @contextlib.contextmanager
    def never_locked(directory: Path, *, waits: bool) -> Any:
        directory.mkdir(exist_ok=True)
        yield

    def broadcast(value: Any, src: int) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src)
        return values[0]

    def write_slowly(*arguments: Any) -> Any:
        with Path(record).open("a") as file:
            file.write(f"begin {rank}\n")
        time.sleep(0.2)
        plan = write(*arguments)
        with Path(record).open("a") as file:
            file.write(f"end {rank}\n")
        return plan

    rank, write = dist.get_rank(), plans._write_plan
    plans._locked, plans._write_plan = never_locked, write_slowly  # type: ignore[assignment]
    trainer: Any = SimpleNamespace(
        num_nodes=dist.get_world_size(),
        num_devices=1,
        node_rank=rank,
        local_rank=0,
        strategy=SimpleNamespace(broadcast=broadcast),
    )
    data = CorpusData(Path(paths[rank]), OPTIONS, verify_hashes="first_touch", tokenizer_hash=None)
    try:
        make_plan_in_turn(data, trainer)
    except (UserError, QuietExit) as error:
        return type(error).__name__, 0
    assert data.plans is not None
    return "", data.plans[0].num_sequences


@pytest.mark.parametrize("is_shared", [True, False])
def test_nodes_never_write_a_plan_at_the_same_time_without_locks(tmp_path: Path, corpus: Path, is_shared: bool) -> None:
    """A corpus that both nodes see gets one plan, by the first; copies of it get one each."""
    paths = [str(shutil.copytree(corpus, tmp_path / name)) for name in ("one", "other")]
    ends = run_ranks(make_plan, 2, [paths[0]] * 2 if is_shared else paths, str(tmp_path / "record"))
    assert ends[0] == ends[1]
    assert ends[0][1] > 5
    written = (tmp_path / "record").read_text().splitlines()
    assert written == ["begin 0", "end 0", *(() if is_shared else ("begin 1", "end 1"))]


def test_a_plan_that_cannot_be_made_ends_all_ranks_and_is_reported_once(tmp_path: Path, corpus: Path) -> None:
    damaged = shutil.copytree(corpus, tmp_path / "damaged")
    index = next(damaged.rglob("*.ds.index"))
    index.write_bytes(index.read_bytes()[:-1] + b"\x01")
    ends = run_ranks(make_plan, 2, [str(damaged)] * 2, str(tmp_path / "record"))
    assert [name for name, _ in ends] == ["UserError", "QuietExit"]
