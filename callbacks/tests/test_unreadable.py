"""A checkpoint that only cannot be read is not called corrupt: nothing is renamed, the run stops with the path."""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from genesis_callbacks.base.checkpoint_errors import UnreadableCheckpointError
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import (
    CorruptCheckpointError,
    QuarantineWarning,
    Ranks,
    SaveTarget,
    Snapshot,
    find_latest,
    read_tensors,
    save_blocking,
    verify,
)

FILES = ("COMMITTED", "manifest.json", "__0_0.distcp", "state.json", ".metadata")
NOBODY = 65534


def save_two(directory: Path) -> tuple[Path, Path]:
    directory.mkdir(exist_ok=True)
    target = SaveTarget(directory, Ranks())

    def save(step: int) -> Path:
        parts = local_shards("model.weight", torch.full((3, 4), float(step)), "parameter")
        return save_blocking(target, lambda: Snapshot(step, {}, parts, {"step": step}))

    return save(3), save(6)


class RefusedFile:
    """While it is entered, this process is refused one file, when it is opened or when it is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, number: int, when: str) -> None:
        self._path, self._number = path.stat(), number
        if when == "open":
            monkeypatch.setattr(os, "open", self._wrap(os.open, lambda path: os.stat(path)))  # noqa: PTH116
        else:
            for name in ("read", "readv", "preadv"):
                monkeypatch.setattr(os, name, self._wrap(getattr(os, name), os.fstat))

    def _wrap(self, function: Callable[..., Any], find: Callable[[Any], os.stat_result]) -> Callable[..., Any]:
        def wrapped(place: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                found = find(place)
            except OSError:
                return function(place, *arguments, **keywords)
            if (found.st_dev, found.st_ino) == (self._path.st_dev, self._path.st_ino):
                raise OSError(self._number, os.strerror(self._number), str(place))
            return function(place, *arguments, **keywords)

        return wrapped


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT])
@pytest.mark.parametrize("when", ["open", "read"])
@pytest.mark.parametrize("name", FILES)
def test_latest_stops_with_the_path_and_renames_nothing(tmp_path, monkeypatch, name, when, number):
    _, newest = save_two(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        RefusedFile(patch, newest / name, number, when)
        with pytest.raises(UnreadableCheckpointError) as caught:
            find_latest(tmp_path)
        with pytest.raises(UnreadableCheckpointError):
            verify(newest)
    message = str(caught.value)
    assert message.startswith(f"{newest / name} cannot be read ({os.strerror(number)})")
    assert "make the file readable" in message
    assert len(message.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert find_latest(tmp_path) == newest


@pytest.mark.skipif(not os.access("/proc/self/mem", os.R_OK), reason="needs a file that fails with a real EIO")
@pytest.mark.parametrize("name", ["COMMITTED", "manifest.json"])
def test_a_real_input_output_error_is_not_damage(tmp_path, name):
    _, newest = save_two(tmp_path)
    (newest / name).unlink()
    (newest / name).symlink_to("/proc/self/mem")  # nothing is mapped at address 0, and read(2) answers EIO
    with pytest.raises(UnreadableCheckpointError, match=f"{name} cannot be read .Input/output error."):
        find_latest(tmp_path)
    assert newest.is_dir()


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that any user may search, unlike those of pytest."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def run_as_nobody(function: Callable[[], object]) -> str:
    """Returns what `function` raises in a child that has dropped root's rights, where it had them."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            answer = repr(function())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answer = stream.read()
    os.waitpid(pid, 0)
    return answer


@pytest.mark.parametrize("name", [*FILES, "."])
def test_a_user_without_the_right_to_read_quarantines_nothing(open_path, name):
    _, newest = save_two(open_path / "checkpoints")
    for path in (open_path / "checkpoints").rglob("*"):
        path.chmod(path.stat().st_mode | stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0))
    (open_path / "checkpoints").chmod(0o777)  # so that renaming would be allowed
    (newest / name).chmod(0)
    before = sorted(path.name for path in (open_path / "checkpoints").iterdir())
    answer = run_as_nobody(lambda: find_latest(open_path))
    assert answer.startswith("UnreadableCheckpointError: "), answer
    assert "Permission denied" in answer
    assert str(newest) in answer
    assert sorted(path.name for path in (open_path / "checkpoints").iterdir()) == before
    (newest / name).chmod(0o755)
    assert find_latest(open_path) == newest


def test_proven_damage_beside_an_unreadable_file_is_damage(tmp_path, monkeypatch):
    first, newest = save_two(tmp_path)
    (newest / "state.json").write_bytes(b"{}")
    RefusedFile(monkeypatch, newest / "__0_0.distcp", errno.EIO, "read")
    with pytest.warns(QuarantineWarning, match=r"state\.json has 2 bytes"):
        assert find_latest(tmp_path) == first


def test_a_loop_of_links_is_damage(tmp_path):
    first, newest = save_two(tmp_path)
    (newest / "state.json").unlink()
    (newest / "state.json").symlink_to("state.json")
    with pytest.raises(CorruptCheckpointError, match=r"state\.json is not a file: Too many levels"):
        verify(newest, "quick")
    with pytest.warns(QuarantineWarning):
        assert find_latest(tmp_path) == first


@pytest.mark.parametrize("when", ["open", "read"])
def test_reading_tensors_of_an_unreadable_file_does_not_call_it_corrupt(tmp_path, monkeypatch, when):
    _, newest = save_two(tmp_path)
    RefusedFile(monkeypatch, newest / "__0_0.distcp", errno.EIO, when)
    with pytest.raises(UnreadableCheckpointError):
        read_tensors(newest)
