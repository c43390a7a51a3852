"""Forged requests for `genesis serve`: raw bytes on a connection, to one server that must outlive all of them."""

import json
import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from genesis.cli.main import main
from tests.forged.checkpoints import change_somewhere
from tests.forged.operators import ALIEN, JSON_ACTS
from tests.forged.runner import LIMIT_SECONDS, SLACK_BYTES, Outcome, Runner, cpu_seconds
from tests.serve.support import send_bytes

_MODEL: Final = "step-00000000"
_TEXT: Final[dict[str, Any]] = {"model": _MODEL, "prompt": "a", "max_tokens": 2, "stop": ["b"], "logprobs": 1}
_CHAT: Final[dict[str, Any]] = {
    "model": _MODEL,
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "max_tokens": 2,
}
_BODY: Final = json.dumps(_TEXT).encode()
_HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_LENGTH: Final = b"Content-Length: %d\r\n\r\n" % len(_BODY)
_RAW: Final[dict[str, bytes]] = {
    "two lengths": _HEAD + b"Content-Length: 1\r\n" + _LENGTH + _BODY,
    "length and chunks": _HEAD + b"Transfer-Encoding: chunked\r\n" + _LENGTH + _BODY,
    "a negative length": _HEAD + b"Content-Length: -1\r\n\r\n" + _BODY,
    "a length of digits": _HEAD + b"Content-Length: " + b"9" * 500 + b"\r\n\r\n" + _BODY,
    "a short body": _HEAD + b"Content-Length: 9999\r\n\r\n" + _BODY,
    "a bad chunk": _HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + _BODY,
    "a large chunk": _HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + _BODY,
    "half a header": _HEAD[:40],
    "a long header": _HEAD + b"X: " + b"a" * 100_000 + b"\r\n" + _LENGTH + _BODY,
    "many headers": _HEAD + b"X: a\r\n" * 20_000 + _LENGTH + _BODY,
    "a header of zeros": _HEAD + b"X: \0\0\r\n" + _LENGTH + _BODY,
    "no host": _HEAD.replace(b"Host: localhost\r\n", b"") + _LENGTH + _BODY,
    "another host": _HEAD.replace(b"localhost", b"evil.example") + _LENGTH + _BODY,
    "two hosts": _HEAD + b"Host: evil.example\r\n" + _LENGTH + _BODY,
    "another type": _HEAD.replace(b"application/json", b"text/plain") + _LENGTH + _BODY,
    "gzip": _HEAD + b"Content-Encoding: gzip\r\n" + _LENGTH + _BODY,
    "a line that is folded": _HEAD + b"X: a\r\n b\r\n" + _LENGTH + _BODY,
    "a space before the colon": _HEAD + b"Content-Length : 5\r\n" + _LENGTH + _BODY,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "a long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a path out": b"GET /page/..%2f..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "an alien model": b"GET /v1/models/%1b%5b2J%e2%80%ae%0d%0a HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "another method": b"PUT /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
    "noise": random.Random(0).randbytes(5000) + b"\r\n\r\n",
    "pipelined": (b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n\r\n") * 500,
}
_LARGE: Final[dict[str, dict[str, Any]]] = {
    "a prompt of a megabyte": {**_TEXT, "prompt": "a " * 500_000},
    "many prompts": {**_TEXT, "prompt": ["a"] * 100_000},
    "many ids": {**_TEXT, "prompt": [1] * 500_000},
    "many stops": {**_TEXT, "stop": ["a"] * 100_000},
    "an id beyond": {**_TEXT, "prompt": [2**40]},
    "an alien prompt": {**_TEXT, "prompt": ALIEN, "user": ALIEN},
    "a thousand turns": {**_CHAT, "messages": _CHAT["messages"] * 500},
    "a long assistant": {**_CHAT, "messages": [{"role": "assistant", "content": "a " * 500_000}, *_CHAT["messages"]]},
    "large tools": {**_CHAT, "tools": [{"type": "function", "function": {"name": "f", "description": "a " * 500_000}}]},
    "many tools": {**_CHAT, "tools": _CHAT["tools"] * 20_000},
    "deep tools": {**_CHAT, "tools": [{"function": json.loads('{"a":' * 300 + "1" + "}" * 300)}]},
    "variables": {**_CHAT, "chat_template_kwargs": {"messages": "x" * 100_000, "range": 1}},
    "a large temperature": {**_TEXT, "temperature": 10**400},
    "a tiny temperature": {**_TEXT, "temperature": 1e-300},
    "many choices": {**_TEXT, "n": 10**9},
    "many tokens": {**_TEXT, "max_tokens": 2**31 - 1},
}
_DEEP: Final = json.loads('{"items":' * 300 + "{}" + "}" * 300)
_SCHEMAS: Final[dict[str, Any]] = {
    "no object": [],
    "an alien type": {"type": ALIEN},
    "itself": {"$ref": "#"},
    "from elsewhere": {"$ref": "file:///etc/passwd"},
    "deep": _DEEP,
    "a large factor": {"type": "integer", "multipleOf": 10**9 + 7},
    "large bounds": {"type": "string", "minLength": 10**9, "maxLength": 10**10},
    "many items": {"type": "array", "minItems": 10**8, "items": {"type": "array", "minItems": 10**8}},
    "many words": {"enum": [f"w{number}" for number in range(4000)]},
    "an expression": {"type": "string", "pattern": "(a{1,999}){1,999}(b|bb)+$"},
    "two of each": {
        "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {"d40": {}},
        "$ref": "#/$defs/d0",
    },
    "any of many": {"anyOf": [{"properties": {f"a{n}": {"pattern": f"(x|y){{{n}}}"}}} for n in range(300)]},
    "numbers": {"type": "number", "minimum": -1e308, "maximum": 1e-308, "exclusiveMinimum": 10**400},
    "a name of control characters": {"type": "object", "properties": {ALIEN: {"const": ALIEN}}, "required": [ALIEN]},
}
_DEEP_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "content": {**_CHAT, "messages": [{"role": "user", "content": "DEEP"}]},
    "another key": {**_CHAT, "messages": [{"role": "user", "content": "a", "b": "DEEP"}]},
    "arguments": {
        **_CHAT,
        "messages": [*_CHAT["messages"], {"role": "assistant", "tool_calls": [{"function": {"arguments": "DEEP"}}]}],
    },
    "variables": {**_CHAT, "chat_template_kwargs": {"a": "DEEP"}},
    "parameters": {**_CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": "DEEP"}}}]},
    "a schema": {**_TEXT, "structured_outputs": {"json": {"enum": ["DEEP"]}}},
    "a bias": {**_TEXT, "logit_bias": {"1": "DEEP"}},
    "a prompt": {**_TEXT, "prompt": "DEEP"},
    "a user": {**_TEXT, "user": "DEEP"},
}
_LEVELS: Final = (100, 300, 450, 700, 950)
_STRUCTURES: Final[dict[str, Any]] = {
    "an expression of nothing": {"regex": ""},
    "an open expression": {"regex": "(((("},
    "counts of counts": {"regex": "((a{1,999}){1,999}){1,999}"},
    "an expression that looks ahead": {"regex": "(?=a)(?!b)\\1"},
    "letters of all languages": {"regex": r"(\p{L}{1,300}|\p{N}{1,300}){1,300}"},
    "a grammar of nothing": {"grammar": ""},
    "a grammar of no rule": {"grammar": "start: nowhere"},
    "a grammar of itself": {"grammar": "start: start"},
    "an ambiguous grammar": {"grammar": 'start: s\ns: s s | "a" | ""'},
    "a grammar of many rules": {"grammar": "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(2000))},
    "an import": {"grammar": "%import common.WORD\nstart: WORD"},
    "a file": {"grammar": '%llguidance {"grammars": [{"json_file": "/etc/passwd"}]}\nstart: "a"'},
    "no choice": {"choice": []},
    "an alien choice": {"choice": [ALIEN, "", "\ud800"]},
    "two structures": {"regex": "a", "choice": ["a"]},
}
_BIASES: Final[dict[str, Any]] = {
    "an id beyond": {"10000000": 1},
    "no id": {ALIEN: 1},
    "a bias of much": {"1": 10**400},
    "a bias of a text": {"1": "x"},
    "a list": [1],
    "many ids": {str(number): 1 for number in range(60_000)},
    "negative": {"-1": 1},
}
_TOOLS: Final[dict[str, Any]] = {
    "a number": 5,
    "a tool of nothing": [{}],
    "an alien name": [{"type": "function", "function": {"name": ALIEN, "parameters": {}}}],
    "a long name": [{"type": "function", "function": {"name": "n" * 100_000}}],
    "the same twice": _CHAT["tools"] * 2,
    "parameters of a list": [{"type": "function", "function": {"name": "f", "parameters": [1]}}],
    "deep parameters": [{"type": "function", "function": {"name": "f", "parameters": _DEEP}}],
    "many": [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object"}}} for n in range(3000)
    ],
}


def _iterate_structures() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, schema in _SCHEMAS.items():
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        yield f"schema: {name}", {**_CHAT, "tools": [], "response_format": wanted}
    for name, structure in _STRUCTURES.items():
        yield f"structure: {name}", {**_TEXT, "structured_outputs": structure}
    for name, bias in _BIASES.items():
        yield f"bias: {name}", {**_TEXT, "logit_bias": bias}
    for name, tools in _TOOLS.items():
        for choice in ("auto", "required"):
            yield f"tools {choice}: {name}", {**_CHAT, "tools": tools, "tool_choice": choice}
    yield "a choice of another tool", {**_CHAT, "tool_choice": {"type": "function", "function": {"name": ALIEN}}}


_CONTROL: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def iterate_requests(seed: int) -> Iterator[tuple[str, bytes]]:
    """Yields names and bytes."""
    yield from _RAW.items()
    for name, content in (*_LARGE.items(), *_iterate_structures()):
        yield name, _build(content, json.dumps(content).encode())
    for name, content in _DEEP_FIELDS.items():
        for levels in _LEVELS:
            body = json.dumps(content).replace('"DEEP"', "[" * levels + "]" * levels).encode()
            yield f"{name} of {levels} levels", _build(content, body)
    for content in (_TEXT, _CHAT):
        kind = "chat" if "messages" in content else "text"
        for act, change in JSON_ACTS.items():
            yield f"{kind}: {act}", _build(content, change(content))
        for number in range(25):
            changed, chooser = json.loads(json.dumps(content)), random.Random(f"{seed} {kind} {number}")
            for _ in range(1 + number % 3):
                if changed:
                    change_somewhere(changed, chooser)
            yield f"{kind}: change {number}", _build(content, json.dumps(changed).encode())


def _build(content: dict[str, Any], body: bytes) -> bytes:
    head = _HEAD.replace(b"/completions", b"/chat/completions") if "messages" in content else _HEAD
    return head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body


def run(runner: Runner, seed: int, every: int = 1) -> Iterator[Outcome]:
    """Sends each request to one server and yields what it answered; an ordinary request follows each."""
    place = runner.directory / "sound"
    command = [
        "serve",
        str(place / "run"),
        "--port",
        "0",
        "--device",
        "cpu",
        "--chat_template",
        str(place / "template.jinja"),
    ]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = runner.start(out, err, place, lambda: main(command))
        try:
            port = _find_port(out)
            sound = _build(_TEXT, _BODY)
            assert send_bytes(port, sound, 60.0).startswith(b"HTTP/1.1 200")
            need = _watch(pid, lambda: send_bytes(port, sound, 60.0))[2]
            for name, data in [*iterate_requests(seed)][::every]:
                answer, seconds, num_bytes = _watch(pid, lambda data=data: send_bytes(port, data, 2.0))  # type: ignore[misc]
                begin_seconds = time.monotonic()
                still = send_bytes(port, sound, LIMIT_SECONDS)
                waited_seconds = time.monotonic() - begin_seconds
                yield _judge(name, data, answer, seconds, num_bytes, need, still, waited_seconds)
            printed = _read(err)
            problems = ("logged control characters",) if _CONTROL.search(printed) else ()
            yield Outcome("request", "the log of all", 400, 0.0, len(printed), "", problems)
        finally:
            runner.stop(pid)


def _judge(
    name: str, data: bytes, answer: bytes, seconds: float, num_bytes: int, need: int, still: bytes, waited: float
) -> Outcome:
    found = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
    status, body = int(found[1]) if found else 0, answer.partition(b"\r\n\r\n")[2]
    problems = []
    if status >= 500:
        problems.append(f"status {status}: {body[:300]!r}")
    if 400 <= status < 500 and (len(body) > 3000 or _CONTROL.search(body)):
        problems.append(f"an answer that is not short and printable: {body[:300]!r}")
    if seconds > LIMIT_SECONDS:
        problems.append(f"took {seconds:.0f} s")
    if num_bytes > 2 * need + SLACK_BYTES + 4 * len(data):
        problems.append(f"took {num_bytes >> 20} MB")
    if not still.startswith(b"HTTP/1.1 200"):
        problems.append(f"the next request got {still[:200]!r} after {waited:.1f} s")
    line = body[:300].decode(errors="replace")
    return Outcome("request", name, status, round(seconds, 2), num_bytes, line, tuple(problems))


def _watch(pid: int, act: Any) -> tuple[bytes, float, int]:
    """Returns what an act gave, the processor time that it took the server, and the memory that it added."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before_bytes, before_seconds = _peak_bytes(pid), cpu_seconds(pid)
    answer = act()
    return answer, cpu_seconds(pid) - before_seconds, _peak_bytes(pid) - before_bytes


def _peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _find_port(out: Any) -> int:
    for _ in range(1200):
        if found := re.search(rb"http://127\.0\.0\.1:(\d+)/", _read(out)):
            return int(found[1])
        time.sleep(0.1)
    raise AssertionError("the server does not start")


def _read(file: Any) -> bytes:
    file.seek(0)
    content: bytes = file.read()
    return content
