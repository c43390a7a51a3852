"""Runs cases, each in a process forked from this one, and says what is wrong with how it ended."""

import ctypes
import dataclasses
import gc
import importlib
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import genesis.data.prepare
import genesis.operations.mirror.restore  # noqa: F401
from genesis.base import processes
from genesis.cli.main import main
from genesis.export import importing, proof
from tests.forged import sound
from tests.forged.operators import Case

LIMIT_SECONDS: Final = 20.0
"""Of processor time, by the command and its processes: how busy the machine is must not count."""
HANG_SECONDS: Final = 300.0
"""Of the clock, on a busy machine; what waits for ever uses no processor time, and ends sooner."""
IDLE_SECONDS: Final = 15.0
"""After so long without any processor time a process waits for something that never comes."""
SLACK_BYTES: Final = 64 << 20
"""What an allocator may keep by chance."""
_LARGEST_BYTES: Final = 4 << 30
_LARGEST_SECONDS: Final = 30
_GRACE_SECONDS: Final = 3.0
"""A worker notices the end of its pipe, and ends."""
_MAX_LINE: Final = 2100
_SUBREAPER: Final = 36
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_LINES: Final = re.compile(r"((genesis )?(?!Traceback)[\w ]+: (?!error).+\n)*genesis: error: .+\n(  .+\n)*")
"""One line of error, after lines of stages, warnings and what was passed over; bad rows have lines below it."""
_NOISE: Final = re.compile(r"^(?:[EW]\d{4} [\d:.]+ \d+ \S*torch/|Failed to load \S*torchao).*\n", re.MULTILINE)
"""What torchao prints, where it is installed, as soon as transformers looks for it."""
_YES: Final = b"y\n" * 200


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        case: `kind: name`.
        status: The exit status, or the HTTP status of an answer.
        seconds: Processor time.
        num_bytes: The memory that the case added, at its peak.
        line: The first line of error.
        problems: What is wrong.
    """

    kind: str
    name: str
    status: int
    seconds: float
    num_bytes: int
    line: str
    problems: tuple[str, ...] = ()


@dataclass
class Runner:
    """Runs cases below a directory, whose sound inputs it makes.

    Attributes:
        directory: A directory that does not exist.
        has_families: Whether the sound inputs have models of several families.
        mark: The file that planted code makes.
    """

    directory: Path
    has_families: bool = False
    needs: dict[tuple[str, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mark = self.directory / "it-ran"
        self._case = self.directory / "case"
        importing.run_proof.__globals__["run_prove"] = fork_proof
        proof.run_prove = fork_proof
        processes.start_worker = ForkedWorker  # type: ignore[assignment,misc]
        for module in (proof.PROVE_MODULE, "genesis.data.tokenize_worker", "genesis.cli.import_", "genesis.cli.data"):
            importlib.import_module(module)
        self.directory.mkdir(parents=True)
        with tempfile.TemporaryFile("w+") as out:
            pid = self.start(out, out, self.directory, self._write_sound)
            _, status, _ = os.wait4(pid, 0)
            out.seek(0)
            assert status == 0, out.read()
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        gc.freeze()

    def _write_sound(self) -> int:
        sound.write_all(self.directory / "sound", has_families=self.has_families)
        return 0

    def run(self, cases: Iterable[Case]) -> Iterator[Outcome]:
        """Yields how each case ended; a command is tried on the sound inputs first."""
        for case in cases:
            if case.command not in self.needs:
                self.needs[case.command] = _LARGEST_BYTES
                found = self._run(dataclasses.replace(case, name="sound", forge=lambda root: None))
                assert (found.status, found.problems) == (0, ()), found
                self.needs[case.command] = found.num_bytes
            yield self._run(case)

    def _run(self, case: Case) -> Outcome:
        shutil.rmtree(self._case, ignore_errors=True)
        for name in ("cwd", "home", "tmp", "out", "outside"):
            (self._case / name).mkdir(parents=True)
        (self._case / "outside/secret").write_text("a secret")
        shutil.copytree(self.directory / "sound", self._case / "in", symlinks=True)
        case.forge(self._case / "in")
        before = _list(self._case)
        base_bytes = self._measure_nothing()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            start_seconds = time.monotonic()
            pid = self.start(out, err, self._case / "cwd", lambda: _limited(case.command))
            has_hung = not _wait(pid)
            if has_hung:
                os.killpg(pid, signal.SIGKILL)
            _, code, usage = os.wait4(pid, 0)
            wall_seconds = time.monotonic() - start_seconds
            out.seek(0)
            err.seek(0)
            printed, errors = (_NOISE.sub("", file.read().decode(errors="replace")) for file in (out, err))
        left = _end_left(pid)
        status = os.waitstatus_to_exitcode(code)
        seconds = usage.ru_utime + usage.ru_stime
        num_bytes = max(0, usage.ru_maxrss * 1024 - base_bytes)
        problems = [f"hangs ({wall_seconds:.0f} s)"] if has_hung else []
        problems += _judge(status, printed, errors) if not has_hung else []
        if seconds > LIMIT_SECONDS:
            problems.append(f"took {seconds:.0f} s")
        if num_bytes > 2 * self.needs[case.command] + SLACK_BYTES:
            problems.append(f"took {num_bytes >> 20} MB, a sound input {self.needs[case.command] >> 20} MB")
        if left and not has_hung:
            problems.append(f"left {left} processes")
        if self.mark.exists():
            self.mark.unlink()
            problems.append("ran code")
        after, free = _list(self._case), ("out", *(f"in/{name}" for name in case.may_write))
        changed = sorted(
            name
            for name in before.keys() | after.keys()
            if before.get(name) != after.get(name) and not name.startswith(free)
        )
        if changed and not has_hung:
            problems.append(f"wrote outside: {changed[:5]}")
        if status and not has_hung and case.command[0] == "import" and list((self._case / "out").iterdir()):
            problems.append("left a part of the import")
        line = errors.partition("\n")[0][:300]
        return Outcome(case.kind, case.name, status, round(seconds, 2), num_bytes, line, tuple(problems))

    def _measure_nothing(self) -> int:
        """Returns the peak memory of a process that is forked and ends."""
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        return os.wait4(pid, 0)[2].ru_maxrss * 1024

    def start(self, out: Any, err: Any, cwd: Path, act: Any) -> int:
        """Starts a process in a session of its own: what it reads is an endless yes, and its home is empty."""
        ours, theirs = os.pipe()
        os.write(theirs, _YES)
        os.close(theirs)
        pid = os.fork()
        if pid:
            os.close(ours)
            return pid
        os.setsid()
        for number, descriptor in enumerate((ours, out.fileno(), err.fileno())):
            os.dup2(descriptor, number)
        os.chdir(cwd)
        os.environ |= {"HOME": str(cwd.parent / "home"), "TMPDIR": str(cwd.parent / "tmp"), "OMP_NUM_THREADS": "1"}
        tempfile.tempdir = None
        resource.setrlimit(resource.RLIMIT_AS, (_virtual_bytes() + _LARGEST_BYTES, resource.RLIM_INFINITY))
        _end(act)
        raise AssertionError

    def stop(self, pid: int) -> None:
        """Ends a process that `start` has started, and what it has started."""
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        _end_left(pid)


class ForkedWorker:
    """Does what `genesis.base.processes.start_worker` does, by a fork."""

    def __init__(self, module: str, descriptor: int) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.closerange(3, descriptor)
            os.closerange(descriptor + 1, 1024)
            _end(lambda: importlib.import_module(module).main(descriptor) or 0)

    def poll(self) -> int | None:
        """Returns the exit status, or None while the process runs."""
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit status."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        """Kills the process."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_proof(request: str, module: str = proof.PROVE_MODULE) -> subprocess.CompletedProcess[str]:
    """Does what `genesis.export.proof.run_prove` does, by a fork."""
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - without the escapes of the command
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            _end(lambda: importlib.import_module(module).main([request]))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        err.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith("{")]
        return subprocess.CompletedProcess([], status, "\n".join(lines), err.read())


def _limited(command: Sequence[str]) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (_LARGEST_SECONDS, _LARGEST_SECONDS))
    return main(list(command))


def _end(act: Any) -> None:
    """Ends this process by an act, as an interpreter would."""
    status: Any = 70
    try:
        status = act()
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status if isinstance(status, int) else 1)


def _judge(status: int, printed: str, errors: str) -> list[str]:
    """Returns what is wrong with an exit status and what was printed."""
    problems = []
    if status not in (0, 1, 2):
        problems.append(f"exit status {status}: {errors[-600:]}")
    elif status and not (_LINES.fullmatch(errors) or (not errors and printed)):
        problems.append(f"not one line: {errors[:300]!r} ... {errors[-300:]!r}")
    if found := _CONTROL.search(printed + errors):
        problems.append(f"printed {found[0]!r}")
    if any(len(line) > _MAX_LINE for line in (printed + errors).splitlines()):
        problems.append("printed a long line")
    return problems


def _wait(pid: int) -> bool:
    """Waits for the end of a process; returns False for one that hangs."""
    poll, descriptor = select.poll(), os.pidfd_open(pid)
    poll.register(descriptor, select.POLLIN)
    begin_seconds = moved_seconds = time.monotonic()
    used = 0.0
    try:
        while not poll.poll(1000):
            now_seconds, now_used = time.monotonic(), sum(map(cpu_seconds, _members(pid)))
            if now_used != used:
                used, moved_seconds = now_used, now_seconds
            if now_seconds - begin_seconds > HANG_SECONDS or now_seconds - moved_seconds > IDLE_SECONDS:
                return False
        return True
    finally:
        os.close(descriptor)


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of a process; 0 if it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _members(session: int) -> list[int]:
    """Returns the processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[3]) == session and words[0] != "Z":
            found.append(int(path.parent.name))
    return found


def _end_left(session: int) -> int:
    """Kills what is left of a session and returns how many processes that were."""
    deadline_seconds = time.monotonic() + _GRACE_SECONDS
    while _members(session) and time.monotonic() < deadline_seconds:
        time.sleep(0.02)
    left = len(members := _members(session))
    for pid in members:
        os.kill(pid, signal.SIGKILL)
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG if not left else 0)[0] == 0:
                return left
        except ChildProcessError:
            return left


def _list(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Returns kind, size and time of change of everything below a directory; directories change when files do."""
    found = {}
    for path in directory.rglob("*"):
        state = path.lstat()
        is_directory = path.is_dir() and not path.is_symlink()
        of_file = (0, 0) if is_directory else (state.st_size, state.st_mtime_ns)
        found[str(path.relative_to(directory))] = (state.st_mode >> 12, *of_file)
    return found


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def summarise(outcomes: Sequence[Outcome]) -> str:
    """Returns a table of the kinds."""
    rows = [
        "| kind | cases | refused | accepted | failed | most seconds | most memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(one.kind for one in outcomes):
        some = [one for one in outcomes if one.kind == kind]
        accepted = sum(one.status in (0, 200) for one in some)
        failed = sum(bool(one.problems) for one in some)
        slowest, largest = max(one.seconds for one in some), max(one.num_bytes for one in some)
        counts = f"{len(some)} | {len(some) - accepted} | {accepted} | {failed}"
        rows.append(f"| {kind} | {counts} | {slowest:.1f} | {largest >> 20} MB |")
    return "\n".join(rows)
