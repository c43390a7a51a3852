"""One attempt of a supervised run: watched until its ranks have ended or must be ended, then ended cleanly."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from genesis.operations.supervise.classify import Evidence, RankEnd
from genesis.operations.supervise.launch_protocol import STACKS_SIGNAL, Child
from genesis.operations.supervise.launcher_client import LauncherClient, LauncherLostError
from genesis.operations.supervise.space import has_space
from genesis_callbacks.base.event_reader import EventFollower
from genesis_callbacks.base.events import Event
from genesis_callbacks.base.untrusted import open_file
from genesis_callbacks.heartbeats import HeartbeatRecord, read_heartbeats

_POLL_SECONDS: Final = 0.05
_LOOK_SECONDS: Final = 0.2
_STACKS_SECONDS: Final = 0.3
_STOPPED_SECONDS: Final = 5.0
"""A process in state T makes no progress, however slow its steps are."""
_FULL_DISK_SECONDS: Final = 5.0
_HEARTBEAT_BYTES: Final = 1 << 16
_OTHERS_END_SECONDS: Final = 120.0
_OUTPUT_BYTES: Final = 1 << 16
_OOM_FILES: Final = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


@dataclass(frozen=True)
class Limits:
    """How long things may take.

    Args:
        hang_seconds: A rank that trains, and has no heartbeat for so long, hangs.
        start_seconds: From the launch to the first step, which compiles and connects.
        phase_seconds: The same as `hang_seconds` for a rank that does something else, such as a save or a validation.
        grace_seconds: From SIGTERM to SIGKILL, when ranks are ended.
        deadline_seconds: From a request to save and stop until SIGKILL.
    """

    hang_seconds: float = 300.0
    start_seconds: float = 1800.0
    phase_seconds: float = 1800.0
    grace_seconds: float = 10.0
    deadline_seconds: float = 100.0

    def choose(self, beat: HeartbeatRecord | None) -> float:
        """Returns how long a rank with this last heartbeat may be silent. Pure."""
        if beat is None or "first_step" not in beat.milestones:
            return max(self.start_seconds, self.hang_seconds)
        return self.hang_seconds if beat.phase == "train" else max(self.phase_seconds, self.hang_seconds)


@dataclass
class Sight:
    """What is seen of an attempt.

    Attributes:
        heartbeats: By rank, those of this attempt.
        restored_step: Step of the checkpoint that was restored; None before, and for a start from scratch.
        started_seconds: When a rank had taken the run's directory, by the monotonic clock; None before.
        failures: By rank, the first event of its fit's failure.
    """

    heartbeats: dict[int, HeartbeatRecord] = field(default_factory=dict)
    restored_step: int | None = None
    started_seconds: float | None = None
    failures: dict[int, Event] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The largest step that a rank reported; None before the first batch."""
        steps = [beat.step for beat in self.heartbeats.values() if "first_step" in beat.milestones]
        return max(steps, default=None)

    @property
    def has_trained(self) -> bool:
        """Whether a rank trained a step, or began its first one after a restore: the model has fitted before."""
        return self.step is not None or (bool(self.restored_step) and self.milestone("train") is not None)

    def milestone(self, name: str) -> float | None:
        """Returns when the last rank came to a milestone; None before."""
        moments = [beat.milestones.get(name) for beat in self.heartbeats.values()]
        found = [moment for moment in moments if moment is not None]
        return max(found) if found else None


class Peers(Protocol):
    """The other nodes of an attempt. Neither method waits."""

    def has_ended(self) -> bool:
        """Returns whether another node's ranks have failed or the node is lost, so that these must be ended."""

    def tell_end(self) -> None:
        """Lets the other nodes know that the ranks of this one have failed, hang, or were stopped."""


class Attempt:
    """Watches the ranks of an attempt, from their launch or from the moment at which they are found.

    Args:
        run_dir: The run's directory.
        client: The connection to the launcher, whose state lists the ranks.
        outputs: By rank, the file of its output.
        limits: How long things may take.
        find_stop: Returns why the ranks shall save and stop, or None.
        on_look: Called with what is seen, a few times a second.
        peers: The other nodes of the attempt; None on one node.
        events: What follows the run's events from before the launch; None for an attempt that is found.
    """

    def __init__(
        self,
        run_dir: Path,
        client: LauncherClient,
        outputs: Mapping[int, Path],
        limits: Limits,
        find_stop: Callable[[], str | None],
        on_look: Callable[[Sight], None],
        peers: Peers | None = None,
        events: EventFollower | None = None,
    ) -> None:
        self._run_dir, self._client, self._outputs, self._limits = run_dir, client, outputs, limits
        self._find_stop, self._on_look = find_stop, on_look
        state = client.state
        assert state is not None
        self._forked_seconds = state.forked_seconds
        self._children: Sequence[Child] = state.children
        self._peers = peers
        # Monotonic clocks of several machines, and of one machine before and after a reboot, cannot be compared: only
        # what comes from now on is of this attempt.
        self._events = events or EventFollower(run_dir, is_from_now=peers is not None)
        self._looked_seconds = 0.0
        self._oom_kills = _count_oom_kills()
        self._hung: tuple[int | None, float] | None = None
        self._has_lost_launcher = False
        self._is_disk_full = False
        self.sight = Sight()
        self.end_seconds = 0.0
        """When the end was noticed, by the monotonic clock."""

    @property
    def pids(self) -> dict[int, int]:
        """Process id by rank."""
        return {child.rank: child.pid for child in self._children}

    @property
    def statuses(self) -> dict[int, int]:
        """Exit status by rank, of the ranks that have ended."""
        return {child.rank: child.status for child in self._children if child.status is not None}

    def run(self) -> Evidence:
        """Watches until the attempt is over and none of its ranks is left; returns what is left of them."""
        stop_reason: str | None = None
        try:
            stop_reason = self._watch()
        except LauncherLostError:
            self._lose_launcher()
        self.end_seconds = time.monotonic()
        if self._peers is not None and not self._is_complete():
            self._peers.tell_end()
        self._look()
        survivors = {child.rank for child in self._children if child.status is None}
        if survivors and not self._has_lost_launcher:
            self._end_ranks(has_hung=self._hung is not None)
        self._look()
        # Without space neither events nor output say why a rank has ended.
        has_failed = any(child.status not in (0, None) for child in self._children)
        self._is_disk_full = self._is_disk_full or (has_failed and not has_space(self._run_dir, _HEARTBEAT_BYTES))
        return self._gather(survivors, stop_reason)

    def _is_complete(self) -> bool:
        return all(child.status == 0 for child in self._children)

    # ---- watching

    def _watch(self) -> str | None:
        """Returns why the ranks were asked to stop, once a rank has failed, all have ended or one hangs; or None."""
        first_end_seconds: float | None = None
        while True:
            self._poll(_POLL_SECONDS)
            alive = [child for child in self._children if child.status is None]
            if not alive or any(child.status for child in self._children):
                return None
            now = time.monotonic()
            if len(alive) < len(self._children):  # the others have ended well; these close their files
                first_end_seconds = first_end_seconds or now
            if self._peers is not None and self._peers.has_ended():
                return None
            stop_reason = self._find_stop()
            if stop_reason is not None:
                self._stop_ranks()
                return stop_reason
            if now - self._looked_seconds >= _LOOK_SECONDS:
                self._look()
                self._is_disk_full = self._is_silenced_by_disk(now, alive)
                self._hung = self._find_hung(now, alive, first_end_seconds)
                if self._hung is not None or self._is_disk_full:
                    return None

    def _poll(self, seconds: float) -> None:
        if self._client.poll(seconds) and self._client.state is not None:
            self._children = self._client.state.children

    def _look(self) -> None:
        self._looked_seconds = time.monotonic()
        pids = self.pids
        for rank, beat in read_heartbeats(self._run_dir).items():
            # The file of an earlier attempt stays until the rank writes its first.
            if pids.get(rank) == beat.pid and beat.monotonic_seconds >= self._forked_seconds:
                self.sight.heartbeats[rank] = beat
        for event in self._events.poll():
            is_ours = self._peers is None or event.rank in pids
            if is_ours and event.monotonic_seconds < self._forked_seconds:
                continue
            if event.kind == "started" and is_ours and self.sight.started_seconds is None:
                self.sight.started_seconds = event.monotonic_seconds
            elif event.kind == "restored":
                self.sight.restored_step = event.step
            elif event.kind == "failed" and is_ours and event.rank is not None and event.checkpoint is None:
                self.sight.failures.setdefault(event.rank, event)
        self._on_look(self.sight)

    def _find_hung(
        self, now: float, alive: Sequence[Child], first_end_seconds: float | None
    ) -> tuple[int | None, float] | None:
        """Returns the rank that hangs, and for how long; None if none does."""
        silences = {child.rank: now - self._last_sign(child.rank) for child in alive}
        longest = max(silences, key=silences.__getitem__)
        # All ranks stop together when one does, so that the one that the kernel stopped is named before the others.
        stopped = [child.rank for child in alive if _is_stopped(child.pid)]
        if stopped and silences[longest] > min(_STOPPED_SECONDS, self._limits.hang_seconds):
            return stopped[0], silences[stopped[0]]
        if first_end_seconds is not None and now - first_end_seconds > _OTHERS_END_SECONDS:
            return longest, now - first_end_seconds
        late = {
            rank: silence
            for rank, silence in silences.items()
            if silence > self._limits.choose(self.sight.heartbeats.get(rank))
        }
        first = max(late, key=late.__getitem__, default=None)
        return None if first is None else (first, late[first])

    def _is_silenced_by_disk(self, now: float, alive: Sequence[Child]) -> bool:
        """Returns whether all ranks are silent and the disk is full: they may train on, but cannot save."""
        silence = min(now - self._last_sign(child.rank) for child in alive)
        return silence > _FULL_DISK_SECONDS and not has_space(self._run_dir, _HEARTBEAT_BYTES)

    def _last_sign(self, rank: int) -> float:
        beat = self.sight.heartbeats.get(rank)
        return self._forked_seconds if beat is None else beat.monotonic_seconds

    # ---- ending

    def _stop_ranks(self) -> None:
        """Asks all ranks to save and stop, and waits until they have or the deadline has passed."""
        self._send(signal.SIGTERM)
        self._wait_ended(self._limits.deadline_seconds)

    def _end_ranks(self, *, has_hung: bool) -> None:
        """Ends the ranks that are left: stacks, SIGTERM, a grace period, SIGKILL."""
        if has_hung:
            self._send(STACKS_SIGNAL)
            self._send(signal.SIGCONT)  # a stopped process handles no signal but SIGKILL
            self._wait_ended(_STACKS_SECONDS)
        self._send(signal.SIGTERM)
        # A rank that hangs in native code never reaches the end of a step, where it would act on the signal.
        self._wait_ended(min(1.0, self._limits.grace_seconds) if has_hung else self._limits.grace_seconds)
        self._send(signal.SIGKILL)
        self._wait_ended(float("inf"))

    def _send(self, number: int) -> None:
        # A child that has ended and is not waited for keeps its number: the launcher reaps and reports in one step.
        for child in self._children:
            if child.status is None:
                try:
                    os.kill(child.pid, number)
                except ProcessLookupError:
                    continue

    def _wait_ended(self, limit_seconds: float) -> None:
        deadline_seconds = time.monotonic() + limit_seconds
        try:
            while any(child.status is None for child in self._children):
                left = deadline_seconds - time.monotonic()
                if left <= 0:
                    return
                self._poll(min(left, _LOOK_SECONDS))
        except LauncherLostError:
            self._lose_launcher()

    def _lose_launcher(self) -> None:
        """Notes that the kernel has ended all ranks with their launcher."""
        self._has_lost_launcher, now = True, time.monotonic()
        for child in self._children:
            if child.status is None:
                child.status, child.ended_seconds = -signal.SIGKILL, now

    # ---- what is left

    def _gather(self, survivors: set[int], stop_reason: str | None) -> Evidence:
        return Evidence(
            ranks=[self._describe(child, child.rank in survivors) for child in self._children],
            has_trained=self.sight.has_trained,
            hung_rank=None if self._hung is None else self._hung[0],
            hung_seconds=None if self._hung is None else self._hung[1],
            stop_reason=stop_reason,
            is_disk_full=self._is_disk_full,
            oom_kills=_count_oom_kills() - self._oom_kills,
        )

    def _describe(self, child: Child, is_survivor: bool) -> RankEnd:
        failure = self.sight.failures.get(child.rank)
        # What our own signals did to a rank says nothing about it.
        is_ours = is_survivor and child.status in (-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)
        beat = self.sight.heartbeats.get(child.rank)
        has_reported = beat is not None and beat.phase == "failed"
        return RankEnd(
            rank=child.rank,
            status=None if is_ours else child.status,
            moment_seconds=failure.monotonic_seconds
            if failure is not None
            else child.ended_seconds or self.end_seconds,
            output=read_tail(self._outputs[child.rank]).decode(errors="replace"),
            error_class=(failure.error_class or "") if failure is not None else "",
            error_text=failure.text if failure is not None else "",
            failed_step=beat.step if beat is not None and has_reported else None,
            failed_clocks=dict(beat.clocks) if beat is not None and has_reported else {},
        )


def read_tail(path: Path, max_bytes: int = _OUTPUT_BYTES) -> bytes:
    """Returns the end of a file; nothing if there is none."""
    try:
        with open_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            return file.read()
    except OSError:
        return b""


def read_from(path: Path, offset: int) -> bytes:
    """Returns what a file has from an offset on; nothing if there is no file."""
    try:
        with open_file(path) as file:
            file.seek(offset)
            return file.read()
    except OSError:
        return b""


def _is_stopped(pid: int) -> bool:
    try:
        # The process name stands in brackets and may contain anything, also brackets and spaces.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return fields[:1] == [b"T"]


def _count_oom_kills() -> int:
    """Returns how many processes of this control group the kernel has ended for memory so far; 0 if it cannot tell."""
    for name in _OOM_FILES:
        try:
            lines = Path(name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        if counts and counts[0].isdecimal():
            return int(counts[0])
    return 0
