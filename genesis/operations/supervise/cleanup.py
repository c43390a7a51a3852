"""Waits until everything that an attempt held is free, and names what it waits for.

A writer that still saves is waited for: its checkpoint may be the newest. Everything else that is left of the attempt
is killed. What other programs hold is never touched.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from genesis.base.processes import Mark, find_kind, find_processes, kill_process, run_program
from genesis.base.run_directory import RunDirectory
from genesis_callbacks.base.locks import lock_file
from genesis_callbacks.base.run_directory import LOCK_NAME

_SHARED_MEMORY: Final = Path("/dev/shm")
_FIRST_POLL_SECONDS: Final = 0.01
_LAST_POLL_SECONDS: Final = 0.25
_QUIET_SECONDS: Final = 0.5
_SMI_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Held:
    """Something that an attempt still holds.

    Args:
        text: What it is, for people.
        is_ours: Whether it belongs to this run, so that it may be ended.
    """

    text: str
    is_ours: bool


@dataclass(frozen=True)
class Scene:
    """Where an attempt ran.

    Args:
        run_dir: The run's directory.
        mark: Identifies its processes.
        spared: Processes with the mark that stay: the supervisor and the launcher.
        pids: The ranks' process ids, whose shared memory is removed.
        port: The port at which the next ranks will meet; None if any free one will do.
        writer_seconds: How long a writer that still saves may take.
        has_lock: Whether the run's lock must be free: ranks of other nodes may hold it.
    """

    run_dir: Path
    mark: Mark
    spared: Collection[int]
    pids: Sequence[int] = ()
    port: int | None = None
    writer_seconds: float = 60.0
    has_lock: bool = True


def wait_until_free(scene: Scene, limit_seconds: float, report: Callable[[str], None]) -> list[Held]:
    """Waits until nothing of an attempt is held, and returns what still is after the limit."""
    began_seconds = time.monotonic()
    poll_seconds, reported = _FIRST_POLL_SECONDS, ""
    while held := find_held(scene, time.monotonic() - began_seconds):
        waited_seconds = time.monotonic() - began_seconds
        if waited_seconds > limit_seconds:
            return held
        text = ", ".join(each.text for each in held)
        if waited_seconds > _QUIET_SECONDS and text != reported:
            reported = text
            report(f"waiting for: {text}")
        time.sleep(poll_seconds)
        poll_seconds = min(2 * poll_seconds, _LAST_POLL_SECONDS)
    remove_shared_memory(scene.pids)
    if reported:
        report(f"free after {time.monotonic() - began_seconds:.1f} s")
    return []


def find_held(scene: Scene, waited_seconds: float = 0.0) -> list[Held]:
    """Returns what of an attempt is still held, after ending what may be ended."""
    held = []
    ours = [process for process in find_processes(scene.mark) if process.pid not in scene.spared]
    for process in ours:
        kind = find_kind(process)
        # A writer whose trainer is gone ends by itself when its save is committed.
        if kind != "writer" or waited_seconds > scene.writer_seconds:
            kill_process(process.pid, scene.mark)
        held.append(Held(f"{kind} (process {process.pid})", is_ours=True))
    # The lock and the port first become free when their processes are gone.
    if not held:
        if scene.has_lock and not _is_lock_free(RunDirectory(scene.run_dir).checkpoints / LOCK_NAME):
            held.append(Held("the run's lock, which another process holds", is_ours=False))
        if scene.port is not None and not is_port_free(scene.port):
            held.append(Held(f"port {scene.port}", is_ours=False))
        held += _find_on_devices(scene.pids)
    return held


def _is_lock_free(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        # Shared, for a moment only: a fit that starts meanwhile tries for longer than that.
        lock_file(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def is_port_free(port: int) -> bool:
    """Returns whether a server could listen on a port of this machine; a port in TIME_WAIT counts as free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen(1)
        except OSError:
            return False
    return True


def choose_port(avoided: Collection[int] = ()) -> int:
    """Returns a port that is free now; if another process takes it before the ranks do, they end and try again."""
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.bind(("127.0.0.1", 0))
            port: int = server.getsockname()[1]
        if port not in avoided:
            return port


def _find_on_devices(pids: Collection[int]) -> list[Held]:
    """Returns which of the ranks' processes still hold memory of an NVIDIA device; nothing without such devices."""
    if not pids or shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        done = run_program(command, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = [line.partition(",")[::2] for line in done.stdout.splitlines()]
    return [
        Held(f"{memory.strip()} of a device, held by process {pid}", is_ours=True)
        for pid, memory in found
        if pid.strip().isdecimal() and int(pid) in pids
    ]


def remove_shared_memory(pids: Collection[int]) -> int:
    """Removes the shared memory that torch named after processes that have ended; returns the number of files."""
    removed = 0
    for pid in pids:
        for path in _SHARED_MEMORY.glob(f"torch_{pid}_*"):
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
    return removed
