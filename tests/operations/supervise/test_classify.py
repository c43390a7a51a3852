"""Each class of ends has its signature; the first cause wins over its consequences."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from genesis.base.determinism import UNREPEATABLE
from genesis.base.errors import UserError
from genesis.cli.supervise import main
from genesis.cli.supervise_recipe import read_recipe
from genesis.operations.supervise.attempt import Limits, Sight
from genesis.operations.supervise.classify import Evidence, RankEnd, classify
from genesis.operations.supervise.ends import CONSEQUENCES, ENDS, EndClass
from genesis.operations.supervise.plan import FACTS_NAME, read_facts, write_facts
from genesis.recipe.resolved import ResolvedRecipe
from genesis_callbacks.heartbeats import HeartbeatRecord

EXAMPLES = [
    (name, signature.example)
    for name, rule in ENDS.items()
    for signature in rule.signatures
    if name not in ("out_of_memory_at_start", "out_of_memory_at_save")
]


@pytest.mark.parametrize(("name", "example"), EXAMPLES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(EXAMPLES)])
def test_the_quoted_text_of_each_signature_is_of_its_class(name: EndClass, example: str) -> None:
    end = RankEnd(0, 1, 1.0, f"step 41/100\n{example}\n")
    assert classify(Evidence((end,), has_trained=True)).end_class == name
    told = RankEnd(0, 1, 1.0, "", *example.partition(": ")[::2])
    assert classify(Evidence((told,), has_trained=True)).end_class == name


def test_every_class_has_a_way_to_be_found_and_a_status_of_its_own() -> None:
    for name, rule in ENDS.items():
        assert rule.signatures or rule.statuses or rule.evidence or name == "unknown"
        assert all(re.search(each.pattern, each.example, re.IGNORECASE) for each in rule.signatures)
    statuses = [rule.exit_status for rule in ENDS.values()]
    assert sorted(status for status in statuses if statuses.count(status) > 1) == [2, 2]


@pytest.mark.parametrize(
    ("status", "name"),
    [(-9, "lost_rank"), (-11, "native_crash"), (2, "user_mistake"), (143, "interrupted"), (1, "unknown")],
)
def test_a_status_decides_where_no_text_does(status: int, name: EndClass) -> None:
    found = classify(Evidence((RankEnd(0, status, 1.0, "some words"),), has_trained=True))
    assert (found.end_class, found.rank) == (name, 0)


@pytest.mark.parametrize("consequence", [signature.example for signature in CONSEQUENCES])
def test_a_consequence_is_never_the_cause_even_if_it_came_first(consequence: str) -> None:
    ends = (RankEnd(0, 1, 1.0, consequence), RankEnd(1, -9, 2.0), RankEnd(2, 70, 0.5))
    assert classify(Evidence(ends, has_trained=True)).rank == 1


def test_the_rank_that_failed_first_is_named() -> None:
    ends = (RankEnd(0, -11, 5.0), RankEnd(1, 1, 4.0, "", "MemoryError", "no memory"), RankEnd(2, 2, 6.0))
    found = classify(Evidence(ends, has_trained=True))
    assert (found.end_class, found.rank) == ("host_out_of_memory", 1)


def test_the_moment_decides_between_memory_at_start_in_a_step_and_at_a_save() -> None:
    text = ENDS["out_of_memory_in_step"].signatures[0].example
    assert classify(Evidence((RankEnd(0, 1, 1.0, text),), has_trained=False)).end_class == "out_of_memory_at_start"
    saving = RankEnd(0, 1, 1.0, text, "SaveFailedError", "staging failed")
    assert classify(Evidence((saving,), has_trained=True)).end_class == "out_of_memory_at_save"


@pytest.mark.parametrize(
    ("restored_step", "milestones", "has_trained"),
    [
        (None, {"train": 1.0, "first_step": 2.0}, True),
        (20, {"train": 1.0}, True),  # the step after a checkpoint fails again and again, and is no start
        (20, {"setup": 1.0}, False),
        (None, {"train": 1.0}, False),
        (0, {"train": 1.0}, False),
    ],
)
def test_the_first_step_after_a_restore_is_a_step(
    restored_step: int | None, milestones: dict[str, float], has_trained: bool
) -> None:
    beat = HeartbeatRecord(0, 1, 42, "node", "failed", 20, 1.0, 1.0, milestones=milestones)
    assert Sight({0: beat}, restored_step).has_trained is has_trained


def test_the_process_that_holds_the_device_is_named() -> None:
    text = ENDS["out_of_memory_at_start"].signatures[0].example
    assert classify(Evidence((RankEnd(0, 1, 1.0, text),), has_trained=False)).reason.endswith(
        "process 4242 holds 20.00 GiB of the device"
    )


def test_a_kill_by_the_kernel_for_memory_is_not_a_lost_rank() -> None:
    evidence = Evidence((RankEnd(0, -9, 1.0),), has_trained=True, oom_kills=1)
    assert classify(evidence).end_class == "host_out_of_memory"


def test_a_hang_and_a_preemption_are_known_to_the_supervisor_itself() -> None:
    ends = (RankEnd(0, None, 1.0), RankEnd(1, None, 1.0))
    hang = classify(Evidence(ends, has_trained=True, hung_rank=1, hung_seconds=31.0))
    assert (hang.end_class, hang.rank, hang.reason) == ("hang", 1, "rank 1 made no progress for 31 s")
    stopped = classify(Evidence((RankEnd(0, 143, 1.0),), has_trained=True, stop_reason="SIGTERM"))
    assert (stopped.end_class, stopped.reason) == ("preempted", "SIGTERM")


def test_ranks_that_all_ended_well_are_no_end_of_a_class() -> None:
    assert classify(Evidence((RankEnd(0, 0, 1.0), RankEnd(1, 0, 1.0)), has_trained=True)).end_class is None


def test_only_consequences_are_a_lost_rank() -> None:
    found = classify(Evidence((RankEnd(0, 70, 1.0, CONSEQUENCES[1].example),), has_trained=True))
    assert found.end_class == "lost_rank"


def test_a_warning_of_what_a_rank_survived_is_not_its_end() -> None:
    output = "genesis: warning: quarantined step-00000040: it does not verify\nRuntimeError: something else\n"
    assert classify(Evidence((RankEnd(0, 1, 1.0, output),), has_trained=True)).end_class == "unknown"
    killed = RankEnd(0, -9, 1.0, "OSError: [Errno 28] No space left on device")
    assert classify(Evidence((killed,), has_trained=True)).end_class == "lost_rank"


def test_a_hang_that_the_ranks_found_themselves_names_the_rank_that_is_missing() -> None:
    line = "genesis-callbacks: error: [rank 0] hang: rank 3 is missing: it has written no report"
    diagnosis = classify(Evidence([RankEnd(0, 92, 10.0, line)], has_trained=True))
    assert (diagnosis.end_class, diagnosis.rank) == ("hang", 3)


def test_a_rank_has_the_limit_of_its_phase_and_a_first_step_that_of_the_start() -> None:
    limits = Limits(hang_seconds=10.0, start_seconds=100.0, phase_seconds=50.0)
    first = HeartbeatRecord(0, 1, 42, "node", "train", 0, 1.0, 1.0)
    later = replace(first, milestones={"first_step": 1.0})
    assert [limits.choose(beat) for beat in (None, first, later)] == [100.0, 100.0, 10.0]
    assert limits.choose(replace(later, phase="generate")) == 50.0


@pytest.mark.parametrize("price", ["nan", "inf", "-1", "much"])
def test_a_price_that_is_no_price_is_refused(price: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as caught:
        main(["--cost_per_hour", price, "--", "fit"])
    assert "is not a price" in capsys.readouterr().err + str(caught.value)


@pytest.mark.parametrize("url", ["nonsense", "file:///etc/passwd", "http://", ""])
def test_a_notice_of_preemption_comes_from_an_address_of_the_web(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as caught:
        main(["--preempt_url", url, "--", "fit"])
    assert "is no address of the web" in capsys.readouterr().err + str(caught.value)


def test_a_recipe_without_sizes_is_refused_by_their_name() -> None:
    resolved = {"trainer": {"devices": 1, "accelerator": "cpu"}, "data": {"micro_batch_size": None}, "run_dir": "r"}
    with pytest.raises(UserError, match=r"data\.micro_batch_size is missing: give a recipe by --config"):
        read_recipe(ResolvedRecipe.complete(resolved, "r"))


def test_a_recipe_whose_kernels_need_not_repeat_has_a_note_for_the_supervisor(tmp_path: Path) -> None:
    trainer = {"devices": 1, "accelerator": "cpu", "deterministic": "auto"}
    resolved: dict[str, Any] = {"trainer": trainer, "model": {}, "run_dir": "r"}
    resolved["data"] = {"micro_batch_size": 1, "global_batch_size": 2}
    assert read_recipe(ResolvedRecipe.complete(resolved, "r")).note == ""
    trainer["deterministic"] = False
    write_facts(tmp_path / FACTS_NAME, read_recipe(ResolvedRecipe.complete(resolved, "r")))
    facts = read_facts(tmp_path)
    assert facts is not None
    assert facts.note == UNREPEATABLE
