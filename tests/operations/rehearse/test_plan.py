"""The plan of kills is a function of its seed, and a kill is due when what it was aimed at is seen."""

from dataclasses import replace

import pytest

from genesis.operations.rehearse.plan import PHASES, Aim, Pace, Phase, PlannedKill, Sight, Trigger, Victim, plan_kills

VICTIMS: tuple[Victim, ...] = ("group", "rank", "writer")
PACE = Pace(start=10.0, step=2.0, save=4.0, slowest=5.0)
STAGING = ("step-00000030.staging-a",)


def plan(seed: int, num_kills: int, victims: tuple[Victim, ...] = VICTIMS) -> list[PlannedKill]:
    return plan_kills(seed, num_kills, max_steps=60, every_n_steps=10, victims=victims)


def test_a_seed_gives_the_same_kills_and_another_gives_others() -> None:
    assert plan(5, 20) == plan(5, 20)
    assert plan(5, 20) != plan(6, 20)


@pytest.mark.parametrize("num_kills", [1, 3, 50])
def test_kills_come_in_the_order_of_their_steps_within_the_run(num_kills: int) -> None:
    for seed in range(50):
        steps = [kill.step for kill in plan(seed, num_kills)]
        assert len(steps) == num_kills
        assert steps == sorted(steps)
        assert set(steps) <= set(range(1, 60))


def test_half_of_the_kills_fall_into_saves_and_some_into_restarts() -> None:
    kills = plan(1, 50)
    aims = [kill.aim for kill in kills]
    assert (aims.count("save"), aims.count("start"), aims.count("step")) == (25, 12, 13)
    assert all(kill.step % 10 == 0 for kill in kills if kill.aim == "save")


def test_fifty_kills_hit_all_ranks_the_first_and_the_last_in_every_phase_of_a_start() -> None:
    starts = [kill for kill in plan(1, 50) if kill.aim == "start"]
    chosen = [("group", 0.0), ("rank", 0.0), ("rank", 0.999)]
    assert {(kill.phase, kill.victim, kill.draw) for kill in starts} == {
        (phase, victim, draw) for phase in PHASES for victim, draw in chosen
    }
    assert {kill.phase for kill in plan(1, 50) if kill.aim != "start"} == {None}


def test_a_run_of_one_rank_is_killed_in_the_phases_that_its_starts_have() -> None:
    starts = [kill for kill in plan(1, 50, ("group", "writer")) if kill.aim == "start"]
    assert {kill.victim for kill in starts} == {"group"}
    assert {kill.phase for kill in starts} == {"imports", "restore", "first step"}


def test_steps_are_spread_over_the_whole_run() -> None:
    steps = {kill.step for seed in range(1000) for kill in plan(seed, 6) if kill.aim == "step"}
    assert steps == set(range(1, 60))


def test_every_kind_of_victim_takes_its_turn() -> None:
    for seed in range(20):
        assert {kill.victim for kill in plan(seed, 3)} == set(VICTIMS)
        assert {kill.victim for kill in plan(seed, 3, ("group",))} == {"group"}


def trigger(aim: Aim, fraction: float = 0.5) -> Trigger:
    return Trigger(PlannedKill("group", aim, step=30, fraction=fraction, draw=0.0), PACE, {})


def test_a_kill_within_a_step_is_due_its_fraction_of_a_step_after_the_step_is_logged() -> None:
    step = trigger("step")
    assert not step.is_due(Sight(100.0, None))
    assert not step.is_due(Sight(100.0, 29))
    assert not step.is_due(Sight(101.0, 30))
    assert not step.is_due(Sight(101.9, 30))
    assert step.is_due(Sight(102.0, 30))


def test_a_kill_within_a_step_that_takes_longer_than_others_may_fall_anywhere_in_it() -> None:
    # Validation, say.
    step = Trigger(PlannedKill("group", "step", step=30, fraction=0.5, draw=0.0), PACE, {30: 40.0})
    assert not step.is_due(Sight(100.0, 30))
    assert not step.is_due(Sight(119.0, 30))
    assert step.is_due(Sight(120.0, 30))


def test_a_kill_within_a_step_that_was_overrun_is_due_still() -> None:
    assert trigger("step", fraction=0.0).is_due(Sight(100.0, 34))


def test_a_kill_in_a_save_waits_for_that_save_to_be_seen() -> None:
    save = trigger("save")
    early = replace(Sight(90.0, 19), staging=("step-00000020.staging-a",))
    assert not save.is_due(early)
    assert not save.is_due(Sight(95.0, 29))
    assert not save.is_due(Sight(100.0, 29, STAGING))
    assert save.is_due(Sight(102.0, 30, STAGING))


def test_a_kill_in_a_save_that_was_missed_takes_the_next_save() -> None:
    save = trigger("save", fraction=0.0)
    assert not save.is_due(Sight(100.0, 33))
    assert save.is_due(Sight(120.0, 39, ("step-00000040.staging-b",)))


def test_what_an_earlier_training_left_in_flight_is_no_save_of_this_one() -> None:
    assert not trigger("save", fraction=0.0).is_due(Sight(1.0, None, STAGING))


def start_trigger(phase: Phase) -> Trigger:
    return Trigger(PlannedKill("rank", "start", step=30, fraction=0.5, draw=0.0, phase=phase), PACE, {})


def test_a_kill_during_imports_is_due_its_fraction_of_them_after_the_launch() -> None:
    imports = start_trigger("imports")
    assert not imports.is_due(Sight(0.0, None))
    assert not imports.is_due(Sight(1.9, None))
    assert imports.is_due(Sight(2.0, None))


@pytest.mark.parametrize(("phase", "delay_seconds"), [("rendezvous", 2.0), ("restore", 1.0), ("first step", 1.0)])
def test_a_kill_in_a_later_phase_of_a_start_waits_for_that_phase(phase: Phase, delay_seconds: float) -> None:
    trigger = start_trigger(phase)
    assert not trigger.is_due(Sight(50.0, None, phase="imports"))
    assert not trigger.is_due(Sight(60.0, None, phase=phase))
    assert not trigger.is_due(Sight(60.0 + 0.9 * delay_seconds, None, phase=phase))
    assert trigger.is_due(Sight(60.0 + delay_seconds, None, phase=phase))
    assert start_trigger("rendezvous").is_due(Sight(70.0, None, phase="first step")) is False


def test_a_kill_in_a_start_that_was_missed_is_due_at_the_first_step() -> None:
    assert start_trigger("restore").is_due(Sight(3.0, 31))
