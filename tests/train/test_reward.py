"""Rewards: the user's code is allowed or not run at all, ends in one line with the row, and runs in its own process."""

import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from genesis.base.errors import UserError
from genesis.chat.options import ChatOptions
from genesis.chat.render import open_renderer
from genesis.data.prompts import Prompt, PromptOptions, RewardOptions
from genesis.data.sources import SourceOptions
from genesis.generate.load import load_decoder
from genesis.model.scores import score_text
from genesis.train.reward import (
    Rewards,
    find_reward_models,
    identify_reward_models,
    match_numbers,
    score_length,
)
from genesis.train.reward_worker import Fault, call_function
from genesis_callbacks.base.manifest import read_committed_hash
from tests.commands import ForkedCommand
from tests.tiny_runs import build_decoder, save
from tests.tokenizer.test_huggingface import qwen

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


def load(name: str, seconds: float = 60.0, *, is_allowed: bool = True) -> Rewards:
    return Rewards((RewardOptions(name, "reward"),), seconds, is_allowed=is_allowed)


def score(rewards: Rewards, prompt: Prompt, text: str, number: int = 1) -> float:
    (found,) = rewards.score(prompt, text, number, 3, 8)
    return float(found)


def test_a_file_or_a_module_gives_the_function(tmp_path: Path) -> None:
    path = tmp_path / "scores.py"
    path.write_text(CODE)
    rewards = load(f"{path}:reward")
    prompt = make_prompt(answer="So.")
    assert score(rewards, prompt, "So.") == 1.0
    assert score(rewards, prompt, "No.") == 0.0
    assert load("math:fsum").names == ("reward",)


def test_code_that_is_not_allowed_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "scores.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{CODE}")
    with pytest.raises(UserError, match="--allow_reward_code true"):
        load(f"{path}:reward", is_allowed=False)
    assert not (tmp_path / "ran").exists()
    load(f"{path}:reward")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reward", "give module:function, file.py:function, exact_match or math_answer"),
        ("missing.py:reward", "no such file: missing.py"),
        ("no_such_module_here:reward", "cannot be imported .ModuleNotFoundError"),
        ("math:no_such_function", "has no function 'no_such_function'"),
        ("math:pi", "has no function 'pi'"),
    ],
)
def test_a_function_that_is_not_found_is_named(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_a_module_that_fails_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scores.py"
    path.write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"scores\.py:reward cannot be imported .ZeroDivisionError"):
        load(f"{path}:reward")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, 1e300, "1.0", None, [1.0]])
def test_a_reward_that_is_no_finite_number_is_a_fault(value: Any) -> None:
    found = call_function(lambda: value, ())
    assert isinstance(found, Fault)
    assert found.what.startswith("gave ")
    assert found.rest.startswith("; return a ")
    assert "\n" not in "".join(found)


@pytest.mark.parametrize("error", [KeyError("answer"), RuntimeError("two\nlines"), SystemExit(3)])
def test_an_error_in_the_function_is_a_fault_in_one_line(error: BaseException) -> None:
    def fail() -> float:
        raise error

    found = call_function(fail, ())
    assert isinstance(found, Fault)
    assert found.what == "failed"
    assert found.rest.startswith(f": {type(error).__name__}")
    assert "\n" not in found.rest


def test_a_result_and_an_error_that_cannot_be_printed_are_faults() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fail() -> float:
        raise BrokenError

    def give() -> object:
        return BrokenError()

    functions: tuple[tuple[Callable[..., Any], str], ...] = ((fail, "failed: <BrokenError>"), (give, "gave '<Broken"))
    for function, words in functions:
        found = call_function(function, ())
        assert isinstance(found, Fault)
        assert words in "".join(found).replace("BrokenError: ", "")


SLOW_OR_BROKEN = """
import os, time

def reward(messages, text, columns):
    return {"raise": fail, "hang": hang, "nan": nan, "list": many, "die": die}[text]()

def fail():
    raise ValueError("two\\nlines")

def hang():
    time.sleep(1000)

def nan():
    return float("nan")

def many():
    return [1.0, 2.0]

def die():
    os._exit(3)
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", "failed for answer 2 to prompts.jsonl, line 7: ValueError: two lines; correct it"),
        (
            "hang",
            "took longer than 1 s for answer 2 to prompts.jsonl, line 7; correct it, or raise "
            "data.prompts.reward_seconds",
        ),
        ("nan", "gave nan for answer 2 to prompts.jsonl, line 7; return a finite number that fits float32"),
        ("list", "gave '[1.0, 2.0]' for answer 2 to prompts.jsonl, line 7; return a number"),
        ("die", "ended with status 3 for answer 2 to prompts.jsonl, line 7; correct it"),
    ],
)
def test_a_function_that_misbehaves_ends_in_one_line_with_the_row(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "scores.py"
    path.write_text(SLOW_OR_BROKEN)
    rewards = load(f"{path}:reward", 1.0)
    with pytest.raises(UserError) as caught:
        score(rewards, make_prompt(), text, 2)
    assert str(caught.value) == f"the reward function {path}:reward {message}"


def test_a_row_whose_file_is_gone_is_named_by_its_source(tmp_path: Path) -> None:
    def read_again() -> str:
        raise FileNotFoundError("prompts.jsonl")

    path = tmp_path / "scores.py"
    path.write_text(SLOW_OR_BROKEN)
    with pytest.raises(UserError, match="gave nan for answer 1 to questions 7; return"):
        score(load(f"{path}:reward"), make_prompt()._replace(locate=read_again), "nan")


def test_a_function_has_a_process_of_its_own_and_changes_nothing_here(tmp_path: Path) -> None:
    path = tmp_path / "scores.py"
    path.write_text(
        "import os\n\ndef reward(messages, text, columns):\n    messages.append({'role': 'assistant'})\n"
        "    return columns['scores'].pop()\n\ndef process(*arguments):\n    return os.getpid()\n"
    )
    options = (RewardOptions(f"{path}:reward", "first"), RewardOptions(f"{path}:process", "second", weight=2.0))
    rewards, prompt = Rewards(options, 60.0, is_allowed=True), make_prompt(scores=[1.0, 2.0])
    found = [rewards.score(prompt, "So.", number, 3, 8) for number in (1, 2, 3)]
    assert rewards.names == ("first", "second")
    assert [one[0] for one in found] == [2.0, 2.0, 2.0]
    assert len(prompt.messages) == 1
    (process,) = {int(one[1]) for one in found}
    assert process != os.getpid()
    os.kill(process, 0)  # it lives
    del rewards
    wait_until(lambda: not is_running(process))  # what watches it has ended, and the kernel then ends it


# ---- the rewards of Genesis


def test_the_right_answer_needs_no_permission_and_a_record_without_one_is_named() -> None:
    options = (
        RewardOptions("exact_match", "exact", column="solution"),
        RewardOptions("math_answer", column="solution"),
    )
    rewards = Rewards(options, 60.0, is_allowed=False)
    found = [rewards.score(make_prompt(solution=12), text, 1, 3, 8).tolist() for text in (" 12\n", "It is 12.0", "13")]
    assert found == [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]
    with pytest.raises(UserError, match=r"line 7: the field 'solution' is None, and exact_match compares .* `column`"):
        rewards.score(make_prompt(answer=12), "12", 1, 3, 8)


@pytest.mark.parametrize(
    ("text", "expected", "is_right"),
    [
        ("The sum is 7, so that 3 + 4 = 7.", "7", True),
        ("First 7, then 8", "7", False),
        (r"So \boxed{\frac{1}{2}} remains of 30", "0.5", True),
        (r"\boxed{\dfrac{-3}{4}}", "-0.75", True),
        (r"\boxed{x^{2} + 1}", "x^{2}+1", True),
        (r"\boxed{1+x^{2}}", "x^{2}+1", False),  # equal by algebra alone
        (r"\boxed{12", "12", False),  # cut
        ("He has 1,234 apples.\n#### 1234", "#### 1,234", True),
        ("$1,000.00", "1000", True),
        ("50\\%", "50", True),
        ("1/3", "2/6", True),
        ("0.333", "1/3", False),
        ("1/0", "0", False),
        ("-5", "5", False),
        ("no number", "5", False),
        ("", "5", False),
        ("yes", " yes ", True),
        ("9" * 5000, "9" * 5000, True),  # too long for a number: compared as text
        ("1e9", "1000000000", False),
        (r"\boxed{\text{B}}", r"\boxed{\text{A}}", False),
        (r"\boxed{\text{(C)}}", "(C)", True),
        (r"\boxed{12\text{ apples}}", "12", True),
        (r"\boxed{}", r"\text{(C)}", False),
        (r"\boxed{}", r"\boxed{}", False),
        ("so x=5-3", "3", True),
        ("on 2024-01-05", "5", True),
    ],
)
def test_a_final_answer_is_compared_as_an_exact_number(text: str, expected: str, is_right: bool) -> None:
    assert match_numbers(text, expected) is is_right


@pytest.mark.parametrize("piece", ["1", "1,", "\\boxed{", "{", "\\text{", ". "])
def test_a_long_text_has_no_right_answer(piece: str) -> None:
    assert not match_numbers(piece * 20_000, "5")


def test_overlong_answers_lose_reward_within_the_buffer_alone() -> None:
    """DAPO, equation 13, with a longest length of 20 and a buffer of 4."""
    assert [score_length(size, 20, 4) for size in (1, 16, 17, 18, 20)] == [0.0, 0.0, -0.25, -0.5, -1.0]
    options = (RewardOptions("exact_match"), RewardOptions("overlong", buffer_tokens=4))
    rewards = Rewards(options, 60.0, is_allowed=False)
    assert rewards.score(make_prompt(answer="So."), "So.", 1, 18, 20).tolist() == [1.0, -0.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "neither of data.prompts.reward and data.prompts.rewards is given"),
        ({"reward": "a:b", "rewards": (RewardOptions("c:d"),)}, "both of data.prompts.reward"),
        ({"rewards": (RewardOptions("a:score"), RewardOptions("b:score"))}, "has the names score, score; give each"),
        ({"rewards": (RewardOptions("overlong", buffer_tokens=2),)}, "overlong alone"),
        (
            {"rewards": (RewardOptions("a:b"), RewardOptions("overlong", buffer_tokens=9)), "max_new_tokens": 8},
            "buffer_tokens of reward overlong is 9, more than data.prompts.max_new_tokens 8",
        ),
        (
            {
                "rewards": (RewardOptions("environment"), RewardOptions("overlong", buffer_tokens=25)),
                **{"environment": "a:B", "max_new_tokens": 8, "max_turns": 3},
            },
            "is 25, more than data.prompts.max_turns times data.prompts.max_new_tokens 24; lower it",
        ),
        ({"reward": "a:b", "reward_seconds": 0.0}, "reward_seconds is 0.0; it must be above 0 and at most 1,000,000"),
        ({"reward": "a:b", "max_resamples": -1}, "max_resamples is -1; it must be at least 0"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    def check() -> None:
        given = PromptOptions((SourceOptions("questions", ("questions.jsonl",)),), "tokenizer", **changes)
        given.check_rewards(are_learned=True)

    with pytest.raises(UserError, match=message):
        check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": ""}, "function of data.prompts.rewards is empty"),
        ({"function": "a:spread"}, "has the name 'spread'"),
        ({"function": "a:b", "name": "x_no_signal"}, "has the name 'x_no_signal'"),
        ({"function": "a:b", "name": "a b"}, "has the name 'a b'"),
        ({"function": "a:b", "weight": 0.0}, "weight of reward b is 0.0"),
        ({"function": "a:b", "weight": math.nan}, "weight of reward b is nan"),
        ({"function": "overlong"}, "buffer_tokens of reward overlong is None; overlong needs"),
        ({"function": "a:b", "buffer_tokens": 3}, "buffer_tokens of reward b is 3; overlong needs"),
        ({"function": "overlong", "buffer_tokens": 0}, "buffer_tokens of reward overlong is 0; it must be at least 1"),
    ],
)
def test_a_reward_without_a_meaning_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RewardOptions(**options)


def test_what_a_function_has_started_ends_with_its_time(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import subprocess, pathlib, time\n\n"
        "def reward(messages, text, columns):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "    child.wait()\n\n"
        "def other(messages, text, columns):\n"
        "    return 1.0\n"
    )
    options = tuple(RewardOptions(f"{tmp_path / 'slow.py'}:{name}", name) for name in ("reward", "other"))
    rewards = Rewards(options, 5.0, is_allowed=True)
    with pytest.raises(UserError, match=r"took longer than 5 s .*reward_seconds"):
        rewards.score(make_prompt(), "So.", 1, 3, 20)
    wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


BLOCKED = {
    "a call that waits": "ctypes.CDLL(None).pause()",
    "a call that holds the interpreter": "ctypes.PyDLL(None).pause()",
    "a search without end": "re.match('(a+)+$', 64 * 'a' + 'b')",
}
HANGING = """
import ctypes, os, pathlib, re, subprocess

def reward(messages, text, columns):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path("pids.part").write_text(f"{os.getpid()} {os.getppid()} {child.pid}")
    pathlib.Path("pids.part").rename("pids")
    BLOCKED
"""
RANK = """
from genesis.data.prompts import Prompt, RewardOptions
from genesis.train.reward import Rewards

rewards = Rewards((RewardOptions("hanging.py:reward", "reward"),), 600.0, is_allowed=True)
rewards.score(Prompt((1,), [], {}, "questions 1", lambda: "a line"), "So.", 1, 3, 8)
"""


@pytest.mark.process
@pytest.mark.parametrize("kind", BLOCKED)
def test_a_function_that_never_returns_ends_with_its_rank_and_what_it_has_started(tmp_path: Path, kind: str) -> None:
    (tmp_path / "hanging.py").write_text(HANGING.replace("BLOCKED", BLOCKED[kind]))
    (tmp_path / "rank.py").write_text(RANK)
    with ForkedCommand(str(tmp_path / "rank.py"), cwd=tmp_path) as rank:
        wait_until((tmp_path / "pids").exists)
        rank.kill()
        assert rank.wait() == -signal.SIGKILL
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        wait_until(lambda pid=pid: not is_running(pid))  # type: ignore[misc]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_the_signal_that_ended_a_function_is_named(tmp_path: Path, number: signal.Signals) -> None:
    default = "" if number == signal.SIGKILL else f"signal.signal({number}, signal.SIG_DFL)"
    (tmp_path / "dying.py").write_text(
        f"import os, signal\n\ndef reward(messages, text, columns):\n    {default}\n"
        f"    os.kill(os.getpid(), {number})\n"
    )
    with pytest.raises(UserError, match=f"ended by signal {int(number)} "):
        score(load(f"{tmp_path / 'dying.py'}:reward"), make_prompt(), "So.")


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_seconds = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline_seconds
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Returns whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_signal_to_all_processes_of_a_run_leaves_the_rewards(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def reward(messages, text, columns):\n    return 1.0\n")
    rewards = Rewards((RewardOptions(f"{tmp_path / 'one.py'}:reward"),), 60.0, is_allowed=True)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        rewards._worker.process.send_signal(number)
    assert rewards.score(make_prompt(), "So.", 1, 3, 20).tolist() == [1.0]


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scorer") / "run"
    directory.mkdir()
    qwen(directory)
    return save(directory / "checkpoints", 1, build_decoder(5, num_scores=1), {}, num_scores=1).parents[1]


def test_a_reward_model_scores_the_prompt_with_the_answer(scorer: Path) -> None:
    options = (
        RewardOptions("reward_model", "helpful", weight=0.5, model=str(scorer)),
        RewardOptions("exact_match", column="answer"),
    )
    rewards = Rewards(options, 60.0, is_allowed=False)
    prompt = make_prompt(answer="So.")
    loaded = load_decoder(scorer, allows_scores=True)
    renderer = open_renderer(loaded.text_tokenizer, ChatOptions())
    for text in ("So.", "No <|im_end|> at all"):
        found = rewards.score(prompt, text, 1, 3, 8)
        ids = renderer.render([*prompt.messages, {"role": "assistant", "content": text}]).ids.tolist()
        assert found.tolist() == [score_text(loaded.decoder, ids), float(text == "So.")]
    assert rewards.names == ("helpful", "exact_match")
    with pytest.raises(UserError, match=r"prompts\.jsonl, line 7: an answer has .* and the reward model .* reads 256"):
        rewards.score(prompt, "long " * 300, 1, 3, 8)


def test_what_is_no_reward_model_is_refused_at_the_start(scorer: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing"):
        Rewards((RewardOptions("reward_model", model="nothing"),), 60.0, is_allowed=False)
    (tmp_path / "run").mkdir()
    qwen(tmp_path / "run")
    save(tmp_path / "run/checkpoints", 1, build_decoder(5), {})
    with pytest.raises(UserError, match="is no reward model: name one that"):
        Rewards((RewardOptions("reward_model", model=str(tmp_path / "run")),), 60.0, is_allowed=False)
    for given in ({"function": "reward_model"}, {"function": "exact_match", "model": str(scorer)}):
        with pytest.raises(UserError, match=r"model of reward .* needs the run or the export of a reward model"):
            RewardOptions(**given)


def test_the_identity_of_a_run_has_the_hash_of_its_reward_models(scorer: Path) -> None:
    options = (RewardOptions("exact_match"), RewardOptions("reward_model", model=str(scorer)))
    (checkpoint,) = (scorer / "checkpoints").iterdir()
    identity = identify(options)
    assert identity["reward_models"] == read_committed_hash(checkpoint)
    assert identify(options[:1]) == {}
    dated = identify(options, ChatOptions(date="2026-01-31"))
    assert dated["reward_models"] == identity["reward_models"]
    assert dated["reward_templates"] != identity["reward_templates"]


def identify(options: Sequence[RewardOptions], chat: ChatOptions | None = None) -> dict[str, str]:
    return identify_reward_models(find_reward_models(options, {}), chat or ChatOptions())


def test_a_reward_model_is_found_once_and_again_after_its_run_has_gone_on(scorer: Path, tmp_path: Path) -> None:
    run, prompt = shutil.copytree(scorer, tmp_path / "run"), make_prompt()
    options = (RewardOptions("reward_model", model=str(run)),)
    models, identity = find_reward_models(options, {}), identify(options)
    wanted = score(Rewards(options, 60.0, is_allowed=False, models=models), prompt, "So.")
    save(run / "checkpoints", 2, build_decoder(6, num_scores=1), {}, num_scores=1)
    for found in (models, find_reward_models(options, identity)):
        assert identify_reward_models(found, ChatOptions()) == identity
        assert score(Rewards(options, 60.0, is_allowed=False, models=found), prompt, "So.") == wanted
    assert identify(options)["reward_models"] != identity["reward_models"]
    assert score(Rewards(options, 60.0, is_allowed=False), prompt, "So.") != wanted
    (run / "chat").mkdir()
    (run / "chat/template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    again = identify_reward_models(models, ChatOptions())
    assert again["reward_models"] == identity["reward_models"]
    assert again["reward_templates"] != identity["reward_templates"]


def test_a_template_or_a_context_that_does_not_fit_is_refused_before_training(scorer: Path, tmp_path: Path) -> None:
    run, prompt = shutil.copytree(scorer, tmp_path / "run"), make_prompt()
    options = (RewardOptions("reward_model", model=str(run)),)
    (run / "chat").mkdir()
    (run / "chat/template.jinja").write_text(
        "{{ strftime_now('%Y') }}{% for message in messages %}{% if message.role == 'system' %}"
        "{{ raise_exception('no system') }}{% endif %}{{ message.content }}{% endfor %}"
    )
    with pytest.raises(UserError, match=r"cannot read an answer to .*, line 7: .* as --data\.prompts\.date 2026-01-31"):
        Rewards(options, 60.0, is_allowed=False).check_prompts([prompt])
    dated = Rewards(options, 60.0, is_allowed=False, chat=ChatOptions(date="2026-01-31"))
    dated.check_prompts([])
    dated.check_prompts([prompt])
    system = prompt._replace(messages=[{"role": "system", "content": "Be brief."}, *prompt.messages])
    with pytest.raises(UserError, match=r"cannot read an answer to .*, line 7: .*no system"):
        dated.check_prompts([system, prompt])
    long = prompt._replace(ids=tuple(range(300)), messages=[{"role": "user", "content": "Why? " * 300}])
    with pytest.raises(UserError, match=r"reads 256: lower data\.prompts\.max_new_tokens, or leave out long prompts"):
        dated.check_prompts([long, prompt])


def test_functions_are_checked_before_a_reward_model_is_loaded(tmp_path: Path) -> None:
    for function, words in (("a.py:reward", "allow it by --allow_reward_code true"), ("nothing", "give module:")):
        options = (RewardOptions("reward_model", model=str(tmp_path / "none")), RewardOptions(function, "other"))
        with pytest.raises(UserError, match=words):
            Rewards(options, 60.0, is_allowed=False)
