"""Stores on loopback for tests: a web server with faults that are asked for, and S3 behind such a server."""

import hashlib
import http.client
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}
BUCKET = "corpus"


class FaultyStore:
    """Serves `files` over HTTP, or what stands at `behind` (host, port), with the faults that a test puts in.

    Each GET (HEAD: `head_faults`) takes the next of `faults`: a status, or

        hang       no answer until the test ends
        trickle    the headers, then hardly anything
        cut        half of what was asked for, then the connection is closed
        gate       half of what was asked for, then the rest when `gate` is set; `half_sent` tells
        flip       one bit is another

    The last one stays if `repeat` is set. A HEAD says the next of `head_lengths`, the truth when there is none.
    """

    def __init__(self, behind: tuple[str, int] | None = None) -> None:
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, str] = {}
        self.faults: list[int | str] = []
        self.head_faults: list[int | str] = []
        self.repeat = False
        self.has_ranges = True
        self.head_lengths: list[int] = []
        self.requests: list[tuple[str, str, str]] = []
        self.agents: set[str] = set()
        self.behind = behind
        self.gate, self.half_sent, self.ended = threading.Event(), threading.Event(), threading.Event()
        store = self

        class Handler(_Handler):
            pass

        Handler.store = store
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.server.server_address)

    def count(self, method: str, path: str = "") -> int:
        return sum(seen == method and path in where for seen, where, _ in self.requests)

    def __enter__(self) -> "FaultyStore":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.gate.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()  # joins the threads of all requests


class _Handler(BaseHTTPRequestHandler):
    store: FaultyStore

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:  # the name is http.server's
        self._answer(self.store.faults)

    def do_HEAD(self) -> None:
        self._answer(self.store.head_faults)

    def _answer(self, faults: list[int | str]) -> None:
        store = self.store
        store.requests.append((self.command, self.path, self.headers.get("Range", "")))
        store.agents.add(self.headers.get("User-Agent", ""))
        fault = (faults[0] if store.repeat else faults.pop(0)) if faults else None
        if fault == "hang":
            store.ended.wait()
            return
        status, headers, body = (fault, {}, b"") if isinstance(fault, int) else self._find()
        if fault == "flip":
            body = bytes([body[0] ^ 1]) + body[1:]
        self.send_response(status)
        length = store.head_lengths.pop(0) if self.command == "HEAD" and store.head_lengths else len(body)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with suppress(ConnectionError):  # who asked has gone
                self._send(body, fault)

    def _send(self, body: bytes, fault: int | str | None) -> None:
        if fault == "trickle":
            for index in range(len(body)):
                self.wfile.write(body[index : index + 1])
                if self.store.ended.wait(0.05):
                    return
        self.wfile.write(body[: len(body) // 2])
        if fault == "cut":
            return
        if fault == "gate":
            self.store.half_sent.set()
            self.store.gate.wait()
        self.wfile.write(body[len(body) // 2 :])

    def _find(self) -> tuple[int, dict[str, str], bytes]:
        store = self.store
        if store.behind is not None:
            return self._forward(store.behind)
        name = self.path.partition("?")[0]
        if name.endswith("/"):
            links = "".join(f'<a href="{file}">{file}</a>' for file in store.files if file.startswith(name))
            return 200, {"Content-Type": "text/html"}, links.encode()
        if name not in store.files:
            return 404, {}, b""
        data = store.files[name]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()[:20]}"', **store.headers}
        if self.command == "GET" and store.has_ranges and "Range" in self.headers:
            start = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
            return 206, {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}, data[start:]
        return 200, headers, data

    def _forward(self, behind: tuple[str, int]) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*behind)
        try:
            connection.request(self.command, self.path, headers=dict(self.headers))
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        skipped = ("transfer-encoding", "connection", "date", "server")
        return answer.status, {name: value for name, value in answer.getheaders() if name.lower() not in skipped}, body


@contextmanager
def serve_s3() -> Iterator[tuple[tuple[str, int], "object"]]:
    """Serves S3 on loopback; gives its address and a client of boto3 with the bucket `BUCKET`."""
    reason = "s3fs, moto[s3], flask and flask-cors are not installed"
    pytest.importorskip("s3fs", reason=reason)
    moto = pytest.importorskip("moto.server", reason=reason)
    boto3 = pytest.importorskip("boto3", reason=reason)
    # No checksums beside the ETag, as most stores like S3 have none; one that there is botocore compares itself.
    config = pytest.importorskip("botocore.config").Config(request_checksum_calculation="when_required")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        config=config,
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    client.create_bucket(Bucket=BUCKET)
    try:
        yield (host, port), client
    finally:
        client.close()
        server.stop()
