"""A Hub of datasets on loopback: the part of its HTTP interface by which `hf://datasets/...` is listed and read."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class DatasetHub:
    """Its datasets: the files of each revision by their paths.

    Attributes:
        datasets: For each name the revisions, and for each of these the files.
        large: Files that are held outside of git, with their SHA-256.
        gated: Datasets that need a token.
        faults: Statuses that the next downloads answer with.
        flips: Whether a bit of each download is another one.
        requests: What was asked for.
    """

    datasets: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    faults: list[int] = field(default_factory=list)
    flips: bool = False
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def describe(self, path: str, data: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry = {"type": "file", "path": path, "size": len(data), "oid": blob}
        if path in self.large:
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def list_tree(self, files: dict[str, bytes], directory: str) -> list[dict[str, Any]] | None:
        """Returns the entries of a directory; None if there is no such directory."""
        prefix = f"{directory}/" if directory else ""
        below = {path: data for path, data in files.items() if path.startswith(prefix)}
        if not below and directory:
            return None
        found = {}
        for path, data in below.items():
            first, _, rest = path[len(prefix) :].partition("/")
            is_file = not rest
            found[first] = (
                self.describe(path, data)
                if is_file
                else {"type": "directory", "path": prefix + first, "size": 0, "oid": "0" * 40}
            )
        return list(found.values())


class _Handler(BaseHTTPRequestHandler):
    hub: DatasetHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(path)
        name, revision = r"([\w.-]+/[\w.-]+)", r"([\w.-]+)"
        about = re.fullmatch(rf"/api/datasets/{name}(?:/revision/{revision})?", path)
        tree = re.fullmatch(rf"/api/datasets/{name}/tree/{revision}(?:/(.*))?", path)
        file = re.fullmatch(rf"/datasets/{name}/resolve/{revision}/(.+)", path)
        found = about or tree or file
        if found is None or found[1] not in self.hub.datasets:
            self._reply(401, b'{"error": "Invalid username or password."}', {"X-Error-Code": "RepoNotFound"})
        elif found[1] in self.hub.gated:
            self._reply(403, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"})
        elif (files := self.hub.datasets[found[1]].get(found[2] or "main")) is None:
            self._reply(404, b'{"error": "no revision"}', {"X-Error-Code": "RevisionNotFound"})
        elif about:
            self._reply(200, json.dumps({"id": found[1], "sha": "0" * 40}).encode())
        elif tree is None:
            self._send(files, found[3])
        elif (entries := self.hub.list_tree(files, tree[3] or "")) is None:
            self._reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        else:
            self._reply(200, json.dumps(entries).encode())

    def _send(self, files: dict[str, bytes], path: str) -> None:
        if self.hub.faults:
            return self._reply(self.hub.faults.pop(0), b"{}")
        if path not in files:
            return self._reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = files[path]
        if self.hub.flips:
            data = bytes([data[0] ^ 1]) + data[1:]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            return self._reply(200, data)
        start, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
        return self._reply(206, data[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})

    def _reply(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serve_datasets() -> Iterator[DatasetHub]:
    """Gives a Hub that answers at its `url`."""
    hub = DatasetHub()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
