"""Rollouts that `genesis serve` writes: equal to the trainer's own, and a killed run or server changes no bit."""

import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from genesis.base.errors import RunEndedError, UserError
from genesis.data.rollout_options import KEY_VARIABLE, RolloutOptions
from genesis.data.window import IGNORE_INDEX
from genesis.objectives.policy_gradient import correct_server
from genesis.train.answer_journal import AnswerJournal, Completion
from genesis_callbacks.checkpoint import list_committed
from genesis_callbacks.testing import run_ranks
from tests.commands import DEVNULL, start_genesis
from tests.serve.support import START_SECONDS, Running, start
from tests.tiny_runs import build_decoder, save
from tests.train.rollouts import GROUP_SIZE, STEPS, answer, build_data, build_module, read_log, write_case
from tests.train.support import build_trainer
from tests.train.test_rollout import assert_same_bits

pytestmark = pytest.mark.xdist_group("rollouts")

TOKEN = "a-token-of-a-trainer"
NUM_ANSWERS = 3 * 2 * GROUP_SIZE
"""Of a rollout."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A case with a model that the server begins with."""
    case = write_case(tmp_path_factory.mktemp("case"))
    first = shutil.copytree(case / "tokenizer", case / "first")
    save(first / "checkpoints", 1, build_decoder(1), {})
    return case


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, TOKEN)


def list_arguments(case: Path, run: Path) -> list[str | Path]:
    weights = run / "served" / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    # One text at a time: texts that are generated together round by their number.
    return [case / "first", "--max_concurrent", "1", "--weights", weights]


@contextmanager
def serving(case: Path, run: Path) -> Iterator[Running]:
    with start(*list_arguments(case, run), GENESIS_TOKEN=TOKEN) as server:
        yield server


def train(
    url: str, directory: str, case: str, lag: int | None, *arguments: Any, retry_seconds: float = 60.0, **options: Any
) -> dict[str, Any]:
    rollouts = RolloutOptions("openai", url, max_lag=lag, retry_seconds=retry_seconds)
    prompts = options.pop("prompts", {}) | {"rollouts": rollouts}
    os.environ[KEY_VARIABLE] = TOKEN  # in a process of ranks, which may have begun before this test
    return answer(directory, case, *arguments, prompts=prompts, **options)


def list_answers(directory: Path) -> dict[str, int]:
    """Returns the number of lines in each file of answers."""
    answers = directory / "served" / "answers"
    return {path.name.partition(".")[0]: path.read_bytes().count(b"\n") for path in sorted(answers.glob("*"))}


class WaitForTheNext(pl.Callback):
    """Holds the last step of the first rollout until the answers of the second one are on the disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, idx: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while trainer.global_step == 2 and list_answers(self.directory).get("0000000001") != NUM_ANSWERS:
            assert time.monotonic() < deadline, list_answers(self.directory)
            time.sleep(0.1)


@pytest.fixture(scope="module", params=[5, None])
def straight(
    request: pytest.FixtureRequest, case: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int | None, Path, dict[str, Any]]:
    """A run that nothing stops, by the lag: its directory, and its result."""
    directory = tmp_path_factory.mktemp("straight")
    callbacks = [WaitForTheNext(directory)] if request.param else []
    with pytest.MonkeyPatch.context() as patch, serving(case, directory) as server:
        patch.setenv(KEY_VARIABLE, TOKEN)
        arguments = (server.url, str(directory), str(case), request.param, "replicated", STEPS)
        (run,) = run_ranks(train, 1, *arguments, *callbacks)
    return request.param, directory, run


@pytest.mark.slow
def test_a_server_writes_the_answers_with_the_log_probabilities_of_the_trainer(
    straight: tuple[int | None, Path, dict[str, Any]],
) -> None:
    lag, directory, run = straight
    log = read_log(directory)
    assert len(log) == STEPS
    assert [line["train/lag"] for line in log] == ([0, 1, 2, 0, 1, 2] if lag is None else [0, 1, 2, 3, 4, 5])
    for line in log[:3] if lag else log:
        assert line["train/server_error"] < 1e-5
        assert line["train/server_ratio"] == pytest.approx(1, abs=1e-5)
        assert line["train/truncated"] == 0
    if lag:  # the weights of the second rollout are those before the first one was trained
        assert all(line["train/server_error"] > 1e-3 for line in log[3:])
    assert all(line["train/first_ratio_error"] == 0 for line in log[::3])
    assert all(len({*row} - {-100}) > 1 for step in run["batches"] for batch in step for row in batch)
    assert list_answers(directory) == {"0000000000": NUM_ANSWERS, "0000000001": NUM_ANSWERS}
    names = sorted(path.name.partition("-")[0] for path in (directory / "served" / "weights").iterdir())
    assert names == (["0000000003"] if lag is None else ["0000000000", "0000000003"])


class KillBeforeStep(pl.Callback):
    """Kills its rank, by SIGKILL, when a window of a later step of a rollout is about to be trained."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, idx: int) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class KillInGeneration(pl.Callback):
    """Kills a process, by SIGKILL, when some of the answers of the second rollout are there."""

    def __init__(self, process: int | None = None) -> None:
        self.process = process

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        append, count = AnswerJournal.append, iter(range(7))

        def append_and_kill(journal: AnswerJournal, rollout: int, key: str, found: Completion) -> None:
            append(journal, rollout, key, found)
            if rollout == 1 and next(count, None) == 6:
                journal.sync()
                os.kill(self.process or os.getpid(), signal.SIGKILL)

        AnswerJournal.append = append_and_kill  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("killer", [KillInGeneration(), KillBeforeStep(2), KillBeforeStep(4)], ids=["writes", "2", "4"])
def test_a_killed_run_ends_with_the_same_bits(
    tmp_path: Path, case: Path, straight: tuple[int | None, Path, dict[str, Any]], killer: pl.Callback
) -> None:
    lag, directory, expected = straight
    with serving(case, tmp_path) as server:
        arguments = (server.url, str(tmp_path), str(case), lag, "replicated", STEPS)
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(train, 1, *arguments, killer)
        before = list_answers(tmp_path)
        (resumed,) = run_ranks(train, 1, *arguments)
    check_same(directory, tmp_path, expected, resumed)
    if isinstance(killer, KillInGeneration):
        assert 7 <= before["0000000001"] < NUM_ANSWERS
    assert list_answers(tmp_path) == list_answers(directory)  # each answer was asked for once


def check_same(directory: Path, other: Path, expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert_same_bits(expected, found)
    for one, two in zip(read_log(directory), read_log(other), strict=True):
        names = ("loss", "reward", "ratio", "server_error", "server_ratio", "lag", "grad_norm")
        assert [one[f"train/{name}"] for name in names] == [two[f"train/{name}"] for name in names]


@pytest.mark.slow
def test_a_killed_server_that_starts_again_writes_the_rest_of_a_rollout(
    tmp_path: Path, case: Path, straight: tuple[int | None, Path, dict[str, Any]]
) -> None:
    lag, directory, expected = straight
    environment = {**os.environ, "GENESIS_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    arguments = ("serve", *list_arguments(case, tmp_path), "--device", "cpu")
    with start_genesis(*arguments, "--port", "0", stdout=-1, stderr=DEVNULL, env=environment) as first:
        assert first.stdout is not None
        port = first.stdout.readline().split("/")[2].rpartition(":")[2]
        again: list[Any] = []

        def restart() -> None:
            first.wait(START_SECONDS)
            command = start_genesis(*arguments, "--port", port, stdout=DEVNULL, stderr=DEVNULL, env=environment)
            again.append(command)

        thread = threading.Thread(target=restart)
        thread.start()
        killer = KillInGeneration(first.pid)
        try:
            (run,) = run_ranks(
                train, 1, f"http://127.0.0.1:{port}", str(tmp_path), str(case), lag, "replicated", STEPS, killer
            )
        finally:
            first.kill()
            thread.join()
            for command in again:
                command.kill()
                command.wait(START_SECONDS)
    check_same(directory, tmp_path, expected, run)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Training failed .RunEndedError.")  # which the command prints
def test_a_run_whose_server_stays_away_ends_in_one_line_and_goes_on_with_what_is_on_the_disk(
    tmp_path: Path, case: Path, straight: tuple[int | None, Path, dict[str, Any]]
) -> None:
    lag, _, expected = straight
    away = ("http://127.0.0.1:9", str(tmp_path), str(case), lag)
    with pytest.raises(RunEndedError, match=r"cannot be reached .*, for 0.2 s .*start it again"):
        train(*away, retry_seconds=0.2)
    with serving(case, tmp_path) as server, pytest.raises(AssertionError, match="died without a word"):
        run_ranks(train, 1, server.url, *away[1:], "replicated", STEPS, KillBeforeStep(4))
    # From the step before the second rollout, whose answers are on the disk: no server is needed for them.
    ((newest, _),) = [found for found in list_committed(tmp_path) if found[1].step == 4]
    shutil.rmtree(newest)
    (run,) = run_ranks(train, 1, *away)
    assert run["restored"] == 3
    assert_same_bits(expected, run)


@pytest.mark.slow
def test_two_ranks_ask_for_their_own_prompts_and_a_resume_on_one_finds_their_answers(
    tmp_path: Path, case: Path, straight: tuple[int | None, Path, dict[str, Any]]
) -> None:
    lag, _, expected = straight
    with serving(case, tmp_path) as server:
        arguments = (server.url, str(tmp_path), str(case), lag, "replicated")
        ranks = run_ranks(train, 2, *arguments, 4)
        for step in range(3):
            assert [row for rank in ranks for row in rank["batches"][step]] == expected["batches"][step]
        files = sorted(path.name for path in (tmp_path / "served" / "answers").iterdir())
        assert files == [f"{rollout:010d}.rank-{rank}.jsonl" for rollout in range(2) for rank in range(2)]
        (resumed,) = run_ranks(train, 1, *arguments, STEPS)
    assert [line["train/server_error"] < 0.1 for line in read_log(tmp_path)] == [True] * STEPS
    assert len(resumed["batches"]) == STEPS - 4
    assert sorted(path.name for path in (tmp_path / "served" / "answers").iterdir()) == files


def test_a_run_without_a_directory_and_whole_weights_for_vllm_are_refused(case: Path, tmp_path: Path) -> None:
    data = build_data(case, rollouts=RolloutOptions("openai", "http://a"))
    with pytest.raises(UserError, match="needs the run's directory: set checkpoint"):
        build_trainer("auto", 1, 1, []).fit(build_module(data), data)
    with pytest.raises(UserError, match="whose server loads adapters alone while it runs"):
        answer(str(tmp_path), str(case), prompts={"rollouts": RolloutOptions("openai", "http://a", "vllm")})


def test_the_correction_is_a_truncated_ratio_of_each_token_or_answer() -> None:
    labels = torch.tensor([[IGNORE_INDEX, 3, 4, 5], [IGNORE_INDEX, 6, 7, IGNORE_INDEX]])
    trainer = torch.tensor([[0.0, -1.0, -2.0, -3.0], [0.0, -1.0, -1.0, 0.0]])
    server = torch.tensor([[9.0, -1.0, -4.0, -2.5], [9.0, -1.5, -0.5, 9.0]])
    given = (trainer, server, labels)
    ratios, most = (trainer - server).exp(), torch.tensor([2.0])
    factors, figures = correct_server(*given, "token", most)
    assert factors[0, 1:].tolist() == pytest.approx([1.0, 2.0, float(ratios[0, 3])])
    assert figures["server_error"].tolist() == pytest.approx([2.5 / 3, 0.5])
    assert figures["truncated"].tolist() == pytest.approx([1 / 3, 0.0])
    assert figures["server_ratio"].tolist() == pytest.approx([float(ratios[row, 1 : 4 - row].mean()) for row in (0, 1)])
    factors, _ = correct_server(*given, "sequence", most)
    assert factors.tolist() == pytest.approx([math.exp(1.5 / 3), 1.0])
    factors, figures = correct_server(*given, "product", most)
    assert factors.tolist() == pytest.approx([2.0, 1.0])
    assert figures["truncated"].tolist() == [True, False]
