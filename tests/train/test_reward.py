"""Reward functions: allowed or not run at all; errors and results without a meaning name the row."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from genesis.base.errors import UserError
from genesis.data.prompts import Prompt
from genesis.train.reward import Reward, load_reward

CODE = """
from dataclasses import dataclass

@dataclass
class Scores:
    good: float = 1.0

def reward(messages, text, columns):
    return Scores().good if text == columns["answer"] else 0
"""


def make_prompt(**columns: Any) -> Prompt:
    return Prompt(
        (1, 2), [{"role": "user", "content": "Why?"}], columns, "questions 7", lambda: "prompts.jsonl, line 7"
    )


def test_a_file_or_a_module_gives_the_function(tmp_path: Path) -> None:
    path = tmp_path / "scores.py"
    path.write_text(CODE)
    reward = load_reward(f"{path}:reward", is_allowed=True)
    prompt = make_prompt(answer="So.")
    assert reward.score(prompt, "So.", 1) == 1.0
    assert reward.score(prompt, "No.", 1) == 0.0
    assert load_reward("math:fsum", is_allowed=True).name == "math:fsum"


def test_code_that_is_not_allowed_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "scores.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{CODE}")
    with pytest.raises(UserError, match="--allow_reward_code true"):
        load_reward(f"{path}:reward", is_allowed=False)
    assert not (tmp_path / "ran").exists()
    load_reward(f"{path}:reward", is_allowed=True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reward", "give module:function or file.py:function"),
        ("missing.py:reward", "no such file: missing.py"),
        ("no_such_module_here:reward", "cannot be imported .ModuleNotFoundError"),
        ("math:no_such_function", "has no function 'no_such_function'"),
        ("math:pi", "has no function 'pi'"),
    ],
)
def test_a_function_that_is_not_found_is_named(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_reward(name, is_allowed=True)
    assert "\n" not in str(caught.value)


def test_a_module_that_fails_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scores.py"
    path.write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"scores\.py:reward cannot be imported .ZeroDivisionError"):
        load_reward(f"{path}:reward", is_allowed=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, 1e300, "1.0", None, [1.0]])
def test_a_reward_that_is_no_finite_number_names_the_row(value: Any) -> None:
    with pytest.raises(UserError, match=r"gave .* for answer 3 to prompts\.jsonl, line 7; return a") as caught:
        Reward("scores.py:reward", lambda *arguments: value).score(make_prompt(), "So.", 3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [KeyError("answer"), RuntimeError("two\nlines"), SystemExit(3)])
def test_an_error_in_the_function_names_the_row_in_one_line(error: BaseException) -> None:
    def fail(*arguments: Any) -> float:
        raise error

    with pytest.raises(
        UserError, match=f"failed for answer 2 to prompts.jsonl, line 7: {type(error).__name__}"
    ) as caught:
        Reward("scores.py:reward", fail).score(make_prompt(), "So.", 2)
    assert "\n" not in str(caught.value)


def test_a_row_whose_file_is_gone_is_named_by_its_source() -> None:
    def read_again() -> str:
        raise FileNotFoundError("prompts.jsonl")

    with pytest.raises(UserError, match="gave nan for answer 1 to questions 7; return"):
        Reward("scores.py:reward", lambda *arguments: math.nan).score(
            make_prompt()._replace(locate=read_again), "So.", 1
        )


def test_a_function_that_changes_its_arguments_changes_nothing() -> None:
    def greedy(messages: list[dict[str, Any]], text: str, columns: dict[str, Any]) -> float:
        messages.append({"role": "assistant", "content": text})
        return float(columns["scores"].pop())

    reward, prompt = Reward("scores.py:reward", greedy), make_prompt(scores=[1.0, 2.0])
    assert [reward.score(prompt, "So.", number) for number in (1, 2, 3)] == [2.0, 2.0, 2.0]
    assert len(prompt.messages) == 1


def test_a_result_and_an_error_that_cannot_be_printed_are_one_line() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fail(*_: object) -> float:
        raise BrokenError

    for function, message in ((fail, "failed for .*BrokenError"), (lambda *_: BrokenError(), "gave '<BrokenError>'")):
        with pytest.raises(UserError, match=message):
            Reward("own", function).score(make_prompt(), "text", 1)


def test_a_function_that_turns_gradients_on_leaves_them_off() -> None:
    def reward(*_: object) -> float:
        torch.set_grad_enabled(True)
        return 1.0

    with torch.no_grad():
        assert Reward("own", reward).score(make_prompt(), "text", 1) == 1.0
        assert not torch.is_grad_enabled()
