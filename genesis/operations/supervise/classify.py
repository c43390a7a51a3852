"""Assigns a class to the end of an attempt, from what is left of its ranks. Pure: a first cause wins."""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from genesis.operations.supervise.ends import CONSEQUENCE_STATUSES, CONSEQUENCES, ENDS, EndClass, Signature

_MAX_REASON: Final = 400
_OUT_OF_MEMORY: Final = frozenset({"out_of_memory_at_start", "out_of_memory_in_step", "out_of_memory_at_save"})
_SAVE_FAILED: Final = re.compile(r"SaveFailedError|the save of step|save .* failed", re.IGNORECASE)
_WARNING: Final = re.compile(r"\bwarning\b|\w+Warning:", re.IGNORECASE)
_KILLED: Final = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGSEGV, -signal.SIGBUS)
_MISSING_RANK: Final = re.compile(r"\brank (\d{1,7}) is missing: ")
_OTHER_PROCESS: Final = re.compile(r"Process (\d+) has ([\d.]+ \wiB) memory in use")


@dataclass(frozen=True)
class RankEnd:
    """What is left of a rank.

    Args:
        rank: The rank.
        status: Its exit status, negative for a signal; None if it still ran when the supervisor ended it.
        moment_seconds: When it failed or ended, by the monotonic clock.
        output: The end of its output.
        error_class: The class of the error in its `failed` event; empty without one.
        error_text: The text of that error.
        failed_step: The last step of a rank that reported its failure by a heartbeat; None without one.
        failed_clocks: Exact counts of that heartbeat.
    """

    rank: int
    status: int | None
    moment_seconds: float
    output: str = ""
    error_class: str = ""
    error_text: str = ""
    failed_step: int | None = None
    failed_clocks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """What is left of an attempt.

    Args:
        ranks: Its ranks.
        has_trained: Whether a rank had trained a step in this attempt, or begun the first one after a restore.
        hung_rank: The rank that stopped first, if the supervisor ended the attempt because it hung.
        hung_seconds: How long that rank had been silent; None if the attempt did not hang.
        stop_reason: Why the supervisor asked the ranks to save and stop; None if it did not.
        oom_kills: How often the kernel's out-of-memory killer ended a process during the attempt.
        is_disk_full: Whether the run's disk was full when the end was noticed; no rank could then write its reason.
    """

    ranks: Sequence[RankEnd]
    has_trained: bool
    hung_rank: int | None = None
    hung_seconds: float | None = None
    stop_reason: str | None = None
    oom_kills: int = 0
    is_disk_full: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """The class of an end, or None for a run that is complete.

    Args:
        end_class: The class; None if all ranks ended with status 0 by themselves.
        rank: The rank that failed first; None if no rank is to blame.
        reason: The evidence in one line.
    """

    end_class: EndClass | None
    rank: int | None
    reason: str


def classify(evidence: Evidence) -> Diagnosis:
    """Returns the class of an end, with the rank that failed first and the evidence.

    Example:
        >>> killed, other = RankEnd(1, -9, 10.0), RankEnd(0, 1, 12.0, "RuntimeError: Connection closed by peer")
        >>> classify(Evidence((other, killed), has_trained=True))
        Diagnosis(end_class='lost_rank', rank=1, reason='rank 1 was killed by SIGKILL')
    """
    if evidence.stop_reason is not None:
        return Diagnosis("preempted", None, evidence.stop_reason)
    if evidence.is_disk_full:
        return Diagnosis("disk_full", None, "the run's disk is full: no heartbeat, event or checkpoint can be written")
    if evidence.hung_seconds is not None:
        where = "" if evidence.hung_rank is None else f"rank {evidence.hung_rank} "
        return Diagnosis(
            "hang", evidence.hung_rank, f"{where}made no progress for {evidence.hung_seconds:.0f} s".strip()
        )
    failed = sorted(
        (end for end in evidence.ranks if end.status not in (0, None)), key=lambda end: (end.moment_seconds, end.rank)
    )
    if not failed:
        return Diagnosis(None, None, "all ranks ended with status 0")
    causes = [end for end in failed if not _is_consequence(end)]
    first = (causes or failed)[0]
    if not causes:
        # A rank that vanished without a status of its own: the others name it, or nobody does.
        return Diagnosis("lost_rank", first.rank, _describe(first, _last_line(first)))
    return _classify_rank(first, evidence)


def _classify_rank(end: RankEnd, evidence: Evidence) -> Diagnosis:
    # A warning is about something that the rank survived, and a rank that was killed did not end by what it printed.
    lines = [line for line in end.output.splitlines() if not _WARNING.search(line)]
    output = "" if end.status in _KILLED else "\n".join(lines)
    text = f"{end.error_class}: {end.error_text}\n{output}"
    for part in (f"{end.error_class}: {end.error_text}", output):
        for name, rule in ENDS.items():
            line = _find(rule.signatures, part)
            if line is not None:
                name = _choose_memory_class(text, evidence) if name in _OUT_OF_MEMORY else name
                missing = _MISSING_RANK.search(line) if name == "hang" else None
                rank = end.rank if missing is None else int(missing[1])
                return Diagnosis(name, rank, _describe(end, line) + _name_other_processes(text))
    if end.status in (-signal.SIGKILL, 137) and evidence.oom_kills:
        reason = (
            f"{_describe(end, '')}; the kernel's out-of-memory killer ended {evidence.oom_kills} processes meanwhile"
        )
        return Diagnosis("host_out_of_memory", end.rank, reason)
    for name, rule in ENDS.items():
        if end.status in rule.statuses:
            return Diagnosis(name, end.rank, _describe(end, "" if (end.status or 0) < 0 else _last_line(end)))
    return Diagnosis("unknown", end.rank, _describe(end, _last_line(end)))


def _choose_memory_class(text: str, evidence: Evidence) -> EndClass:
    if _SAVE_FAILED.search(text):
        return "out_of_memory_at_save"
    return "out_of_memory_in_step" if evidence.has_trained else "out_of_memory_at_start"


def _name_other_processes(text: str) -> str:
    found = dict(_OTHER_PROCESS.findall(text))
    return "".join(f"; process {pid} holds {size} of the device" for pid, size in found.items())


def _is_consequence(end: RankEnd) -> bool:
    if end.status in CONSEQUENCE_STATUSES:
        return True
    # A rank's own error comes last in its output, so that only the end of the text decides.
    text = f"{end.error_class}: {end.error_text}\n{_last_line(end)}"
    return _find(CONSEQUENCES, text) is not None


def _find(signatures: Sequence[Signature], text: str) -> str | None:
    """Returns the line in which one of the signatures is found."""
    for signature in signatures:
        found = re.search(signature.pattern, text, re.IGNORECASE)
        if found is not None:
            start = text.rfind("\n", 0, found.start()) + 1
            end = text.find("\n", found.end())
            return text[start : None if end < 0 else end].strip()
    return None


def _last_line(end: RankEnd) -> str:
    lines = [line.strip() for line in end.output.splitlines() if line.strip()]
    if end.error_text:
        return f"{end.error_class}: {end.error_text}"
    return lines[-1] if lines else ""


def _describe(end: RankEnd, line: str) -> str:
    if end.status is not None and end.status < 0:
        how = f"was killed by {_name_signal(-end.status)}"
    else:
        how = f"ended with status {end.status}"
    line = " ".join(line.removeprefix(": ").removeprefix("genesis: error: ").split())
    return (f"rank {end.rank} {how}" + (f": {line}" if line else ""))[:_MAX_REASON]


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
