"""A Hub on loopback: the part of its HTTP interface that an upload needs, with what was uploaded kept in memory."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.loopback import serving

TOKEN = "hf_" + "a1B2" * 9


@dataclass
class Repository:
    is_private: bool
    sdk: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    snapshots: dict[str, dict[str, bytes]] = field(default_factory=dict)


@dataclass
class Hub:
    """What is on it.

    Args:
        large_suffixes: Files with these come by the protocol for large files, all others in the commit.
    """

    large_suffixes: tuple[str, ...] = ()
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        body = self._read_body()
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{method} {path}")
        if method != "PUT" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._reply(401, {"error": "Invalid credentials"})
        for pattern, handle in _ROUTES.items():
            if found := re.fullmatch(pattern, f"{method} {path}"):
                return self._reply(*handle(self.hub, body, *found.groups()))
        return self._reply(404, {"error": f"no such address: {path}"})

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _reply(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


Reply = tuple[int, Any]


def _create(hub: Hub, body: bytes) -> Reply:
    asked = json.loads(body)
    kind, name = asked.get("type") or "model", f"{asked['organization']}/{asked['name']}"
    url = f"{hub.url}/{'' if kind == 'model' else kind + 's/'}{name}"
    if f"{kind}s/{name}" in hub.repositories:
        return 409, {"error": "You already created this repo", "url": url}
    hub.repositories[f"{kind}s/{name}"] = Repository(asked.get("visibility") == "private", asked.get("sdk"))
    return 200, {"url": url}


def _refs(hub: Hub, _: bytes, name: str) -> Reply:
    tags = [
        {"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": oid}
        for tag, oid in hub.repositories[name].tags.items()
    ]
    return 200, {"branches": [], "converts": [], "tags": tags}


def _head(hub: Hub, _: bytes, name: str) -> Reply:
    return 200, {"id": name.partition("/")[2], "sha": f"{len(hub.repositories[name].commits):040x}"}


def _tree(hub: Hub, _: bytes, name: str) -> Reply:
    return 200, [_describe(path, data) for path, data in hub.repositories[name].files.items()]


def _find(hub: Hub, body: bytes, name: str, tag: str) -> Reply:
    repository = hub.repositories[name]
    files = repository.snapshots[repository.tags[tag]]
    paths = [path for path in parse_qs(body.decode())["paths"] if path in files]
    return 200, [_describe(path, files[path]) for path in paths]


def _describe(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "oid": _blob_id(data)}


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _check_head(hub: Hub, body: bytes) -> Reply:
    content = json.loads(body)["content"]
    is_good = content.startswith("---\n") and "\nlicense: " in content
    return (200 if is_good else 400), {"errors": [] if is_good else [{"message": "no license"}], "warnings": []}


def _plan(hub: Hub, body: bytes, name: str) -> Reply:
    present = hub.repositories[name].files
    files = [
        {
            "path": file["path"],
            "uploadMode": "lfs" if file["path"].endswith(hub.large_suffixes or ("\0",)) else "regular",
            "shouldIgnore": False,
            "oid": _blob_id(present[file["path"]]) if file["path"] in present else None,
        }
        for file in json.loads(body)["files"]
    ]
    return 200, {"files": files}


def _batch(hub: Hub, body: bytes, name: str) -> Reply:
    objects = [
        {**file, "actions": {"upload": {"href": f"{hub.url}/objects/{file['oid']}"}}}
        for file in json.loads(body)["objects"]
    ]
    return 200, {"transfer": "basic", "objects": objects}


def _put(hub: Hub, body: bytes, oid: str) -> Reply:
    if hashlib.sha256(body).hexdigest() != oid:
        return 400, {"error": "the bytes are not those of the object"}
    hub.objects[oid] = body
    return 200, {}


def _commit(hub: Hub, body: bytes, name: str) -> Reply:
    repository = hub.repositories[name]
    for line in body.splitlines():
        operation = json.loads(line)
        value = operation["value"]
        if operation["key"] == "header":
            repository.commits.append(value["summary"])
        elif operation["key"] == "file":
            repository.files[value["path"]] = base64.b64decode(value["content"])
        elif operation["key"] == "lfsFile":
            repository.files[value["path"]] = hub.objects[value["oid"]]
        elif operation["key"] == "deletedFile":
            del repository.files[value["path"]]
        else:
            return 400, {"error": f"unknown operation {operation['key']}"}
    oid = f"{len(repository.commits):040x}"
    repository.snapshots[oid] = dict(repository.files)
    return 200, {"commitUrl": f"{hub.url}/{name.removeprefix('models/')}/commit/{oid}", "commitOid": oid}


def _tag(hub: Hub, body: bytes, name: str, oid: str) -> Reply:
    tag = json.loads(body)["tag"]
    if tag in hub.repositories[name].tags:
        return 409, {"error": "the tag is there"}
    hub.repositories[name].tags[tag] = oid
    return 200, {}


_REPOSITORY = r"((?:models|spaces)/[\w.-]+/[\w.-]+)"
_ROUTES = {
    r"POST /api/repos/create": _create,
    rf"GET /api/{_REPOSITORY}/refs": _refs,
    rf"GET /api/{_REPOSITORY}/revision/main": _head,
    rf"GET /api/{_REPOSITORY}/tree/main": _tree,
    rf"POST /api/{_REPOSITORY}/paths-info/([\w.]+)": _find,
    r"POST /api/validate-yaml": _check_head,
    rf"POST /api/{_REPOSITORY}/preupload/main": _plan,
    r"POST /((?:spaces/)?[\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch": _batch,
    r"PUT /objects/(\w+)": _put,
    rf"POST /api/{_REPOSITORY}/commit/main": _commit,
    rf"POST /api/{_REPOSITORY}/tag/(\w+)": _tag,
}


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Gives a Hub that answers at its `url`."""
    hub = Hub()
    with serving(_Handler, hub=hub) as url:
        hub.url = url
        yield hub
