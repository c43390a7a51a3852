"""The process that runs environments, one call at a time: a `PipedWorker` of `genesis.train.environment`.

It receives its `sys.path` and the name of the class, imports it, and answers with None or what is wrong. Then it gets
calls: `reset` makes an environment for an episode, `step` gives it a turn of the model, `clear` forgets all of them.
What a call returns is checked here, so that only plain data cross the pipe. It imports neither torch nor Lightning,
unless the class does.
"""

import json
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

from genesis.base.processes import serve_pipe
from genesis.train.reward_worker import Fault, check_number, describe_error, load_function, prepare_process, spell_value
from genesis_callbacks.base.json_text import load_json

_ROLES: Final = ("system", "user", "tool")


class Start(NamedTuple):
    """What `reset` gives: messages that follow those of the record, and the definitions of tools."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


class Step(NamedTuple):
    """What `step` gives: messages that answer the model's turn, a reward, and whether the episode has ended."""

    messages: list[dict[str, Any]]
    reward: float
    is_done: bool


class Host:
    """The environments of one process, by the numbers of their episodes."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._environments: dict[int, Any] = {}

    def call(self, name: str, episode: int, *arguments: Any) -> Start | Step | Fault | None:
        """Returns the result of a call, or what is wrong with it."""
        if name == "clear":
            self._environments.clear()
            return None
        try:
            return self._reset(episode, *arguments) if name == "reset" else self._step(episode, *arguments)
        except (Exception, SystemExit) as error:  # of the user's code
            return Fault("failed", f": {describe_error(error)}; correct it")

    def _reset(self, episode: int, record: Mapping[str, Any], seed: int) -> Start | Fault:
        environment = self._environments[episode] = self._kind()
        messages = _read_messages(environment.reset(record, seed))
        if isinstance(messages, Fault):
            return messages
        tools = getattr(environment, "tools", None) or []
        plain = _make_plain(tools)
        if not isinstance(plain, list) or not all(_is_tool(tool) for tool in plain):
            return Fault(f"has the tools {spell_value(tools)!r}", "; give a list of definitions of functions")
        return Start(messages, plain)

    def _step(self, episode: int, message: Mapping[str, Any]) -> Step | Fault:
        found = self._environments[episode].step(message)
        if not isinstance(found, tuple) or len(found) != 3:
            return Fault(f"gave {spell_value(found)!r}", "; return observation, reward and whether the episode is done")
        observation, value, is_done = found
        reward = check_number(value)
        if isinstance(reward, Fault):
            return Fault(f"{reward.what} as its reward", reward.rest)
        if not isinstance(is_done, bool) and str(getattr(is_done, "dtype", None)) != "bool":  # numpy's and torch's
            return Fault(f"gave {spell_value(is_done)!r} for whether the episode is done", "; return True or False")
        messages = _read_messages(observation)
        if isinstance(messages, Fault):
            return messages
        if is_done:
            del self._environments[episode]
        elif not messages:
            return Fault("gave no observation", ", but has not ended the episode; return a message, or done")
        return Step(messages, reward, is_done)


def _is_tool(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _read_messages(given: Any) -> list[dict[str, Any]] | Fault:
    """Returns messages in plain types; a text is a message of the user."""
    if isinstance(given, str):
        return [{"role": "user", "content": str(given)}]
    plain = _make_plain([] if given is None else given)
    if not isinstance(plain, list) or not all(isinstance(one, dict) for one in plain):
        return Fault(f"gave the observation {spell_value(given)!r}", "; return a text or a list of messages")
    for one in plain:
        if one.get("role") not in _ROLES or not isinstance(one.get("content"), str):
            return Fault(
                f"gave the message {spell_value(one)!r}",
                f"; give each a role ({', '.join(_ROLES)}) and a content, which is a text",
            )
    return plain


def _make_plain(value: Any) -> Any:
    """Returns a value as JSON has it; None if it is no JSON. The other process has no classes of the user."""
    try:
        return load_json(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None


def main(descriptor: int) -> None:
    """Imports the class and runs its environments until the process at the other end is gone."""
    prepare_process()

    def serve(connection: "Connection[Any, Any]") -> None:
        sys.path[:], name = connection.recv()
        kind = load_function(name, kind="class", what="environment")
        connection.send(kind if isinstance(kind, Fault) else None)
        host = Host(kind)
        while True:
            connection.send(host.call(*connection.recv()))

    serve_pipe(descriptor, serve)
