"""What is done to a sound file: to the file as such, to its bytes, and to a JSON document in it."""

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forged.checkpoints import change_somewhere

ALIEN = "a\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2028\r\ngenesis: error: none\x00"
HOLE_BYTES = 1 << 40
DEPTH = 200_000

Forge = Callable[[Path], None]
"""Changes the sound inputs below a directory."""


@dataclass(frozen=True)
class Case:
    """A forged input and the command that opens it.

    Attributes:
        kind: `import`, `template`, `manifest` or `data`.
        name: What was forged, and how.
        forge: Changes a copy of the sound inputs.
        command: The command line; its working directory is beside the inputs, `in/`, and `out` is what it may write.
        may_write: Names in `in/` that the command may change.
    """

    kind: str
    name: str
    forge: Forge
    command: tuple[str, ...]
    may_write: tuple[str, ...] = ()


def _replace(path: Path, make: Callable[[], object]) -> None:
    path.unlink(missing_ok=True)
    make()


def _hole(path: Path) -> None:
    path.touch()
    os.truncate(path, HOLE_BYTES)


FILE_ACTS: dict[str, Forge] = {
    "fifo": lambda path: _replace(path, lambda: os.mkfifo(path)),
    "directory": lambda path: _replace(path, path.mkdir),
    "link to itself": lambda path: _replace(path, lambda: path.symlink_to(path.name)),
    "link to /dev/zero": lambda path: _replace(path, lambda: path.symlink_to("/dev/zero")),
    "link to /proc/self/mem": lambda path: _replace(path, lambda: path.symlink_to("/proc/self/mem")),
    "link to nothing": lambda path: _replace(path, lambda: path.symlink_to("/nowhere/at/all")),
    "hole": _hole,
    "gone": lambda path: path.unlink(),
}
BYTE_ACTS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "empty": lambda data, chooser: b"",
    "half": lambda data, chooser: data[: len(data) // 2],
    "noise": lambda data, chooser: chooser.randbytes(min(len(data), 4096)),
    "zeros": lambda data, chooser: bytes(len(data)),
    "UTF-16": lambda data, chooser: data.decode("latin-1").encode("utf-16"),
    "one byte": lambda data, chooser: _flip(data, chooser, 1),
    "fifty bytes": lambda data, chooser: _flip(data, chooser, 50),
}
JSON_ACTS: dict[str, Callable[[Any], bytes]] = {
    "key twice": lambda content: json.dumps(content).encode().rstrip()[:-1] + b', "a": 1, "a": 2}',
    "deep lists": lambda content: b"[" * DEPTH + b"]" * DEPTH,
    "deep value": lambda content: (
        json.dumps(content).encode()[:-1] + b', "a": ' + b'{"a":' * DEPTH + b"1" + b"}" * DEPTH
    ),
    "value of 950 levels": lambda content: (
        json.dumps(content).encode()[:-1] + b', "a": ' + b'{"a":[' * 475 + b"1" + b"]}" * 475 + b"}"
    ),
    "list": lambda content: json.dumps([content]).encode(),
    "number": lambda content: b"NaN",
    "long key": lambda content: json.dumps({**content, "k" * 100_000: 1}).encode(),
    "alien key": lambda content: json.dumps({**content, ALIEN: {ALIEN: ALIEN}}).encode(),
}


def _flip(data: bytes, chooser: random.Random, count: int) -> bytes:
    changed = bytearray(data)
    for _ in range(count if data else 0):
        changed[chooser.randrange(len(data))] ^= 1 + chooser.randrange(255)
    return bytes(changed)


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> Forge:
    """Returns an act that changes the bytes of a file below the sound inputs."""

    def write(root: Path) -> None:
        (root / path).write_bytes(change((root / path).read_bytes()))

    return write


def set_values(path: Path, **values: Any) -> Forge:
    """Returns an act that sets keys of a JSON file."""
    return rewrite(path, lambda data: json.dumps({**json.loads(data), **values}).encode())


def change_json(path: Path, seed: str, number: int) -> Forge:
    """Returns an act that puts odd values and keys at places that are drawn."""

    def change(data: bytes) -> bytes:
        content, chooser = json.loads(data), random.Random(seed)
        for _ in range(number):
            if content:
                change_somewhere(content, chooser)
        return json.dumps(content).encode()

    return rewrite(path, change)


def forge_files(paths: Iterable[str], seed: int) -> Iterator[tuple[str, Forge]]:
    """Yields every act on every file."""
    for name in paths:
        path = Path(name)
        for act, forge in FILE_ACTS.items():
            yield f"{name}: {act}", lambda root, path=path, forge=forge: forge(root / path)  # type: ignore[misc]
        for act, change in BYTE_ACTS.items():
            chooser = random.Random(f"{seed} {name} {act}")
            yield f"{name}: {act}", rewrite(path, lambda data, c=change, r=chooser: c(data, r))  # type: ignore[misc]


def forge_json(paths: Iterable[str], seed: int, num_changed: int) -> Iterator[tuple[str, Forge]]:
    """Yields every act on every JSON file, and `num_changed` drawn changes."""
    for name in paths:
        for act, change in JSON_ACTS.items():
            yield f"{name}: {act}", rewrite(Path(name), lambda data, c=change: c(json.loads(data)))  # type: ignore[misc]
        for number in range(num_changed):
            yield f"{name}: change {number}", change_json(Path(name), f"{seed} {name} {number}", 1 + number % 3)
