import base64
import hashlib
import random
import subprocess
import sys
import threading
import time

import fsspec
import pytest

from genesis.base.errors import UserError
from genesis.data.remote import RemoteFile, download, file_name, list_files, strip_local
from genesis.data.store import StoreError, StoreOptions, is_url, plan_wait_seconds
from tests.data.store_support import BUCKET, CREDENTIALS, FaultyStore, serve_s3

DATA = random.Random(0).randbytes(300_000)


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    monkeypatch.setenv("GENESIS_STORE_ATTEMPTS", "3")
    monkeypatch.setenv("GENESIS_STORE_ATTEMPT_SECONDS", "20")
    monkeypatch.setattr("genesis.data.store._FIRST_WAIT_SECONDS", 0.01)


@pytest.fixture
def store():
    with FaultyStore() as store:
        store.files["/a.txt"] = DATA
        yield store


@pytest.fixture(scope="module")
def s3_server():
    with serve_s3() as (address, client):
        yield address, client


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The client of an S3 server and the store that stands before it."""
    address, client = s3_server
    with FaultyStore(behind=address) as store:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": store.url}.items():
            monkeypatch.setenv(name, value)
        pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()  # it keeps the endpoint
        for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
            client.delete_object(Bucket=BUCKET, Key=item["Key"])
        yield client, store


def put(client, key, data=b"text", **options):
    client.put_object(Bucket=BUCKET, Key=key, Body=data, **options)


def fetch(file, path):
    with path.open("w+b", buffering=0) as destination:
        download(file, destination)
    return path.read_bytes()


def find(store, path="/a.txt"):
    (file,) = list_files(store.url + path, ())
    return file


# The web


def test_a_file_is_found_with_its_size_and_identity_and_comes_whole(store, tmp_path):
    file = find(store)
    assert file == RemoteFile(store.url + "/a.txt", len(DATA), f'ETag: "{hashlib.sha256(DATA).hexdigest()[:20]}"')
    assert store.count("GET") == 0
    assert fetch(file, tmp_path / "a") == DATA


def test_web_directories_and_globs_are_listed(store):
    for name in ("/d/x.jsonl", "/d/y.jsonl.gz", "/d/z.md"):
        store.files[name] = b"text"
    assert [file.url for file in list_files(f"{store.url}/d/", (".jsonl", ".jsonl.gz"))] == [
        f"{store.url}/d/x.jsonl",
        f"{store.url}/d/y.jsonl.gz",
    ]
    assert [file.url for file in list_files(f"{store.url}/d/*.md", ())] == [f"{store.url}/d/z.md"]
    assert list_files(f"{store.url}/d/*.none", ()) == list_files(f"{store.url}/none.txt", ()) == []


@pytest.mark.parametrize("faults", [[500, 503], ["cut", 500], [429, "cut"]])
def test_a_store_that_fails_now_and_then_gives_the_file_whole(store, tmp_path, faults):
    file = find(store)
    store.faults = faults
    assert fetch(file, tmp_path / "a") == DATA
    assert store.count("GET") == 3


def test_a_head_that_fails_is_no_missing_file(store):
    store.head_faults, store.faults = [500, 500], [500, 500]
    assert find(store).num_bytes == len(DATA)
    store.head_faults, store.faults, store.repeat = [500], [500], True
    with pytest.raises(StoreError, match=r"a\.txt: 3 attempts failed, the last with .*500"):
        find(store)


def test_what_came_before_a_connection_was_cut_is_not_asked_for_again(store, tmp_path):
    file = find(store)
    store.faults = ["cut"]
    assert fetch(file, tmp_path / "a") == DATA
    assert [span for method, _, span in store.requests if method == "GET"] == ["bytes=0-", f"bytes={len(DATA) // 2}-"]


def test_a_server_without_ranges_begins_again(store, tmp_path):
    store.has_ranges = False
    file = find(store)
    store.faults = ["cut"]
    assert fetch(file, tmp_path / "a") == DATA
    store.faults, store.repeat = ["cut"], True
    with pytest.raises(StoreError, match="3 attempts failed"):
        fetch(file, tmp_path / "a")


@pytest.mark.parametrize(
    ("fault", "message"),
    [(500, "500"), ("hang", "no response in time"), ("trickle", "no response in time"), ("cut", "ClientPayloadError")],
)
def test_a_store_that_always_fails_is_named_with_what_it_did_last(store, tmp_path, monkeypatch, fault, message):
    file = find(store)
    if fault in ("hang", "trickle"):
        monkeypatch.setenv("GENESIS_STORE_ATTEMPT_SECONDS", "0.2")
    store.faults, store.repeat = [fault], True
    # A piece more of the file is no answer of use: each attempt has to bring it to its end, or a block on.
    with pytest.raises(StoreError, match=rf"{store.url}/a\.txt: 3 attempts failed, the last with .*{message}"):
        fetch(file, tmp_path / "a")
    assert store.count("GET") == 3


def test_all_attempts_together_have_a_time_limit(store, tmp_path, monkeypatch):
    file = find(store)
    monkeypatch.setenv("GENESIS_STORE_ATTEMPTS", "1000000")
    monkeypatch.setenv("GENESIS_STORE_SECONDS", "0.5")
    store.faults, store.repeat = [500], True
    begin = time.monotonic()
    with pytest.raises(StoreError, match=r"\d+ attempts failed"):
        fetch(file, tmp_path / "a")
    assert store.count("GET") > 2
    assert time.monotonic() - begin < 20


def test_what_no_attempt_can_mend_is_tried_once(store, tmp_path):
    file = find(store)
    store.faults = [403]
    with pytest.raises(UserError, match=r"access to .*a\.txt is denied .*403.*give credentials"):
        fetch(file, tmp_path / "a")
    store.faults = [416]
    with pytest.raises(UserError, match=r"the store refuses .*a\.txt .*416"):
        fetch(file, tmp_path / "a")
    assert store.count("GET") == 2


def test_a_file_that_vanishes_is_named(store, tmp_path):
    file = find(store)
    store.faults = [404]
    with pytest.raises(UserError, match=r"a\.txt was removed since it was listed; .*--restart"):
        fetch(file, tmp_path / "a")
    del store.files["/a.txt"]
    with pytest.raises(UserError, match=r"a\.txt was removed since it was listed"):
        fetch(file, tmp_path / "a")


def test_a_file_that_changes_is_named_whenever_it_does(store, tmp_path):
    file = find(store)
    store.files["/a.txt"] = DATA[:-1]
    with pytest.raises(UserError, match=r"a\.txt has changed since it was listed: it had 300000 bytes and has 299999"):
        fetch(file, tmp_path / "a")
    store.files["/a.txt"] = DATA[::-1]
    with pytest.raises(UserError, match=r"a\.txt has changed since it was listed: its ETag was .* and is "):
        fetch(file, tmp_path / "a")
    assert store.count("GET") == 0


@pytest.mark.parametrize(("size", "message"), [(300_000, "its ETag was .* and is"), (300_004, "and has 300004")])
def test_a_file_that_changes_while_it_is_downloaded_is_named(store, tmp_path, size, message):
    file = find(store)
    store.faults = ["gate"]

    def change():
        store.half_sent.wait()
        store.files["/a.txt"] = bytes(size)
        store.gate.set()

    thread = threading.Thread(target=change)
    thread.start()
    with pytest.raises(UserError, match=rf"a\.txt has changed since it was listed: .*{message}"):
        fetch(file, tmp_path / "a")
    thread.join()


def test_an_answer_longer_than_the_file_is_refused(store, tmp_path):
    file = find(store)._replace(num_bytes=1000)
    store.head_lengths = [1000]
    with pytest.raises(UserError, match=r"a\.txt has changed since it was listed: it had 1000 bytes and now has more"):
        fetch(file, tmp_path / "a")


def test_a_file_that_came_with_another_hash_is_refused(store, tmp_path):
    store.headers["Content-MD5"] = base64.b64encode(hashlib.md5(DATA).digest()).decode()
    file = find(store)
    assert fetch(file, tmp_path / "a") == DATA
    store.faults = ["flip"]
    wanted = hashlib.md5(DATA).hexdigest()
    with pytest.raises(UserError, match=rf"the download of .*a\.txt has MD5 \w+, the store lists {wanted}"):
        fetch(file, tmp_path / "a")


# S3


def test_s3_objects_directories_and_globs_are_listed(s3):
    client, _ = s3
    for key in ("web/a.jsonl", "web/deep/b.jsonl", "web/c.md", "d.jsonl"):
        put(client, key)

    def names(path):
        return [file.url.removeprefix(f"s3://{BUCKET}/") for file in list_files(f"s3://{BUCKET}{path}", (".jsonl",))]

    assert names("/web") == names("/web/") == names("/web/**/*.jsonl") == ["web/a.jsonl", "web/deep/b.jsonl"]
    assert names("/web/*.jsonl") == names("/web/[a-b].jsonl") == names("/web/a.json?") == ["web/a.jsonl"]
    assert names("/*/*/*.jsonl") == ["web/deep/b.jsonl"]
    assert names("") == ["d.jsonl", "web/a.jsonl", "web/deep/b.jsonl"]
    assert names("/web/c.md") == ["web/c.md"]
    assert names("/none") == names("/none/*.jsonl") == []


def test_an_s3_object_comes_whole_by_blocks(s3, tmp_path, monkeypatch):
    client, store = s3
    monkeypatch.setattr("genesis.data.remote._BLOCK_BYTES", 100_000)
    put(client, "a.txt", DATA + b"end")
    (file,) = list_files(f"s3://{BUCKET}/a.txt", ())
    store.faults = [500, "cut"]
    assert fetch(file, tmp_path / "a") == DATA + b"end"
    assert store.count("GET") == 4 + 2


def test_retries_of_s3fs_and_botocore_do_not_multiply_ours(s3, tmp_path, monkeypatch):
    client, store = s3
    put(client, "a.txt", DATA)
    (file,) = list_files(f"s3://{BUCKET}/a.txt", ())
    monkeypatch.setenv("GENESIS_STORE_ATTEMPT_SECONDS", "19")  # nothing kept from the listing
    for fault in (500, 503, "cut"):
        store.requests.clear()
        store.faults, store.repeat = [fault], True
        with pytest.raises(StoreError, match=r"a\.txt: 3 attempts failed"):
            fetch(file, tmp_path / "a")
        assert store.count("GET") == 3


def test_the_settings_of_fsspec_hold_beside_ours(s3, tmp_path, monkeypatch):
    client, store = s3
    put(client, "a.txt", DATA)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    settings = {"endpoint_url": store.url, "config_kwargs": {"user_agent_extra": "mine/1"}}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    (file,) = list_files(f"s3://{BUCKET}/a.txt", ())
    store.faults, store.repeat = [500], True
    with pytest.raises(StoreError):
        fetch(file, tmp_path / "a")
    assert store.count("GET") == 3
    assert all("mine/1" in agent for agent in store.agents)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "trickle"])
def test_an_s3_server_that_hangs_is_named(s3, tmp_path, monkeypatch, fault):
    client, store = s3
    put(client, "a.txt", DATA)
    (file,) = list_files(f"s3://{BUCKET}/a.txt", ())
    monkeypatch.setenv("GENESIS_STORE_ATTEMPT_SECONDS", "1")
    store.faults, store.repeat = [fault], True
    with pytest.raises(StoreError, match=r"3 attempts failed, the last with (no response|\w*Timeout)"):
        fetch(file, tmp_path / "a")


@pytest.mark.parametrize("path", ["/web", "/web/*.jsonl", "/**/*.jsonl"])
def test_a_listing_that_fails_leaves_nothing_out(s3, path):
    client, store = s3
    for key in ("web/a.jsonl", "web/deep/b.jsonl"):
        put(client, key)
    store.faults = [500, 500]
    assert list_files(f"s3://{BUCKET}{path}", (".jsonl",))
    store.faults, store.repeat = [500], True
    with pytest.raises(StoreError, match="3 attempts failed"):
        list_files(f"s3://{BUCKET}{path}", (".jsonl",))


def test_nothing_is_remembered_of_an_earlier_listing(s3, tmp_path):
    client, _ = s3
    put(client, "web/a.txt", b"first")
    (old,) = list_files(f"s3://{BUCKET}/web/*.txt", ())
    put(client, "web/a.txt", b"other")
    put(client, "web/b.txt")
    with pytest.raises(UserError, match=r"a\.txt has changed since it was listed"):
        fetch(old, tmp_path / "a")
    new, _ = list_files(f"s3://{BUCKET}/web/*.txt", ())
    assert new.identity != old.identity


def test_an_s3_object_that_changes_or_vanishes_is_named(s3, tmp_path):
    client, _ = s3
    put(client, "a.txt", b"first")
    (file,) = list_files(f"s3://{BUCKET}/a.txt", ())
    put(client, "a.txt", b"other")
    with pytest.raises(UserError, match=r"s3://corpus/a\.txt has changed since it was listed: its ETag was"):
        fetch(file, tmp_path / "a")
    client.delete_object(Bucket=BUCKET, Key="a.txt")
    with pytest.raises(UserError, match=r"s3://corpus/a\.txt was removed since it was listed"):
        fetch(file, tmp_path / "a")


def test_an_s3_object_with_a_flipped_bit_is_refused_where_its_etag_is_its_hash(s3, tmp_path):
    client, store = s3
    put(client, "a.txt", DATA)
    put(client, "encrypted.txt", DATA, ServerSideEncryption="aws:kms", SSEKMSKeyId="some")
    for name in ("a.txt", "encrypted.txt"):
        (file,) = list_files(f"s3://{BUCKET}/{name}", ())
        store.faults = ["flip"]
        if name == "a.txt":
            with pytest.raises(UserError, match=r"the download of .*a\.txt has MD5 \w+, the store lists \w+"):
                fetch(file, tmp_path / "a")
        else:  # there it is none
            assert len(fetch(file, tmp_path / "a")) == len(DATA)


def test_an_s3_bucket_that_may_not_be_read_is_refused_at_once(s3):
    client, store = s3
    put(client, "web/a.jsonl")
    store.faults, store.head_faults, store.repeat = [403], [403], True
    with pytest.raises(UserError, match=r"access to s3://corpus/web/\*\.jsonl is denied .*give credentials"):
        list_files(f"s3://{BUCKET}/web/*.jsonl", ())
    assert len(store.requests) == 1


# What needs no store


def test_a_package_that_is_missing_is_named():
    program = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from genesis.data.remote import list_files\n"
        "try: list_files('s3://bucket/a.txt', ())\n"
        "except ValueError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.startswith("s3://bucket/a.txt needs a package that is not installed (Install s3fs")
    assert result.stdout.endswith("pip install 'genesis-lm[s3]'\n")


def test_a_store_that_nobody_knows_is_named():
    with pytest.raises(UserError, match=r"nowhere://a cannot be read \(Protocol not known: nowhere\)"):
        list_files("nowhere://a", ())


def test_waits_double_up_to_a_bound_and_are_drawn():
    for draw in (0.0, 0.5, 1.0):
        waits = [plan_wait_seconds(number, draw) for number in range(1, 2000)]
        assert waits == sorted(waits)
        assert waits[1] == 2 * waits[0]
        assert waits[-1] <= 30
    assert plan_wait_seconds(3, 0.0) < plan_wait_seconds(3, 0.5) < plan_wait_seconds(3, 1.0)


@pytest.mark.parametrize(
    ("name", "value"), [("ATTEMPTS", "0"), ("ATTEMPTS", "2.5"), ("SECONDS", "x"), ("SECONDS", "nan")]
)
def test_limits_that_make_no_sense_are_named(monkeypatch, name, value):
    monkeypatch.setenv(f"GENESIS_STORE_{name}", value)
    with pytest.raises(UserError, match=f"GENESIS_STORE_{name} is '?{value}'?; give a"):
        StoreOptions.from_environment()


def test_urls_are_told_from_paths():
    assert all(map(is_url, ("s3://b/a", "https://h/a", "memory://a", "zip://a::s3://b/c.zip", "simplecache::s3://b/c")))
    assert not any(map(is_url, ("a", "/a/b", "./s3://b", "a:b", "file:///a", "C/d", "~/x")))
    assert [strip_local(path) for path in ("file:///a/b.txt", "/a/b", "c")] == ["/a/b.txt", "/a/b", "c"]
    assert file_name("https://h/a.jsonl.gz?sign=x.txt#y") == "https://h/a.jsonl.gz"
    assert file_name("zip://in/a.jsonl::https://h/b.zip?c") == "zip://in/a.jsonl"
    assert file_name("simplecache::s3://b/a.txt") == "s3://b/a.txt"
    assert file_name("/here/a::b.txt") == "/here/a::b.txt"
    assert file_name("s3://b/what?.txt") == "s3://b/what?.txt"
