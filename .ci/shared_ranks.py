"""A pytest plugin that lets the workers of pytest-xdist share one fork server of ranks: its imports take seconds.

Each worker would otherwise start a server of its own (`genesis_callbacks.testing`). The first worker that needs ranks
starts it and leaves its address in a file; the others join. A server ends when the last process closes the descriptor
that multiprocessing calls alive, and each worker holds one of its own.
"""

import fcntl
import json
import os
import tempfile
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

# multiprocessing has no public way to a server of another process.
_SERVER: Any = forkserver._forkserver
NOTE = pytest.StashKey[str]()


class SharedServer:
    """Starts the server of a run of pytest, or joins the one that another worker has started.

    Args:
        note: The file with the address of the server, and the process that started it.
    """

    def __init__(self, note: Path) -> None:
        self._note = note
        self._start = _SERVER.ensure_running
        self._has_joined = False

    def ensure_running(self) -> None:
        """Does what the method of the same name of multiprocessing's `ForkServer` does."""
        if self._has_joined:
            resource_tracker.ensure_running()
            return
        with self._note.open("a+") as note:
            fcntl.flock(note, fcntl.LOCK_EX)
            note.seek(0)
            text = note.read()
            if _SERVER._forkserver_pid is not None or not text or not self._join(**json.loads(text)):
                self._start()
                started = (os.getpid(), _SERVER._forkserver_alive_fd, _SERVER._forkserver_address)
                note.truncate(0)
                note.write(json.dumps(dict(zip(("pid", "alive", "address"), started, strict=True))))

    def _join(self, pid: int, alive: int, address: str) -> bool:
        """Returns whether the server can be used; it cannot if the worker that started it has ended."""
        try:
            _SERVER._forkserver_alive_fd = os.open(f"/proc/{pid}/fd/{alive}", os.O_WRONLY)
        except OSError:
            return False
        # The socket lies in a directory that ends with the other worker: a second name for it lies in this one's.
        own = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        os.link(address, own)
        _SERVER._forkserver_address = own
        self._has_joined = True
        return True


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Gives a worker the name of the file, which the controller makes before its first worker."""
    if NOTE not in node.config.stash:
        descriptor, name = tempfile.mkstemp(prefix="rank-server-")
        os.close(descriptor)
        node.config.stash[NOTE] = name
    node.workerinput["rank_server"] = node.config.stash[NOTE]


def pytest_configure(config: pytest.Config) -> None:
    """Lets a worker of pytest-xdist share its server."""
    if given := getattr(config, "workerinput", None):
        _SERVER.ensure_running = SharedServer(Path(given["rank_server"])).ensure_running


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the file in the controller, which ends after its workers."""
    if NOTE in config.stash:
        Path(config.stash[NOTE]).unlink()
