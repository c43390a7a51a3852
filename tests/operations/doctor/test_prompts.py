"""The doctor on a recipe whose model answers prompts: constant rewards, cut answers, templates without a stop."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from genesis.cli.doctor_recipe import build_recipe
from genesis.data.prompt_data import EpisodesOfGroup, Group, PromptData
from genesis.operations.doctor.checks import Check
from genesis.operations.doctor.prompts import check_answers, check_rewards, check_template
from genesis.operations.doctor.protocol import examine
from tests.operations.doctor.recipes import have_room
from tests.train.rollouts import SEQ_LEN, build_data, write_case

CLOSED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def group(rewards: list[list[float]], finished: list[bool] | None = None) -> Group:
    single = np.array(rewards)
    is_finished = np.array([True] * len(single) if finished is None else finished)
    answers = tuple(np.arange(3, dtype=np.int32) for _ in single)
    return Group(answers, is_finished, single.sum(1), np.zeros(len(single), np.float32), single)


@pytest.mark.parametrize(
    ("groups", "names", "are_learned", "status", "line"),
    [
        ([group([[0.0], [1.0]]), group([[0.0], [0.0]])], ["right"], True, "passed", "50% of 2 prompts have equal"),
        ([group([[0.0], [0.0]]), group([[0.0], [0.0]])], ["right"], True, "failed", "right 0 on average, from 0 to 0"),
        ([group([[1.0], [1.0]]), group([[0.0], [0.0]])], ["right"], True, "failed", "100% of 2 prompts have equal"),
        ([group([[1.0], [1.0]]), group([[0.0], [0.0]])], ["right"], False, "passed", "100% of 2 prompts"),
        ([group([[0.0, 2.0], [1.0, 2.0]])], ["right", "form"], True, "warning", "form 2 on average, from 2 to 2"),
        ([group([[0.0], [1.0]]), *[group([[0.0], [0.0]])] * 9], ["right"], True, "warning", "90% of 10 prompts"),
        ([group([[], []])], [], False, "does not apply", "there are no rewards"),
    ],
)
def test_rewards_that_never_differ_fail(
    groups: list[Group], names: list[str], are_learned: bool, status: str, line: str
) -> None:
    check = check_rewards(groups, names, are_learned=are_learned)
    assert check.status == status
    assert line in check.found
    assert bool(check.remedy) == (status in ("failed", "warning"))


@pytest.mark.parametrize(("finished", "status"), [(0, "failed"), (1, "warning"), (2, "passed"), (4, "passed")])
def test_answers_that_are_all_cut_fail(finished: int, status: str) -> None:
    check = check_answers([group([[0.0]] * 4, [True] * finished + [False] * (4 - finished))], 3)
    assert check.status == status
    assert f"{finished} of 4 answers ended by themselves; they have 3.0 tokens on average" in check.found
    assert ("raise data.prompts.max_new_tokens, which is 3" in check.remedy) == (status != "passed")


def test_observations_are_no_tokens_of_answers() -> None:
    one = group([[0.0]] * 2, [False, False])
    is_own = tuple(np.array([True, *[False] * (len(answer) - 1)]) for answer in one.answers)
    episodes = EpisodesOfGroup(np.zeros(1, np.int32), is_own, np.ones((2, 3), np.int64))
    check = check_answers([replace(one, episodes=episodes)], 3)
    assert "they have 1.0 tokens on average, at most 1" in check.found
    assert "data.prompts.max_turns or data.seq_len" in check.remedy


@pytest.mark.parametrize(
    ("template", "status", "line"),
    [
        (CLOSED, "passed", "answers end with '</s>'; the template writes the answer 'So.' as 'So.</s>'"),
        (CLOSED.replace("{{ eos_token }}", "\n"), "failed", "as 'So.\\n'"),
        (CLOSED.replace("assistant: {% endif", "bot: {% endif"), "warning", "differs from its prompt at token"),
    ],
)
def test_a_template_without_a_stop_fails(tmp_path: Path, template: str, status: str, line: str) -> None:
    case = write_case(tmp_path)
    (case / "chat.jinja").write_text(template)
    data = build_data(case, template=case / "chat.jinja").training
    assert isinstance(data, PromptData)
    check = check_template(data)
    assert check.status == status, check
    assert line in check.found
    assert bool(check.remedy) == (status != "passed")


def examine_prompts(directory: Path, reward: str, **prompts: Any) -> dict[str, Check]:
    case = write_case(directory, reward)
    options = {"sources": [{"name": "questions", "paths": [str(case / "prompts.jsonl")]}], "group_size": 4}
    shape = {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 32, "max_seq_len": SEQ_LEN}
    options |= {"tokenizer": str(case / "tokenizer"), "reward": f"{case}/reward.py:reward", "max_new_tokens": 12}
    recipe = {
        "run_dir": str(directory / "run"),
        "model": {
            "decoder": {**shape, "vocab_size": build_data(case).training.vocab_size},
            "objective": {"class_path": "genesis.objectives.GRPO"},
        },
        "data": {"prompts": {**options, **prompts}, "seq_len": SEQ_LEN, "micro_batch_size": 6, "global_batch_size": 32},
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 1000},
    }
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (directory / "doctor").mkdir()
    arguments = ["--config", str(directory / "recipe.yaml"), "--allow_reward_code", "true"]
    found = examine(partial(build_recipe, arguments), directory / "doctor", have_room, lambda line: None)
    assert any("answers to 8 prompts" in note for note in found.notes)
    return {check.name: check for check in found.checks}


@pytest.mark.slow
def test_a_recipe_with_prompts_is_examined_by_its_answers(tmp_path: Path) -> None:
    for name in ("good", "constant"):
        (tmp_path / name).mkdir()
    reward = 'def reward(messages, text, columns):\n    return float(sum(map(text.count, "aeiou")))\n'
    nowhere = {"by": "openai", "url": "http://127.0.0.1:9"}  # the doctor asks no server
    found = examine_prompts(tmp_path / "good", reward, max_resamples=3, rollouts=nowhere)
    assert found.keys() == {"template", "answers", "rewards"}
    assert found["rewards"].status == "passed", found["rewards"]
    assert found["template"].status == "passed", found["template"]
    assert "of 32 answers ended by themselves" in found["answers"].found
    reward = "def reward(messages, text, columns):\n    return 0.5\n"
    found = examine_prompts(tmp_path / "constant", reward, max_new_tokens=1)
    assert found["rewards"].status == "failed"
    assert "reward 0.5 on average, from 0.5 to 0.5" in found["rewards"].found
    assert found["answers"].status in ("failed", "warning")
