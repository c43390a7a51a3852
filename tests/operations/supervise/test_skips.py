"""`--may_skip_data`: which windows are blamed, what the budget allows, and supervised runs that skip planted data."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from genesis.base.errors import UserError
from genesis.base.processes import Mark
from genesis.base.run_directory import RunDirectory
from genesis.cli.supervise import main as supervise_main
from genesis.operations.rehearse.compare import compare_runs
from genesis.operations.supervise.crashes import CrashRecord, read_crashes, write_crash
from genesis.operations.supervise.decide import Action, PastEnd, Policy, decide
from genesis.operations.supervise.ends import EndClass
from genesis.operations.supervise.options import SuperviseOptions
from genesis.operations.supervise.plain import decode
from genesis.operations.supervise.plan import Plan, RecipeFacts, build_jobs
from genesis.operations.supervise.run_state import RunState
from genesis.operations.supervise.skips import NO_SKIPS, Blame, Skips, find_blame
from genesis.operations.supervise.state import read_skips, write_skips
from genesis_callbacks.base.event_reader import read_events
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import run_genesis
from tests.operations.supervise.supervised import Run

STORM = Blame(first=88, stop=112, global_batch_size=8, before_step=11)
MEMORY = Blame(first=96, stop=104, global_batch_size=8, before_step=12)


def storm(number: int = 1, blame: Blame | None = STORM) -> list[PastEnd]:
    return [PastEnd("non_finite", 14, 10, blame)] * number


def without_memory(number: int, blame: Blame | None = MEMORY) -> list[PastEnd]:
    return [PastEnd("out_of_memory_in_step", 12, 10, blame)] * number


# ---- which data are to blame


def test_a_storm_is_blamed_on_all_windows_since_the_last_update() -> None:
    assert find_blame("non_finite", 14, {"data_position": 112, "last_update_step": 11}, 8) == STORM


def test_a_step_without_memory_is_blamed_on_its_own_window() -> None:
    assert find_blame("out_of_memory_in_step", 12, {"data_position": 96, "last_update_step": 12}, 8) == MEMORY


@pytest.mark.parametrize("name", ["hang", "lost_rank", "out_of_memory_at_save", "corrupt_data", "user_mistake"])
def test_no_other_end_is_blamed_on_data(name: EndClass) -> None:
    assert find_blame(name, 14, {"data_position": 112, "last_update_step": 11}, 8) is None


@pytest.mark.parametrize("clocks", [{}, {"data_position": 112}, {"data_position": 112, "last_update_step": 14}])
def test_nothing_is_blamed_where_a_rank_has_not_reported_what_it_takes(clocks: dict[str, int]) -> None:
    assert find_blame("non_finite", 14, clocks, 8) is None
    assert find_blame("non_finite", 14, {"data_position": 112, "last_update_step": 11}, 0) is None


# ---- the decision


def test_without_consent_a_storm_only_rolls_back() -> None:
    action = decide(storm(), Policy())
    assert (action.skips, action.checkpoints_back, action.text) == ((), 1, "roll back by 1 checkpoint")
    assert "--may_skip_data" not in decide(storm(3), Policy()).text


def test_with_consent_a_storm_rolls_back_and_skips_its_windows() -> None:
    action = decide(storm(), Policy(may_skip_data=10))
    assert (action.kind, action.skips, action.checkpoints_back, action.before_step) == ("restart", ((88, 112),), 1, 11)
    assert action.text == (
        "roll back by 1 checkpoint and skip 3 windows of data, positions 88 to 111 (3 of --may_skip_data 10 used)"
    )


def test_storms_are_skipped_as_long_as_the_budget_lasts_and_then_the_run_stops() -> None:
    skips, history, policy = NO_SKIPS, [], Policy(may_skip_data=7, max_ends_without_progress=99)
    backs = []
    for first in (88, 112, 136, 160, 184):
        history.append(PastEnd("non_finite", 14, 10, Blame(first, first + 24, 8, 11)))
        action = decide(history, policy, skips)
        if action.skips:
            skips = skips.add(action.skips, 8)
        backs.append((action.kind, action.checkpoints_back, bool(action.skips)))
    assert backs[:2] == [("restart", 1, True), ("restart", 2, True)]
    assert backs[2:] == [("stop", 0, False)] * 3
    assert (skips.positions, skips.num_windows) == (((88, 136),), 6)
    assert action.exit_status == 88
    assert action.text == (
        "stop: not finite after 2 roll backs; to skip 3 more windows of data, positions 184 to 207, --may_skip_data 7 "
        "is too few: 6 are used"
    )


def test_a_storm_larger_than_the_budget_rolls_back_as_without_consent() -> None:
    policy = Policy(may_skip_data=2)
    assert [decide(storm(number), policy).kind for number in (1, 2, 3)] == ["restart", "restart", "stop"]
    assert not decide(storm(), policy).skips
    assert decide(storm(3, None), policy).text.endswith("no rank has reported which data to skip")


def test_data_that_are_skipped_already_are_not_paid_for_again() -> None:
    skips = Skips(((80, 104),), 3)
    action = decide(storm(), Policy(may_skip_data=4), skips)
    assert (action.skips, skips.add(action.skips, 8)) == (((104, 112),), Skips(((80, 112),), 4))
    assert action.text.endswith("and skip 1 window of data, positions 104 to 111 (4 of --may_skip_data 4 used)")
    inside = Skips(((96, 104),), 1)
    assert decide(storm(), Policy(may_skip_data=9), inside).skips == ((88, 96), (104, 112))
    action = decide(storm(3), Policy(may_skip_data=99), Skips(((0, 200),), 25))
    assert action.text.endswith("the data at positions 88 to 111 are skipped already")


def test_skips_in_very_many_places_keep_their_count_and_get_more(tmp_path: Path) -> None:
    full = Skips(tuple((first, first + 8) for first in range(1_000, 641_000, 16)), 40_000)
    write_skips(tmp_path, full)
    assert read_skips(tmp_path) == full
    assert decide(storm(), Policy(may_skip_data=10**6), full).skips == ((88, 112),)


def test_a_step_without_memory_is_skipped_after_it_was_cut_smaller() -> None:
    policy = Policy(may_skip_data=1, max_ends_without_progress=9)
    actions = [decide(without_memory(number), policy) for number in range(1, 5)]
    assert [(each.micro_batch_divisor, each.skips) for each in actions] == [
        (1, ()),
        (2, ()),
        (4, ()),
        (4, ((96, 104),)),
    ]
    assert actions[-1].text == (
        "restart from the newest checkpoint and skip 1 window of data, positions 96 to 103 "
        "(1 of --may_skip_data 1 used)"
    )
    assert decide(without_memory(5), policy, NO_SKIPS.add(actions[-1].skips, 8)).kind == "stop"
    assert decide(without_memory(4, None), policy).kind == "stop"


def test_a_roll_back_begins_before_the_storm_even_if_it_was_saved() -> None:
    action = Action("restart", "", checkpoints_back=1, before_step=11)
    assert Plan.follow(Plan(), action, [4, 8, 10, 12, 14]).from_step == 8
    assert Plan.follow(Plan(), action, [12, 14]) == Plan(from_step=12)
    assert Plan.follow(Plan(), replace(action, before_step=0), [4, 8]) == Plan(is_fresh=True)
    assert Plan.follow(Plan(), replace(action, before_step=None), [4, 8, 10, 12, 14]).from_step == 12


# ---- what outlives a supervisor


def test_what_is_skipped_survives_the_supervisor_and_forged_files_do_not_count(tmp_path: Path) -> None:
    assert read_skips(tmp_path) == NO_SKIPS
    skips = Skips(((8, 16), (32, 40)), 2)
    write_skips(tmp_path, skips)
    assert read_skips(tmp_path) == skips
    path = RunDirectory(tmp_path).supervisor / "skips.json"
    for positions in ("[[8]]", "[[16, 8]]", "3", '[["a", "b"]]', "[8]", "[null]"):
        path.write_text(f'{{"positions": {positions}, "num_windows": 2}}')
        assert read_skips(tmp_path) == NO_SKIPS, positions
    for forged in ('{"positions": [], "num_windows": -4}', '{"positions": []}', "[]", "{", ""):
        path.write_text(forged)
        assert read_skips(tmp_path) == NO_SKIPS, forged


def test_skips_that_a_node_describes_are_read_by_itself_and_by_others() -> None:
    skips = Skips(((8, 16), (32, 40)), 2)
    assert decode(Skips, asdict(skips)) == decode(Skips, json.loads(json.dumps(asdict(skips)))) == skips


def test_what_comes_back_from_a_mirror_counts_for_the_budget_and_the_numbers_of_crashes(tmp_path: Path) -> None:
    options = SuperviseOptions(("fit",), tmp_path)
    run = RunState(options, lambda line: None)
    for number in (1, 2):
        write_crash(tmp_path, CrashRecord(number, number, "hang", 0, 13, 1.7e9, "silent", "restart"))
    write_skips(tmp_path, Skips(((8, 16),), 4))
    run.take_restored()
    assert run.skips == Skips(((8, 16),), 4)
    assert run.records.last_number == 2
    assert run.records.history(run.memory.first_crash) == [], "a new machine is a new try"
    # What a full disk has not taken is known nevertheless.
    run.skips = Skips(((8, 16), (24, 32)), 5)
    run.take_restored()
    assert run.skips.num_windows == 5
    run.close()


def test_ranks_are_told_what_to_skip_beside_what_the_recipe_skips(tmp_path: Path) -> None:
    facts = RecipeFacts(str(tmp_path), 1, 1, 2, skip_positions=((0, 8),))
    arguments = [["fit"], tmp_path, facts, Plan(), 1, 29500, Mark("M", "x")]
    (job,) = build_jobs(*arguments, skips=((88, 112),))  # type: ignore[arg-type]
    word, recipe = list(job.arguments)[-2:]
    assert (word, yaml.safe_load(Path(recipe).read_text())) == (
        "--config",
        {"data": {"skip_positions": [[0, 8], [88, 112]]}},
    )
    (job,) = build_jobs(*arguments)  # type: ignore[arg-type]
    assert "--config" not in job.arguments
    many = tuple((first, first + 8) for first in range(1_000, 1_000_000, 16))
    jobs = build_jobs(*arguments, skips=many)  # type: ignore[arg-type]
    assert sum(len(word) for job in jobs for word in job.arguments) < 4096, "they fit into a packet"


@pytest.mark.parametrize("what", ["prompts", "pairs of answers"])
def test_data_that_cannot_be_skipped_are_refused_before_the_start(tmp_path: Path, what: str) -> None:
    facts = RecipeFacts(str(tmp_path), 1, 1, 2, unskippable=what)
    facts.check(tmp_path)
    with pytest.raises(UserError, match=f"--may_skip_data is 3, but this run trains on {what}, which cannot"):
        facts.check(tmp_path, may_skip_data=3)


def test_numbers_of_windows_that_are_none_are_refused_in_one_line() -> None:
    for wrong in ("-1", "many", "1.5", "9" * 40):
        with pytest.raises(UserError, match=r"--may_skip_data: '.*' is not a whole number of at least 0"):
            supervise_main([f"--may_skip_data={wrong}", "--", "fit"])


# ---- real runs


def changes(first: int, stop: int, **arguments: Any) -> dict[str, Any]:
    poison = {"class_path": "tests.operations.supervise.poison.PoisonedData"}
    return {
        "trainer.max_steps": 24,
        "trainer.callbacks": [{**poison, "init_args": {"first": first, "stop": stop, **arguments}}],
        "counters.max_consecutive_skips": 3,
        "schedule.total_updates": 24,
    }


def train_straight(run: Run, corpus: Path, directory: Path, given: dict[str, Any], *options: str) -> Path:
    """Trains the recipe of a run without a supervisor, told what to skip from the start."""
    straight = directory / "straight" / "run"
    straight.parent.mkdir()
    recipe = {"trainer.val_check_interval": 1000, "checkpoint.every_n_steps": 4, **given}
    path = write_recipe(straight.parent / "recipe.yaml", build_recipe(corpus, straight), recipe)
    done = run_genesis("fit", "--config", str(path), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return straight


@pytest.mark.slow
@pytest.mark.process
def test_a_run_with_poisoned_windows_rolls_back_skips_them_and_equals_a_run_told_to_skip_them(
    tiny_corpus: Path, tmp_path: Path
) -> None:
    # Steps 11 to 13, after the checkpoint of step 8; the one of step 12 lies in the storm.
    given = changes(80, 104)
    run = Run(tiny_corpus, tmp_path, given)
    status = run.supervise(policy=Policy(max_ends_without_progress=3, may_skip_data=5))
    assert status == 0, "\n".join(run.lines)
    (crash,) = read_crashes(run.run_dir)
    assert (crash.end_class, crash.step) == ("non_finite", 13)
    assert crash.action == (
        "roll back by 1 checkpoint and skip 3 windows of data, positions 80 to 103 (3 of --may_skip_data 5 used)"
    )
    assert [event.step for event in read_events(run.run_dir) if event.kind == "restored"] == [4]
    assert read_skips(run.run_dir) == Skips(((80, 104),), 3)
    straight = train_straight(run, tiny_corpus, tmp_path, given, "--data.skip_positions", "[[80, 104]]")
    comparison = compare_runs(straight, run.run_dir)
    assert comparison.is_equal, comparison


@pytest.mark.slow
@pytest.mark.process
def test_a_run_that_begins_in_a_storm_begins_again_and_equals_a_run_told_to_skip_it(
    tiny_corpus: Path, tmp_path: Path
) -> None:
    given = changes(0, 48)  # two storms of three windows; the second one is saved, at step 4
    run = Run(tiny_corpus, tmp_path, given)
    status = run.supervise(policy=Policy(max_ends_without_progress=4, may_skip_data=6))
    assert status == 0, "\n".join(run.lines)
    assert not [event for event in read_events(run.run_dir) if event.kind == "restored"]
    assert read_skips(run.run_dir) == Skips(((0, 48),), 6)
    straight = train_straight(run, tiny_corpus, tmp_path, given, "--data.skip_positions", "[[0, 48]]")
    comparison = compare_runs(straight, run.run_dir)
    assert comparison.is_equal, comparison


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.repeat  # storms are skipped as long as the budget lasts
def test_a_budget_that_is_used_up_stops_the_run_and_prints_what_was_tried(tiny_corpus: Path, tmp_path: Path) -> None:
    run = Run(tiny_corpus, tmp_path, changes(80, 128))  # six windows in a row, of which a storm has three
    policy = Policy(max_ends_without_progress=9, may_skip_data=4)
    assert run.supervise(policy=policy) == 88, run.lines
    crashes = read_crashes(run.run_dir)
    assert {crash.end_class for crash in crashes} == {"non_finite"}
    assert "skip 3 windows" in crashes[0].action
    assert all("skip" not in crash.action for crash in crashes[1:-1])
    assert "positions 104 to 127, --may_skip_data 4 is too few: 3 are used" in crashes[-1].action
    tried = [line for line in run.lines if line.startswith("  crash ")]
    assert len(tried) == len(crashes)
    # A new supervisor goes on with what is left of the budget: one window, which three are too many for.
    assert run.supervise(policy=policy) == 88
    assert read_skips(run.run_dir).num_windows == 3


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("first", [80, pytest.param(64, id="first-step-after-a-checkpoint")])
@pytest.mark.repeat  # a step without memory is skipped after it was cut smaller
def test_a_batch_without_memory_is_skipped_in_the_end(tiny_corpus: Path, tmp_path: Path, first: int) -> None:
    run = Run(tiny_corpus, tmp_path, changes(first, first + 8, exhausts_memory=True))
    status = run.supervise(policy=Policy(max_ends_without_progress=9, may_skip_data=1))
    assert status == 0, "\n".join(run.lines)
    actions = [crash.action for crash in read_crashes(run.run_dir)]
    assert actions[:3] == [
        "replay the step",
        "replay the step in micro-batches of 1/2 of the size",
        "replay the step in micro-batches of 1/4 of the size",
    ]
    assert actions[3].startswith(
        f"restart from the newest checkpoint and skip 1 window of data, positions {first} to {first + 7}"
    )
