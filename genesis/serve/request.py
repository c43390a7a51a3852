"""Parses the body of `POST /v1/completions` strictly: unknown, invalid and unsupported fields are refused by name."""

import difflib
import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, NoReturn

from genesis.generate.sample import SamplingOptions
from genesis.serve.errors import ApiError

DEFAULT_NEW_TOKENS = 16
"""The default of OpenAI's API."""
MAX_TOP_LOGPROBS = 5
_MAX_STOPS = 4
_MAX_STOP_CHARS = 1000
_LARGEST_COUNT = 2**31 - 1
_SMALLEST_POSITIVE = 1e-6
"""In float32 a smaller number becomes zero or has no reciprocal."""
_IGNORED = ("user",)
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}
"""Unsupported fields of OpenAI's API, with the values that have no effect."""
_FIELDS = (
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "best_of",
    "stop",
    "seed",
    "logprobs",
    "echo",
    "stream",
    "stream_options",
)


@dataclass(frozen=True)
class CompletionRequest:
    """A client's request; every value is in range except for limits that depend on the model.

    Attributes:
        model: The id, as the client gave it.
        prompts: Texts, or lists of tokens.
        max_new_tokens: New tokens per choice; None for the server's default.
        num_choices: Choices per prompt.
        stop: Texts that end a choice; they are not part of it.
        seed: The sampling seed; None for a random one.
        num_top_logprobs: How many alternatives each token is returned with; None to return no probabilities.
        has_echo: Whether the response repeats the prompt before the generated text.
        is_stream: Whether tokens are sent as they are generated.
        has_usage: Whether a stream ends with the token counts.
    """

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    max_new_tokens: int | None
    sampling: SamplingOptions
    num_choices: int
    stop: tuple[str, ...]
    seed: int | None
    num_top_logprobs: int | None
    has_echo: bool
    is_stream: bool
    has_usage: bool

    @property
    def num_texts(self) -> int:
        """The number of texts to generate."""
        return len(self.prompts) * self.num_choices


def parse_completion(body: bytes, max_texts: int) -> CompletionRequest:
    """Returns the request in `body`.

    Args:
        body: JSON.
        max_texts: The largest allowed number of prompts times choices.

    Raises:
            ApiError: The body is not JSON, or a field is unknown, of a wrong type, out of range or not supported.
    """
    fields = _Fields(_parse_json(body))
    is_stream = fields.flag("stream")
    request = CompletionRequest(
        model=fields.required_text("model"),
        prompts=_read_prompts(fields),
        max_new_tokens=fields.integer("max_tokens", 1, _LARGEST_COUNT),
        sampling=SamplingOptions(
            temperature=_read_temperature(fields),
            top_k=fields.integer("top_k", 1, _LARGEST_COUNT),
            top_p=fields.number("top_p", _SMALLEST_POSITIVE, 1.0, default=1.0),
        ),
        num_choices=fields.integer("n", 1, max_texts) or 1,
        stop=_read_stop(fields),
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        num_top_logprobs=fields.integer("logprobs", 0, MAX_TOP_LOGPROBS),
        has_echo=fields.flag("echo"),
        is_stream=is_stream,
        has_usage=_read_has_usage(fields, is_stream=is_stream),
    )
    best_of = fields.integer("best_of", 1, _LARGEST_COUNT)
    if best_of not in (None, request.num_choices):
        _refuse("best_of", f"is {best_of} but n is {request.num_choices}: remove best_of, or set it to n")
    if request.has_echo and request.num_top_logprobs is not None:
        _refuse("echo", "with logprobs is not supported, the prompt's tokens have no probabilities: remove one of them")
    if request.num_texts > max_texts:
        _refuse(
            "prompt",
            f"has {len(request.prompts)} texts with n {request.num_choices}: a request may have {max_texts} in total",
        )
    return request


def _parse_json(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except ApiError:
        raise
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ApiError('the body is not a JSON object: {"model": ..., "prompt": ...}')
    for name in content:
        if name not in (*_FIELDS, *_IGNORED, *_NOT_SUPPORTED):
            near = difflib.get_close_matches(name[:100], _FIELDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ApiError(f"unknown field {_show(name)}{hint}", param=name[:100], code="unknown_field")
    for name, values in _NOT_SUPPORTED.items():
        if not any(content.get(name) == value and not isinstance(content.get(name), bool) for value in values):
            _refuse(name, "is not supported: remove it")
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(f"the body contains {name}, which is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ApiError(f"the body has the field {_show(twice)} twice", param=twice[:100])
    return content


def _refuse(param: str, problem: str) -> NoReturn:
    raise ApiError(f"{param} {problem}", param=param)


def _show(value: Any) -> str:
    """Returns a value for a message, shortened, in one line."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."


class _Fields:
    """Reads the fields of a request by type; null means that a field is not given."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def value(self, name: str) -> Any:
        return self._content.get(name)

    def required_text(self, name: str) -> str:
        value = self.value(name)
        if value is None:
            _refuse(name, "is missing")
        if not isinstance(value, str):
            _refuse(name, f"is {_show(value)}: it must be a string")
        return value

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            _refuse(name, f"is {_show(value)}: it must be true or false")
        return bool(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            _refuse(name, f"is {_show(value)}: it must be an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.value(name)
        if value is None:
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(_to_float(value)) or not low <= value <= high:
            _refuse(name, f"is {_show(value)}: it must be a number from {low:g} to {high:g}")
        return float(value)


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _read_temperature(fields: _Fields) -> float:
    temperature = fields.number("temperature", 0.0, 2.0, default=1.0)
    if 0.0 < temperature < _SMALLEST_POSITIVE:
        _refuse("temperature", f"is {temperature}: it must be 0 or from {_SMALLEST_POSITIVE:g} to 2")
    return temperature


def _read_prompts(fields: _Fields) -> tuple[str | tuple[int, ...], ...]:
    value = fields.value("prompt")
    if value is None:
        _refuse("prompt", "is missing")
    if isinstance(value, str) or (isinstance(value, list) and value and _is_token(value[0])):
        value = [value]
    if not isinstance(value, list) or not value:
        _refuse("prompt", f"is {_show(value)}: it must be a string, a list of tokens, or a list of those")
    return tuple(_read_prompt(prompt) for prompt in value)


def _read_prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        if not _is_unicode(prompt):
            _refuse("prompt", "contains a lone surrogate, which is not a character")
        return prompt
    if not isinstance(prompt, list) or not all(_is_token(token) for token in prompt):
        _refuse("prompt", f"contains {_show(prompt)}: each prompt must be a string or a list of tokens")
    if not prompt:
        _refuse("prompt", "contains an empty list: give at least one token")
    return tuple(prompt)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _read_stop(fields: _Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > _MAX_STOPS or not all(isinstance(text, str) for text in texts):
        _refuse("stop", f"is {_show(value)}: it must be a string or a list of at most {_MAX_STOPS} strings")
    if any(not 0 < len(text) <= _MAX_STOP_CHARS for text in texts):
        _refuse("stop", f"contains a text that is empty or longer than {_MAX_STOP_CHARS} characters")
    return tuple(texts)


def _read_has_usage(fields: _Fields, *, is_stream: bool) -> bool:
    options = fields.value("stream_options")
    if options is None:
        return False
    if not is_stream:
        _refuse("stream_options", "requires stream: remove stream_options, or set stream to true")
    if not isinstance(options, dict):
        _refuse("stream_options", f"is {_show(options)}: it must be an object")
    unknown = next((name for name in options if name != "include_usage"), None)
    if unknown is not None:
        _refuse("stream_options", f"has the unknown field {_show(unknown)}: only include_usage is supported")
    value = options.get("include_usage")
    if value is not None and not isinstance(value, bool):
        _refuse("stream_options", f"has include_usage {_show(value)}: include_usage must be true or false")
    return bool(value)
