"""A mirror in a store: S3 of moto on loopback behind a gate that fails, hangs and comes back, and fsspec's memory."""

import shutil
import threading
import time
from pathlib import Path

import fsspec
import pytest

from genesis.base.errors import UserError
from genesis.data.store import StoreError
from genesis.operations.supervise.mirror import OWNER_NAME
from genesis.operations.supervise.mirror_contents import read_contents, verify_contents
from genesis.operations.supervise.mirror_history import find_history, verify_history
from genesis.operations.supervise.mirror_open import open_place
from genesis.operations.supervise.mirror_restore import restore_run
from genesis.operations.supervise.mirror_source import Pace
from genesis.operations.supervise.mirror_state import read_mirror_statuses
from genesis_callbacks.checkpoint import verify
from tests.data.store_support import BUCKET, CREDENTIALS, serve_s3
from tests.operations.supervise.mirror_support import Gate, Run, open_mirror, save_base, sync
from tests.operations.supervise.test_mirror_history import LoggedRun, rows_of

URL = f"s3://{BUCKET}/runs/a"
LARGE = 3_000_000
"""Elements of a tensor whose file is uploaded in parts."""


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    monkeypatch.setenv("GENESIS_STORE_ATTEMPTS", "3")
    monkeypatch.setenv("GENESIS_STORE_ATTEMPT_SECONDS", "20")
    monkeypatch.setattr("genesis.data.store._FIRST_WAIT_SECONDS", 0.01)


@pytest.fixture(scope="module")
def s3_server():
    with serve_s3() as (address, client):
        yield address, client


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The client of an S3 server, and the gate before the server."""
    address, client = s3_server
    with Gate(address) as gate:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": gate.url}.items():
            monkeypatch.setenv(name, value)
        pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()  # it keeps the endpoint
        for key in list_keys(client):
            client.delete_object(Bucket=BUCKET, Key=key)
        yield client, gate


def list_keys(client) -> list[str]:
    return [item["Key"] for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]


def steps(url: str) -> list[int]:
    return sorted(listing.step for listing in read_contents(open_place(url)).checkpoints.values())


def restore(url: str, path: Path):
    return restore_run(open_place(url), path, report=lambda line: None)


def test_checkpoints_go_to_s3_whole_and_a_run_continues_from_there(s3, tmp_path: Path):
    client, _ = s3
    run = Run(tmp_path / "run", num_elements=LARGE)
    for step in (1, 2, 3):
        run.save(step)
    sync(run, URL)
    assert steps(URL) == [2, 3]
    place = open_place(URL)
    assert {problem for _, problem in verify_contents(place, read_contents(place), Pace(None))} == {None}
    outcome = restore(URL, tmp_path / "elsewhere")
    assert outcome.restored == (3,)
    verify(tmp_path / "elsewhere" / "checkpoints" / "step-00000003", "deep")
    assert not any("step-00000001" in key for key in list_keys(client))


@pytest.mark.slow
def test_the_history_goes_to_s3_whole_and_a_run_has_it_on_an_empty_machine(s3, tmp_path: Path, monkeypatch):
    client, gate = s3
    run = LoggedRun(tmp_path / "run")
    run.train(1, 2)
    sync(run, URL)
    run.train(3, 4)
    with open_mirror(run, URL) as mirror:
        mirror._look(mirror._read_run())
        real = mirror._history._copy_file

        def copy_and_refuse(*given):
            file = real(*given)
            gate.mode = "refuse"
            return file

        monkeypatch.setattr(mirror._history, "_copy_file", copy_and_refuse)
        with pytest.raises(StoreError):  # the server goes away in the middle of a copy
            mirror.sync()
        gate.mode = "open"
        monkeypatch.setattr(mirror._history, "_copy_file", real)
        found = find_history(open_place(URL))
        assert found is not None
        assert found.step == 2, "the copy before is whole"
        mirror.sync()
    folders = {key.split("/history/")[1].split("/")[0] for key in list_keys(client) if "/history/" in key}
    assert max(folders) == "00000002", "what the copy that was cut off has left is gone"
    assert [problem for _, problem in verify_history(open_place(URL), Pace(None))] == [None]
    restore(URL, tmp_path / "elsewhere")
    assert rows_of(tmp_path / "elsewhere") == [1, 2, 3, 4]
    assert (tmp_path / "elsewhere" / "events" / "rank-0.jsonl").exists()


def test_the_marker_is_the_last_object_of_a_checkpoint_and_the_first_to_go(s3, tmp_path: Path, monkeypatch):
    run = Run(tmp_path / "run")
    run.save(1)
    seen: list[tuple[str, str]] = []

    def note(request, **options):
        seen.append((request, options.get("Key", "").rpartition("/")[2]))

    with open_mirror(run, URL, keep_last=1) as mirror:
        store = mirror._place._store.files  # type: ignore[attr-defined]
        real = store._call_s3

        async def call(request, *arguments, **options):
            note(request, **options)
            return await real(request, *arguments, **options)

        monkeypatch.setattr(store, "_call_s3", call)
        mirror.sync()
        puts = [key for request, key in seen if request == "put_object"]
        assert puts[-1] == "COMMITTED"
        seen.clear()
        run.save(2)
        mirror.sync()
    deletes = [key for request, key in seen if request == "delete_object"]
    assert deletes[0] == "COMMITTED"
    assert steps(URL) == [2]


@pytest.mark.slow
def test_a_checkpoint_without_a_marker_is_no_checkpoint_and_is_continued(s3, tmp_path: Path):
    client, _ = s3
    run = Run(tmp_path / "run")
    run.save(1)
    sync(run, URL)
    prefix = "runs/a/checkpoints/step-00000001"
    client.delete_object(Bucket=BUCKET, Key=f"{prefix}/COMMITTED")
    client.put_object(Bucket=BUCKET, Key="runs/a/checkpoints/step-00000099/part", Body=b"half")
    assert steps(URL) == []
    written = [item["LastModified"] for item in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]]
    sync(run, URL)
    assert steps(URL) == [1]
    assert not any("step-00000099" in key for key in list_keys(client))
    assert len(written) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param("refuse", marks=pytest.mark.slow), pytest.param("hang", marks=pytest.mark.slow), "cut"]
)
def test_a_server_that_fails_and_comes_back_gets_the_checkpoint_whole(s3, tmp_path: Path, monkeypatch, mode: str):
    _, gate = s3
    monkeypatch.setenv("GENESIS_STORE_ATTEMPT_SECONDS", "0.5")
    run = Run(tmp_path / "run", num_elements=LARGE)
    run.save(1)
    lines: list[str] = []
    with open_mirror(run, URL, lines, poll_seconds=0.05) as mirror:
        mirror.sync()  # the first request of all may be refused for a mistake; later ones are repeated for ever
        run.save(2)
        gate.mode, gate.cut_bytes = mode, 200_000
        thread = threading.Thread(target=run_until_stopped, args=(mirror,))
        thread.start()
        try:
            wait_for(lambda: read_mirror_statuses(run.path)[0].problem)
            monkeypatch.setenv("GENESIS_STORE_ATTEMPT_SECONDS", "20")
            gate.mode = "open"
            wait_for(lambda: not read_mirror_statuses(run.path)[0].problem)
        finally:
            STOPPED.set()
            thread.join()
            STOPPED.clear()
    assert any("the mirror tries again" in line for line in lines)
    assert "the mirror works again" in lines
    assert steps(URL) == [1, 2]
    assert restore(URL, tmp_path / "elsewhere").restored == (2,)


STOPPED = threading.Event()


class Stop(BaseException):
    pass


def run_until_stopped(mirror) -> None:
    real = mirror.sync

    def sync_or_stop():
        if STOPPED.is_set():
            raise Stop
        return real()

    mirror.sync = sync_or_stop
    try:
        mirror.run()
    except Stop:
        return


def wait_for(condition, limit_seconds: float = 60.0) -> None:
    deadline = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_store_that_changes_bytes_is_named_and_gets_no_marker(s3, tmp_path: Path, monkeypatch):
    run = Run(tmp_path / "run")
    run.save(1)
    with open_mirror(run, URL) as mirror:
        place = mirror._place
        real = place.write  # type: ignore[attr-defined]

        def write(path, blocks, num_bytes):
            def flipped(block_bytes):
                for block in blocks(block_bytes):
                    yield bytes([block[0] ^ 1]) + block[1:]

            real(path, flipped, num_bytes)

        monkeypatch.setattr(place, "write", write)
        with pytest.raises(StoreError, match="has other bytes than were written"):
            mirror.sync()
    assert steps(URL) == []


def test_a_store_that_keeps_nothing_of_what_it_takes_is_named(s3, tmp_path: Path, monkeypatch):
    run = Run(tmp_path / "run")
    run.save(1)
    with open_mirror(run, URL) as mirror:
        real = mirror._place.write  # type: ignore[attr-defined]
        monkeypatch.setattr(mirror._place, "write", lambda *arguments: None)  # type: ignore[attr-defined]
        with pytest.raises(StoreError, match="has other bytes than were written, 3 times"):
            mirror.sync()
        monkeypatch.setattr(mirror._place, "write", real)  # type: ignore[attr-defined]
        mirror._place._remove_file(mirror._place._locate(OWNER_NAME))  # type: ignore[attr-defined]
        with pytest.raises(StoreError, match=r"has lost mirror\.json, which this mirror has written there"):
            mirror.sync()
    assert steps(URL) == []


def test_a_bucket_that_does_not_exist_and_a_url_without_one_are_one_line(s3, tmp_path: Path):
    run = Run(tmp_path / "run")
    run.save(1)
    with pytest.raises(UserError, match="there is no bucket nosuchbucket; create it"):
        sync(run, "s3://nosuchbucket/a")
    with pytest.raises(UserError, match="names no bucket"):
        open_place("s3://")
    with pytest.raises(UserError, match="nosuch://x"):
        open_place("nosuch://x")
    with pytest.raises(UserError, match="give a directory, or a URL"):
        open_place(" ")


def test_unfinished_uploads_of_a_killed_mirror_are_aborted(s3, tmp_path: Path):
    client, _ = s3
    client.create_multipart_upload(Bucket=BUCKET, Key="runs/a/checkpoints/step-00000001/part")
    client.create_multipart_upload(Bucket=BUCKET, Key="runs/other/part")
    run = Run(tmp_path / "run")
    run.save(1)
    sync(run, URL)
    uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    assert [upload["Key"] for upload in uploads] == ["runs/other/part"]


def test_any_store_of_fsspec_is_a_place_also_for_bases(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("genesis.operations.supervise.mirror_store.BLOCK_BYTES", 1000)  # fsspec writes larger files
    base = save_base(tmp_path / "runs" / "base" / "checkpoints")
    run = Run(tmp_path / "runs" / "a", base=base)
    for step in (1, 2, 3):
        run.save(step)
    url = "memory://mirrors/a"
    try:
        sync(run, url)
        assert steps(url) == [2, 3]
        shutil.rmtree(tmp_path / "runs")
        assert restore(url, tmp_path / "runs" / "a").step == 3
        verify(tmp_path / "runs" / "a" / "checkpoints" / "step-00000003", "deep")
        (restored,) = (tmp_path / "runs" / "a" / "bases").iterdir()
        verify(restored, "deep")
    finally:
        fsspec.filesystem("memory").rm("/mirrors", recursive=True)
