"""Calls of tools in the text that a model writes: where its family begins and ends them, and how they are spelled.

A call that cannot be read, or that names no tool of the request, stays text: nothing of an answer is lost.
"""

import ast
import json
import re
import secrets
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

from genesis.chat.held import count_held
from genesis.chat.streamed_object import StreamedObject
from genesis.tokenizer.tokenizer import Tokenizer

Tools = Mapping[str, Mapping[str, Any]]
"""The tools of a request: the schema of the arguments by the tool's name."""

_MAX_BODY_CHARS: Final = 2**17
_MISTRAL: Final = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\s*\{)")
_MAX_HEAD_CHARS: Final = 2**12
"""A call whose arguments begin later is given when it is whole."""
_SEPARATOR: Final = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK: Final = re.compile(
    rf"(?:function{_SEPARATOR})?([\w.-]+)(?:{_SEPARATOR}|\n```json\n)(.*?)(?:\n```)?", re.DOTALL
)
_NAME: Final = re.compile(r"[\w.-]+")
_SPACE: Final = re.compile(r"\s*")
_STRING: Final = re.compile(r"""(["'])(?:\\.|(?!\1)[^\\])*+(\1)?""", re.DOTALL)
_VALUES: Final = (("<function=", "</function>"), ("<arg_value>", "</arg_value>"))
_MAX_TRIED_CHARS: Final = 2**19
"""How many characters of an answer are read as a call in vain before the first sign of an end counts as one."""


class ToolForm(NamedTuple):
    """How a family of models writes calls of tools.

    Args:
        begin: What precedes a call, or several.
        end: What follows; None if calls end with the answer.
        family: The family, for messages.
        mark: What a template of this family has beside `begin`.
        forced: What a call that is asked for has before its arguments, with NAME for the tool, and behind them; where
            the arguments are no JSON, the name of the rules of a call in `genesis.serve.forced_calls`.
        is_bare: Whether a whole answer may be calls without what precedes them.
        symbols: Further control symbols within calls.
    """

    begin: str
    end: str | None
    family: str = ""
    mark: str = ""
    forced: tuple[str, str] | str = ('{"name": "NAME", "arguments": ', "}")
    is_bare: bool = False
    symbols: tuple[str, ...] = ()


_DEEPSEEK_SIGNS: Final = ("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>")
_LINES: Final = ('\n{"name": "NAME", "arguments": ', "}\n")
_LIST: Final = ('[{"name": "NAME", "arguments": ', "}]")
_MISTRAL_SYMBOLS: Final = ("[ARGS]", "[CALL_ID]")
HARMONY: Final = ToolForm(
    "<|channel|>",
    None,
    "GPT-OSS",
    mark="<|message|>",
    forced=(" to=functions.NAME<|channel|>commentary json<|message|>", ""),
    is_bare=True,  # the sign stands within what a forced call begins with
    symbols=("<|start|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"),
)
"""Read by `genesis.chat.harmony`."""
# Of several with one sign, the first whose mark is in the template.
_FORMS: Final = (
    ToolForm("<tool_call>", "</tool_call>", "Qwen3-Coder", mark="<function=", forced="function_tags"),
    ToolForm("<tool_call>", "</tool_call>", "GLM", mark="<arg_key>", forced="keyed_tags"),
    ToolForm("<tool_call>", "</tool_call>", "Hermes", forced=_LINES),  # Qwen, SmolLM, Granite 4, too
    # The model must write an id, which no one reads.
    ToolForm(
        "[TOOL_CALLS]", None, "Mistral", "[CALL_ID]", ("NAME[CALL_ID]000000000[ARGS]", ""), False, _MISTRAL_SYMBOLS
    ),
    ToolForm("[TOOL_CALLS]", None, "Mistral", "[ARGS]", ("NAME[ARGS]", ""), False, _MISTRAL_SYMBOLS),
    ToolForm("[TOOL_CALLS]", None, "Mistral", forced=_LIST, symbols=_MISTRAL_SYMBOLS),
    ToolForm("<|python_tag|>", None, "Llama 3", forced=('{"name": "NAME", "parameters": ', "}"), is_bare=True),
    ToolForm("<|tool_call|>", "<|/tool_call|>", "Phi-4 mini", forced=_LIST),
    ToolForm("<|tool_call_start|>", "<|tool_call_end|>", "LFM2", forced="python_list"),
    HARMONY,
    ToolForm("<function_calls>", "</function_calls>", "OLMo 3", forced="python"),
    ToolForm(
        *_DEEPSEEK_SIGNS,
        "DeepSeek-V3",
        mark="```json",
        forced=(f"function{_SEPARATOR}NAME\n```json\n", "\n```"),
        symbols=(_SEPARATOR,),
    ),
    ToolForm(*_DEEPSEEK_SIGNS, "DeepSeek", forced=(f"NAME{_SEPARATOR}", ""), symbols=(_SEPARATOR,)),
)
_HEADS: Final = (
    re.compile(r'\s*+(?:\[\s*+)?\{\s*+"name"\s*+:\s*+"([\w.-]++)"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'),
    re.compile(r"\s*+([\w.-]++)(?:\[CALL_ID\]\w*+)?(?:\[ARGS\])?\s*+(?=\{)"),
    re.compile(rf"\s*+(?:function{_SEPARATOR})?([\w.-]++)(?:{_SEPARATOR}|\n```json\n)\s*+(?=\{{)"),
)
"""The texts before arguments of JSON, with the name of the tool. They take what they have read for good: white space of
any length costs its length."""
_OTHER: Final = ToolForm("<tool_call>", "</tool_call>", is_bare=True)


def find_form(template: str | None) -> ToolForm:
    """Returns how the models of a chat template write calls; without a known sign as Hermes, or as bare JSON."""
    text = template or ""
    return next((form for form in _FORMS if form.begin in text and form.mark in text), _OTHER)


class Call(NamedTuple):
    """A call of a tool; the arguments are JSON."""

    name: str
    arguments: str


class ToolText(NamedTuple):
    """The part of an answer that can be sent: its text outside of calls, and the calls, in the form of OpenAI's API.

    Args:
        content: The text.
        calls: The calls; of a stream their parts, each with the call's index: the first has the name, the others the
            arguments as they come.
    """

    content: str
    calls: list[dict[str, Any]]
    reasoning: str = ""
    """Text in the channel of reasoning, in the formats that have one."""


class ToolReader:
    """Finds the calls in an answer while it comes. A call is sent when it is whole.

    White space before a call, and directly behind it, is no part of the text. A sign of an end within a value does not
    end a call: a body that is no call and has an open value goes on to the next sign.

    Args:
        form: How the model writes calls.
        tools: The tools of the request.
        has_one_call: Whether the answer ends with its first call: what follows is left out.
        is_stream: Whether arguments of JSON are given as they come. A call is then one as soon as its name is that
            of a tool and its arguments have begun.
    """

    def __init__(self, form: ToolForm, tools: Tools, *, has_one_call: bool = False, is_stream: bool = False) -> None:
        self._form, self._tools, self._has_one_call = form, tools, has_one_call
        self._is_stream = is_stream
        self._arguments: StreamedObject | None = None  # of the call that is given in pieces
        self._held = ""
        self._space = ""  # before the call that has begun; text if it is no call
        self._opening: str | None = None  # of the call that has begun
        self._first_end: int | None = None  # behind the first sign of an end, if that ended no call
        self._num_searched = 0
        self._num_tried = 0
        self._is_behind_call = False
        self._has_content = False
        self.num_calls = 0

    def feed(self, text: str, *, is_last: bool) -> ToolText:
        """Returns what can be sent after more text of the answer."""
        self._held += text
        content, calls = "", list[dict[str, Any]]()
        while self._arguments or not (self._has_one_call and self.num_calls):
            if self._opening is None:
                content += self._read_text(is_last=is_last)
                if self._opening is None:
                    break
            calls += self._read_pieces() if self._is_stream else []
            found = self._read_calls(is_last=is_last)
            if found is None:
                break
            content += found.content
            calls += found.calls
        self._has_content = self._has_content or bool(content)
        return ToolText(content, calls)

    def _read_pieces(self) -> list[dict[str, Any]]:
        """Returns what has come of the call that has begun, if its arguments are JSON."""
        pieces = []
        if self._arguments is None:
            heads = (head.match(self._held, 0, _MAX_HEAD_CHARS) for head in _HEADS)
            match = next(filter(None, heads), None)
            if match is None or match[1] not in self._tools:
                return []
            self._arguments = StreamedObject(match.end())
            pieces.append(self._describe(Call(match[1], "")))
        new = self._arguments.read(self._held)
        return pieces + ([{"index": self.num_calls - 1, "function": {"arguments": new}}] if new else [])

    def _read_text(self, *, is_last: bool) -> str:
        """Returns the text up to a call, or what cannot be the beginning of one."""
        form = self._form
        if self._is_behind_call:
            self._held = self._held.lstrip()
            self._is_behind_call = not self._held
        held = self._held
        start = held.lstrip()[:1]
        if form.is_bare and not self._has_content and (start in ("{", "[") or not (start or is_last)):
            self._opening = "" if start else None
            return ""
        place = held.find(form.begin)
        if place >= 0:
            self._opening = form.begin
            self._held = held[place + len(form.begin) :]
            before = held[:place].rstrip()
            self._space = held[len(before) : place]
            return before
        shown = len(held) if is_last else len(held) - count_held(held, [form.begin])
        if not is_last:
            shown = len(held[:shown].rstrip())
        self._held = held[shown:]
        return held[:shown]

    def _read_calls(self, *, is_last: bool) -> ToolText | None:
        """Returns the calls that have begun, or their text if they are none; None as long as they have not ended."""
        end = self._form.end if self._opening else None
        while end is not None and (place := self._held.find(end, self._num_searched)) >= 0:
            body, self._num_searched = self._held[:place], place + len(end)
            if calls := parse_calls(body, self._form, self._tools):
                return self._close(self._num_searched, calls)
            self._first_end = self._first_end or self._num_searched
            self._num_tried += len(body)
            if self._num_tried > _MAX_TRIED_CHARS or not _has_open_value(body):
                return self._close(self._first_end)
        if not is_last:
            self._num_searched = max(self._num_searched, len(self._held) - len(end or ""))
            return None
        if calls := parse_calls(self._held, self._form, self._tools):
            return self._close(len(self._held), calls)
        return self._close(self._first_end or len(self._held))

    def _close(self, stop: int, calls: list[Call] | None = None) -> ToolText:
        """Ends what has begun: calls up to `stop`, or text if there are none."""
        is_given, self._arguments = self._arguments is not None, None
        calls = (calls or [])[is_given : 1 if self._has_one_call else None]
        content = "" if calls or is_given else f"{self._space}{self._opening}{self._held[:stop]}"
        self._held = self._held[stop:]
        self._opening, self._space, self._first_end, self._num_searched = None, "", None, 0
        self._is_behind_call = bool(calls) or is_given
        return ToolText(content, [self._describe(call) for call in calls])

    def _describe(self, call: Call) -> dict[str, Any]:
        self.num_calls += 1
        return describe_call(call, self.num_calls - 1 if self._is_stream else None)


def describe_call(call: Call, index: int | None) -> dict[str, Any]:
    """Returns a call in the form of OpenAI's API, with a new id, and with its index in a stream."""
    # Nine letters and digits, which Mistral's templates ask for.
    function = {"name": call.name, "arguments": call.arguments}
    described = {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}
    return described if index is None else {"index": index, **described}


def find_symbols(form: ToolForm, tokenizer: Tokenizer | None) -> Mapping[int, str]:
    """Returns the spelling of the signs that are control symbols of a tokenizer, by their ids."""
    return {} if tokenizer is None else _find_symbols(form, cast("Hashable", tokenizer))


@lru_cache(maxsize=16)
def _find_symbols(form: ToolForm, tokenizer: Any) -> Mapping[int, str]:
    signs = {form.begin, form.end, *form.symbols}
    return {
        token: piece for token, piece in enumerate(tokenizer.pieces) if piece in signs and tokenizer.is_control(token)
    }


def parse_calls(body: str, form: ToolForm, tools: Tools) -> list[Call] | None:
    """Returns the calls in the text between the signs of a family; None if it is no call of these tools."""
    if len(body) > _MAX_BODY_CHARS:
        return None
    calls: list[Call] = []
    if form.end is not None:
        return _read_part(body.strip(), tools)
    parts, num_tried = deque(body.split(form.begin)), 0
    while parts:
        part = parts.popleft()
        found = _read_part(part.strip(), tools)
        while found is None:
            num_tried += len(part)
            if not parts or num_tried > _MAX_TRIED_CHARS or not _has_open_value(part):
                return None
            part += form.begin + parts.popleft()  # the sign was in a value
            found = _read_part(part.strip(), tools)
        calls += found
    return calls


def _has_open_value(text: str) -> bool:
    """Returns whether a sign behind this text may be a part of a value, which has not ended.

    >>> [_has_open_value(text) for text in ('{"a": "b', '{"a": "b"', "<function=f><parameter=a>1")]
    [True, False, True]
    """
    is_quoted = any(string[2] is None for string in _STRING.finditer(text))
    return is_quoted or any(text.rfind(begin) > text.rfind(end) for begin, end in _VALUES)


def _read_part(text: str, tools: Tools) -> list[Call] | None:
    for read in _READERS:
        try:
            found = list(read(text, tools))
            if found and all(name in tools for name, _ in found):
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
    while position < len(text):
        name, position = _read_between("<function=", ">", text, position)
        position, given = _skip_space(text, position), dict[str, Any]()
        while not text.startswith("</function>", position):
            key, position = _read_between("<parameter=", ">", text, position)
            value, position = _read_between("", "</parameter>", text, position)
            given[key] = _convert(value.removeprefix("\n").removesuffix("\n"), key, tools.get(name.strip()))
            position = _skip_space(text, position)
        position = _skip_space(text, position + len("</function>"))
        yield name.strip(), given


def _read_keyed(text: str, tools: Tools) -> _Found:
    """A name before `<arg_key>` and `<arg_value>`, as GLM writes it."""
    match = _NAME.match(text)
    if match is None:
        return
    position, given = _skip_space(text, match.end()), dict[str, Any]()
    while position < len(text):
        key, position = _read_between("<arg_key>", "</arg_key>", text, position)
        value, position = _read_between("<arg_value>", "</arg_value>", text, _skip_space(text, position))
        given[key] = _convert(value, key, tools.get(match[0]))
        position = _skip_space(text, position)
    yield match[0], given


def _read_between(begin: str, end: str, text: str, position: int) -> tuple[str, int]:
    """Returns what stands between two signs, the first of them at a position, and the position behind the second.

    Each character is looked at once: an expression that searches for both would look for the end from each beginning.

    Raises:
        ValueError: A sign is missing.
    """
    if not text.startswith(begin, position):
        raise ValueError("no call")
    stop = text.index(end, position + len(begin))
    return text[position + len(begin) : stop], stop + len(end)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


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
    """Returns a literal, in which the words of JSON may stand, too."""
    words = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in words:
        return words[node.id]
    if isinstance(node, ast.List):
        return [_read_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        return dict(zip(keys, map(_read_value, node.values), strict=True))
    return ast.literal_eval(node)


def _convert(text: str, key: str, schema: Mapping[str, Any] | None) -> Any:
    """Returns a value that is spelled without quotes, by the type that the tool's schema gives it."""
    properties = (schema or {}).get("properties")
    of_key = properties.get(key) if isinstance(properties, Mapping) else None
    if isinstance(of_key, Mapping) and (of_key.get("type") == "string" or text in _list_strings(of_key)):
        return text
    try:
        return _DECODER.decode(text)
    except ValueError:
        return text


def _list_strings(schema: Mapping[str, Any]) -> list[str]:
    choices = [*schema["enum"]] if isinstance(schema.get("enum"), list) else [schema.get("const")]
    return [one for one in choices if isinstance(one, str)]


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
