"""Measures the memory that is available to this process."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Returns the number of bytes that this process can use without swapping, also in a container; None if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    limit = _read_container_limit()
    return available if limit is None else min(available, limit)


def _read_container_limit() -> int | None:
    """Returns the bytes below the container's limit, plus droppable caches; None without a limit or a known layout."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return None if limit == "max" else max(0, int(limit) - int(used["anon"]))
    except (OSError, KeyError, ValueError):
        return None
