"""What a stranger has put in the place of a file never blocks, never fills memory, and never leads anywhere else."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from genesis_callbacks.base.errors import UserError
from genesis_callbacks.base.events import EventLog
from genesis_callbacks.base.files import RefusedFileError, create_file, replace_file
from genesis_callbacks.base.locks import open_lock
from genesis_callbacks.base.untrusted import (
    check_directory,
    check_file,
    open_file,
    path_below,
    read_file,
    read_text,
)


def put_link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_socket(path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{directory}/{path.name}")  # the name itself may be too long for a socket
    os.close(directory)


IRREGULAR = [
    (os.mkfifo, "a FIFO"),
    (put_link_to_fifo, "a FIFO"),
    (put_device, "a device"),
    (put_socket, "a socket"),
    (os.mkdir, "a directory"),
]


@pytest.mark.parametrize(("put", "kind"), IRREGULAR)
@pytest.mark.parametrize("read", [open_file, read_file, read_text, check_file])
def test_what_is_no_file_is_refused_by_name_without_waiting(
    tmp_path: Path, put: Callable[[Path], None], kind: str, read: Callable[[Path], object]
) -> None:
    put(tmp_path / "file")
    with pytest.raises(RefusedFileError, match=f"/file is {kind}, but must be a file"):
        read(tmp_path / "file")


@pytest.mark.parametrize(("put", "kind"), IRREGULAR[:-1])
@pytest.mark.parametrize("place", ["file", "inner/file"])
def test_a_directory_for_a_library_holds_files_and_directories_alone(
    tmp_path: Path, put: Callable[[Path], None], kind: str, place: str
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "other").write_bytes(b"")
    check_directory(tmp_path)
    put(tmp_path / place)
    with pytest.raises(RefusedFileError, match=f" is {kind}, but must be a file"):
        check_directory(tmp_path)


def test_a_name_with_a_null_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedFileError, match="has a null character in its name"):
        read_file(tmp_path / "a\0b")


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"a\r\nb")
    (tmp_path / "file").symlink_to("blob")
    assert (read_file(tmp_path / "file"), read_text(tmp_path / "file")) == (b"a\r\nb", "a\nb")
    assert check_file(tmp_path / "file") == 4


def test_a_file_is_read_up_to_its_limit_also_if_its_size_was_another(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(RefusedFileError, match=r"/file has more than 4 bytes, the limit of such a file"):
        read_file(tmp_path / "file", 4)
    with pytest.raises(RefusedFileError, match="more than 4 bytes"):
        check_file(tmp_path / "file", 4)
    os.truncate(tmp_path / "file", 1 << 40)
    with pytest.raises(RefusedFileError, match="more than 16,777,216 bytes"):
        read_file(tmp_path / "file")
    # The kernel gives these files the size 0, as a file has that grows after it was opened.
    assert read_file("/proc/self/maps") != b""
    with pytest.raises(RefusedFileError, match="more than 100 bytes"):
        read_file("/proc/self/maps", 100)


def test_a_descriptor_that_the_user_gives_is_read_whole_and_is_no_file_of_data() -> None:
    reader, writer = os.pipe()
    for read in (open_file, check_file):
        with pytest.raises(RefusedFileError, match="is no file that can be read again"):
            read(f"/dev/fd/{reader}")
    os.write(writer, b"steps: 1\n")
    os.close(writer)
    assert read_text(f"/dev/fd/{reader}") == "steps: 1\n"
    os.close(reader)
    assert read_text("/dev/null") == ""


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"before")
    for name in ("new", "file.staging", "lock", "events/rank-0.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), create_file(tmp_path / "new"):
        pass
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(tmp_path / "file", b"after")
    with pytest.raises(RefusedFileError, match="/lock is a link, but must be a file"):
        open_lock(tmp_path / "lock")
    assert "symbolic links" in str(EventLog(tmp_path, 0).append("started"))
    assert victim.read_bytes() == b"before"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(("/etc/passwd", "is an absolute path"), ("//host/share", "is an absolute path")),
        *((name, "leads upwards") for name in ("..", "../x", "a/../x", "a/..", "a/../../x")),
        *((name, "has an empty part") for name in ("", ".", "a//b", "a/", "./a", "a/./b")),
        *((name, "part that begins with ~") for name in ("~", "~root/x", "a/~/b")),
        *((name, "cannot be printed") for name in ("a\0b", "a\nb", "\x1b[2J", "a\u202eb", "\ud800")),
        *((name, "is a path of Windows") for name in ("..\\x", "a\\b", "C:x", "c:/x", "\\\\host\\x")),
        *((name, "is the name of a device") for name in ("nul", "CON", "a/aux.json", "com1/x", "LPT9.txt")),
        *(("a" * 256, "more than 255 bytes"), ("é" * 128, "more than 255 bytes")),
        *((name, "is no text") for name in (None, 5, ["a"], {"a": 1}, b"a")),
        *(("out/x", "leads out of .* through a link"), ("far", "leads out of"), ("loop/x", "leads nowhere")),
    ],
)
def test_a_listed_name_that_leads_elsewhere_is_refused_with_its_file(tmp_path: Path, name: object, fault: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to("..")
    (root / "far").symlink_to("/etc/hostname")
    (root / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=f"^index.json lists .*{fault}") as refusal:
        path_below(root, name, "index.json")
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 400 + len(str(root)) * 2


def test_a_sound_name_is_a_path_below_its_root(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for name in ("a", "train/web/00000.ds", "a b", "día/文.json", ".hidden", "a..b", "console", "link/x", "a~"):
        assert path_below(tmp_path, name, "index.json") == tmp_path / name
    assert path_below(Path(), "a", "index.json") == Path("a")


def test_a_snapshot_of_the_hubs_cache_may_lead_to_the_blobs_of_its_model_alone(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "hash").write_bytes(b"")
    (snapshot / "model.safetensors").symlink_to("../../blobs/hash")
    (snapshot / "other").symlink_to("../../refs")
    assert path_below(snapshot, "model.safetensors", "index.json").exists()
    with pytest.raises(UserError, match="leads out of"):
        path_below(snapshot, "other", "index.json")
