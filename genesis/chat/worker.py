"""The process that renders chat templates, one message at a time: a worker of `genesis.base.limited_workers`.

It imports little, so that it starts quickly and a bare worker needs few megabytes.
"""

import json
import pickle
from collections.abc import Callable
from datetime import date
from functools import lru_cache
from typing import Any, Final

from genesis.base.errors import UserError, numbered
from genesis.base.limited_workers import serve_limited
from genesis.chat.pool import MEMORY_BYTES, NUM_CHARS, Answer, Request
from genesis.chat.sandbox import SandboxedTemplate
from genesis.chat.template import ConversationError
from genesis.chat.turns import lay_out

_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "has_generation_tags": lambda template: template.has_generation_tags,
    "render": SandboxedTemplate.render,
    "render_marked": SandboxedTemplate.render_marked,
    "lay_out": lay_out,
}


def main(descriptor: int) -> None:
    """Serves the connection with the file descriptor `descriptor` until its other end is closed."""
    serve_limited(descriptor, _answer, kept_bytes=MEMORY_BYTES // 2)


def _answer(message: bytes) -> bytes:
    (num_chars,) = NUM_CHARS.unpack_from(message)
    answers = [_run(request, num_chars) for request in pickle.loads(memoryview(message)[NUM_CHARS.size :])]
    return json.dumps(answers, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _run(request: Request, num_chars: int) -> Answer:
    try:
        template = _compile(request.template, request.name, request.today)
        result = _FUNCTIONS[request.function](template, *request.arguments, **request.options)
    except UserError as error:
        return Answer(mistake=str(error), is_of_conversation=isinstance(error, ConversationError))
    text = result[0] if isinstance(result, tuple) else result
    if isinstance(text, str) and len(text) > num_chars:
        return Answer(limit=f"writes more than {numbered(num_chars, 'characters')}")
    return Answer(result)


@lru_cache(maxsize=64)
def _compile(text: str, name: str, today: date | None) -> SandboxedTemplate:
    return SandboxedTemplate(text, name, today)
