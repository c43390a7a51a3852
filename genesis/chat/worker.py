"""The process that renders chat templates: a `PipedWorker` that answers one request of `genesis.chat.pool` at a time.

The kernel ends it at the limit of processor time, also within one operation of the interpreter. It imports little, so
that it starts quickly and a bare worker needs few megabytes.
"""

import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from datetime import date
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, Final

from genesis.base.errors import UserError
from genesis.base.parent import end_with_forker
from genesis.base.processes import serve_pipe
from genesis.chat.pool import LIMITS, MEMORY_BYTES, OUT_OF_MEMORY, Answer, Request
from genesis.chat.sandbox import SandboxedTemplate
from genesis.chat.template import ConversationError
from genesis.chat.turns import lay_out

_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "has_generation_tags": lambda template: template.has_generation_tags,
    "render": SandboxedTemplate.render,
    "render_marked": SandboxedTemplate.render_marked,
    "lay_out": lay_out,
}
_KEPT_BYTES: Final = MEMORY_BYTES // 2
"""Memory that a worker may keep after an answer; with more it ends, and gives way to a new one."""
_HAS_MEMORY_LIMIT: Final = sys.platform == "linux"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def main(descriptor: int) -> None:
    """Serves the connection with the file descriptor `descriptor` until its other end is closed."""
    end_with_forker()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve_pipe(descriptor, _serve)


def _serve(connection: "Connection[object, object]") -> None:
    # The address space of this process, the quantity that is limited.
    pages = os.open("/proc/self/statm", os.O_RDONLY) if _HAS_MEMORY_LIMIT else None
    start_bytes = _count_bytes(pages)
    while (now_bytes := _count_bytes(pages)) - start_bytes <= _KEPT_BYTES:
        message = connection.recv_bytes()
        seconds, num_bytes, num_chars = LIMITS.unpack_from(message)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # an idle process spends none of it
        _limit_memory(now_bytes + num_bytes)
        try:
            answer = _answer(pickle.loads(memoryview(message)[LIMITS.size :]), num_chars)
            connection.send_bytes(json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


def _answer(request: Request, num_chars: int) -> Answer:
    try:
        template = _compile(request.template, request.name, request.today)
        result = _FUNCTIONS[request.function](template, *request.arguments, **request.options)
    except UserError as error:
        return Answer(mistake=str(error), is_of_conversation=isinstance(error, ConversationError))
    text = result[0] if isinstance(result, tuple) else result
    if isinstance(text, str) and len(text) > num_chars:
        return Answer(limit=f"writes more than {num_chars:,} characters")
    return Answer(result)


@lru_cache(maxsize=32)
def _compile(text: str, name: str, today: date | None) -> SandboxedTemplate:
    return SandboxedTemplate(text, name, today)


def _count_bytes(pages: int | None) -> int:
    return 0 if pages is None else int(os.pread(pages, 64, 0).split()[0]) * _PAGE_BYTES


def _limit_memory(num_bytes: int) -> None:
    if _HAS_MEMORY_LIMIT:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
