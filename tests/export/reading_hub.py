"""A Hub on loopback: the part of its HTTP interface that a download needs."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.loopback import serving


@dataclass
class ReadingHub:
    """Its models: the files of each by name.

    Attributes:
        gated: Models that need a token.
        requests: What was asked for.
    """

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def commit_of(self, name: str) -> str:
        return hashlib.sha1(repr(sorted(self.models[name].items())).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: ReadingHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        about = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(?:revision|tree)/([\w./-]+))?", path)
        file = re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([\w.-]+)/(.+)", path)
        found = about or file
        name = found[1] if found else ""
        if name not in self.hub.models:
            return self._reply(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, has_body)
        if name in self.hub.gated:
            return self._reply(403, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"}, has_body)
        commit, files = self.hub.commit_of(name), self.hub.models[name]
        if found and found[2] not in (None, "main", commit):
            return self._reply(404, b'{"error": "no revision"}', {"X-Error-Code": "RevisionNotFound"}, has_body)
        if about:
            siblings = [{"rfilename": path, "size": len(data), "blobId": _id(data)} for path, data in files.items()]
            tree = [{"type": "file", "path": path, "size": len(data), "oid": _id(data)} for path, data in files.items()]
            content: Any = tree if "/tree/" in path else {"id": name, "sha": commit, "siblings": siblings}
            return self._reply(200, json.dumps(content).encode(), {"Content-Type": "application/json"}, has_body)
        assert file is not None
        if file[3] not in files:
            return self._reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, has_body)
        data = files[file[3]]
        return self._reply(200, data, {"X-Repo-Commit": commit, "ETag": f'"{_id(data)}"'}, has_body)

    def _reply(self, status: int, data: bytes, headers: dict[str, str], has_body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if has_body:
            self.wfile.write(data)


def _id(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serve_models() -> Iterator[ReadingHub]:
    """Gives a Hub that answers at its `url`."""
    hub = ReadingHub()
    with serving(_Handler, hub=hub) as url:
        hub.url = url
        yield hub
