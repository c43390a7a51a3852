"""Episodes: an answer of several turns, between which an environment answers.

All unfinished episodes write their next turn in one batch, and then their environments answer all of them. Which
episodes share a batch therefore depends on the turns alone, and not on how long an environment takes, or a resumed run
would round differently.

An episode is one sequence of ids behind its prompt. Those that the model has sampled stay as they are, and are what is
learned. The ids of an observation are what the chat template adds to the conversation: the text behind the symbol that
closes the model's turn, up to where the model writes its next one. They are context, and never a label.

An episode ends when its environment ends it (`done`), at the last of its turns (`turns`), or where a turn or an
observation does not fit (`length`): a turn that is cut is not shown to the environment. It ends with a turn of the
model.

A turn that the chat template refuses, such as one with more calls than the format has, is a plain text without calls.
The episode ends where the template refuses this, too (`refused`): what a model samples never ends the run.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genesis.base.errors import UserError, numbered
from genesis.chat.harmony import HarmonyReader
from genesis.chat.stops import check_ends, find_turn_ends
from genesis.chat.template import ConversationError, Message
from genesis.chat.tools import HARMONY, ToolReader, Tools, find_form
from genesis.data.prompt_data import PromptData
from genesis.data.prompts import Prompt
from genesis.generate.batch import Request
from genesis.train.environment import Call, Environments
from genesis.train.environment_worker import Start, Step
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.untrusted import read_file

Ending = Literal["done", "turns", "length", "refused"]
Generate = Callable[[Sequence[Request]], Sequence[NDArray[np.int32]]]
NUM_WHOLE_TRANSCRIPTS: Final = 20
"""The newest rollouts of which all episodes are kept."""
_ID: Final = "{:05d}{:04d}"
"""Nine letters and digits, which Mistral's templates ask for, by the turn and the number of the call."""


class Asked(NamedTuple):
    """What a request is for.

    Args:
        prompt: The prompt.
        number: The number of the answer among those to it, from 1.
        seed: The seed of the environment, which all answers to the prompt share.
    """

    prompt: Prompt
    number: int
    seed: int


class Episode(NamedTuple):
    """What happened in an episode.

    Args:
        messages: The whole conversation.
        num_first: Messages before the model's first turn.
        last: The index of the model's last turn.
        rewards: What the environment gave for each turn that it saw.
        num_tokens: The tokens of each turn.
        ending: How it ended.
        num_calls: Calls of tools.
        num_unread: Calls of tools that cannot be read.
    """

    messages: Sequence[Message]
    num_first: int
    last: int
    rewards: Sequence[float]
    num_tokens: Sequence[int]
    ending: Ending
    num_calls: int
    num_unread: int

    @property
    def reward(self) -> float:
        """Returns the sum of the rewards."""
        return sum(self.rewards)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Returns the numbers of `EPISODE_COUNTS`."""
        return len(self.num_tokens), self.num_calls, self.num_unread


class Answer(NamedTuple):
    """An answer to a prompt.

    Args:
        prompt: The ids before it.
        ids: Its tokens, with the observations of an episode.
        is_own: Which of them the model has written.
        is_finished: Whether it ended by itself, and not at a limit.
        episode: The episode, if it is one.
        log_probs: The log-probabilities of its tokens, where a server gives them.
    """

    prompt: tuple[int, ...]
    ids: NDArray[np.int32]
    is_own: NDArray[np.bool_]
    is_finished: bool
    episode: Episode | None = None
    log_probs: NDArray[np.float32] | None = None

    @property
    def num_own(self) -> int:
        """Returns the number of tokens that the model has written."""
        return int(self.is_own.sum())


@dataclass
class _Playing:
    """An episode that goes on."""

    asked: Asked
    request: Request
    prompt: tuple[int, ...]
    messages: list[Message]
    tools: list[dict[str, Any]]
    num_first: int
    ids: list[int] = field(default_factory=list)
    is_own: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    last: int = 0
    num_calls: int = 0
    num_unread: int = 0
    ending: Ending | None = None
    written: str = ""  # the conversation up to the model's last turn, as the template writes it

    def place(self) -> str:
        """Returns the turn and the record, for messages."""
        return f"in turn {len(self.num_tokens)} of {_name(self.asked)}"

    def close(self) -> Answer:
        """Returns the episode as an answer."""
        assert self.ending is not None, "it has ended"
        episode = Episode(
            *(self.messages, self.num_first, self.last, self.rewards, self.num_tokens, self.ending),
            *(self.num_calls, self.num_unread),
        )
        ids, is_own = np.array(self.ids, np.int32), np.array(self.is_own, np.bool_)
        return Answer(self.prompt, ids, is_own, self.ending == "done", episode)


class Episodes:
    """Plays episodes in the environment of the prompts. Communicates with no rank.

    Args:
        data: The prompts.
        is_allowed: Whether the command line allows the user's code.
        note: Called after each result of an environment.

    Raises:
        UserError: The environment cannot be opened, or the chat template does not close turns.
    """

    def __init__(self, data: PromptData, is_allowed: bool, note: Callable[[], None] = lambda: None) -> None:
        options, renderer = data.prompt_options, data.renderer
        assert options.environment is not None, "there is one"
        self._data, self._renderer, self._name = data, renderer, options.environment
        self._form = find_form(renderer.template.text)
        check_ends(renderer.template, data.tokenizer, options.variables)
        ends = find_turn_ends(renderer.template, data.tokenizer, options.variables).ids
        self._ends = {data.tokenizer.pieces[token]: token for token in ends}
        self._written_roles: set[tuple[str, ...]] = set()
        self._environments = Environments(
            options.environment, options.num_environments, options.step_seconds, is_allowed=is_allowed, note=note
        )

    def play(self, requests: Sequence[Request], asked: Sequence[Asked], generate: Generate) -> list[Answer]:
        """Returns the episodes of requests, in their order.

        Args:
            requests: The first turns; those that follow have the same options, and seeds that depend on theirs.
            asked: What each is for.
            generate: Writes one turn for each of some requests.

        Raises:
            UserError: The environment fails, or the template cannot write what it gives; the message has the record.
        """
        calls = [
            Call("reset", number, (_describe_record(one.prompt), one.seed), partial(_name_start, one))
            for number, one in enumerate(asked)
        ]
        starts = self._environments.reset(calls)
        begun: dict[tuple[str, int], tuple[Start, tuple[int, ...]]] = {}
        episodes = []
        for request, target, start in zip(requests, asked, starts, strict=True):
            key = target.prompt.name, target.seed
            if key not in begun:
                begun[key] = start, self._render_start(target.prompt, start)
            if begun[key][0] != start:
                raise UserError(
                    f"the environment {self._name} does not begin as before {_name_start(target)}: the same record and "
                    "seed must give the same messages and tools; correct it"
                )
            messages, tools = [*target.prompt.messages, *start.messages], _choose_tools(target.prompt, start)
            episodes.append(_Playing(target, request, begun[key][1], messages, tools, len(messages)))
        while going := [(number, one) for number, one in enumerate(episodes) if one.ending is None]:
            turns = generate([self._ask(one) for _, one in going])
            steps = []
            for (number, one), ids in zip(going, turns, strict=True):
                message = self._read_turn(one, ids)
                if message is not None:
                    steps.append((one, Call("step", number, (message,), one.place)))
            results = self._environments.step([call for _, call in steps])
            for (one, _), step in zip(steps, results, strict=True):
                self._go_on(one, step)
        return [one.close() for one in episodes]

    def _render_start(self, prompt: Prompt, start: Start) -> tuple[int, ...]:
        """Returns the ids before the model's first turn."""
        if start.tools and prompt.tools:
            raise UserError(
                f"{prompt.place}: both the record and the environment {self._name} have tools; leave one of them out"
            )
        messages, tools = [*prompt.messages, *start.messages], _choose_tools(prompt, start)
        try:
            ids = prompt.ids
            if start.messages or start.tools:
                ids = tuple(self._renderer.render_prompt(messages, tools, variables=prompt.variables))
            if tools and ids == tuple(self._renderer.render_prompt(messages, variables=prompt.variables)):
                raise ConversationError(
                    f"the chat template {self._renderer.template.name} leaves out the tools; give one that writes them"
                )
        except ConversationError as error:
            raise UserError(f"{prompt.place}: {error}") from None
        if len(ids) >= (longest := self._data.options.seq_len):
            raise UserError(
                f"{prompt.place}: the prompt has {numbered(len(ids), 'tokens')} with what the environment "
                f"{self._name} adds, and data.seq_len is {longest:,}, so that no answer fits; raise it"
            )
        return ids

    def _ask(self, one: _Playing) -> Request:
        """Returns the request of the next turn."""
        turn, context = len(one.num_tokens), [*one.prompt, *one.ids]
        room, most = self._data.options.seq_len - len(context), self._data.prompt_options.max_new_tokens
        seed = one.request.seed if not turn else _seed_of_turn(one.request.seed, turn)
        return replace(one.request, prompt=context, max_new_tokens=room if most is None else min(room, most), seed=seed)

    def _read_turn(self, one: _Playing, ids: NDArray[np.int32]) -> Message | None:
        """Adds a turn of the model, and returns it as the environment gets it; None if it ends the episode."""
        one.ids += ids.tolist()
        one.is_own += [True] * len(ids)
        one.num_tokens.append(len(ids))
        stops = self._data.stop_ids
        known = [token for token in ids.tolist() if token < self._data.tokenizer.vocab_size and token not in stops]
        text = self._data.tokenizer.spell(known, has_controls=True)
        plain: dict[str, Any] = {"role": "assistant", "content": text}
        message, num_unread = self._read_calls(one, text) if one.tools or self._form is HARMONY else (plain, 0)
        one.last = len(one.messages)
        one.messages.append(message)
        if int(ids[-1]) not in stops:
            one.ending = "length"
        elif not self._write(one):
            num_unread += len(message.get("tool_calls", ()))
            one.messages[-1] = message = plain
            if not self._write(one):
                one.ending = "refused"
        one.num_calls += len(message.get("tool_calls", ()))
        one.num_unread += num_unread
        return message if one.ending is None else None

    def _write(self, one: _Playing) -> bool:
        """Keeps how the template writes an episode up to the model's last turn; False if it refuses this turn."""
        variables = one.asked.prompt.variables
        try:
            one.written = self._renderer.write_whole(one.messages, one.tools or None, variables=variables)
        except ConversationError:
            return False
        return True

    def _read_calls(self, one: _Playing, text: str) -> tuple[dict[str, Any], int]:
        """Returns a turn with its calls of tools, and how many cannot be read: what is no call of these stays text."""
        functions = [tool.get("function", tool) for tool in one.tools]
        tools: Tools = {function["name"]: function.get("parameters") or {} for function in functions}
        reader = HarmonyReader(tools) if self._form is HARMONY else ToolReader(self._form, tools)
        found = reader.feed(text, is_last=True)
        message: dict[str, Any] = {"role": "assistant", "content": found.content}
        if found.reasoning:
            message["reasoning_content"] = found.reasoning
        if found.calls:
            # An id that is drawn would differ in a resumed run.
            turn = len(one.num_tokens)
            message["tool_calls"] = [
                {**call, "id": _ID.format(turn, number)} for number, call in enumerate(found.calls)
            ]
        is_bare = self._form.is_bare and not found.calls and found.content.lstrip().startswith(("{", "["))
        return message, found.content.count(self._form.begin) + is_bare

    def _go_on(self, one: _Playing, step: Step) -> None:
        """Adds what an environment has given for the last turn: the reward, and the observation if it goes on."""
        one.rewards.append(step.reward)
        if step.is_done:
            one.messages += step.messages
            one.ending = "done"
            return
        if len(one.num_tokens) == self._data.prompt_options.max_turns:
            one.messages += step.messages
            one.ending = "turns"
            return
        try:
            ids = self._observe(one, step.messages)
        except ConversationError as error:
            raise UserError(f"the environment {self._name} cannot be answered {one.place()}: {error}") from None
        one.messages += step.messages
        if len(one.prompt) + len(one.ids) + len(ids) >= self._data.options.seq_len:
            one.ending = "length"
            return
        one.ids += ids
        one.is_own += [False] * len(ids)

    def _observe(self, one: _Playing, messages: Sequence[Message]) -> list[int]:
        """Returns the ids that the template adds behind the symbol that closes the model's turn."""
        name, variables = self._renderer.template.name, one.asked.prompt.variables
        before = one.written
        after = self._renderer.write_prompt([*one.messages, *messages], one.tools or None, variables=variables)
        end, symbol = max((before.rfind(symbol) + len(symbol), symbol) for symbol in self._ends)
        if before[end:].strip() or not after.startswith(before[:end]):
            raise ConversationError(
                f"the chat template {name} writes a turn otherwise once others follow (as templates that drop earlier "
                "reasoning do); give a template that keeps the text of all turns by data.prompts.template"
            )
        roles = tuple(message["role"] for message in messages)
        if roles not in self._written_roles:  # a template decides by the role what it writes
            if after == self._renderer.write_prompt(one.messages, one.tools or None, variables=variables):
                raise ConversationError(f"the chat template {name} leaves out the observation; give one that writes it")
            self._written_roles.add(roles)
        # With the symbol, because some tokenizers begin a text otherwise than what follows a symbol.
        first, *ids = self._renderer.tokenizer.encode_with_controls(symbol + after[end:])
        if first != self._ends[symbol]:
            raise ConversationError(f"the tokenizer writes something before {symbol!r}, which closes the turn")
        return ids


def describe_episode(episode: Episode) -> dict[str, Any]:
    """Returns what a transcript has of an episode; its turns have their tokens, and the rewards that they got."""
    turns: list[dict[str, Any]] = [dict(message) for message in episode.messages[episode.num_first :]]
    own = [turn for turn in turns if turn["role"] == "assistant"]
    for turn, num_tokens in zip(own, episode.num_tokens, strict=True):
        turn["num_tokens"] = num_tokens
    for turn, reward in zip(own, episode.rewards, strict=False):  # the last turn may be cut
        turn["reward"] = reward
    return {
        "messages": list(episode.messages[: episode.num_first]),
        "turns": turns,
        "text": "\n".join(f"{turn['role']}: {_spell_turn(turn)}" for turn in turns),
        "num_turns": len(own),
        "num_calls": episode.num_calls,
        "num_unread_calls": episode.num_unread,
        "ending": episode.ending,
    }


def _spell_turn(turn: Mapping[str, Any]) -> str:
    calls = (call["function"] for call in turn.get("tool_calls", ()))
    return " ".join(filter(None, [turn["content"], *(f"{call['name']}({call['arguments']})" for call in calls)]))


def shorten_transcripts(directory: Path, rank: int, num_kept: int) -> None:
    """Leaves only the first episodes in the newest file that is no longer one of the last `NUM_WHOLE_TRANSCRIPTS`.

    Args:
        directory: Where the transcripts of rollouts are.
        rank: The rank that has written them.
        num_kept: The number of episodes that stay.
    """
    older = sorted(directory.glob(f"*.rank-{rank}.jsonl"))[:-NUM_WHOLE_TRANSCRIPTS]
    for path in older[-1:]:
        lines = read_file(path).splitlines(keepends=True)
        if len(lines) > num_kept:
            replace_file(path, b"".join(lines[:num_kept]))


def _describe_record(prompt: Prompt) -> dict[str, Any]:
    """Returns the fields of a record, with its conversation as messages."""
    return {**prompt.columns, "messages": list(prompt.messages)}


def _choose_tools(prompt: Prompt, start: Start) -> list[dict[str, Any]]:
    return start.tools or [dict(tool) for tool in prompt.tools or ()]


def _name_start(asked: Asked) -> str:
    return f"at the start of {_name(asked)}"


def _name(asked: Asked) -> str:
    return f"episode {asked.number} of {asked.prompt.place}"


def _seed_of_turn(seed: int, turn: int) -> int:
    """Returns the seed of a turn behind the first, from that of the first."""
    return int.from_bytes(hashlib.sha256(f"{seed} turn {turn}".encode()).digest()[:8], "little") >> 1
