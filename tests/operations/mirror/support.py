"""Small runs with real checkpoints, and a gate before a server that fails, hangs and comes back."""

import contextlib
import select
import socket
import socketserver
import threading
from pathlib import Path

import torch

from genesis.operations.mirror.mirror import Mirror, MirrorOptions
from genesis.operations.mirror.places import open_place
from genesis.operations.mirror.plan import MirrorRetention
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import (
    Ranks,
    Retention,
    RunMetadata,
    SaveScope,
    SaveTarget,
    Snapshot,
    save_blocking,
)
from genesis_callbacks.checkpoint.scope import bind_scope

BASE = torch.arange(50.0)


class Run:
    """A run whose checkpoints tests make one by one.

    Args:
        path: Its directory.
        num_elements: Size of the tensor of each checkpoint; its values are the step.
        base: A checkpoint that `save_base` made, to which the run leaves its tensor.
        keep_last: The run's own retention.
    """

    def __init__(
        self, path: Path, *, num_elements: int = 1000, base: Path | None = None, keep_last: int | None = None
    ) -> None:
        self.path, self.directory, self._num_elements = path, path / "checkpoints", num_elements
        self.directory.mkdir(parents=True, exist_ok=True)
        self._frozen = {"model.base": BASE} if base else {}
        scope = SaveScope(base, ["model.base"]) if base else SaveScope.everything()
        ranks = Ranks()
        bound = bind_scope(scope, self._parts(0), (), ranks)
        origin = RunMetadata({}, {"model": {}})
        self.target = SaveTarget(
            self.directory, ranks, origin=origin, retention=Retention(keep_last=keep_last), scope=bound
        )

    def _parts(self, step: int):
        tensors = {"model.weight": torch.full((self._num_elements,), float(step)), **self._frozen}
        return [part for name, value in tensors.items() for part in local_shards(name, value, "parameter")]

    def save(self, step: int) -> Path:
        return save_blocking(self.target, lambda: _snapshot(step, self._parts(step)))


def _snapshot(step: int, parts) -> Snapshot:
    section = {"trainer": {"global_step": step}, "model_extras": {}, "optimizers": []}
    return Snapshot(step, {"step": step, "tokens_seen": 100 * step}, parts, section)


def save_base(directory: Path) -> Path:
    """Saves the checkpoint that holds `BASE`, as step 0 of a run of its own."""
    directory.mkdir(parents=True)
    target = SaveTarget(directory, Ranks(), origin=RunMetadata({}, {"model": {}}))
    return save_blocking(target, lambda: _snapshot(0, local_shards("model.base", BASE, "parameter")))


def open_mirror(run: Run | Path, url: str | Path, lines: list[str] | None = None, **options) -> Mirror:
    """Opens a mirror; `options` are those of its retention, and of `MirrorOptions`."""
    retention = MirrorRetention(options.pop("keep_last", 2), options.pop("keep_every_n_steps", None))
    path = run if isinstance(run, Path) else run.path
    report = (lambda line: None) if lines is None else lines.append
    return Mirror(path, open_place(str(url)), MirrorOptions(retention, **options), report)


def sync(run: Run | Path, url: str | Path, **options) -> list[str]:
    """Brings a mirror up to date once, and returns the lines that it has printed."""
    lines: list[str] = []
    with open_mirror(run, url, lines, **options) as mirror:
        mirror.sync()
    return lines


class Gate:
    """Passes connections on to a server, until a test closes it.

    Attributes:
        mode: "open"; "refuse" closes each connection at once; "hang" passes nothing on; "cut" ends each connection
            after `cut_bytes` bytes of its client.
    """

    def __init__(self, behind: tuple[str, int]) -> None:
        self.mode, self.cut_bytes, self._behind = "open", 0, behind
        self.num_connections = 0
        self._ended = threading.Event()
        gate = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    gate._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads, block_on_close, allow_reuse_address = True, True, True

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self._server.server_address)

    def _serve(self, client: socket.socket) -> None:
        self.num_connections += 1
        if self.mode == "refuse":
            return
        with socket.create_connection(self._behind) as server:
            num_sent = 0
            while not self._ended.is_set():
                ready, _, _ = select.select([client, server], [], [], 0.02)
                if self.mode == "refuse":
                    return
                if self.mode == "hang":
                    self._ended.wait(0.02)
                    continue
                for source in ready:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    num_sent += len(data) if source is client else 0
                    if self.mode == "cut" and num_sent > self.cut_bytes:
                        return
                    (server if source is client else client).sendall(data)

    def __enter__(self) -> "Gate":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
