"""How much memory this process can take."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Returns the bytes that this process can take without swapping, also within a container; None if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    limit = _read_container_limit()
    return available if limit is None else min(available, limit)


def _read_container_limit() -> int | None:
    """Returns what the container has left, not counting what it can drop; None without a limit or another layout."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return None if limit == "max" else max(0, int(limit) - int(used["anon"]))
    except (OSError, KeyError, ValueError):
        return None
