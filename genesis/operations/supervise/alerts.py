"""Reports a crash, a recovery and the end of a run to people, by a webhook or a command.

Both work in a thread of their own, with a limit of time. They have no effect on the training: an alert that cannot
be delivered is one line of the supervisor's output.
"""

import asyncio
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from genesis.base.errors import UserError
from genesis.base.processes import start_program
from genesis.operations.supervise.crashes import CrashRecord
from genesis.operations.supervise.observers import NullObserver
from genesis.operations.supervise.status import SupervisorStatus

_ATTEMPTS: Final = 3
_PAUSE_SECONDS: Final = 1.0
_MAX_WAITING: Final = 100
_LONGEST_CLOSE_SECONDS: Final = 120.0
_MAX_SHOWN: Final = 200


@dataclass(frozen=True)
class AlertOptions:
    """Who hears of a run.

    Args:
        webhook: URL that gets a JSON object by POST; None for none.
        command: A program and its arguments, which gets the same object on its standard input; None for none.
        limit_seconds: Limit of each attempt of a webhook, and of the command.
    """

    webhook: str | None = None
    command: Sequence[str] | None = None
    limit_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.webhook is not None and (
            urlsplit(self.webhook).scheme not in ("http", "https") or not urlsplit(self.webhook).hostname
        ):
            raise UserError(f"the webhook {self.webhook!r} is no address of the web; give http:// or https://")
        if self.command is not None and not self.command:
            raise UserError("the command for alerts is empty; give a program and its arguments")
        if not self.limit_seconds > 0:
            raise UserError(f"the limit of alerts is {self.limit_seconds} s; give a number above 0")


def read_command(text: str) -> list[str]:
    """Returns the words of a command line.

    Raises:
        UserError: A quotation has no end.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"the command for alerts is {text!r}: {error}") from error


def check_program(command: Sequence[str]) -> None:
    """Refuses a command for alerts whose program cannot be started from here.

    Raises:
        UserError: There is no such program, or it is not executable.
    """
    if shutil.which(command[0]) is None:
        raise UserError(
            f"the command for alerts is {shlex.join(command)!r}, but {command[0]!r} is no program that can be started: "
            "correct its name or path, or make it executable"
        )


class Alerts(NullObserver):
    """Delivers an alert for each crash, recovery and end, in order.

    The object of an alert has `event` ("crash", "recovery" or "end"), `run`, `text` for people, `time`, and what else
    is known: `step`, `class`, `rank`, `reason`, `action`, `lost_seconds`, `state`.

    Args:
        run_dir: The run's directory.
        options: Who hears of the run.
        report: Prints a line.
    """

    def __init__(self, run_dir: Path, options: AlertOptions, report: Callable[[str], None]) -> None:
        self._run_dir, self._options, self._report = run_dir, options, report
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
        self._thread.start()

    def on_end(self, record: CrashRecord) -> None:
        """Sends the alert of a crash."""
        rank = "" if record.rank is None else f", rank {record.rank} first"
        text = f"{self._run_dir} crashed at step {record.step}: {record.end_class}{rank}: {record.reason}"
        self._put("crash", f"{text}; {record.action}", _describe(record))

    def on_recovered(self, record: CrashRecord) -> None:
        """Sends the alert of a recovery."""
        lost = "" if record.lost_seconds is None else f" after {record.lost_seconds:.1f} s"
        text = f"{self._run_dir} trains again{lost}, from step {record.resumed_from} ({record.end_class})"
        self._put("recovery", text, _describe(record))

    def on_complete(self, status: SupervisorStatus) -> None:
        """Sends the alert of the end, and waits until all are delivered or their limits are over."""
        text = f"{self._run_dir} is {status.state} at step {status.step}"
        content = {"step": status.step, "state": status.state, "reason": status.reason}
        self._put("end", f"{text}{f': {status.reason}' if status.reason else ''}", content)
        self.close()

    def close(self) -> None:
        """Waits until all alerts are delivered, for a bounded time."""
        try:
            self._waiting.put(None, timeout=self._options.limit_seconds)
        except queue.Full:
            return
        num_waiting = self._waiting.qsize() + 1
        limit_seconds = num_waiting * 2 * _ATTEMPTS * (self._options.limit_seconds + _PAUSE_SECONDS)
        self._thread.join(min(limit_seconds, _LONGEST_CLOSE_SECONDS))

    def _put(self, event: str, text: str, content: Mapping[str, Any]) -> None:
        alert = {"event": event, "run": str(self._run_dir), "text": text, "time": time.time(), **content}
        try:
            self._waiting.put_nowait(alert)
        except queue.Full:
            self._report(f"an alert is lost, because {_MAX_WAITING} others wait: {text}")

    def _work(self) -> None:
        while (alert := self._waiting.get()) is not None:
            for deliver, target in ((self._post, self._options.webhook), (self._call, self._options.command)):
                if target is None:
                    continue
                try:
                    problem = deliver(alert)
                except Exception as error:  # nothing that an alert does may end the thread that delivers the next one
                    problem = f"{type(error).__name__}: {error}"
                if problem is not None:
                    self._report(f"the alert of the {alert['event']} is not delivered: {problem[:_MAX_SHOWN]}")

    def _post(self, alert: Mapping[str, Any]) -> str | None:
        assert self._options.webhook is not None
        host = urlsplit(self._options.webhook).hostname  # the rest of a webhook's address is often a secret
        problem = ""
        for number in range(_ATTEMPTS):
            if number:
                time.sleep(_PAUSE_SECONDS)
            try:
                status = asyncio.run(_send(self._options.webhook, alert, self._options.limit_seconds))
            except TimeoutError:
                problem = f"{host} did not answer in {self._options.limit_seconds:g} s"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                problem = f"{host} cannot be reached ({type(error).__name__})"
            else:
                if status < 400:
                    return None
                problem = f"{host} answered with status {status}"
                if status < 500 and status != 429:
                    return problem  # a mistake in the address; the same request has the same answer
        return problem

    def _call(self, alert: Mapping[str, Any]) -> str | None:
        assert self._options.command is not None
        variables = {"GENESIS_EVENT": str(alert["event"]), "GENESIS_RUN": str(alert["run"])}
        name = self._options.command[0]
        try:
            process = start_program(
                list(self._options.command),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        except OSError as error:
            return f"{name} cannot be started: {error.strerror}"
        try:
            process.communicate(json.dumps(alert, allow_nan=False).encode(), self._options.limit_seconds)
        except subprocess.TimeoutExpired:
            return f"{name} was killed after {self._options.limit_seconds:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        return None if process.returncode == 0 else f"{name} ended with status {process.returncode}"


async def _send(url: str, alert: Mapping[str, Any], limit_seconds: float) -> int:
    limit = aiohttp.ClientTimeout(total=limit_seconds)
    # Proxies of the environment, as the machine's other programs use them.
    async with (
        aiohttp.ClientSession(timeout=limit, trust_env=True) as session,
        session.post(url, json=alert, allow_redirects=False) as answer,
    ):
        return answer.status


def _describe(record: CrashRecord) -> dict[str, Any]:
    return {
        "step": record.step,
        "class": record.end_class,
        "rank": record.rank,
        "reason": record.reason,
        "action": record.action,
        "number": record.number,
        "lost_seconds": record.lost_seconds,
        "resumed_from": record.resumed_from,
    }
