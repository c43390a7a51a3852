"""Clients take turns, however much of each of them waits."""

import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from genesis.serve.turns import Turns
from tests.serve.support import save_endless, start, wait_until

NUM_GREEDY = 60


def filled(texts: str) -> Turns[str]:
    turns: Turns[str] = Turns()
    for number, client in enumerate(texts):
        turns.add(client, f"{client}{number}")
    return turns


def test_a_client_with_one_text_waits_for_one_text_of_a_client_with_many() -> None:
    turns = filled("aaaaaab")
    assert [turns.take() for _ in range(len(turns))] == ["a0", "b6", "a1", "a2", "a3", "a4", "a5"]


def test_the_client_that_holds_least_is_next() -> None:
    turns = filled("aabb")
    assert turns.take({"a": 16, "b": 1}) == "b2"
    assert turns.take({"a": 1, "b": 2}) == "a0"
    assert turns.take({"a": 1, "b": 1}) == "b3"


def test_what_is_removed_or_put_back_keeps_the_turns_of_others() -> None:
    turns = filled("aab")
    turns.put_first("b", "again")
    turns.remove("a", "a0")
    turns.remove("a", "gone")
    assert (len(turns), turns.count("b"), [*turns]) == (3, 2, ["again", "b2", "a1"])
    assert [turns.take() for _ in range(3)] == ["again", "a1", "b2"]


def count_answers(asked: Sequence[Future[int]]) -> int:
    """Returns how many requests have got their text."""
    return sum(one.done() and one.result() == 200 for one in asked)


@pytest.mark.process
@pytest.mark.slow
def test_a_client_with_sixty_requests_delays_the_one_of_another_client_by_its_share_and_takes_no_place_of_it(
    run: Path, tmp_path: Path
) -> None:
    served = tmp_path / "run"
    shutil.copytree(run, served, ignore=shutil.ignore_patterns("step-*"))
    save_endless(served)
    body = {"model": "run", "prompt": "alpha", "max_tokens": 60, "temperature": 0.0}
    with (
        start(served, "--max_concurrent", "2", "--max_queue", "48", "--max_models", "1") as running,
        ThreadPoolExecutor(NUM_GREEDY) as threads,
    ):
        body["model"] = running.ask("/v1/models")[1]["data"][0]["id"]

        def ask(client: str) -> int:
            return running.ask("/v1/completions", body, client=client)[0]

        greedy = [threads.submit(ask, "127.0.0.2") for _ in range(NUM_GREEDY)]
        wait_until(lambda: running.ask("/api/status")[1]["num_waiting"] > NUM_GREEDY // 2)
        num_before = count_answers(greedy)
        assert ask("127.0.0.3") == 200
        # The two texts in the batch, and the two that run beside the other client's.
        assert count_answers(greedy) - num_before <= 6
        assert sorted({one.result() for one in greedy}) == [200, 429]  # a quarter of the queue is for others
