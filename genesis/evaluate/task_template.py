"""Templates of tasks, which run in a worker process with the limits of chat templates.

A task is somebody else's: its templates are programs, and run where the kernel ends them. The worker imports Jinja
alone; lm-eval gets an environment that asks it.
"""

import json
import pickle
import re
from functools import lru_cache
from typing import Any, Final

import jinja2
import jinja2.sandbox

from genesis.base.errors import numbered
from genesis.base.limited_workers import LimitedWorkers, LimitReachedError, serve_limited
from genesis.chat.pool import MAX_CHARS, MEMORY_BYTES, SECONDS

_WORKERS: Final = LimitedWorkers("genesis.evaluate.task_template", 1)


class TaskTemplateError(Exception):
    """A template of a task fails, or exceeds a limit."""


class TaskTemplates:
    """The part of `jinja2.Environment` that lm-eval uses."""

    def from_string(self, template: str) -> "TaskTemplate":
        """Returns a template, which is compiled when it is rendered."""
        return TaskTemplate(template)


class TaskTemplate:
    """The part of `jinja2.Template` that lm-eval uses."""

    def __init__(self, text: str) -> None:
        self._text = text

    def render(self, **row: Any) -> str:
        """Returns the text for a row.

        Raises:
            TaskTemplateError: The template fails, or exceeds a limit.
        """
        message = pickle.dumps((self._text, row))
        num_bytes = MEMORY_BYTES + 32 * len(message)
        try:
            text, fault = json.loads(_WORKERS.ask(message, SECONDS * (1 + len(message) / 1e6), num_bytes))
        except LimitReachedError as error:
            text, fault = "", f"a template {error}"
        if len(text) > MAX_CHARS + 16 * len(message):
            fault = f"a template writes {numbered(len(text), 'characters')}"
        if fault:
            raise TaskTemplateError(fault)
        return str(text)


# ---- in the worker


def main(descriptor: int) -> None:
    """Serves the connection with the file descriptor `descriptor` until its other end is closed."""
    serve_limited(descriptor, _answer)


def _answer(message: bytes) -> bytes:
    text, row = pickle.loads(message)
    try:
        answer = _compile(text).render(**row), ""
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        answer = "", " ".join(f"{type(error).__name__}: {error}".split())
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")


@lru_cache(maxsize=64)
def _compile(text: str) -> jinja2.Template:
    return _SANDBOX.from_string(text)


def _replace(string: str, pattern: str, repl: str, count: int = 0) -> str:
    """Does what lm-eval's filter of that name does."""
    return re.sub(pattern, repl, string, count=count)


_SANDBOX: Final = jinja2.sandbox.SandboxedEnvironment(
    loader=jinja2.BaseLoader(), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
)
_SANDBOX.filters["regex_replace"] = _replace
