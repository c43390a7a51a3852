"""Episodes in an environment: exact gradients of the model's own turns, and a run that is killed in an episode."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from genesis.model.decoder import Decoder
from genesis.objectives import GRPO
from genesis.objectives.policy_gradient import PolicyGradient
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from genesis.train.csv_log import CSVLog
from genesis.train.environment import Environments
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, TokenCounters
from genesis_callbacks.testing import run_ranks
from tests.train.rollouts import GROUP_SIZE, STEPS, answer, build_data, build_module, read_log, write_case
from tests.train.support import build_trainer
from tests.train.test_rollout import KeepWindows, assert_same_bits

pytestmark = pytest.mark.xdist_group("rollouts")

STOPS = range(120, 220)
"""Ids that also end a turn, so that a model with random weights ends its turns."""
ENVIRONMENT = """
import random

class Game:
    def reset(self, record, seed):
        self.random, self.turns = random.Random(seed), 0
        return f"Begin {self.random.randrange(100)}."

    def step(self, message):
        self.turns += 1
        text = message["content"]
        reward = sum(character in "aeiou" for character in text) / (len(text) + 1)
        return f"{len(text)} and {self.random.randrange(100)}", reward, self.random.random() < 0.2
"""
OPTIONS: dict[str, Any] = {"reward": None, "max_turns": 3, "num_environments": 2, "seq_len": 160, "max_new_tokens": 10}


def write_game(directory: Path, environment: str = ENVIRONMENT) -> Path:
    case = write_case(directory)
    (case / "game.py").write_text(environment)
    (case / "tokenizer" / "generation_config.json").write_text(json.dumps({"eos_token_id": [*STOPS]}))
    return case


def name_game(case: Path, **changes: Any) -> dict[str, Any]:
    return {**OPTIONS, "environment": f"{case / 'game.py'}:Game", **changes}


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_game(tmp_path_factory.mktemp("game"))


def play(directory: str, case: str, preset: str = "grpo", max_steps: int = STEPS, *callbacks: Any) -> dict[str, Any]:
    module = {"objective": GRPO(preset, cut_answers="mask" if preset == "dapo" else "learn")}
    prompts = name_game(Path(case))
    return answer(directory, case, "replicated", max_steps, *callbacks, prompts=prompts, module=module)


def read_transcripts(directory: Path) -> list[dict[str, Any]]:
    files = sorted((directory / "rollouts").iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def list_rows(window: Any) -> Iterator[tuple[Any, int]]:
    for micro_batch in window.micro_batches:
        for row in range(len(micro_batch.labels)):
            yield micro_batch, row


def mark_own(transcript: dict[str, Any], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Returns the ids of an episode as its template writes them, and which the model wrote, whose ids are -1."""
    system = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in transcript["messages"])
    ids = tokenizer.encode_with_controls(f"{system}<|im_start|>assistant\n")
    is_own = [False] * len(ids)
    for index, turn in enumerate(transcript["turns"]):
        if turn["role"] == "assistant":
            ids += [-1] * turn["num_tokens"]
            is_own += [True] * turn["num_tokens"]
        elif index + 1 < len(transcript["turns"]):
            text = f"<|im_end|>\n<|im_start|>user\n{turn['content']}<|im_end|>\n<|im_start|>assistant\n"
            ids += tokenizer.encode_with_controls(text)[1:]
            is_own += [False] * (len(ids) - len(is_own))
    return ids, is_own


def slow_gradients(
    module: GenesisModule, window: Any, weights: dict[str, Tensor], transcripts: list[dict[str, Any]], tokenizer: Any
) -> tuple[dict[str, Tensor], float]:
    """Returns gradient and loss of a step in float64, episode by episode, with the mask that the transcripts give."""
    model = Decoder(module.decoder_config)
    model.load_state_dict(weights)
    model.double()
    assert isinstance(module.objective, PolicyGradient)
    options = module.objective.options
    losses = []
    for (micro_batch, row), transcript in zip(list_rows(window), transcripts, strict=True):
        written, is_own = mark_own(transcript, tokenizer)
        found = micro_batch.input_ids[row].tolist()
        assert all(one in (-1, other) for one, other in zip(written, found, strict=False))
        inputs = torch.tensor([found[: len(written) - 1]])
        labels = torch.tensor([*found[1 : len(written) - 1], int(micro_batch.labels[row][len(written) - 2])])
        places = torch.tensor(is_own[1:]).nonzero().squeeze(1)
        log_probs = model(inputs)[0].log_softmax(-1)[places, labels[places]]
        ratios = torch.exp(log_probs - micro_batch.extra["old_token_log_prob"][row][places].double())
        advantage = micro_batch.extra["advantage"][row].double()
        held = ratios.clamp(1 - options.clip_low, 1 + options.clip_high) * advantage
        losses.append(-torch.minimum(ratios * advantage, held).mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    return {f"decoder.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}, float(
        loss.detach()
    )


def test_losses_and_gradients_equal_a_slow_reference_that_masks_observations(game: Path, tmp_path: Path) -> None:
    data = build_data(game, **name_game(game))
    module, keep = build_module(data, objective=GRPO("grpo")), KeepWindows()
    checkpoint = AsyncProcessCheckpoint(run_dir=str(tmp_path), every_n_steps=3, mode="sync")
    logger = CSVLog(tmp_path / "metrics.csv")
    build_trainer("auto", 1, 3, [keep, checkpoint, TokenCounters()], logger=logger).fit(module, data)
    log = read_log(tmp_path)
    transcripts = read_transcripts(tmp_path)
    rows = 2 * GROUP_SIZE
    assert len(transcripts) == 3 * rows
    assert {one["ending"] for one in transcripts} == {"done", "turns", "length"}
    assert sum(one["num_turns"] > 1 for one in transcripts) > 8
    tokenizer = open_tokenizer(game / "tokenizer")
    for step, (window, weights, gradients) in enumerate(keep.steps):
        own = transcripts[step * rows : (step + 1) * rows]
        assert window.num_valid_tokens == sum(one["num_tokens"] for one in own)
        for (micro_batch, row), one in zip(list_rows(window), own, strict=True):
            assert micro_batch.extra["count_of.turns"][row] == one["num_turns"]
            assert micro_batch.extra["is_finished"][row] == (one["ending"] == "done")
            rewards = [turn.get("reward", 0.0) for turn in one["turns"]]
            assert float(micro_batch.extra["reward"][row]) == pytest.approx(sum(rewards)) == one["reward"]
        expected, loss = slow_gradients(module, window, weights, own, tokenizer)
        assert log[step]["train/loss"] == pytest.approx(loss, abs=1e-6)
        assert expected.keys() == gradients.keys()
        assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
        for name, gradient in expected.items():
            assert float((gradients[name] - gradient).abs().max()) < 1e-5, name
    for one in transcripts[:GROUP_SIZE]:  # a group begins alike, and each episode goes on by itself
        assert one["messages"] == transcripts[0]["messages"]
    assert len({json.dumps(one["turns"]) for one in transcripts[:GROUP_SIZE]}) == GROUP_SIZE


class KillInSecondTurn(pl.Callback):
    """Kills its rank, by SIGKILL, before environments answer the second turns of the second rollout."""

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if trainer.global_step == 3:
            step, count = Environments.step, iter(range(1))

            def step_or_die(environments: Environments, calls: Any) -> Any:
                if next(count, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return step(environments, calls)

            Environments.step = step_or_die  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize("preset", ["grpo", "dapo"])
def test_a_run_that_is_killed_in_an_episode_ends_with_the_same_bits_and_two_ranks_equal_one(
    preset: str, game: Path, tmp_path: Path
) -> None:
    (straight,) = run_ranks(play, 1, str(tmp_path / "straight"), str(game), preset)
    arguments = (str(tmp_path / "killed"), str(game), preset, STEPS)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(play, 1, *arguments, KillInSecondTurn())
    (resumed,) = run_ranks(play, 1, *arguments)
    assert_same_bits(straight, resumed)
    assert read_transcripts(tmp_path / "straight") == read_transcripts(tmp_path / "killed")
    ranks = run_ranks(play, 2, str(tmp_path / "two"), str(game), preset)
    for step in range(STEPS):
        assert [row for rank in ranks for row in rank["batches"][step]] == straight["batches"][step]
        for name in ("reward", "advantage", "count_of.turns", "is_finished"):
            assert [one for rank in ranks for one in rank["extras"][step][name]] == straight["extras"][step][name]
    for name, tensor in straight["weights"].items():
        assert float((ranks[0]["weights"][name] - tensor).abs().max()) < 1e-5
    assert max(row["train/turns"] for row in read_log(tmp_path / "straight")) > 1.5
    for one, other in zip(read_log(tmp_path / "straight"), read_log(tmp_path / "two"), strict=True):
        for name in ("reward", "turns", "calls", "unread_calls", "answer_tokens", "entropy", "finished", "loss"):
            assert other[f"train/{name}"] == pytest.approx(one[f"train/{name}"], abs=1e-5), name
