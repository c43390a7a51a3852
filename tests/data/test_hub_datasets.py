"""`hf://datasets/ORG/NAME/...` as a source, on a Hub on loopback: listed, read, compared with what was listed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfFileSystem, constants

from genesis.base.errors import UserError
from genesis.data.manifest import read_manifest
from genesis.data.remote import RemoteFile, download, list_files
from genesis.data.sources import SourceOptions, plan_spans, read_documents
from genesis.data.sources.files import find_files
from genesis.data.store import StoreError
from tests.data.dataset_hub import DatasetHub, serve_datasets

NAME, URL = "some-lab/texts", "hf://datasets/some-lab/texts"
FILES = {
    "README.md": b"# Texts",
    "train/a.jsonl": b'{"text": "alpha"}\n' * 50,
    "train/more/b.jsonl": b'{"text": "beta"}\n' * 40,
    "test.jsonl": b'{"text": "gamma"}\n' * 30,
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetHub]:
    monkeypatch.setenv("GENESIS_STORE_ATTEMPTS", "3")
    monkeypatch.setattr("genesis.data.store._FIRST_WAIT_SECONDS", 0.01)
    with serve_datasets() as hub:
        hub.datasets[NAME] = {"main": dict(FILES), "v1": {"train/a.jsonl": b'{"text": "old"}\n'}}
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("GENESIS_STORE_ATTEMPT_SECONDS", "20")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        HfFileSystem.clear_instance_cache()
        yield hub
        HfFileSystem.clear_instance_cache()


def fetch(file: RemoteFile, path: Path) -> bytes:
    with path.open("w+b", buffering=0) as destination:
        download(file, destination)
    return path.read_bytes()


def test_files_directories_and_globs_are_found_with_the_ids_of_their_blobs(hub: DatasetHub, tmp_path: Path) -> None:
    (file,) = list_files(f"{URL}/train/a.jsonl", ())
    blob = hub.describe("train/a.jsonl", FILES["train/a.jsonl"])["oid"]
    assert file == RemoteFile(f"{URL}/train/a.jsonl", 900, f"blob_id: {blob}")
    assert fetch(file, tmp_path / "a") == FILES["train/a.jsonl"]
    names = {"train/a.jsonl", "train/more/b.jsonl", "test.jsonl"}
    assert {file.url for file in list_files(URL, (".jsonl",))} == {f"{URL}/{name}" for name in names}
    assert [file.url for file in list_files(f"{URL}/train/*.jsonl", ())] == [f"{URL}/train/a.jsonl"]
    assert len(list_files(f"{URL}/**/*.jsonl", ())) == 3


def test_a_revision_is_part_of_the_path(hub: DatasetHub, tmp_path: Path) -> None:
    source = SourceOptions(name="texts", paths=(f"{URL}@v1/train/a.jsonl",))
    (found,) = find_files(source)
    assert found.path == f"{URL}@v1/train/a.jsonl"
    assert fetch(RemoteFile(found.path, found.num_bytes, found.identity), tmp_path / "a") == b'{"text": "old"}\n'


def test_a_branch_that_moves_is_noticed_by_the_blob(hub: DatasetHub, tmp_path: Path) -> None:
    (file,) = list_files(f"{URL}/test.jsonl", ())
    hub.datasets[NAME]["main"]["README.md"] = b"# More texts"  # another commit, with the same file
    assert fetch(file, tmp_path / "a") == FILES["test.jsonl"]
    hub.datasets[NAME]["main"]["test.jsonl"] = FILES["test.jsonl"].replace(b"gamma", b"delta")
    with pytest.raises(UserError, match=r"has changed since it was listed: its blob_id was"):
        fetch(file, tmp_path / "b")
    del hub.datasets[NAME]["main"]["test.jsonl"]
    with pytest.raises(UserError, match=r"was removed since it was listed"):
        fetch(file, tmp_path / "c")


@pytest.mark.parametrize("is_large", [False, True])
def test_a_download_is_compared_with_the_hash_that_the_hub_lists(
    is_large: bool, hub: DatasetHub, tmp_path: Path
) -> None:
    hub.large = {"test.jsonl"} if is_large else set()
    (file,) = list_files(f"{URL}/test.jsonl", ())
    assert fetch(file, tmp_path / "a") == FILES["test.jsonl"]
    hub.flips = True
    with pytest.raises(UserError, match=r"has (SHA-256|the blob id) .*, the store lists"):
        fetch(file, tmp_path / "b")


def test_a_hub_that_is_overloaded_for_a_moment_is_asked_again(hub: DatasetHub, tmp_path: Path) -> None:
    (file,) = list_files(f"{URL}/test.jsonl", ())
    hub.faults = [503]
    assert fetch(file, tmp_path / "a") == FILES["test.jsonl"]


def test_what_is_missing_or_not_permitted_is_one_line(hub: DatasetHub) -> None:
    source = SourceOptions(name="texts", paths=(f"{URL}/none.jsonl",))
    for path in (f"{URL}/none.jsonl", f"{URL}@v9/test.jsonl", f"{URL}/*.parquet"):
        with pytest.raises(UserError, match=r"source texts: no file at hf://datasets/some-lab/texts"):
            find_files(SourceOptions(name="texts", paths=(path,)))
    with pytest.raises(UserError, match=r"access to hf://datasets/some-lab/secret.* is denied .*HF_TOKEN"):
        find_files(SourceOptions(name="texts", paths=("hf://datasets/some-lab/secret/a.jsonl",)))
    hub.gated.add(NAME)
    HfFileSystem.clear_instance_cache()
    with pytest.raises(UserError, match=r"access to hf://datasets/some-lab/texts.* is denied .*HF_TOKEN"):
        find_files(source)
    for path in ("hf://datasets/alone", "hf://datasets"):
        with pytest.raises(UserError, match=r"cannot be read"):
            find_files(SourceOptions(name="texts", paths=(path,)))


def test_offline_is_refused_without_a_retry(hub: DatasetHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set") as error:
        list_files(f"{URL}/test.jsonl", ())
    assert not isinstance(error.value, StoreError)


def test_documents_are_read_as_from_local_files(
    hub: DatasetHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(tmp_path / "cache"))
    source = SourceOptions(name="texts", paths=(f"{URL}@main/train",))
    files = find_files(source)
    assert [file.path for file in files] == [f"{URL}@main/train/a.jsonl", f"{URL}@main/train/more/b.jsonl"]
    found = [document.text for span in plan_spans(source, files, 1 << 20) for document in read_documents(source, span)]
    assert found == ["alpha"] * 50 + ["beta"] * 40


@pytest.mark.slow
def test_a_corpus_is_prepared_from_it(hub: DatasetHub, tiny_corpus: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "GENESIS_CACHE_DIR": str(tmp_path / "c"),
    }
    sources = json.dumps([{"name": "texts", "paths": [f"{URL}@main/train"]}])
    command = ("data", "prepare", "--name", "corpus", "--out", str(tmp_path), "--tokenizer", str(tiny_corpus))
    started = [sys.executable, "-m", "genesis", *command, "--sources", sources, "--num_workers", "2"]
    subprocess.run(started, env=environment, check=True)
    manifest = read_manifest(tmp_path / "corpus")
    assert sum(source.num_documents for source in manifest.train) == 90
