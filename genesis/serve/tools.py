"""Calls of tools in the text that a model writes: where its family begins and ends them, and how they are spelled.

A call that cannot be read, or that names no tool of the request, stays text: nothing of an answer is lost.
"""

import ast
import json
import re
import secrets
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

from genesis.generate.grammar import write_schema
from genesis.serve.held import count_held
from genesis.tokenizer.tokenizer import Tokenizer

Tools = Mapping[str, Mapping[str, Any]]
"""The tools of a request: the schema of the arguments by the tool's name."""

_MAX_BODY_CHARS: Final = 2**17
_MISTRAL: Final = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\s*\{)")
_SEPARATOR: Final = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK: Final = re.compile(
    rf"(?:function{_SEPARATOR})?([\w.-]+)(?:{_SEPARATOR}|\n```json\n)(.*?)(?:\n```)?", re.DOTALL
)
_FUNCTION: Final = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_KEYED: Final = re.compile(r"([\w.-]+)\s*((?:<arg_key>.*</arg_value>)?)", re.DOTALL)
_KEY_AND_VALUE: Final = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class ToolForm(NamedTuple):
    """How a family of models writes calls of tools.

    Args:
        begin: What precedes a call, or several.
        end: What follows; None if calls end with the answer.
        key: The name of the arguments in a call that is JSON.
        is_bare: Whether a whole answer may be calls without what precedes them.
        symbols: Further control symbols within calls.
    """

    begin: str
    end: str | None
    key: str = "arguments"
    is_bare: bool = False
    symbols: tuple[str, ...] = ()


_FORMS: Final = (
    ToolForm("<tool_call>", "</tool_call>"),  # Hermes, Qwen, SmolLM, Granite 4, GLM
    ToolForm("[TOOL_CALLS]", None, symbols=("[ARGS]", "[CALL_ID]")),  # Mistral
    ToolForm("<|python_tag|>", None, key="parameters", is_bare=True),  # Llama 3
    ToolForm("<|tool_call|>", "<|/tool_call|>"),  # Phi-4 mini
    ToolForm("<|tool_call_start|>", "<|tool_call_end|>"),  # LFM2
    ToolForm("<function_calls>", "</function_calls>"),  # OLMo 3
    ToolForm(
        "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>", symbols=(_SEPARATOR,)
    ),  # DeepSeek
)
_OTHER: Final = ToolForm("<tool_call>", "</tool_call>", is_bare=True)


def find_form(template: str | None) -> ToolForm:
    """Returns how the models of a chat template write calls; without a known sign as Hermes, or as bare JSON."""
    return next((form for form in _FORMS if form.begin in (template or "")), _OTHER)


class Call(NamedTuple):
    """A call of a tool; the arguments are JSON."""

    name: str
    arguments: str


class ToolText(NamedTuple):
    """The part of an answer that can be sent: its text outside of calls, and the calls, in the form of OpenAI's API."""

    content: str
    calls: list[dict[str, Any]]


class ToolReader:
    """Finds the calls in an answer while it comes. A call is sent when it is whole.

    White space around calls is no part of the text.

    Args:
        form: How the model writes calls.
        tools: The tools of the request.
    """

    def __init__(self, form: ToolForm, tools: Tools) -> None:
        self._form, self._tools = form, tools
        self._held = ""
        self._space = ""  # before the call that has begun; text if it is no call
        self._opening: str | None = None  # of the call that has begun
        self._num_searched = 0
        self._has_content = False
        self.num_calls = 0

    def feed(self, text: str, *, is_last: bool) -> ToolText:
        """Returns what can be sent after more text of the answer."""
        self._held += text
        content, calls = "", []
        while True:
            if self._opening is None:
                content += self._read_text(is_last=is_last)
                if self._opening is None:
                    break
            body = self._read_body(is_last=is_last)
            if body is None:
                break
            found = parse_calls(body, self._form, self._tools)
            if found is None:
                closing = self._form.end if self._form.end and self._is_closed else ""
                content += self._space + self._opening + body + (closing or "")
            else:
                calls += [self._describe(call) for call in found]
            self._opening, self._space = None, ""
        self._has_content = self._has_content or bool(content)
        return ToolText(content, calls)

    def _read_text(self, *, is_last: bool) -> str:
        """Returns the text up to a call, or what cannot be the beginning of one."""
        held, form = self._held, self._form
        if self.num_calls:
            held = held.lstrip()
        start = held.lstrip()[:1]
        if form.is_bare and not self._has_content and (start in ("{", "[") or not (start or is_last)):
            self._opening, self._held = "" if start else None, held
            return ""
        place = held.find(form.begin)
        if place >= 0:
            self._opening, self._num_searched = form.begin, 0
            self._held = held[place + len(form.begin) :]
            before = held[:place].rstrip()
            self._space = held[len(before) : place]
            return before
        shown = len(held) if is_last else len(held) - count_held(held, [form.begin])
        if not is_last:
            shown = len(held[:shown].rstrip())
        self._held = held[shown:]
        return held[:shown]

    def _read_body(self, *, is_last: bool) -> str | None:
        """Returns the text of a call, or of several; None as long as it has not ended."""
        end = self._form.end if self._opening else None
        place = -1 if end is None else self._held.find(end, self._num_searched)
        self._is_closed = place >= 0
        if end is not None and place >= 0:
            body, self._held = self._held[:place], self._held[place + len(end) :]
            return body
        self._num_searched = max(0, len(self._held) - len(end or ""))
        if not is_last:
            return None
        body, self._held = self._held, ""
        return body

    def _describe(self, call: Call) -> dict[str, Any]:
        self.num_calls += 1
        # Nine letters and digits, which Mistral's templates ask for.
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}


def find_symbols(form: ToolForm, tokenizer: Tokenizer | None) -> Mapping[int, str]:
    """Returns the spelling of the signs that are control symbols of a tokenizer, by their ids."""
    return {} if tokenizer is None else _find_symbols(form, cast("Hashable", tokenizer))


@lru_cache(maxsize=16)
def _find_symbols(form: ToolForm, tokenizer: Any) -> Mapping[int, str]:
    signs = {form.begin, form.end, *form.symbols}
    return {
        token: piece for token, piece in enumerate(tokenizer.pieces) if piece in signs and tokenizer.is_control(token)
    }


def write_choice(form: ToolForm, tools: Tools, tokenizer: Tokenizer | None) -> str:
    """Returns a grammar of one call of one of the tools.

    Args:
        form: How the model writes calls.
        tools: The tools that may be called.
        tokenizer: The tokenizer of the model, which may have control symbols for the signs of the form.
    """
    ids = {piece: token for token, piece in find_symbols(form, tokenizer).items()}
    signs = ("", "") if form.is_bare else (form.begin, form.end or "")
    begin, end = (_write_sign(sign, ids) for sign in signs)
    lines = [f"start: {begin} call {end}", "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, (name, schema) in enumerate(tools.items()):
        opening = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.key}": '
        lines += [f'call_{index}: {json.dumps(opening, ensure_ascii=False)} given_{index} "}}"']
        lines += [f"given_{index}: {write_schema(schema)}"]
    return "\n".join(lines)


def _write_sign(sign: str, ids: Mapping[str, int]) -> str:
    return f"<[{ids[sign]}]>" if sign in ids else json.dumps(sign, ensure_ascii=False)


def parse_calls(body: str, form: ToolForm, tools: Tools) -> list[Call] | None:
    """Returns the calls in the text between the signs of a family; None if it is no call of these tools."""
    if len(body) > _MAX_BODY_CHARS:
        return None
    calls: list[Call] = []
    for part in body.split(form.begin) if form.end is None else [body]:
        found = _read_part(part.strip(), tools)
        if found is None or not all(call.name in tools for call in found):
            return None
        calls += found
    return calls


def _read_part(text: str, tools: Tools) -> list[Call] | None:
    for read in _READERS:
        try:
            found = list(read(text, tools))
            if found:
                return [Call(name, json.dumps(given, ensure_ascii=False, allow_nan=False)) for name, given in found]
        # What a model writes may be anything; each of these means that it is not in this form.
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


_Found = Iterator[tuple[str, dict[str, Any]]]


def _read_json(text: str, tools: Tools) -> _Found:
    """Objects with name and arguments, alone, in a list, or one after the other."""
    position = 0
    while position < len(text):
        value, position = _DECODER.raw_decode(text, position)
        for one in value if isinstance(value, list) else [value]:
            call = one.get("function", one) if isinstance(one, dict) else None
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                raise ValueError("no call")
            yield call["name"], _read_arguments(call.get("arguments", call.get("parameters")))
        while position < len(text) and text[position] in " \t\r\n;,":
            position += 1


def _read_arguments(given: Any) -> dict[str, Any]:
    found = _DECODER.decode(given) if isinstance(given, str) else {} if given is None else given
    if not isinstance(found, dict):
        raise TypeError("arguments must be an object")
    return found


def _read_named_json(text: str, tools: Tools) -> _Found:
    """A name before the object of its arguments, as Mistral writes it; DeepSeek has its own sign between them."""
    named = _DEEPSEEK.fullmatch(text)
    if named is not None:
        yield named[1], _read_arguments(named[2])
        return
    match = _MISTRAL.match(text)
    if match is not None:
        yield match[1], _read_arguments(text[match.end() :])


def _read_tags(text: str, tools: Tools) -> _Found:
    """`<function=NAME>` with `<parameter=NAME>`, as Qwen3-Coder and Qwen3.5 write it."""
    position = 0
    while match := _FUNCTION.match(text, position):
        position = match.end()
        pairs = _PARAMETER.findall(match[2])
        yield match[1].strip(), {key: _convert(value, key, tools.get(match[1].strip())) for key, value in pairs}
    if text[position:].strip():
        raise ValueError("more than calls")


def _read_keyed(text: str, tools: Tools) -> _Found:
    """A name before `<arg_key>` and `<arg_value>`, as GLM writes it."""
    match = _KEYED.fullmatch(text)
    if match is not None:
        pairs = _KEY_AND_VALUE.findall(match[2])
        yield match[1], {key: _convert(value, key, tools.get(match[1])) for key, value in pairs}


def _read_python(text: str, tools: Tools) -> _Found:
    """Calls as Python, in a list or a line each: LFM2, OLMo 3, and Llama 3's own tools."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        statements = ast.parse(text).body
    for statement in statements:
        value = statement.value if isinstance(statement, ast.Expr) else None
        for call in value.elts if isinstance(value, ast.List) else [value]:
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError("no call")
            yield _read_name(call.func), {_read_key(one): _read_value(one.value) for one in call.keywords}


def _read_name(node: ast.expr) -> str:
    # Llama 3 writes `brave_search.call(query=...)`.
    node = node.value if isinstance(node, ast.Attribute) and node.attr == "call" else node
    if not isinstance(node, (ast.Name, ast.Attribute)):
        raise ValueError("no name")
    return ast.unparse(node)


def _read_key(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("no name of an argument")
    return keyword.arg


def _read_value(node: ast.expr) -> Any:
    words = {"true": True, "false": False, "null": None}
    return words[node.id] if isinstance(node, ast.Name) and node.id in words else ast.literal_eval(node)


def _convert(text: str, key: str, schema: Mapping[str, Any] | None) -> Any:
    """Returns a value that is spelled without quotes, by the type that the tool's schema gives it."""
    properties = (schema or {}).get("properties")
    of_key = properties.get(key) if isinstance(properties, Mapping) else None
    if isinstance(of_key, Mapping) and of_key.get("type") == "string":
        return text
    try:
        return _DECODER.decode(text)
    except ValueError:
        return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)
_READERS: Final[tuple[Callable[[str, Tools], _Found], ...]] = (
    _read_json,
    _read_named_json,
    _read_tags,
    _read_keyed,
    _read_python,
)
