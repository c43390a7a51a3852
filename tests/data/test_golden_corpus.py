"""A corpus, its texts and the windows of both, as version 0.1.0 wrote and gave them before its data hubs were split."""

import json
from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from genesis.cli.data import verify_main
from genesis.data.old_keys import rename_old_keys
from genesis.data.prepare import PrepareOptions, prepare_corpus
from genesis.data.sources import SourceOptions
from genesis.data.stream.options import StreamOptions
from genesis.data.window import AccumulationWindow
from genesis.train.data_module import CorpusDataModule
from tests.data.corpus_support import read_tree
from tests.golden.files import GOLDEN

FOLDER = GOLDEN / "corpus-schema-2"
CORPUS, TEXTS = FOLDER / "corpus", FOLDER / "texts"
RECORDED: dict[str, dict[str, Any]] = json.loads((FOLDER / "windows.json").read_text())
NUM_WINDOWS = 30
"""In all, so many before the save and so many after it."""
SOURCES = (SourceOptions("web", (str(TEXTS / "web"),), weight=2), SourceOptions("code", (str(TEXTS / "code"),)))


def build_data(kind: str) -> CorpusDataModule:
    stream = StreamOptions(SOURCES, block_tokens=200, num_workers=0, num_lanes=2) if kind == "stream" else None
    return CorpusDataModule(
        str(CORPUS),
        stream=stream,
        packing="chunk" if kind == "chunk" else "best_fit",
        seq_len=16,
        micro_batch_size=2,
        global_batch_size=8,
        seed=3,
        max_epochs={"code": 1},
    )


def describe(window: AccumulationWindow) -> list[Any]:
    """Returns what the window says of itself, and a digest of all its tensors."""
    digest = blake2b(digest_size=16)
    for micro_batch in window.micro_batches:
        for tensor in (micro_batch.input_ids, micro_batch.labels, micro_batch.document_ids):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
    return [window.data_position, window.num_valid_tokens, window.num_bytes, digest.hexdigest()]


def train(data: CorpusDataModule) -> list[list[Any]]:
    found = []
    windows: Iterable[AccumulationWindow] = data.train_dataloader()
    for window in islice(windows, NUM_WINDOWS):
        data.training.advance(window)
        found.append(describe(window))
    data.training.close()
    return found


@pytest.mark.parametrize("kind", RECORDED)
def test_the_windows_the_state_and_what_follows_it_are_those_of_the_version_before(kind: str) -> None:
    recorded, data = RECORDED[kind], build_data(kind)
    assert train(data) == recorded["windows"]
    assert json.loads(json.dumps(data.state_dict())) == write_as_now(rename_old_keys(recorded["state"]))
    resumed = build_data(kind)
    resumed.setup("fit")
    resumed.load_state_dict(recorded["state"])
    assert train(resumed) == recorded["windows_after"]
    assert list(map(describe, resumed.val_dataloader())) == recorded["validation"]


def write_as_now(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state with what streams have counted since: documents of white space."""
    if "stream" in state:
        state["stream"]["version"] = 2
        lanes = [usage for lane in state["stream"]["lanes"].values() for usage in lane.values()]
        for usage in (*lanes, *state["usage_of_lanes"].values()):
            usage["num_blank_documents"] = 0
    return state


def test_a_corpus_of_the_version_before_verifies_with_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_main([str(CORPUS)]) == 0
    told = capsys.readouterr().out
    assert told.endswith("8 shards, 12,296 bytes, all as in the manifest; plans: best_fit at seq_len 16\n")


def test_the_same_texts_are_prepared_to_the_same_bytes(tmp_path: Path) -> None:
    options = PrepareOptions(
        name="corpus-schema-2",
        tokenizer=CORPUS,
        sources=SOURCES,
        out=tmp_path,
        validation_fraction=0.1,
        shard_tokens=1_500,
        num_workers=1,
        packing="best_fit",
        seq_len=16,
    )
    prepare_corpus(options)
    made = {name: data for name, data in read_tree(options.corpus).items() if not is_working_file(name)}
    assert made == read_tree(CORPUS)


def is_working_file(name: str) -> bool:
    return name.startswith(".prepare/") or name.endswith(".lock")
