"""Prompts: read from every form of conversation, ordered and counted; answers survive a checkpoint and other ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genesis.base.errors import UserError
from genesis.data.loader import Ranks
from genesis.data.prompt_data import Group, PromptData, pack_groups, unpack_groups
from genesis.data.prompts import PromptOptions, find_reward_file
from genesis.data.rollout_options import RolloutOptions
from genesis.data.sources import SourceOptions
from genesis.data.training_data import TrainingOptions
from genesis.data.window import AccumulationWindow
from tests.chat.support import CHATML, write_tokenizer

QUESTION = {"role": "user", "content": "What is two and two?"}
ANSWER = {"role": "assistant", "content": "Four."}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def open_data(tmp_path: Path, tokenizer: Path, records: list[Any], **changes: Any) -> PromptData:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    reward = tmp_path / "reward.py"
    reward.write_text("def reward(messages, text, columns):\n    return 1.0\n")
    batch = {"seq_len": 64, "micro_batch_size": 2, "global_batch_size": 2} | changes.pop("batch", {})
    options = PromptOptions(
        (SourceOptions("questions", (str(path),)),),
        str(tokenizer),
        **({"reward": f"{reward}:reward", "group_size": 2, "steps_per_rollout": 2} | changes),
    )
    return PromptData(options, TrainingOptions(**batch), tokenizer_hash=None)


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"messages": [QUESTION], "answer": 4}, {"answer": 4}),
        ({"messages": [QUESTION, ANSWER]}, {}),
        ({"prompt": QUESTION["content"], "answer": "4"}, {"answer": "4"}),
        ({"prompt": [QUESTION], "tags": ["a"]}, {"tags": ["a"]}),
        ({"prompt": None, "messages": [QUESTION]}, {}),
        ({"prompt": QUESTION["content"], "completion": "Four."}, {"completion": "Four."}),
        # No answer of the data is learned, so that marks have no meaning here: they are columns for the reward.
        ({"messages": [{**QUESTION, "toxic": False}, {**ANSWER, "train": 0.5}], "weight": 0.7}, {"weight": 0.7}),
    ],
)
def test_a_prompt_is_a_conversation_without_its_answer(
    tmp_path: Path, tokenizer: Path, record: dict[str, Any], columns: dict[str, Any]
) -> None:
    data = open_data(tmp_path, tokenizer, [{"prompt": "Hello"}, record])
    hello, prompt = data.prompts.of_source["questions"]
    assert [(m["role"], m["content"]) for m in prompt.messages] == [("user", "What is two and two?")]
    assert prompt.columns == columns
    assert prompt.place == f"{tmp_path / 'prompts.jsonl'}, line 2"
    assert data.tokenizer.decode(prompt.ids).endswith("assistant\n")
    assert hello.ids != prompt.ids
    assert (hello.name, prompt.name) == ("questions 1", "questions 2")


def test_a_prompt_on_which_the_template_exceeds_a_limit_is_named(tmp_path: Path, tokenizer: Path) -> None:
    template = tmp_path / "wide.jinja"
    template.write_text("{% if messages[0].content == 'wide' %}{{ '%999999999d' % 1 }}{% endif %}" + CHATML)
    wanted = r"^source questions: \S*prompts.jsonl, line 2: the chat template \S*wide.jinja needs more than 64 MB"
    with pytest.raises(UserError, match=wanted):
        assert open_data(tmp_path, tokenizer, [{"prompt": "Hello"}, {"prompt": "wide"}], template=template).prompts


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [ANSWER]}, "line 1: the conversation has nothing before the assistant's last turn"),
        (
            {"prompt": "Why?", "messages": [QUESTION]},
            "line 1: the record has both messages and prompt, .* by `chat` of source questions .* or remove one",
        ),
        ({"question": "Why?"}, "line 1: no conversation is in the fields question"),
        ({"prompt": "word " * 300}, "line 1: the prompt has .* tokens, which with 1 new one exceed data.seq_len 64"),
    ],
)
def test_a_record_without_a_usable_prompt_is_refused_with_its_line(
    tmp_path: Path, tokenizer: Path, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        _ = open_data(tmp_path, tokenizer, [record]).prompts


def test_an_error_names_all_bad_rows_of_a_source(tmp_path: Path, tokenizer: Path) -> None:
    both, none, answered = {"prompt": "Why?", "messages": [QUESTION]}, {"question": "Why?"}, {"messages": [ANSWER]}
    with pytest.raises(UserError) as caught:
        _ = open_data(tmp_path, tokenizer, [{"prompt": "Why?"}, both, none, answered, none]).prompts
    first, *lines = str(caught.value).splitlines()
    assert first == "source questions has 4 bad rows; correct them:"
    assert [line.partition("jsonl, ")[2][:6] for line in lines] == ["line 2", "line 3", "line 4"]
    assert lines[1].endswith("(also line 5)")


def test_long_prompts_are_dropped_by_choice_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"prompt": "Hello"}, {"prompt": "word " * 300}]
    prompts = open_data(tmp_path, tokenizer, records, on_long="drop").prompts
    assert len(prompts.of_source["questions"]) == 1
    assert prompts.num_dropped == 1
    with pytest.raises(UserError, match="no prompt that fits"):
        _ = open_data(tmp_path, tokenizer, records[1:], on_long="drop").prompts


def test_the_identity_follows_prompts_columns_and_the_reward_functions_file(tmp_path: Path, tokenizer: Path) -> None:
    first = open_data(tmp_path, tokenizer, [{"prompt": "Hello", "answer": 1}]).identity
    assert open_data(tmp_path, tokenizer, [{"prompt": "Hello", "answer": 1}]).identity == first
    other = open_data(tmp_path, tokenizer, [{"prompt": "Hello", "answer": 2}])
    assert other.identity["prompts"] != first["prompts"]
    assert other.identity["reward"] == first["reward"]
    changed = open_data(tmp_path, tokenizer, [{"prompt": "Hello", "answer": 1}])
    (tmp_path / "reward.py").write_text("def reward(*arguments):\n    return 2.0\n")
    assert changed.identity["reward"] != first["reward"]
    assert changed.identity["prompts"] == first["prompts"]


def make_group(position: int, num_rewards: int = 1) -> Group:
    answers = tuple(np.arange(size, dtype=np.int32) + position for size in (1 + position, 3))
    of_tokens = tuple(-np.arange(len(answer), dtype=np.float32) for answer in answers)
    single = np.array([[position, 1.0, 2.0], [0.5, 3.0, 4.0]])[:, :num_rewards]
    old = np.array([-1.5, position], np.float32)
    return Group(answers, np.array([True, False]), np.array([position, 0.5]), old, single, of_tokens, position - 3)


def same(one: Group, other: Group) -> bool:
    columns = ("is_finished", "rewards", "old_log_probs", "single_rewards", "num_resamples")
    return (
        all(map(np.array_equal, one.answers, other.answers))
        and all(map(np.array_equal, one.token_log_probs or (), other.token_log_probs or ()))
        and (one.token_log_probs is None) == (other.token_log_probs is None)
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)
    )


def test_a_reward_function_of_a_module_is_identified_by_a_source_that_is_not_run(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "of_a_user"
    (package / "scores").mkdir(parents=True)
    ran = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (package / "__init__.py").write_text(ran)
    monkeypatch.syspath_prepend(tmp_path)

    def identify(source: str) -> str | None:
        (package / "scores" / "length.py").write_text(ran + source)
        data = open_data(tmp_path, tokenizer, [{"prompt": "Hello"}])
        data.prompt_options = replace(data.prompt_options, reward="of_a_user.scores.length:score")
        return data.identity.get("reward")

    first = identify("def score(messages, text, columns): return 1.0")
    assert first is not None
    assert identify("def score(messages, text, columns): return 1.0") == first
    assert identify("def score(messages, text, columns): return 2.0") != first
    assert not (tmp_path / "ran").exists()
    assert find_reward_file("of_a_user.nowhere.length:score") is None
    assert find_reward_file("sys:exit") is None


def test_packed_answers_are_the_same_answers() -> None:
    groups = {position: make_group(position, num_rewards=3) for position in (7, 3, 4)}
    unpacked = unpack_groups(pack_groups(groups))
    assert list(unpacked) == [3, 4, 7]
    assert all(same(groups[position], group) for position, group in unpacked.items())
    assert unpack_groups(pack_groups({})) == {}


def test_answers_of_a_release_with_one_reward_are_read() -> None:
    group = make_group(5)
    packed = pack_groups({5: replace(group, token_log_probs=None, num_resamples=0)})
    old = {name: array for name, array in packed.items() if name not in ("single_rewards", "num_resamples")}
    (read,) = unpack_groups(old).values()
    assert same(read, replace(group, single_rewards=group.rewards[:, None], token_log_probs=None, num_resamples=0))


def window_at(position: int) -> AccumulationWindow:
    return AccumulationWindow((), 0, 0, position)


def test_ranks_plan_a_rollout_together_and_keep_what_is_not_trained(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"prompt": f"Question {number}"} for number in range(5)]
    states = []
    for rank in range(2):
        data = open_data(tmp_path, tokenizer, records)
        data.open(Ranks(rank, 2))
        assert data.window(4).data_position == 6
        assert data.plan_rollout(0) == [rank, 2 + rank]
        data.groups = {position: make_group(position) for position in data.plan_rollout(0)}
        assert data.plan_rollout(0) == data.plan_rollout(2) == []
        data.advance(window_at(2))
        assert list(data.groups) == [2 + rank]
        states.append(data.state())
    alone = open_data(tmp_path, tokenizer, records)
    alone.load_state(alone.combine_states(states))
    alone.open(Ranks(0, 1))
    assert alone.cursor.position == 2
    assert alone.plan_rollout(2) == []
    assert all(same(alone.groups[position], make_group(position)) for position in (2, 3))
    assert alone.plan_rollout(4) == [4, 5, 6, 7]


def test_a_resume_with_another_group_size_answers_again(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"prompt": f"Question {number}"} for number in range(5)]
    data = open_data(tmp_path, tokenizer, records)
    data.open(Ranks())
    data.groups = {position: make_group(position) for position in data.plan_rollout(0)}
    other = open_data(tmp_path, tokenizer, records, group_size=4)
    other.load_state(data.state())
    other.open(Ranks())
    assert other.plan_rollout(0) == [0, 1, 2, 3]


def test_a_resume_of_a_servers_rollouts_with_another_batch_size_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    records, remote = [{"prompt": "Hello"}], {"rollouts": RolloutOptions("openai", "http://a")}
    data = open_data(tmp_path, tokenizer, records, **remote)
    data.open(Ranks())
    data.served = {2: "0000000002-abc"}
    same = open_data(tmp_path, tokenizer, records, **remote)
    same.load_state(data.state())
    assert same.served == data.served
    other = open_data(tmp_path, tokenizer, records, **remote, batch={"global_batch_size": 4})
    with pytest.raises(
        UserError, match=r"global_batch_size is 4, and the checkpoint's rollouts .* batches of 2: leave"
    ):
        other.load_state(data.state())
    local = open_data(tmp_path, tokenizer, records, batch={"global_batch_size": 4})
    local.load_state(data.state())
    assert local.served == {}


def test_epochs_end_the_data_at_the_last_whole_batch(tmp_path: Path, tokenizer: Path) -> None:
    data = open_data(tmp_path, tokenizer, [{"prompt": f"{n}"} for n in range(5)], batch={"num_epochs": 1})
    data.open(Ranks())
    assert data.cursor.last_position == 4
    data.advance(window_at(2))
    assert data.find_end() is None
    assert data.plan_rollout(2) == [2, 3]  # and not beyond the end
    data.advance(window_at(4))
    assert "epoch limit" in (data.find_end() or "")
    assert data.sum_usage(lambda values: values)["questions"] == {"prompts": 4, "epochs": 0.8}
    assert sorted(data.prompt_at(position).messages[0]["content"] for position in range(5)) == list("01234")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 0}, "group_size is 0; it must be at least 1"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"batch": {"packing": "best_fit"}}, "data.packing is best_fit"),
        ({"batch": {"micro_batch_size": 3}}, "has 4 answers, not divisible into micro-batches of .* 3"),
    ],
)
def test_options_that_cannot_be_trained_are_refused(
    tmp_path: Path, tokenizer: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        open_data(tmp_path, tokenizer, [{"prompt": "Hello"}], **changes).open(Ranks())


@pytest.mark.parametrize(
    ("changes", "are_learned", "message"),
    [
        ({"group_size": 1}, True, "group_size is 1; it must be at least 2"),
        ({"reward": None}, True, r"neither of data\.prompts\.reward and data\.prompts\.rewards is given; give one"),
        ({"reward": None, "max_resamples": 1}, False, "max_resamples is 1, but there are no rewards"),
        ({"group_size": 1, "reward": None}, False, None),
    ],
)
def test_what_an_objective_needs_of_rewards_is_refused_where_it_is_missing(
    tmp_path: Path, tokenizer: Path, changes: dict[str, Any], are_learned: bool, message: str | None
) -> None:
    options = open_data(tmp_path, tokenizer, [{"prompt": "Hello"}], **changes).prompt_options
    if message is None:
        options.check_rewards(are_learned=are_learned)
        return
    with pytest.raises(UserError, match=message):
        options.check_rewards(are_learned=are_learned)


def test_the_state_of_other_data_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(UserError, match="was not trained on prompts"):
        open_data(tmp_path, tokenizer, [{"prompt": "Hello"}]).load_state({"data_position": 4, "order": {}})


def test_answers_end_where_the_template_closes_turns(tmp_path: Path, tokenizer: Path) -> None:
    # huggingface/open-r1#603 is the same on a base model: every answer counts as cut.
    data = open_data(tmp_path, tokenizer, [{"prompt": "a?"}])
    assert {data.tokenizer.pieces[token] for token in data.stop_ids} == {"</s>", "<|im_end|>"}
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    data = open_data(tmp_path, tokenizer, [{"prompt": "a?"}], template=own)
    assert {data.tokenizer.pieces[token] for token in data.stop_ids} == {"</s>", "<|end|>"}
    assert data.chat_template == own.read_text()
