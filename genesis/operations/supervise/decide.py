"""Decides what follows the end of an attempt: a pure function of all ends, the progress between them and the policy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from genesis.base.errors import numbered
from genesis.data.skipped import Ranges
from genesis.operations.supervise.ends import ENDS, EXIT_REQUEUE, EndClass
from genesis.operations.supervise.skips import NO_SKIPS, Blame, Skips

ActionKind = Literal["restart", "stop", "requeue"]
OnDrift = Literal["stop", "allow", "fresh"]

_MAX_ROLL_BACKS: Final = 2
_MAX_DATA_RETRIES: Final = 1
_NUM_REPLAYS: Final = 1
_MAX_HALVINGS: Final = 2
_MAX_DELAY_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Policy:
    """What the user consents to beforehand.

    Args:
        max_ends_without_progress: So many ends without a new checkpoint between them stop the run.
        on_drift: What to do if the recipe is not that of the newest checkpoint.
        max_crashes: So many crashes in all stop the run; None for no limit.
        may_skip_data: So many windows may be skipped in the whole run.
    """

    max_ends_without_progress: int = 5
    on_drift: OnDrift = "stop"
    max_crashes: int | None = None
    may_skip_data: int = 0


@dataclass(frozen=True)
class PastEnd:
    """One end of an attempt.

    Args:
        end_class: Its class.
        step: The largest step that the attempt reached; None if it did not get to train.
        saved_step: Step of the newest checkpoint at that time; 0 for none.
        blame: The windows of data that may have caused it; None if they are not known.
    """

    end_class: EndClass
    step: int | None
    saved_step: int
    blame: Blame | None = None


@dataclass(frozen=True)
class Action:
    """What the supervisor does next.

    Args:
        kind: Restart, stop, or exit for the queue.
        text: The action in a few words, for people.
        exit_status: The status with which the supervisor exits; None for a restart.
        delay_seconds: Wait before the restart, where the last ones made no progress.
        checkpoints_back: How many committed checkpoints to go back from the newest.
        micro_batch_divisor: By what to divide the size of micro-batches.
        waits_for_space: Whether to wait until the disk has space again.
        takes_new_port: Whether the next attempt must not use the port of the last.
        is_fresh: Whether the next attempt starts from scratch, with the checkpoints so far moved aside.
        before_step: The checkpoint must be none of a later step; None for no limit.
        skips: Positions that are skipped from now on, beside those before.
    """

    kind: ActionKind
    text: str
    exit_status: int | None = None
    delay_seconds: float = 0.0
    checkpoints_back: int = 0
    micro_batch_divisor: int = 1
    waits_for_space: bool = False
    takes_new_port: bool = False
    is_fresh: bool = False
    before_step: int | None = None
    skips: Ranges = ()


def decide(history: Sequence[PastEnd], policy: Policy, skips: Skips = NO_SKIPS) -> Action:
    """Returns what follows the last end of `history`, in a run that has skipped these data.

    Example:
        >>> decide([PastEnd("lost_rank", 12, 10)], Policy()).text
        'restart from the newest checkpoint'
    """
    last = history[-1]
    if last.end_class == "preempted":
        return Action("requeue", "saved; exit for the queue", EXIT_REQUEUE)
    if last.end_class == "user_mistake":
        return _stop(last.end_class, "stop: the same start would fail again")
    if last.end_class == "recipe_drift":
        return _decide_drift(history, policy)
    stuck = _count_without_progress(history)
    if policy.max_crashes is not None and len(history) >= policy.max_crashes:
        return _stop(last.end_class, f"stop: {numbered(len(history), 'crashes')}, the limit of --max_crashes")
    if stuck >= policy.max_ends_without_progress:
        return _stop(last.end_class, f"stop: {stuck} ends without a new checkpoint between them")
    return _restart(history, policy, skips, _delay(stuck))


def _restart(history: Sequence[PastEnd], policy: Policy, skips: Skips, delay_seconds: float) -> Action:
    last = history[-1]
    same = _count_same(history)
    text = "restart from the newest checkpoint" if last.saved_step else "restart from the beginning"
    action = Action("restart", text, delay_seconds=delay_seconds)
    match last.end_class:
        case "port_in_use":
            action = Action("restart", "restart on another port", takes_new_port=True)
        case "disk_full":
            action = Action("restart", "wait for disk space, then restart", waits_for_space=True)
        case "corrupt_data" if same > _MAX_DATA_RETRIES:
            action = _stop(last.end_class, "stop: the shard is still damaged")
        case "non_finite":
            action = _decide_non_finite(last, same, policy, skips, delay_seconds)
        case "out_of_memory_in_step":
            action = _decide_memory(last, _count_memory(history), policy, skips, delay_seconds)
    return action


def _decide_non_finite(last: PastEnd, same: int, policy: Policy, skips: Skips, delay_seconds: float) -> Action:
    back = min(same, _MAX_ROLL_BACKS)
    text = f"roll back by {numbered(back, 'checkpoints')}"
    action = Action("restart", text, delay_seconds=delay_seconds, checkpoints_back=back)
    if last.blame is not None:  # checkpoints of the storm itself would begin in it again
        action = replace(action, before_step=last.blame.before_step)
    # The budget limits how often data are skipped, and the ends without progress how often in one place.
    skipping = _skip(action, last, policy, skips)
    if skipping is not None:
        return skipping
    if same > _MAX_ROLL_BACKS:
        text = f"stop: not finite after {_MAX_ROLL_BACKS} roll backs"
        return _stop(last.end_class, text + skips.explain(last.blame, policy.may_skip_data))
    return action


def _decide_memory(last: PastEnd, same: int, policy: Policy, skips: Skips, delay_seconds: float) -> Action:
    if same <= _NUM_REPLAYS:
        return Action("restart", "replay the step", delay_seconds=delay_seconds)
    halvings = min(same - _NUM_REPLAYS, _MAX_HALVINGS)
    divisor = 2**halvings
    text = f"replay the step in micro-batches of 1/{divisor} of the size"
    action = Action("restart", text, delay_seconds=delay_seconds, micro_batch_divisor=divisor)
    if same - _NUM_REPLAYS <= _MAX_HALVINGS:
        return action
    skipping = _skip(replace(action, text="restart from the newest checkpoint"), last, policy, skips)
    if skipping is not None:
        return skipping
    text = "stop: out of memory with smaller micro-batches, too"
    return _stop(last.end_class, text + skips.explain(last.blame, policy.may_skip_data))


def _skip(action: Action, last: PastEnd, policy: Policy, skips: Skips) -> Action | None:
    """Returns the action with the data skipped that may have caused the end; None if that is not allowed."""
    allowed = skips.allow(last.blame, policy.may_skip_data)
    if last.blame is None or not allowed:
        return None
    return replace(action, text=f"{action.text} and {skips.describe(last.blame, policy.may_skip_data)}", skips=allowed)


def _decide_drift(history: Sequence[PastEnd], policy: Policy) -> Action:
    if policy.on_drift == "fresh" and _count_same(history) == 1:
        return Action("restart", "start from scratch, earlier checkpoints moved aside", is_fresh=True)
    if policy.on_drift == "allow":
        return _stop("recipe_drift", "stop: a part of the recipe changed that cannot change within a run")
    return _stop("recipe_drift", "stop: the recipe is not that of the checkpoint")


def _stop(end_class: EndClass, text: str) -> Action:
    return Action("stop", text, ENDS[end_class].exit_status)


def _count_without_progress(history: Sequence[PastEnd]) -> int:
    """Returns how many ends, up to the last, came without a newer checkpoint between them."""
    number = 1
    for before, after in zip(reversed(history[:-1]), reversed(history[1:]), strict=True):
        if after.saved_step > before.saved_step:
            break
        number += 1
    return number


def _count_same(history: Sequence[PastEnd]) -> int:
    """Returns how many ends, up to the last, are of its class without a newer checkpoint between them."""
    number = 0
    for end in reversed(history[-_count_without_progress(history) :]):
        if end.end_class != history[-1].end_class:
            break
        number += 1
    return number


def _count_memory(history: Sequence[PastEnd]) -> int:
    """Returns how many ends, up to the last, are out of memory in the same step or an earlier one."""
    number, last = 0, history[-1]
    for end in reversed(history):
        if end.end_class != last.end_class or (end.step or 0) < (last.step or 0):
            break
        number += 1
    return number


def _delay(num_without_progress: int) -> float:
    """Returns how long to wait before a restart: not at all at first, then twice as long each time."""
    return 0.0 if num_without_progress <= 2 else min(_MAX_DELAY_SECONDS, 2.0 ** (num_without_progress - 3))
