"""The decision: what follows an end, by the ends before it and the progress between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.operations.supervise.decide import PastEnd, Policy, decide
from genesis.operations.supervise.ends import ENDS, EndClass


def ends(*classes: EndClass, step: int = 12, saved: int = 10) -> list[PastEnd]:
    return [PastEnd(name, step, saved) for name in classes]


@pytest.mark.parametrize(
    "name", ["lost_rank", "hang", "native_crash", "unknown", "interrupted", "communication_timeout"]
)
def test_a_run_restarts_from_its_newest_checkpoint(name: EndClass) -> None:
    action = decide(ends(name), Policy())
    assert (action.kind, action.text, action.delay_seconds) == ("restart", "restart from the newest checkpoint", 0.0)
    assert decide(ends(name, saved=0), Policy()).text == "restart from the beginning"


def test_a_mistake_of_the_user_stops_at_once() -> None:
    action = decide(ends("user_mistake"), Policy())
    assert (action.kind, action.exit_status) == ("stop", 2)


def test_a_preemption_leaves_the_run_to_its_queue() -> None:
    action = decide(ends("lost_rank", "preempted"), Policy(max_ends_without_progress=1))
    assert (action.kind, action.exit_status) == ("requeue", 75)


def test_ends_without_a_new_checkpoint_stop_the_run_with_the_status_of_the_last() -> None:
    policy = Policy(max_ends_without_progress=3)
    assert decide(ends("hang", "lost_rank"), policy).kind == "restart"
    action = decide(ends("hang", "lost_rank", "native_crash"), policy)
    assert (action.kind, action.exit_status) == ("stop", ENDS["native_crash"].exit_status)
    assert action.text == "stop: 3 ends without a new checkpoint between them"
    progress = [*ends("hang", "lost_rank"), PastEnd("native_crash", 30, 20)]
    assert decide(progress, policy).kind == "restart"


def test_restarts_without_progress_wait_longer_each_time() -> None:
    delays = [
        decide(ends(*["lost_rank"] * n), Policy(max_ends_without_progress=99)).delay_seconds for n in range(1, 12)
    ]
    assert delays == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_limit_of_crashes_counts_those_with_progress() -> None:
    history = [PastEnd("lost_rank", 10 * n, 10 * n) for n in range(1, 4)]
    assert decide(history, Policy(max_crashes=4)).kind == "restart"
    assert decide(history, Policy(max_crashes=3)).kind == "stop"


@pytest.mark.parametrize(("on_drift", "kind"), [("stop", "stop"), ("allow", "stop"), ("fresh", "restart")])
def test_drift_follows_the_consent_given_beforehand(on_drift, kind: str) -> None:
    action = decide(ends("recipe_drift"), Policy(on_drift=on_drift))
    assert (action.kind, action.is_fresh) == (kind, on_drift == "fresh")
    assert decide(ends("recipe_drift", "recipe_drift"), Policy(on_drift=on_drift)).kind == "stop"


def test_a_step_without_memory_is_replayed_then_cut_smaller_then_given_up() -> None:
    divisors = []
    for number in range(1, 5):
        action = decide(ends(*["out_of_memory_in_step"] * number), Policy())
        divisors.append(action.micro_batch_divisor if action.kind == "restart" else None)
    assert divisors == [1, 2, 4, None]


def test_a_later_step_without_memory_is_another_one() -> None:
    history = [*ends("out_of_memory_in_step", "out_of_memory_in_step"), PastEnd("out_of_memory_in_step", 15, 10)]
    assert decide(history, Policy()).micro_batch_divisor == 1


def test_steps_that_are_not_finite_roll_back_further_each_time() -> None:
    assert decide(ends("non_finite"), Policy()).checkpoints_back == 1
    assert decide(ends("non_finite", "non_finite"), Policy()).checkpoints_back == 2
    assert decide(ends(*["non_finite"] * 3), Policy()).kind == "stop"


def test_a_full_disk_is_waited_for_and_a_taken_port_is_left() -> None:
    assert decide(ends("disk_full"), Policy()).waits_for_space
    assert decide(ends("port_in_use"), Policy()).takes_new_port
    assert decide(ends("corrupt_data"), Policy()).kind == "restart"
    assert decide(ends("corrupt_data", "corrupt_data"), Policy()).kind == "stop"


@given(st.lists(st.builds(PastEnd, st.sampled_from(list(ENDS)), st.integers(0, 5), st.integers(0, 3)), min_size=1))
def test_every_history_has_an_action_and_a_stop_has_a_status(history: list[PastEnd]) -> None:
    policy = Policy(max_ends_without_progress=4)
    action = decide(history, policy)
    assert (action.exit_status is None) == (action.kind == "restart")
    stuck = [*history[:-1], *[history[-1]] * 4]
    assert decide(stuck, policy).kind != "restart"
