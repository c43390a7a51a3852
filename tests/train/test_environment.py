"""The processes of environments, and how their turns become ids; a mistake is one line with record and turn."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genesis.base.errors import UserError
from genesis.data.prompt_data import PromptData
from genesis.generate.batch import Request
from genesis.generate.sampling_options import SamplingOptions
from genesis.train.environment import Call, Environments
from genesis.train.episodes import Answer, Asked, Episodes
from tests.chat.support import write_tokenizer
from tests.train.rollouts import build_data

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADDER = f"""
import json

class Adder:
    tools = [{TOOL!r}]

    def reset(self, record, seed):
        self.sum = record["sum"]

    def step(self, message):
        calls = message.get("tool_calls", [])
        if not calls and "tool_call" in message["content"]:
            return "Write the call as JSON.", -0.5, False
        if not calls:
            return None, float(message["content"] == self.sum), True
        given = json.loads(calls[0]["function"]["arguments"])
        result = {{"role": "tool", "tool_call_id": calls[0]["id"], "content": str(given["a"] + given["b"])}}
        return [result], 0.25, False
"""


def open_environment(directory: Path, body: str, seconds: float = 30.0) -> Environments:
    (directory / "game.py").write_text(f"import os, time\n\nclass Game:\n{body}\n")
    return Environments(f"{directory / 'game.py'}:Game", 2, seconds, is_allowed=True)


def begin(environments: Environments) -> Any:
    return environments.reset(
        [Call("reset", number, ({"messages": []}, 7), lambda: "at the start") for number in (0, 1)]
    )


def go_on(environments: Environments) -> Any:
    message = {"role": "assistant", "content": "Hello."}
    return environments.step([Call("step", number, (message,), lambda: "in turn 1 of episode 2") for number in (0, 1)])


def test_environments_keep_their_episodes_and_give_plain_data(tmp_path: Path) -> None:
    environments = open_environment(
        tmp_path,
        "    def reset(self, record, seed):\n"
        "        self.turns, self.seed = 0, seed\n"
        "    def step(self, message):\n"
        "        self.turns += 1\n"
        "        return f'{self.turns} {self.seed}', 1, self.turns == 2",
    )
    assert [start.messages for start in begin(environments)] == [[], []]
    (first, _), (last, other) = go_on(environments), go_on(environments)
    assert (first.messages, first.reward, first.is_done) == ([{"role": "user", "content": "1 7"}], 1.0, False)
    assert last == other == ([{"role": "user", "content": "2 7"}], 1.0, True)


def test_sets_have_the_same_order_after_a_restart_and_each_result_is_noted(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(
        "class Game:\n    def reset(self, record, seed): return ' '.join({*'abcdefgh'})\n"
    )
    noted: list[int] = []
    found = []
    for _ in range(2):
        environments = Environments(
            f"{tmp_path / 'game.py'}:Game", 1, 30.0, is_allowed=True, note=lambda: noted.append(1)
        )
        found.append(begin(environments))
    assert found[0] == found[1]
    assert len(noted) == 2 * 3  # the call that forgets earlier episodes, and two beginnings


RESET = "    def reset(self, record, seed): return 'Begin.'\n"
WRONG = {
    "    def reset(self, record, seed): return 1 / 0": r"failed at the start: ZeroDivisionError: .*; correct it$",
    "    def reset(self, record, seed): return [{'role': 'assistant', 'content': 'A'}]": r"gave the message .* a role",
    "    def reset(self, record, seed): return {1}": r"gave the observation .* at the start; return a text",
    "    tools = [5]\n" + RESET: r"has the tools '\[5\]' at the start; give a list of definitions",
    RESET + "    def step(self, message): raise SystemExit": r"failed in turn 1 of episode 2: SystemExit",
    RESET + "    def step(self, message): os._exit(3)": r"ended with status 3 in turn 1 of episode 2; correct it$",
    RESET
    + "    def step(self, message): time.sleep(1000)": r"took longer than 3 s in turn 1 of episode 2; correct it, or",
    RESET + "    def step(self, message): return 'A', float('nan'), True": r"gave nan as its reward in turn 1",
    RESET + "    def step(self, message): return 'A', 'much', True": r"gave 'much' as its reward in turn 1",
    RESET + "    def step(self, message): return 'A', 1.0, 1": r"gave '1' for whether the episode is done in turn 1",
    RESET
    + "    def step(self, message): return 'A', 1.0": r"gave .* in turn 1 of episode 2; return observation, reward",
    RESET
    + "    def step(self, message): return None, 0.0, False": r"gave no observation in turn 1 of episode 2, but has",
}


@pytest.mark.parametrize("body", WRONG, ids=map(str, range(len(WRONG))))
def test_what_is_wrong_with_an_environment_is_one_line(tmp_path: Path, body: str) -> None:
    environments = open_environment(tmp_path, body, 3.0)

    def run() -> None:
        begin(environments)
        go_on(environments)

    with pytest.raises(UserError, match=rf"the (process of the )?environment .*game\.py:Game {WRONG[body]}") as caught:
        run()
    assert "\n" not in str(caught.value)


def test_a_class_that_is_not_allowed_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="allow it by --allow_reward_code true"):
        Environments("game.py:Game", 1, 1.0, is_allowed=False)
    with pytest.raises(UserError, match=r"no such file: .*game\.py"):
        Environments(f"{tmp_path / 'game.py'}:Game", 1, 1.0, is_allowed=True)
    with pytest.raises(UserError, match="give module:Class or file"):
        Environments("Game", 1, 1.0, is_allowed=True)
    with pytest.raises(UserError, match=r"math has no class 'Game'; name one by data\.prompts\.environment"):
        Environments("math:Game", 1, 60.0, is_allowed=True)


# ---- turns as ids


def write_adder(directory: Path, template: str = TEMPLATE, **record: Any) -> PromptData:
    write_tokenizer(directory / "tokenizer", template)
    content = {"prompt": "What is 2 plus 3?", "sum": "5", **record}
    (directory / "prompts.jsonl").write_text(json.dumps(content) + "\n")
    (directory / "adder.py").write_text(ADDER)
    options = {"environment": f"{directory / 'adder.py'}:Adder", "num_environments": 1, "max_turns": 3}
    data = build_data(directory, reward=None, seq_len=1000, max_new_tokens=100, **options).training
    assert isinstance(data, PromptData)
    return data


def play(data: PromptData, turns: Sequence[str]) -> Answer:
    """Returns an episode in which the model writes these turns."""
    waiting = iter(turns)

    def generate(requests: Sequence[Request]) -> list[np.ndarray[Any, Any]]:
        return [np.array(data.tokenizer.encode_with_controls(next(waiting)), np.int32) for _ in requests]

    prompt = data.prompt_at(0)
    request = Request(prompt.ids, 100, SamplingOptions(0.0), 1)
    (answer,) = Episodes(data, is_allowed=True).play([request], [Asked(prompt, 1, 2)], generate)
    return answer


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'


def test_an_episode_has_the_ids_and_labels_of_the_same_conversation_in_training(tmp_path: Path) -> None:
    data = write_adder(tmp_path)
    answer = play(data, [CALL, "5<|im_end|>"])
    assert answer.episode is not None
    assert (answer.episode.reward, answer.episode.ending, answer.episode.counts) == (1.25, "done", (2, 1, 0))
    assert answer.is_finished
    _, called, result, last = answer.episode.messages
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    assert (result["content"], result["tool_call_id"], last["content"]) == ("5", called["tool_calls"][0]["id"], "5")
    whole = data.renderer.render(answer.episode.messages, [TOOL])
    ids = [*answer.prompt, *answer.ids.tolist()]
    assert ids == whole.ids.tolist()[: len(ids)]
    assert [False] * len(answer.prompt) + answer.is_own.tolist() == whole.trained.tolist()[: len(ids)]


def test_a_call_that_cannot_be_read_goes_to_the_environment_and_is_counted(tmp_path: Path) -> None:
    answer = play(write_adder(tmp_path), ["<tool_call>\n{add 2 3}\n</tool_call><|im_end|>", CALL, "6<|im_end|>"])
    assert answer.episode is not None
    assert (answer.episode.rewards, answer.episode.counts) == ([-0.5, 0.25, 0.0], (3, 1, 1))


def test_a_turn_that_the_template_refuses_ends_no_run(tmp_path: Path) -> None:
    check = "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 or 'never' in m.content %}"
    check += "{{ raise_exception('no such turn') }}{% endif %}"
    data = write_adder(tmp_path, TEMPLATE.replace("{% for m in messages %}", check))
    two = CALL.replace("<|im_end|>", "\n" + CALL)
    answer = play(data, [two, CALL, "5<|im_end|>"])
    assert answer.episode is not None
    assert (answer.episode.ending, answer.episode.counts) == ("done", (3, 1, 2))
    assert answer.episode.rewards == [-0.5, 0.25, 1.0]  # the environment got the first turn as a text
    assert answer.episode.messages[1] == {"role": "assistant", "content": two.removesuffix("<|im_end|>")}
    refused = play(data, [CALL, "never<|im_end|>"])
    assert refused.episode is not None
    assert (refused.episode.ending, refused.is_finished, refused.episode.rewards) == ("refused", False, [0.25])
    assert (refused.episode.counts, refused.is_own[-1]) == ((2, 1, 0), True)


def test_an_episode_ends_at_its_limits(tmp_path: Path) -> None:
    data = write_adder(tmp_path)
    endless = play(data, [CALL] * 3)
    assert endless.episode is not None
    assert (endless.episode.ending, endless.is_finished, endless.episode.reward) == ("turns", False, 0.75)
    cut = play(data, [CALL, "It is the"])
    assert cut.episode is not None
    assert (cut.episode.ending, cut.is_finished, cut.episode.rewards) == ("length", False, [0.25])
    assert cut.is_own[-1]


def test_templates_and_records_that_no_episode_can_have_are_refused(tmp_path: Path) -> None:
    rewriting = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content if loop.last else m.content[:2] }}"
    rewriting += "<|im_end|>\n{% endfor %}{% if tools %}{{ tools }}{% endif %}"
    with pytest.raises(
        UserError, match=r"in turn 1 of episode 1 of .*line 1: the chat template .* turn otherwise once"
    ):
        play(write_adder(tmp_path / "one", rewriting), [CALL, "5<|im_end|>"])
    toolless = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises(UserError, match=r"prompts\.jsonl, line 1: the chat template .* leaves out the tools"):
        play(write_adder(tmp_path / "two", toolless), [CALL])
    data = write_adder(tmp_path / "four")
    text = ADDER.replace('self.sum = record["sum"]', "import time; return str(time.time_ns())")
    (tmp_path / "four" / "adder.py").write_text(text)
    request, asked = Request((1,), 100, SamplingOptions(0.0), 1), Asked(data.prompt_at(0), 1, 2)
    with pytest.raises(UserError, match="does not begin as before at the start of episode 2 of"):
        Episodes(data, is_allowed=True).play([request] * 2, [asked, asked._replace(number=2)], lambda requests: [])
    with pytest.raises(UserError, match="both the record and the environment"):
        play(write_adder(tmp_path / "three", tools=[TOOL]), [CALL])
