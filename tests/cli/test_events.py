"""The events of a run of `genesis fit` that is killed, loses a checkpoint and goes on, read back as one story."""

import time
from pathlib import Path

import pytest

from genesis_callbacks.base.event_reader import EventFollower, read_events
from genesis_callbacks.base.events import Event
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import DEVNULL, run_genesis, start_genesis

MAX_STEPS, SAVED_EVERY, VALIDATED_EVERY = 120, 10, 20
DEADLINE_SECONDS = 240
POLL_SECONDS = 0.01


def kill_after_saves(run_dir: Path, recipe: Path, num_saves: int, *arguments: str) -> None:
    """Trains, and sends SIGKILL as soon as the events tell of so many saves."""
    follower, num_seen = EventFollower(run_dir, is_from_now=True), 0
    deadline = time.monotonic() + DEADLINE_SECONDS
    with start_genesis("fit", "--config", recipe, *arguments, stdout=DEVNULL, stderr=DEVNULL) as command:
        while num_seen < num_saves:
            assert command.poll() is None
            assert time.monotonic() < deadline
            num_seen += sum(event.kind == "saved" for event in follower.poll())
            time.sleep(POLL_SECONDS)
        command.kill()
        command.wait()


def follow_story(events: list[Event]) -> list[int]:
    """Follows a run from event to event, asserts that each can follow the ones before, and returns the saved steps."""
    saved: list[int] = []
    step = 0
    for event in events:
        at = event.step or 0
        match event.kind:
            case "quarantined":
                assert saved.pop() == at
            case "verified" | "evaluated":
                assert at in saved
            case "restored":
                assert at == saved[-1]
                step = at
            case "saved":
                assert at % SAVED_EVERY == 0
                assert at > step
                assert event.clocks["updates"] == at
                saved.append(at)
                step = at
            case "validated":
                assert at % VALIDATED_EVERY == 0
                assert at >= step
                assert event.metrics["validation/loss"] > 0
                step = at
            case "ended" | "failed":
                assert (event.kind, at) == ("ended", MAX_STEPS)
    return saved


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.process
def test_a_run_with_kills_a_quarantine_validations_and_an_end_reads_back_as_one_story(
    tmp_path: Path, tiny_corpus: Path
) -> None:
    run_dir = tmp_path / "run"
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        build_recipe(tiny_corpus, run_dir),
        {
            "trainer.max_steps": MAX_STEPS,
            "trainer.val_check_interval": VALIDATED_EVERY,
            "checkpoint.every_n_steps": SAVED_EVERY,
            "checkpoint.keep_last": None,
        },
    )
    kill_after_saves(run_dir, recipe, 3)
    newest = sorted((run_dir / "checkpoints").glob("step-????????"))[-1]
    (newest / "state.json").write_text("nothing")
    kill_after_saves(run_dir, recipe, 2, "--ckpt_path", "latest")
    resumed = run_genesis("fit", "--config", recipe, "--ckpt_path", "latest", timeout=DEADLINE_SECONDS)
    assert resumed.returncode == 0, resumed.stderr
    evaluated = run_genesis("evaluate", run_dir, "--device", "cpu", timeout=DEADLINE_SECONDS)
    assert evaluated.returncode == 0, evaluated.stderr

    events = read_events(run_dir)
    assert follow_story(events)[-1] == MAX_STEPS
    kinds = [event.kind for event in events]
    assert kinds.count("started") == 3
    assert kinds.count("quarantined") == 1
    assert kinds.count("restored") == 2
    assert kinds[-3:] == ["verified", "ended", "evaluated"]
    assert [event.rank for event in events[-3:]] == [0, 0, None]
    (quarantined,) = (event for event in events if event.kind == "quarantined")
    assert quarantined.checkpoint == newest.name
    (evaluation,) = (event for event in events if event.kind == "evaluated")
    assert evaluation.checkpoint == f"step-{MAX_STEPS:08d}"
    assert any(name.endswith("bits_per_byte") for name in evaluation.metrics)
    assert [event.time_seconds for event in events] == sorted(event.time_seconds for event in events)
