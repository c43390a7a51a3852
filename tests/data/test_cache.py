import fcntl
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from genesis.base.errors import UserError
from genesis.data.cache import CacheOptions, _lock, open_copy
from genesis.data.remote import RemoteFile, list_files
from genesis.data.store import StoreError
from tests.data.store_support import FaultyStore

SIZE = 100_000
READER = """
import hashlib, sys
from genesis.data.cache import open_copy
from genesis.data.remote import RemoteFile

url, num_bytes, identity = sys.argv[1:]
print("begins", flush=True)
try:
    with open_copy(RemoteFile(url, int(num_bytes), identity)) as path:
        print(hashlib.sha256(path.read_bytes()).hexdigest(), flush=True)
        sys.stdin.readline()
except ValueError as error:
    print(error)
"""
FORKING = """
import os, sys
from genesis.data.cache import open_copy
from genesis.data.remote import list_files

def read(name):
    (file,) = list_files(sys.argv[1] + name, ())
    with open_copy(file) as path:
        return len(path.read_bytes())

assert read("/0.txt") == int(sys.argv[2])
child = os.fork()
if child == 0:
    os._exit(0 if read("/1.txt") == int(sys.argv[2]) else 1)
assert os.waitpid(child, 0)[1] == 0
assert read("/2.txt") == int(sys.argv[2])
"""
STRESS = """
import random, sys
from genesis.data.cache import open_copy
from genesis.data.remote import list_files

files = list_files(sys.argv[1] + "/*.txt", ())
draw = random.Random(int(sys.argv[2]))
for _ in range(40):
    file = draw.choice(files)
    with open_copy(file) as path:
        assert path.read_bytes() == bytes([int(file.url[-5])]) * file.num_bytes
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GENESIS_STORE_ATTEMPTS", "3")
    return tmp_path / "cache"


@pytest.fixture
def store():
    with FaultyStore() as store:
        for number in range(6):
            store.files[f"/{number}.txt"] = bytes([number]) * SIZE
        yield store


def find(store, number=0):
    (file,) = list_files(f"{store.url}/{number}.txt", ())
    return file


def read(store, number):
    with open_copy(find(store, number)) as path:
        assert path.read_bytes() == bytes([number]) * SIZE
        return path


def endings(directory):
    return sorted(path.suffix for path in directory.iterdir() if path.name != "lock")


def start(program, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def start_reader(file):
    reader = start(READER, *file)
    assert reader.stdout.readline() == "begins\n"
    return reader


def finish(process):
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_waiting_for_lock(pid):
    # "-> FLOCK" marks one that waits.
    return re.search(rf"-> FLOCK .* {pid} ", Path("/proc/locks").read_text()) is not None


def test_a_copy_is_downloaded_once_and_stays(store, directory):
    paths = {read(store, 0) for _ in range(3)}
    assert len(paths) == 1
    assert store.count("GET") == 1
    assert endings(directory) == [".copy", ".lock"]


def test_a_file_that_changes_in_its_store_gets_a_copy_of_its_own(store):
    with open_copy(find(store)) as first:
        store.files["/0.txt"] = b"other"
        with open_copy(find(store)) as second:
            assert (first.read_bytes(), second.read_bytes()) == (bytes(SIZE), b"other")


def test_the_least_recently_used_copies_make_room(store, directory, monkeypatch):
    monkeypatch.setenv("GENESIS_CACHE_BYTES", str(3 * SIZE))
    for number in (0, 1, 2, 0, 3):
        read(store, number)
        assert sum(path.stat().st_size for path in directory.iterdir()) <= 3 * SIZE
    assert endings(directory) == [".copy"] * 3 + [".lock"] * 3
    for number in (0, 2, 3):
        read(store, number)
    assert store.count("GET") == 4
    read(store, 1)
    assert store.count("GET") == 5


def test_a_copy_in_use_by_any_process_is_never_removed(store, directory, monkeypatch):
    monkeypatch.setenv("GENESIS_CACHE_BYTES", str(2 * SIZE))
    reader = start_reader(find(store, 0))
    reader.stdout.readline()
    for number in (1, 2, 3):
        read(store, number)
    read(store, 0)
    assert store.count("GET", "/0.txt") == 1
    reader.communicate("\n", timeout=60)
    for number in (1, 2):
        read(store, number)
    read(store, 0)
    assert store.count("GET", "/0.txt") == 2


def test_without_room_the_next_waits_for_it_and_is_told_what_to_do(store, monkeypatch):
    monkeypatch.setenv("GENESIS_CACHE_BYTES", str(SIZE))
    first, second = find(store, 0), find(store, 1)
    with open_copy(first) as path:
        monkeypatch.setenv("GENESIS_STORE_SECONDS", "0.3")
        with (
            pytest.raises(UserError, match=r"no space for .*/1\.txt: files in use occupy 100000 .* to 200000 or more"),
            open_copy(second),
        ):
            pass
        monkeypatch.setenv("GENESIS_STORE_SECONDS", "60")
        reader = start_reader(second)
        wait_until(lambda: path.with_name("lock").exists() and len(list(path.parent.glob("*.lock"))) == 2)
        assert path.read_bytes() == bytes(SIZE)
    assert reader.stdout.readline()
    reader.communicate("\n", timeout=60)
    assert not path.exists()


def test_a_file_larger_than_the_cache_is_named_with_the_remedy(store, directory, monkeypatch):
    monkeypatch.setenv("GENESIS_CACHE_BYTES", str(SIZE - 1))
    with pytest.raises(
        UserError, match=r"0\.txt has 100000 bytes, but the cache .* 99999; set GENESIS_CACHE_BYTES to 100000"
    ):
        read(store, 0)
    assert (store.count("GET"), endings(directory)) == (0, [])


def test_two_processes_that_want_one_file_download_it_once(store):
    file = find(store)
    store.faults = ["gate"]
    readers = [start_reader(file), start_reader(file)]
    wait_until(lambda: store.half_sent.is_set() and any(is_waiting_for_lock(reader.pid) for reader in readers))
    store.gate.set()
    hashes = [reader.communicate("\n", timeout=60)[0] for reader in readers]
    assert hashes[0] == hashes[1] != ""
    assert store.count("GET") == 1


def test_a_downloader_that_is_killed_leaves_no_copy_and_the_one_that_waits_takes_over(store, directory):
    file = find(store)
    store.faults = ["gate"]
    killed = start_reader(file)
    wait_until(store.half_sent.is_set)
    waiting = start_reader(file)
    wait_until(lambda: is_waiting_for_lock(waiting.pid))
    assert endings(directory) == [".lock", ".part"]
    killed.kill()
    killed.communicate()
    assert waiting.stdout.readline() != ""
    assert endings(directory) == [".copy", ".lock"]
    waiting.communicate("\n", timeout=60)
    assert store.count("GET") == 2
    assert read(store, 0)
    assert store.count("GET") == 2


def test_what_a_killed_downloader_left_is_cleared_by_the_next_download_of_any_file(store, directory):
    file = find(store)
    store.faults = ["gate"]
    killed = start_reader(file)
    wait_until(store.half_sent.is_set)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert endings(directory) == [".lock", ".part"]
    read(store, 1)
    assert endings(directory) == [".copy", ".lock"]


def test_a_download_that_fails_leaves_nothing(store, directory):
    file = find(store)
    store.faults, store.repeat = ["cut"], True
    with pytest.raises(StoreError), open_copy(file):
        pass
    assert endings(directory) == []


def test_a_copy_of_another_size_is_made_anew(store):
    os.truncate(read(store, 0), 17)
    assert read(store, 0)
    assert store.count("GET") == 2


def measure(directory):
    """Returns the bytes of the cache at an instant: under the lock nothing is removed and no room is taken."""
    with (directory / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sizes = {}
        for path in directory.iterdir():  # a download that ends meanwhile is seen twice
            with suppress(FileNotFoundError):
                sizes[path.stem] = max(sizes.get(path.stem, 0), path.stat().st_size)
        return sum(sizes.values())


def test_processes_that_read_at_random_in_a_small_cache_get_whole_files_and_keep_to_its_size(
    store, directory, monkeypatch
):
    monkeypatch.setenv("GENESIS_CACHE_BYTES", str(4 * SIZE))
    directory.mkdir()
    processes = [start(STRESS, store.url, seed) for seed in range(3)]
    largest = 0
    while any(process.poll() is None for process in processes):
        largest = max(largest, measure(directory))
        time.sleep(0.002)
    for process in processes:
        finish(process)
    assert 3 * SIZE <= largest <= 4 * SIZE
    assert not list(directory.glob("*.part"))


def test_a_process_forked_after_the_first_request_downloads_too(store):
    finish(start(FORKING, store.url, SIZE))


def test_a_download_over_the_limit_of_file_sizes_is_told_in_one_line(store, directory):
    file = find(store)
    command = [sys.executable, "-c", READER, *map(str, file)]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, SIZE // 2)),
    )
    assert f"the disk of the cache {directory} is full (File too large) with {file.url}" in result.stdout
    assert endings(directory) == []


def test_a_really_full_disk_is_told_in_one_line_with_the_remedy(store, directory, tmp_path):
    directory.mkdir()
    file = find(store)
    mount = f"mount -t tmpfs -o size=64k none {directory}"
    unshare = [shutil.which("unshare") or "unshare", "-rm", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*unshare, mount], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    program = tmp_path / "reader.py"
    program.write_text(READER)
    command = f'{mount} && "$0" "$@"; ls {directory}'
    result = subprocess.run(
        [*unshare, command, sys.executable, str(program), *map(str, file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    begins, line, *left = result.stdout.splitlines()
    assert begins == "begins"
    assert line == (
        f"the disk of the cache {directory} is full (No space left on device) with {file.url}, {SIZE} bytes; free "
        "space, set GENESIS_CACHE_DIR to another disk, or lower GENESIS_CACHE_BYTES (50000000000)"
    )
    assert left == ["lock"]


def test_threads_of_one_process_share_a_download(store):
    file = find(store)
    store.faults = ["gate"]
    texts = []

    def read_text():
        with open_copy(file) as path:
            texts.append(path.read_bytes())

    threads = [threading.Thread(target=read_text) for _ in range(4)]
    for thread in threads:
        thread.start()
    store.half_sent.wait()
    store.gate.set()
    for thread in threads:
        thread.join()
    assert texts == [bytes(SIZE)] * 4
    assert store.count("GET") == 1


def test_a_lock_whose_file_was_removed_meanwhile_is_not_taken_for_one(tmp_path):
    path = tmp_path / "a.lock"
    first = _lock(path, fcntl.LOCK_EX)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(_lock(path, fcntl.LOCK_EX)))
    thread.start()
    wait_until(lambda: is_waiting_for_lock(os.getpid()))
    path.unlink()
    os.close(first)
    thread.join()
    assert os.path.samestat(os.fstat(taken[0]), path.stat())
    os.close(taken[0])


def test_the_environment_says_where_and_how_much(monkeypatch, tmp_path):
    monkeypatch.setenv("GENESIS_CACHE_BYTES", "7_000")
    assert CacheOptions.from_environment() == CacheOptions(tmp_path / "cache", 7000)
    monkeypatch.delenv("GENESIS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert CacheOptions.from_environment().directory == tmp_path / "genesis"
    for value in ("0", "-1", "many"):
        monkeypatch.setenv("GENESIS_CACHE_BYTES", value)
        with pytest.raises(UserError, match=f"GENESIS_CACHE_BYTES is '{value}'; give a size above 0, such as 50GB"):
            CacheOptions.from_environment()


def test_a_cache_that_is_no_directory_is_named(directory):
    directory.write_text("a file")
    with (
        pytest.raises(UserError, match=r"the cache .*/cache cannot be used \(File exists\); .*GENESIS_CACHE_DIR"),
        open_copy(RemoteFile("http://127.0.0.1/a", 1, "")),
    ):
        pass


def test_copies_of_random_bytes_come_whole(store, directory):
    data = random.Random(0).randbytes(3_000_000)
    store.files["/r.txt"] = data
    store.faults = ["cut", 500]
    (file,) = list_files(f"{store.url}/r.txt", ())
    with open_copy(file) as path:
        assert path.read_bytes() == data
