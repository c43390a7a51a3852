"""Environments: a user's Python class that answers the model's turns. It runs only where an argument allows it.

    class Guess:
        def reset(self, record, seed):
            self.number, self.turns = record["number"], 0
            return "Guess my number."

        def step(self, message):
            self.turns += 1
            right = message["content"].strip() == self.number
            return "No.", float(right), right or self.turns == 5

`reset` begins an episode: `record` has the fields of the prompt's record, with its conversation as `messages`. The
result follows these messages: a text, which is a message of the user, a list of messages, or None. `tools`, if the
environment has it then, is the list of the definitions of its tools. `step` gets a turn of the model, as
`{"role": "assistant", "content": ...}` with `tool_calls` if it calls tools, and returns what follows it, a reward, and
whether the episode has ended. Its rewards are added. The same record, seed and turns must give the same results, or a
resumed run differs from one that was never stopped; all answers to a prompt have the same seed.

Each process runs several environments, one call after the other, and is killed if a call takes too long.
"""

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, Final, NamedTuple

from genesis.base.errors import UserError
from genesis.base.processes import PipedWorker
from genesis.data.prompts import check_code
from genesis.train.environment_worker import Start, Step
from genesis.train.reward_worker import Fault

_IMPORT_SECONDS: Final = 600.0
"""How long the module of an environment may take to be imported."""
_MODULE: Final = "genesis.train.environment_worker"


class Call(NamedTuple):
    """A call of an environment.

    Args:
        name: reset or step.
        episode: The number of the episode.
        arguments: The arguments.
        place: The turn and the record, for messages.
    """

    name: str
    episode: int
    arguments: tuple[Any, ...]
    place: Callable[[], str]


class Environments:
    """The processes of environments, which end with this object. Communicates with no rank.

    Args:
        name: `module:Class` or `file.py:Class`.
        num_processes: How many run at the same time.
        seconds: How long a call may take.
        is_allowed: Whether the command line allows the user's code.
        note: Called after each result, because the calls of a turn may take long.

    Raises:
        UserError: The class is not allowed, or not found, or its module fails.
    """

    def __init__(
        self,
        name: str,
        num_processes: int,
        seconds: float,
        *,
        is_allowed: bool,
        note: Callable[[], None] = lambda: None,
    ) -> None:
        self._name, self._seconds, self._note = name, seconds, note
        check_code("data.prompts.environment", name, "give module:Class or file.py:Class", is_allowed=is_allowed)
        self._workers = [PipedWorker(_MODULE, has_group=True, has_fixed_hashes=True) for _ in range(num_processes)]
        self._end = weakref.finalize(self, _end_all, self._workers)
        for worker in self._workers:
            worker.connection.send((sys.path, name))
        for worker in self._workers:
            fault = self._receive(worker, time.monotonic() + _IMPORT_SECONDS, lambda: "to load", _IMPORT_SECONDS)
            if isinstance(fault, Fault):
                self._end()
                raise UserError(fault.what)

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """Returns the results of calls in their order: those of one episode are made by the same process.

        Raises:
            UserError: An environment fails, takes too long, or returns something else; the message has the place.
        """
        waiting: list[deque[int]] = [deque() for _ in self._workers]
        for index, call in enumerate(calls):
            waiting[call.episode % len(self._workers)].append(index)
        results: list[Any] = [None] * len(calls)
        limits: dict[int, float] = {}

        def send(number: int) -> None:
            call = calls[waiting[number][0]]
            limits[number] = time.monotonic() + self._seconds
            try:
                self._workers[number].connection.send((call.name, call.episode, *call.arguments))
            except OSError:
                raise self._explain_end(self._workers[number], call.place) from None

        for number, queue in enumerate(waiting):
            if queue:
                send(number)
        while limits:
            connections = {self._workers[number].connection: number for number in limits}
            first = min(limits, key=lambda number: limits[number])
            ready = wait(list(connections), max(0.0, limits[first] - time.monotonic()))
            for number in [connections[one] for one in ready] if ready else [first]:  # type: ignore[index]
                index = waiting[number].popleft()
                call = calls[index]
                found = self._receive(self._workers[number], limits.pop(number), call.place, self._seconds)
                if isinstance(found, Fault):
                    self._end()
                    raise UserError(f"the environment {self._name} {found.what} {call.place()}{found.rest}")
                results[index] = found
                self._note()
                if waiting[number]:
                    send(number)
        return results

    def reset(self, calls: Sequence[Call]) -> list[Start]:
        """Returns the beginnings of episodes; those of earlier ones are forgotten."""
        self.run([Call("clear", number, (), lambda: "") for number in range(len(self._workers))])
        return self.run(calls)

    def step(self, calls: Sequence[Call]) -> list[Step]:
        """Returns what follows the model's turns."""
        return self.run(calls)

    def _receive(self, worker: PipedWorker, limit: float, place: Callable[[], str], seconds: float) -> Any:
        """Returns what a process answers; all are killed if it does not in time."""
        try:
            if worker.connection.poll(max(0.0, limit - time.monotonic())):
                return worker.connection.recv()
        except (EOFError, OSError):
            raise self._explain_end(worker, place) from None
        self._end()
        raise UserError(
            f"the environment {self._name} took longer than {seconds:g} s {place()}; correct it, or raise "
            "data.prompts.step_seconds"
        )

    def _explain_end(self, worker: PipedWorker, place: Callable[[], str]) -> UserError:
        reason = worker.describe_end()
        self._end()
        return UserError(f"the process of the environment {self._name} ended {reason} {place()}; correct it")


def _end_all(workers: Sequence[PipedWorker]) -> None:
    for worker in workers:
        worker.end()
