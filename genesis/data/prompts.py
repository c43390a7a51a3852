"""Prompts that a model answers in training: conversations without their answer, with columns for a reward function."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from blake3 import blake3

from genesis.base.errors import UserError, check_is_named, numbered
from genesis.chat.conversation import load_conversation
from genesis.chat.marks import RECORD_MARKS
from genesis.chat.options import ChatOptions
from genesis.chat.render import ChatRenderer
from genesis.chat.template import ConversationError, EndlessTemplateError, Message
from genesis.data.rollout_options import RolloutOptions
from genesis.data.row_notes import MAX_REFUSED, BadRowsError, RefusedRow, explain_refused, strip_place
from genesis.data.sources import (
    BadRow,
    Document,
    SourceOptions,
    check_sources,
    find_files,
    plan_spans,
    read_rows,
    refuse_sources,
)

_SPAN_BYTES = 1 << 40
"""A file is read in one span: prompts are few and are kept in memory."""
_TURNS = ("messages", "conversations", "conversation", "prompt")


EXACT_MATCH, MATH_ANSWER, OVERLONG, REWARD_MODEL = "exact_match", "math_answer", "overlong", "reward_model"
"""The reward functions of Genesis itself, which need no permission."""
ENVIRONMENT: Final = "environment"
"""The reward function that returns the sum of what an environment has given in an episode."""
OWN_REWARDS: Final = (EXACT_MATCH, MATH_ANSWER, OVERLONG, REWARD_MODEL, ENVIRONMENT)
_MAX_REWARD_SECONDS: Final = 1_000_000
_LEAST_COMPARED: Final = 2
_REWARD_NAME: Final = re.compile(r"[A-Za-z]\w*", re.ASCII)
_OF_OTHERS: Final = re.compile(r"(?:.*_)?(?:spread|no_signal)")
"""Names that would log a reward as a figure of the sum, or of another reward."""


@dataclass(frozen=True)
class RewardOptions:
    """One of several rewards.

    Args:
        function: `module:function` or `file.py:function`, which is run only with `--allow_reward_code`; or exact_match,
            math_answer, overlong, reward_model or environment (what the environment of data.prompts gives).
        name: Its name in the log; by default that of the function.
        weight: Its factor in the sum of the rewards.
        column: The field of the record with the right answer, for exact_match and math_answer.
        buffer_tokens: For overlong: over how many tokens before the longest length the reward falls from 0 to -1.
        model: For reward_model: a run, RUN/best, RUN/STEP or an export with a reward model, whose score of the prompt
            with the answer is the reward.
    """

    function: str
    name: str | None = None
    weight: float = 1.0
    column: str = "answer"
    buffer_tokens: int | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        check_is_named(self.function, "function of data.prompts.rewards")
        if _REWARD_NAME.fullmatch(self.label) is None or _OF_OTHERS.fullmatch(self.label):
            raise UserError(
                f"data.prompts.rewards has the name {self.label!r}: give another one by `name`, of letters, digits and "
                "underscores, that does not end with spread or no_signal"
            )
        if not 0.0 < abs(self.weight) < float("inf"):
            raise UserError(f"the weight of reward {self.label} is {self.weight}; it must be a number other than 0")
        if (self.function == OVERLONG) != (self.buffer_tokens is not None):
            raise UserError(
                f"buffer_tokens of reward {self.label} is {self.buffer_tokens}; {OVERLONG} needs a number of tokens, "
                "and other rewards have none"
            )
        check_is_named(self.model, "model of data.prompts.rewards")
        if (self.function == REWARD_MODEL) != (self.model is not None):
            raise UserError(
                f"model of reward {self.label} is {self.model}; {REWARD_MODEL} needs the run or the export of a reward "
                "model (in data.prompts.rewards), and other rewards have none"
            )
        if self.buffer_tokens is not None and self.buffer_tokens < 1:
            raise UserError(f"buffer_tokens of reward {self.label} is {self.buffer_tokens}; it must be at least 1")

    @property
    def label(self) -> str:
        """Returns the name in the log."""
        return self.name if self.name is not None else self.function.rpartition(":")[2]


@dataclass(frozen=True)
class PromptOptions:
    """Prompts that the model answers in training, and how a reward function scores the answers.

    `data.global_batch_size` and the position count prompts, `data.micro_batch_size` counts answers, and `data.seq_len`
    is the longest prompt with its answer.

    Args:
        sources: Named sources of conversations, as `genesis data prepare` takes them. A prompt is a conversation
            without the assistant's last turn, or the field `prompt` alone. The reward function gets all other fields.
        tokenizer: A directory that holds a tokenizer, or its file.
        reward: The reward function, `module:function` or `file.py:function`, which is run only with
            `--allow_reward_code`; or exact_match or math_answer, which compare the answer with the field `answer`.
        rewards: Several rewards instead of one, which are added by their weights and logged by their names.
        reward_seconds: How long a reward function may take for an answer, before the run ends.
        environment: The class of an environment, `module:Class` or `file.py:Class`, which is run only with
            `--allow_reward_code`: it answers the model's turns, and gives rewards; without reward and rewards, its
            reward is the only one. An answer is then an episode of several turns.
        max_turns: Turns of the model after which an episode ends, if its environment has not ended it.
        num_environments: Processes of each rank that run environments at the same time.
        step_seconds: How long an environment may take for a turn, before the run ends.
        group_size: Answers to each prompt, whose rewards are compared with one another.
        max_resamples: How many times a prompt whose answers all got the same reward is replaced by another one of its
            source, before a group without a signal is trained; rewards of the length alone are no signal.
        steps_per_rollout: Optimizer steps, each with prompts of its own, on answers of the same weights.
        max_new_tokens: The longest answer, or turn of an episode; by default what data.seq_len leaves.
        temperature: The divisor of the logits when answers are sampled, and in the loss.
        num_rows: Answers that one rank generates at a time.
        template: File of a Jinja chat template; by default the tokenizer's own.
        date: The date, such as 2026-01-31, for templates that print today's date.
        variables: Further variables of the template, such as `enable_thinking: false`.
        on_long: The action for a prompt that leaves no room for an answer: error or drop.
        num_logged_prompts: Prompts of each rollout and rank whose answers are written to the run's directory; of the
            newest rollouts with an environment, all are written.
        validation_share: The share of the prompts that are not trained, and get one greedy answer in each validation.
            A prompt's content decides whether it is one of them.
        rollouts: Who writes the answers: a server, or the model that trains, which is the default.
    """

    sources: tuple[SourceOptions, ...]
    tokenizer: str
    reward: str | None = None
    rewards: tuple[RewardOptions, ...] = ()
    reward_seconds: float = 60.0
    environment: str | None = None
    max_turns: int = 8
    num_environments: int = 4
    step_seconds: float = 60.0
    group_size: int = 8
    max_resamples: int = 0
    steps_per_rollout: int = 4
    max_new_tokens: int | None = None
    temperature: float = 1.0
    num_rows: int = 64
    template: Path | None = None
    date: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    on_long: Literal["error", "drop"] = "error"
    num_logged_prompts: int = 1
    validation_share: float = 0.0
    rollouts: RolloutOptions | None = None

    def __post_init__(self) -> None:
        check_sources(self.sources)
        refuse_sources(
            self.sources,
            values="which no answer in training has",
            pairs="which have answers already; name another form by `chat`",
            skipping="data.prompts",
        )
        for name in ("reward", "tokenizer", "environment"):
            check_is_named(getattr(self, name), f"data.prompts.{name}")
        least = {
            **{"group_size": 1, "steps_per_rollout": 1, "max_new_tokens": 1, "num_rows": 1},
            **{"num_logged_prompts": 0, "max_resamples": 0, "max_turns": 1, "num_environments": 1},
        }
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise UserError(f"data.prompts.{name} is {value}; it must be at least {bound}")
        self._check_rewards()
        if not 0.0 < self.temperature < float("inf"):
            raise UserError(
                f"data.prompts.temperature is {self.temperature}; it must be above 0, or all answers would be the same"
            )
        if not 0.0 <= self.validation_share < 1.0:
            raise UserError(
                f"data.prompts.validation_share is {self.validation_share}; it must be at least 0 and below 1"
            )
        self.writer.check(self.steps_per_rollout, self.temperature)
        if self.writer.is_remote and self.environment is not None:
            raise UserError(
                "data.prompts.rollouts.by is openai, but episodes in data.prompts.environment are written by the model "
                "that trains; leave rollouts out"
            )
        _ = self.chat

    def _check_rewards(self) -> None:
        if self.reward is not None and self.rewards:
            raise UserError("both of data.prompts.reward and data.prompts.rewards is given; give one of them")
        if self.environment is None and any(reward.function == ENVIRONMENT for reward in self.all_rewards):
            raise UserError(
                f"a reward of data.prompts is {ENVIRONMENT}, but data.prompts.environment is not given; name its class"
            )
        labels = [reward.label for reward in self.all_rewards]
        if len({*labels}) < len(labels):
            raise UserError(f"data.prompts.rewards has the names {', '.join(labels)}; give each another `name`")
        if labels and all(reward.function == OVERLONG for reward in self.all_rewards):
            raise UserError(f"data.prompts.rewards has {OVERLONG} alone, which scores the length; add another reward")
        longest = None if self.max_new_tokens is None else self.longest_answer(sys.maxsize)
        of_turns = "" if self.environment is None else "data.prompts.max_turns times "
        for reward in self.rewards:
            if longest is not None and (reward.buffer_tokens or 0) > longest:
                raise UserError(
                    f"buffer_tokens of reward {reward.label} is {reward.buffer_tokens}, more than "
                    f"{of_turns}data.prompts.max_new_tokens {longest}; lower it"
                )
        for name in ("reward_seconds", "step_seconds"):
            if not 0.0 < getattr(self, name) <= _MAX_REWARD_SECONDS:
                raise UserError(
                    f"data.prompts.{name} is {getattr(self, name)}; it must be above 0 and at most "
                    f"{_MAX_REWARD_SECONDS:,}"
                )

    def check_rewards(self, *, are_learned: bool) -> None:
        """Refuses prompts without what an objective needs of rewards.

        Args:
            are_learned: Whether it learns them.

        Raises:
            UserError: There are none, or nothing to compare them with.
        """
        if are_learned and not self.all_rewards:
            raise UserError("neither of data.prompts.reward and data.prompts.rewards is given; give one of them")
        if are_learned and self.group_size < _LEAST_COMPARED:
            raise UserError(f"data.prompts.group_size is {self.group_size}; it must be at least {_LEAST_COMPARED}")
        if self.max_resamples and not self.all_rewards:
            raise UserError(
                f"data.prompts.max_resamples is {self.max_resamples}, but there are no rewards by which prompts are "
                "replaced; set it to 0"
            )

    @property
    def all_rewards(self) -> tuple[RewardOptions, ...]:
        """Returns the rewards, by default those of the environment; a single one is the sum."""
        if self.rewards or self.reward is self.environment is None:
            return self.rewards
        return (RewardOptions(self.reward or ENVIRONMENT, "reward"),)

    def longest_answer(self, room: int) -> int:
        """Returns how many tokens the model may write for an answer, or in the turns of an episode.

        Args:
            room: The tokens that are left for it.
        """
        num_turns = 1 if self.environment is None else self.max_turns
        return room if self.max_new_tokens is None else min(room, num_turns * self.max_new_tokens)

    @property
    def writer(self) -> RolloutOptions:
        """Returns who writes the answers."""
        return self.rollouts or RolloutOptions()

    @property
    def chat(self) -> ChatOptions:
        """Returns the options of the chat template."""
        return ChatOptions(template=self.template, date=self.date, variables=self.variables)

    @property
    def chat_of_others(self) -> ChatOptions:
        """Returns the same for reward models, which have templates of their own."""
        return replace(self.chat, template=None)


class Prompt(NamedTuple):
    """One prompt.

    `columns` has the fields of its record that are not the conversation. `name` is its source with its number there,
    from 1, and `locate()` returns its file and line, for which it reads the file again. `tools` and `variables` are
    those of its conversation.
    """

    ids: tuple[int, ...]
    messages: Sequence[Message]
    columns: Mapping[str, Any]
    name: str
    locate: Callable[[], str]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = MappingProxyType({})

    @property
    def place(self) -> str:
        """The file and the line; the name if the file cannot be read any more."""
        try:
            return self.locate()
        except (OSError, UserError):
            return self.name


class PromptSet(NamedTuple):
    """The trained prompts of each source by its name, how many were dropped because they are long, and the held-out."""

    of_source: Mapping[str, Sequence[Prompt]]
    num_dropped: int
    held_out: Sequence[Prompt] = ()

    def hash(self) -> str:
        """Returns the identity of the prompts: their ids and their columns."""
        hasher = blake3()
        for name, prompts in self.of_source.items():
            hasher.update(f"{name} {len(prompts)}\n".encode())
            for prompt in prompts:
                hasher.update(_serialise(prompt))
        return hasher.hexdigest()


def _serialise(prompt: Prompt) -> bytes:
    content = [prompt.ids, prompt.messages, prompt.columns]
    return json.dumps(content, sort_keys=True, default=repr).encode("utf-8", "surrogatepass")


def _is_held_out(prompt: Prompt, share: float) -> bool:
    """Returns whether a prompt is validated: equal prompts are on the same side, in any order and on any rank."""
    return int.from_bytes(blake3(b"held out" + _serialise(prompt)).digest(8), "big") < share * 2**64


def check_code(option: str, name: str, remedy: str, *, is_allowed: bool) -> None:
    """Refuses code of a user that cannot be found by its name, or that the command line does not allow.

    Args:
        option: The option that names it.
        name: `module:name` or `file.py:name`.
        remedy: What to give instead of a wrong name.
        is_allowed: Whether the command line allows it.

    Raises:
        UserError: The name is invalid, the code is not allowed, or its file does not exist.
    """
    place, _, own = name.rpartition(":")
    if not place or not own.isidentifier():
        raise UserError(f"{option} is {name!r}; {remedy}")
    if not is_allowed:
        raise UserError(
            f"{option} is {name!r}, Python code that runs with your rights, and a recipe may come from anyone: read "
            "the code, then allow it by --allow_reward_code true"
        )
    if place.endswith(".py") and not Path(place).is_file():
        raise UserError(f"no such file: {place} (relative to {Path.cwd()})")


def find_reward_file(reward: str) -> Path | None:
    """Returns the source file of the function `module:function` or `file.py:function`, of which nothing is run."""
    place = reward.rpartition(":")[0]
    if not place:  # a function of Genesis
        return None
    if place.endswith(".py"):
        return Path(place) if Path(place).is_file() else None
    # Not importlib.util.find_spec, which imports the packages that the module is in.
    first, *inner = place.split(".")
    found = (finder.find_spec(first, None) for finder in sys.meta_path)
    spec = next((spec for spec in found if spec is not None), None)
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By the last part of the name: of a dotted one, Python looks for the imported package.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None


def read_prompts(options: PromptOptions, renderer: ChatRenderer, seq_len: int) -> PromptSet:
    """Returns all prompts, in the order of their files.

    Args:
        options: The options.
        renderer: Turns messages into ids.
        seq_len: The longest prompt with its answer.

    Raises:
        UserError: A file cannot be read, a record has no prompt, or a prompt is too long; the message names the row.
    """
    least = options.max_new_tokens or 1
    found, num_dropped = {}, 0
    held_out: list[Prompt] = []
    for source in options.sources:
        prompts: list[Prompt] = []
        for prompt in _read_source(source, renderer):
            if len(prompt.ids) + least <= seq_len:
                (held_out if _is_held_out(prompt, options.validation_share) else prompts).append(prompt)
            elif options.on_long == "drop":
                num_dropped += 1
            else:
                raise UserError(
                    f"{prompt.place}: the prompt has {numbered(len(prompt.ids), 'tokens')}, which with "
                    f"{numbered(least, 'new ones')} exceed data.seq_len {seq_len:,}; raise it, lower "
                    "data.prompts.max_new_tokens, or set data.prompts.on_long: drop"
                )
        if not prompts:
            rest = " and is not held out by data.prompts.validation_share" if options.validation_share else ""
            raise UserError(f"source {source.name} has no prompt that fits into data.seq_len {seq_len:,}{rest}")
        found[source.name] = prompts
    if options.validation_share and not held_out:
        number = sum(map(len, found.values()))
        raise UserError(
            f"data.prompts.validation_share {options.validation_share} holds out none of "
            f"{numbered(number, 'prompts')}; raise it, or leave it out"
        )
    return PromptSet(found, num_dropped, held_out)


def _read_source(source: SourceOptions, renderer: ChatRenderer) -> Iterator[Prompt]:
    # Marks say what is learned of given answers; here they are columns for the reward function.
    ignored = (*source.ignored_keys, *RECORD_MARKS)
    source, number = replace(source, chat=source.chat or "auto", ignored_keys=ignored), 0
    refused: list[RefusedRow] = []
    for span in plan_spans(source, find_files(source), _SPAN_BYTES):
        for row in read_rows(source, span):
            number += 1
            try:
                prompt = _build(source, row, number, renderer)
            except EndlessTemplateError as error:
                assert row.place is not None, "a record of a conversation"
                raise UserError(f"source {source.name}: {row.place()}: {error}") from None
            except ConversationError as error:
                place = row.place() if row.place is not None else span.file.path
                refused.append(RefusedRow(place, strip_place(str(error), place), may_skip=False))
                if len(refused) == MAX_REFUSED:
                    break
                continue
            if not refused:
                yield prompt
        if len(refused) == MAX_REFUSED:
            break
    if refused:
        raise BadRowsError(explain_refused(source.name, refused, ""))


def _build(source: SourceOptions, document: Document | BadRow, number: int, renderer: ChatRenderer) -> Prompt:
    if isinstance(document, BadRow):
        raise ConversationError(document.explain())
    assert document.record is not None, "a record of a conversation"
    assert document.place is not None, "a record of a conversation"
    fields = [name for name in _TURNS if document.record.get(name) is not None]
    if source.chat == "auto" and source.turn_field is None and len(fields) > 1:
        raise ConversationError(
            f"the record has both {fields[0]} and {fields[1]}, and only one is the prompt; "
            f"name the form by `chat` of source {source.name} (messages, sharegpt or prompt), or remove one of them"
        )
    conversation = load_conversation(document.text)
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ConversationError("the conversation has nothing before the assistant's last turn; remove it")
    ids = renderer.render_prompt(messages, conversation.tools, variables=conversation.variables)
    if not ids:
        raise ConversationError(f"the chat template {renderer.template.name} writes no text for the prompt")
    turns = {*_TURNS, *([source.turn_field] if source.turn_field is not None else [])}
    columns = {name: value for name, value in document.record.items() if name not in turns}
    name, more = f"{source.name} {number}", (conversation.tools, conversation.variables)
    return Prompt(tuple(ids), messages, columns, name, document.place, *more)
