"""Random faults on a supervised run: it ends bit-equal to the straight run, and leaves nothing behind."""

from pathlib import Path

import pytest

from tests.operations.supervise.faults import FaultyRun, choose_kinds, small_disk_of


def run_faults(
    corpus: Path, directory: Path, num_faults: int, max_steps: int, seed: int, kinds: list[str] | None = None
) -> None:
    faulty = FaultyRun(corpus, directory, max_steps, seed)
    with small_disk_of(faulty) as has_disk:
        faulty.train_straight()
        kinds = kinds or choose_kinds(num_faults, seed, has_disk=has_disk)
        outcome = faulty.run(kinds)
        log = (directory / "supervise.log").read_text(errors="replace")
        assert outcome.statuses[-1] == 0, log[-4000:]
        assert outcome.faults == kinds, log[-4000:]
        assert outcome.comparison is not None
        assert outcome.comparison.is_equal, log[-4000:]
        assert outcome.left == []


@pytest.mark.slow
@pytest.mark.early
@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.repeat  # `test_mirror_supervised.py`, `test_loop.py`; the callbacks kill writers and damage checkpoints
def test_a_run_with_a_few_faults_ends_as_if_there_were_none(tiny_corpus: Path, tmp_path: Path) -> None:
    kinds = ["rank", "supervisor", "writer", "corrupt"]
    run_faults(tiny_corpus, tmp_path / "faults", len(kinds), max_steps=300, seed=3, kinds=kinds)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(600)
def test_a_run_with_a_fault_of_each_kind_ends_as_if_there_were_none(tiny_corpus: Path, tmp_path: Path) -> None:
    run_faults(tiny_corpus, tmp_path / "faults", num_faults=10, max_steps=900, seed=3)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(14_400)
def test_a_run_with_a_hundred_faults_ends_as_if_there_were_none(tiny_corpus: Path, tmp_path: Path) -> None:
    run_faults(tiny_corpus, tmp_path / "faults", num_faults=100, max_steps=14_000, seed=1)
