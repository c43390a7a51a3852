"""Detects a forward that not all ranks enter, and ends the run, which would hang otherwise.

Under sharding every forward gathers parameters from other ranks. A callback that samples text on rank 0 alone makes
rank 0 gather from ranks that have moved on: the collectives pair up wrongly or wait until the process group's timeout,
without naming a rank. So each rank counts the forwards of its sharded root and notes their kind (training or not, with
gradients or not). A thread publishes the count in a store of its own. The first of the ranks compares the counts:
two ranks whose forward of the same number is of another kind, or a rank that stays ahead for longer than allowed, end
all ranks with the name of the rank and the line that called.

Being ahead is no sign of a desync until every rank has ended its first windows: before that, a rank may be
compiling its blocks, opening its connections or reading data for the first time, which takes minutes.

Does it communicate? Through a TCP store of its own, never through a process group; the training thread only increments.
Only one rank reads the logs of all, by one request, and the interval grows with the number of ranks, so that the number
of requests per second is bounded however many ranks there are.
"""

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.fsdp import FSDPModule

EXIT_STATUS = 70
"""sysexits' EX_SOFTWARE: the program, not the machine, is at fault."""

_INTERVAL_SECONDS = 0.5
_RANKS_PER_SECOND = 128
"""Upper bound for the ranks that the store serves in a second, with two requests from each."""
_NUM_FIRST_WINDOWS = 2
_NUM_KINDS_KEPT = 256
_FOREIGN_PATHS = (f"{os.sep}torch{os.sep}", f"{os.sep}lightning{os.sep}", f"{os.sep}genesis{os.sep}model{os.sep}")


@dataclass(frozen=True)
class ForwardLog:
    """The forwards that one rank has entered.

    `num_forwards` counts all of them, `kinds` has one letter for each of the last ones, and `num_windows` counts the
    windows that the rank has ended.
    """

    rank: int
    num_forwards: int
    kinds: str
    num_windows: int = _NUM_FIRST_WINDOWS

    def kind(self, number: int) -> str | None:
        """Returns the kind of forward `number` (from 0); None if the log does not contain it yet or any more."""
        index = number - (self.num_forwards - len(self.kinds))
        return self.kinds[index] if 0 <= index < len(self.kinds) else None


def find_divergence(logs: Sequence[ForwardLog]) -> tuple[int, int, str] | None:
    """Returns (number, rank, what) of the first forward whose kind differs between ranks, or None.

    The named rank is the one in the minority; of two ranks, the one that is not training, since all ranks should train.
    """
    # Only forwards whose kind is still in every rank's log, since each log keeps a bounded number of forwards.
    first = max(log.num_forwards - len(log.kinds) for log in logs)
    for number in range(first, min(log.num_forwards for log in logs)):
        kinds = {log.rank: log.kind(number) for log in logs}
        if len(set(kinds.values())) > 1:
            counts = list(kinds.values())
            odd = min(kinds, key=lambda rank: (counts.count(kinds[rank]), kinds[rank] == "t"))
            return number, odd, _KIND_NAMES[kinds[odd] or "?"]
    return None


def find_leader(logs: Sequence[ForwardLog]) -> tuple[int, int] | None:
    """Returns (number, rank) of the forward that one rank has entered and another has not, or None.

    The result is also None while a rank has not ended its first windows.
    """
    if min(log.num_windows for log in logs) < _NUM_FIRST_WINDOWS:
        return None
    ahead = max(logs, key=lambda log: log.num_forwards)
    behind = min(log.num_forwards for log in logs)
    return (behind, ahead.rank) if ahead.num_forwards > behind else None


_KIND_NAMES = {"t": "training", "e": "without gradients", "g": "in eval mode with gradients", "?": "unknown"}


def interval_seconds(num_ranks: int) -> float:
    """Returns the interval between two requests of each of `num_ranks` ranks to the store. Pure."""
    return max(_INTERVAL_SECONDS, num_ranks / _RANKS_PER_SECOND)


class LogStore(Protocol):
    """The part of `torch.distributed.Store` that is used here."""

    def set(self, key: str, value: str, /) -> object:
        """Sets the value of a key."""

    def check(self, keys: list[str], /) -> bool:
        """Returns whether all keys exist."""

    def get(self, key: str, /) -> bytes:
        """Returns the value of a key."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Returns the values of several keys in one request."""


class LogExchange:
    """The logs of all ranks that run the same forwards, and the verdict on them, in a store.

    Args:
        store: Serves all ranks.
        rank: This rank.
        ranks: The ranks that run the same forwards, including this one. The first of them compares the logs.
    """

    def __init__(self, store: LogStore, rank: int, ranks: Sequence[int]) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._keys = [f"log/{other}" for other in ranks]
        self._verdict_key = f"verdict/{ranks[0]}"
        self._is_complete = False

    @property
    def is_judge(self) -> bool:
        """Whether this rank reads the logs of all ranks."""
        return self._rank == self._ranks[0]

    def publish(self, log: ForwardLog) -> None:
        """Sets this rank's log."""
        self._store.set(f"log/{self._rank}", f"{log.num_forwards} {log.num_windows} {log.kinds}")

    def read_logs(self) -> list[ForwardLog]:
        """Returns the logs of all ranks; empty as long as a rank has not published a log."""
        # Reading a missing key would wait for it, and would end the watch after the store's timeout.
        self._is_complete = self._is_complete or self._store.check(self._keys)
        if not self._is_complete:
            return []
        logs = []
        for rank, entry in zip(self._ranks, self._store.multi_get(self._keys), strict=True):
            num_forwards, num_windows, kinds = entry.decode().split(" ")
            logs.append(ForwardLog(rank, int(num_forwards), kinds, int(num_windows)))
        return logs

    def send_verdict(self, verdict: str) -> None:
        """Sets the verdict, which all ranks then read."""
        self._store.set(self._verdict_key, verdict)

    def read_verdict(self) -> str | None:
        """Returns the verdict, if there is one."""
        return self._store.get(self._verdict_key).decode() if self._store.check([self._verdict_key]) else None


class DesyncWatchdog:
    """Watches the forwards of the sharded root in `module` on all ranks; see the module's docstring.

    Args:
        module: Holds one root that `fully_shard` was applied to.
        desync_seconds: How long a rank may be ahead of another, once each has ended its first windows.
        ranks: The ranks that run the same forwards, including this one.
    """

    def __init__(self, module: nn.Module, desync_seconds: float, ranks: Sequence[int]) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._interval_seconds = interval_seconds(self._world_size)
        self._seconds = desync_seconds
        self._num_forwards = self._num_windows = 0
        self._kinds: deque[str] = deque(maxlen=_NUM_KINDS_KEPT)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="desync-watchdog", daemon=True)
        root = next(child for child in module.modules() if isinstance(child, FSDPModule))
        assert isinstance(root, nn.Module)
        # Before FSDP's own hook, which already waits for the other ranks.
        self._hook = root.register_forward_pre_hook(self._count, prepend=True)
        self._leader: tuple[int, int] | None = None
        self._leads_since = 0.0
        self._exchange = LogExchange(self._meet(), self._rank, ranks)

    def _meet(self) -> TCPStore:
        """Opens a store on a port that the system picks, and sends its address to all ranks. Every rank calls it."""
        # A store of its own and not the process group's: a thread that reads from that one could block the store's
        # single connection while the training thread needs it for a new group.
        timeout = timedelta(seconds=30)
        address: list[Any] = [None]
        store = None
        if self._rank == 0:
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            store = TCPStore(host, 0, self._world_size, is_master=True, timeout=timeout, wait_for_workers=False)
            address = [(host, store.port)]
        dist.broadcast_object_list(address, src=0)
        host, port = address[0]
        return store or TCPStore(host, port, self._world_size, is_master=False, timeout=timeout)

    def start(self) -> None:
        """Starts watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stops watching. Does not wait for other ranks."""
        self._hook.remove()
        self._stopped.set()
        self._thread.join(timeout=10 * self._interval_seconds)

    def end_window(self) -> None:
        """Counts a window that this rank has ended. Called by the training thread."""
        self._num_windows += 1

    def _count(self, module: nn.Module, _: Any) -> None:
        kind = ("t" if module.training else "g") if torch.is_grad_enabled() else "e"
        # Count and kind change together: otherwise the thread could read the newest kind with the previous count.
        with self._lock:
            self._kinds.append(kind)
            self._num_forwards += 1

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval_seconds):
            try:
                with self._lock:
                    own = ForwardLog(self._rank, self._num_forwards, "".join(self._kinds), self._num_windows)
                self._exchange.publish(own)
                verdict = self._judge() if self._exchange.is_judge else self._exchange.read_verdict()
            except (RuntimeError, ValueError, dist.DistStoreError):
                # Rank 0, which serves the store, has ended and has printed the reason itself.
                return
            if verdict is not None:
                self._end(verdict)

    def _judge(self) -> str | None:
        """Returns the desync between the ranks' forwards, after sending it to the others; None if there is none."""
        logs = self._exchange.read_logs()
        if not logs:
            return None
        verdict = None
        divergence = find_divergence(logs)
        leader = find_leader(logs)
        if leader != self._leader:
            self._leader, self._leads_since = leader, time.monotonic()
        if divergence is not None:
            number, rank, kind = divergence
            verdict = f"rank {rank} entered forward {number} ({kind}) alone, while the others ran another one"
        elif leader is not None and time.monotonic() - self._leads_since > self._seconds:
            number, rank = leader
            verdict = f"rank {rank} has waited in forward {number} for {self._seconds:g} s; not all ranks entered it"
        if verdict is not None:
            self._exchange.send_verdict(verdict)
        return verdict

    def _end(self, verdict: str) -> None:
        """Ends this process with the reason; the other ranks read the same verdict."""
        frame = sys._current_frames().get(self._main_thread)
        stack = [] if frame is None else traceback.extract_stack(frame)
        ours = [line for line in stack if not any(path in line.filename for path in _FOREIGN_PATHS)]
        where = f"; this rank is in {ours[-1].name} ({ours[-1].filename}:{ours[-1].lineno})" if ours else ""
        sys.stderr.write(
            f"genesis: error: [rank {self._rank}] {verdict}{where}. Under sharding every rank must run every forward: "
            f"sample on all ranks, or from a saved checkpoint in another process\n"
        )
        sys.stderr.flush()
        if self._rank == 0:
            # Rank 0 serves the store, so the other ranks must read the verdict first.
            time.sleep(4 * self._interval_seconds)
        # Not sys.exit, which ends this thread alone: the main thread hangs in a collective.
        os._exit(EXIT_STATUS)
