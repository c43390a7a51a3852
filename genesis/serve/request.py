"""Parses the bodies of `POST /v1/completions`, `/v1/chat/completions` and `/v1/score` strictly."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from genesis.base.errors import numbered
from genesis.generate.grammar import MAX_GRAMMAR_CHARS, write_pattern, write_schema, write_words
from genesis.generate.sampling_options import SamplingOptions
from genesis.serve.fields import Fields, FieldTable, parse_object, refuse, show

DEFAULT_NEW_TOKENS = 16
"""The default of OpenAI's API."""
MAX_TOP_LOGPROBS = 5
_MAX_SCORED_TEXTS = 256
_MAX_SCORED_CHARS = 1 << 22
"""With the question of each answer; one question may stand for all answers."""
_MAX_STOPS = 4
_MAX_BIASES = 1024
_MAX_BIAS = 100.0
_TOKEN_ID = re.compile("[0-9]{1,9}")
_MAX_PENALTY = 2.0
_REPETITION_PENALTIES = (0.1, 10.0)
_MAX_STOP_CHARS = 1000
_LARGEST_COUNT = 2**31 - 1
_SMALLEST_POSITIVE = 1e-6
"""Lower bound of a temperature: in float32 a smaller number becomes zero or has no finite reciprocal."""
_COMMON_FIELDS = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "response_format",
    "structured_outputs",
    "n",
    "stop",
    "seed",
    "stream",
    "stream_options",
)
_COMPLETION = FieldTable(
    '{"model": ..., "prompt": ...}',
    (*_COMMON_FIELDS, "prompt", "best_of", "logprobs", "echo", "return_token_ids"),
    ignored=("user",),
    not_supported={"suffix": (None, "")},
)
_CHAT = FieldTable(
    '{"model": ..., "messages": [{"role": "user", "content": ...}]}',
    (
        *_COMMON_FIELDS,
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "chat_template_kwargs",
    ),
    ignored=("user", "metadata", "store"),
    not_supported={
        "modalities": (None, ["text"]),
        "functions": (None, []),
        "function_call": (None, "none"),
    },
)


_SCORE = FieldTable(
    '{"model": ..., "text_1": question, "text_2": answer}',
    ("model", "messages", "text_1", "text_2", "tools", "chat_template_kwargs"),
    ignored=("user",),
    not_supported={},
)


_LOAD = FieldTable('{"path": ..., "digest": ...}', ("path", "digest"), ignored=(), not_supported={})


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation whose next turn the model writes.

    Attributes:
        messages: The messages, as the client gave them.
        tools: The definitions of the tools; None for none.
        variables: Further variables of the chat template.
        is_whole: Whether no turn follows: the conversation is scored.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None
    variables: Mapping[str, Any]
    is_whole: bool = False


Prompt = str | tuple[int, ...] | ChatPrompt


@dataclass(frozen=True)
class CompletionRequest:
    """A client's request; every value is in range except for limits that depend on the model.

    Attributes:
        model: The id, as the client gave it.
        is_chat: Whether the request is a conversation.
        num_prompts: The number of prompts.
        prompts: Texts, lists of tokens, or one conversation; none where a process of its own encodes them.
        max_new_tokens: New tokens per choice; None for the server's default.
        num_choices: Choices per prompt.
        stop: Texts that end a choice; they are not part of it.
        seed: The sampling seed; None for a random one.
        num_top_logprobs: How many alternatives each token is returned with; None to return no probabilities.
        has_echo: Whether the response repeats the prompt before the generated text.
        has_ids: Whether the response has the ids of the new tokens.
        is_stream: Whether tokens are sent as they are generated.
        has_usage: Whether a stream ends with the token counts.
        grammar: What the text must follow; None for any text.
        grammar_field: The field that the grammar comes from.
        tools: The schema of each tool's arguments by its name; none if the model may call none.
        must_call: Whether the answer must be a call of one of the tools.
        has_one_call: Whether the answer ends with its first call.
        scored_field: The field with what a reward model scores, messages or text_2; None where a model writes.
    """

    model: str
    is_chat: bool
    num_prompts: int
    prompts: tuple[Prompt, ...]
    max_new_tokens: int | None
    sampling: SamplingOptions
    num_choices: int
    stop: tuple[str, ...]
    seed: int | None
    num_top_logprobs: int | None
    has_echo: bool
    is_stream: bool
    has_usage: bool
    grammar: str | None = None
    grammar_field: str | None = None
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    must_call: bool = False
    has_one_call: bool = False
    scored_field: str | None = None
    has_ids: bool = False

    @property
    def is_score(self) -> bool:
        """Returns whether the prompts are whole conversations, for which a reward model gives scores."""
        return self.scored_field is not None

    @property
    def num_texts(self) -> int:
        """The number of texts that a model works on together; those that are scored follow one another."""
        return 1 if self.is_score else self.num_prompts * self.num_choices


def parse_completion(body: bytes, max_texts: int) -> CompletionRequest:
    """Returns the request in `body`.

    Args:
        body: JSON.
        max_texts: The largest allowed number of prompts times choices.

    Raises:
        ApiError: The body is not JSON, or a field is unknown, of a wrong type, out of range or not supported.
    """
    fields = parse_object(body, _COMPLETION)
    is_stream = fields.flag("stream")
    prompts = _read_prompts(fields)
    grammar_field, grammar = _read_grammar(fields)
    request = CompletionRequest(
        model=fields.required_text("model"),
        is_chat=False,
        num_prompts=len(prompts),
        prompts=prompts,
        max_new_tokens=fields.integer("max_tokens", 0, _LARGEST_COUNT),
        sampling=_read_sampling(fields),
        num_choices=fields.integer("n", 1, max_texts) or 1,
        stop=_read_stop(fields),
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        num_top_logprobs=fields.integer("logprobs", 0, MAX_TOP_LOGPROBS),
        has_echo=fields.flag("echo"),
        is_stream=is_stream,
        has_usage=_read_has_usage(fields, is_stream=is_stream),
        grammar=grammar,
        grammar_field=grammar_field,
        has_ids=fields.flag("return_token_ids"),
    )
    best_of = fields.integer("best_of", 1, _LARGEST_COUNT)
    if best_of not in (None, request.num_choices):
        refuse("best_of", f"is {best_of} but n is {request.num_choices}: remove best_of, or set it to n")
    if request.max_new_tokens == 0 and not (request.has_echo and request.num_top_logprobs is not None):
        refuse("max_tokens", "is 0, which only serves the probabilities of a prompt: set echo and logprobs, too")
    if request.has_ids and request.has_echo:
        refuse("return_token_ids", "gives the new tokens alone: remove echo")
    if request.num_texts > max_texts:
        refuse(
            "prompt",
            f"has {numbered(len(request.prompts), 'texts')} with n {request.num_choices}: a request may have "
            f"{max_texts} in total",
        )
    return request


def parse_chat(body: bytes, max_texts: int) -> CompletionRequest:
    """Returns the request in the body of `POST /v1/chat/completions`.

    Args:
        body: JSON.
        max_texts: The largest allowed number of choices.

    Raises:
        ApiError: The body is not JSON, or a field is unknown, of a wrong type, out of range or not supported.
    """
    fields = parse_object(body, _CHAT)
    is_stream = fields.flag("stream")
    limits = [fields.integer(name, 1, _LARGEST_COUNT) for name in ("max_completion_tokens", "max_tokens")]
    if None not in limits and limits[0] != limits[1]:
        refuse("max_tokens", f"is {limits[1]} but max_completion_tokens is {limits[0]}: remove max_tokens")
    has_log_probs = fields.flag("logprobs")
    num_top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if num_top is not None and not has_log_probs:
        refuse("top_logprobs", "requires logprobs: set logprobs to true, or remove top_logprobs")
    grammar_field, grammar = _read_grammar(fields)
    tools, named = _read_tools(fields)
    choice, callable_tools = _read_tool_choice(fields, named)
    if grammar is not None and callable_tools:
        refuse(f"{grammar_field}", 'lets the model call no tool: set tool_choice to "none", or remove one of both')
    return CompletionRequest(
        model=fields.required_text("model"),
        is_chat=True,
        num_prompts=1,
        prompts=(ChatPrompt(_read_messages(fields), None if choice == "none" else tools, _read_variables(fields)),),
        max_new_tokens=limits[0] or limits[1],
        sampling=_read_sampling(fields),
        num_choices=fields.integer("n", 1, max_texts) or 1,
        stop=_read_stop(fields),
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        num_top_logprobs=(num_top or 0) if has_log_probs else None,
        has_echo=False,
        is_stream=is_stream,
        has_usage=_read_has_usage(fields, is_stream=is_stream),
        grammar=grammar,
        grammar_field="tool_choice" if choice == "required" else grammar_field,
        tools=callable_tools,
        must_call=choice == "required",
        has_one_call=fields.value("parallel_tool_calls") is not None and not fields.flag("parallel_tool_calls"),
    )


def parse_score(body: bytes) -> CompletionRequest:
    """Returns the request in the body of `POST /v1/score`: a conversation, or questions and answers.

    Raises:
        ApiError: The body is not JSON, or a field is unknown, of a wrong type, or not supported.
    """
    fields = parse_object(body, _SCORE)
    given = [name for name in ("messages", "text_1", "text_2") if fields.value(name) is not None]
    if given not in (["messages"], ["text_1", "text_2"]):
        refuse(
            given[0] if given else "messages",
            "must be given alone, or text_1 and text_2 instead: a conversation, or questions and answers to them",
        )
    tools, _ = _read_tools(fields)
    if given == ["messages"]:
        conversations = [_read_messages(fields)]
        if conversations[0][-1].get("role") != "assistant":
            refuse("messages", "does not end with a turn of the assistant, the answer that is scored: add it")
    else:
        conversations = [
            ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
            for question, answer in _read_text_pairs(fields)
        ]
    variables = _read_variables(fields)
    return CompletionRequest(
        model=fields.required_text("model"),
        is_chat=True,
        num_prompts=len(conversations),
        prompts=tuple(ChatPrompt(one, tools, variables, is_whole=True) for one in conversations),
        max_new_tokens=0,
        sampling=SamplingOptions(temperature=0.0),
        num_choices=1,
        stop=(),
        seed=None,
        num_top_logprobs=None,
        has_echo=False,
        is_stream=False,
        has_usage=False,
        scored_field=given[-1],
    )


def parse_load(body: bytes) -> tuple[str, str]:
    """Returns the name and the digest in the body of `POST /v1/load_weights`.

    Raises:
        ApiError: The body is not JSON, or a field is unknown or no text.
    """
    fields = parse_object(body, _LOAD)
    return fields.required_text("path"), fields.required_text("digest")


def _read_text_pairs(fields: Fields) -> list[tuple[str, str]]:
    """Returns questions with their answers: one question to each answer, or one for all of them."""
    found: dict[str, list[str]] = {}
    for name in ("text_1", "text_2"):
        value = fields.value(name)
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and len(texts) > _MAX_SCORED_TEXTS:
            refuse(name, f"has {numbered(len(texts), 'texts')}: send at most {_MAX_SCORED_TEXTS} in a request")
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            refuse(name, f"is {show(value)}: it must be a text, or a list of texts")
        if not all(map(_is_unicode, texts)):
            refuse(name, "contains a lone surrogate, which is not a character")
        found[name] = texts
    questions, answers = found.values()
    num_chars = sum(map(len, answers)) + sum(map(len, questions)) * (len(answers) if len(questions) == 1 else 1)
    if num_chars > _MAX_SCORED_CHARS:
        refuse(
            "text_2",
            f"has, with the question of each answer, {numbered(num_chars, 'characters')}: send at most "
            f"{_MAX_SCORED_CHARS:,} in a request",
        )
    if len(questions) == 1:
        questions = questions * len(answers)
    if len(questions) != len(answers):
        refuse(
            "text_1",
            f"has {numbered(len(questions), 'texts')}, and text_2 has {len(answers)}: give one question, or one for "
            "each answer",
        )
    return list(zip(questions, answers, strict=True))


def _read_messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    value = fields.value("messages")
    if value is None:
        refuse("messages", "is missing")
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        refuse("messages", f"is {show(value)}: it must be a list of messages, each an object with role and content")
    if not _is_unicode(json.dumps(value, ensure_ascii=False)):
        refuse("messages", "contains a lone surrogate, which is not a character")
    return tuple(value)


def _read_tools(fields: Fields) -> tuple[tuple[Mapping[str, Any], ...] | None, dict[str, Mapping[str, Any]]]:
    """Returns the definitions of tools for the template, and the schema of each tool's arguments by its name."""
    value = fields.value("tools")
    if value is None:
        return None, {}
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        refuse("tools", f"is {show(value)}: it must be a list of definitions of functions")
    named: dict[str, Mapping[str, Any]] = {}
    for tool in value:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or not _is_unicode(name):
            refuse("tools", f'contains {show(tool)}: each must be {{"type": "function", "function": {{"name": ...}}}}')
        schema = function.get("parameters") or {}
        if not isinstance(schema, dict):
            refuse("tools", f"has the parameters {show(schema)} for {show(name)}: they must be a JSON schema")
        if schema.get("type", "object") != "object":
            refuse("tools", f"has parameters of type {show(schema['type'])} for {show(name)}: they must be an object")
        if name in named:
            refuse("tools", f"has the name {show(name)} twice: give each tool a name of its own")
        named[name] = {"type": "object", **schema}
    return tuple(value), named


def _read_tool_choice(
    fields: Fields, named: Mapping[str, Mapping[str, Any]]
) -> tuple[Literal["auto", "none", "required"], Mapping[str, Mapping[str, Any]]]:
    """Returns whether the model may or must call a tool, and which of them it may call."""
    value = fields.value("tool_choice")
    if value == "none":
        return "none", {}
    if value in (None, "auto"):
        return "auto", named
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if value != "required" and not isinstance(name, str):
        refuse(
            "tool_choice",
            f'is {show(value)}: it must be "auto", "none", "required", or '
            '{"type": "function", "function": {"name": ...}}',
        )
    if value == "required" and not named:
        refuse("tool_choice", 'is "required", but there is no tool: add tools, or remove tool_choice')
    if value != "required" and name not in named:
        refuse("tool_choice", f"is the tool {show(name)}, which is not in tools: name one of these")
    return "required", named if value == "required" else {str(name): named[str(name)]}


def _read_grammar(fields: Fields) -> tuple[str | None, str | None]:
    """Returns the grammar that the text must follow, after the field that it comes from; None without one."""
    found = [("response_format", _read_response_format(fields)), ("structured_outputs", _read_structure(fields))]
    given = [(name, grammar) for name, grammar in found if grammar is not None]
    if len(given) > 1:
        refuse("structured_outputs", "is given with response_format: remove one of both")
    for name, grammar in given:
        if len(grammar) > MAX_GRAMMAR_CHARS:
            refuse(
                name, f"has {numbered(len(grammar), 'characters')}, {MAX_GRAMMAR_CHARS:,} are the most: make it smaller"
            )
        if not _is_unicode(grammar):
            refuse(name, "contains a lone surrogate, which is not a character")
    return given[0] if given else (None, None)


def _read_response_format(fields: Fields) -> str | None:
    value = fields.value("response_format")
    if value is None or value == {"type": "text"}:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object" and len(value) == 1:
        return "start: " + write_schema({"type": "object"})
    described = value.get("json_schema") if kind == "json_schema" and value.keys() <= {"type", "json_schema"} else None
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        refuse(
            "response_format",
            f'is {show(value)}: it must be {{"type": "text"}}, {{"type": "json_object"}}, or '
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
        )
    return "start: " + write_schema(schema)


def _read_structure(fields: Fields) -> str | None:
    """Returns the grammar of vLLM's field `structured_outputs`."""
    value = fields.value("structured_outputs")
    if value is None:
        return None
    if isinstance(value, dict) and len(value) == 1:
        ((kind, content),) = value.items()
        if kind == "json" and isinstance(content, dict):
            return "start: " + write_schema(content)
        if kind == "regex" and isinstance(content, str) and content:
            return "start: " + write_pattern(content)
        if kind == "grammar" and isinstance(content, str) and content:
            return content
        if kind == "choice" and isinstance(content, list) and content:
            words = [word for word in content if isinstance(word, str) and word]
            if len(words) == len(content):
                return "start: " + write_words(words)
    refuse(
        "structured_outputs",
        f'is {show(value)}: it must have one of "json" (a schema), "regex", "choice" (a list of texts) and "grammar" '
        "(in Lark's form)",
    )


def _read_variables(fields: Fields) -> Mapping[str, Any]:
    value = fields.value("chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse("chat_template_kwargs", f"is {show(value)}: it must be an object")
    return value


def _read_sampling(fields: Fields) -> SamplingOptions:
    return SamplingOptions(
        temperature=_read_temperature(fields),
        top_k=fields.integer("top_k", 1, _LARGEST_COUNT),
        top_p=fields.number("top_p", _SMALLEST_POSITIVE, 1.0, default=1.0),
        min_p=fields.number("min_p", 0.0, 1.0, default=0.0),
        presence_penalty=fields.number("presence_penalty", -_MAX_PENALTY, _MAX_PENALTY, default=0.0),
        frequency_penalty=fields.number("frequency_penalty", -_MAX_PENALTY, _MAX_PENALTY, default=0.0),
        repetition_penalty=fields.number("repetition_penalty", *_REPETITION_PENALTIES, default=1.0),
        logit_bias=_read_logit_bias(fields),
    )


def _read_logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """Returns the biases by token; the vocabulary is not known yet."""
    value = fields.value("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > _MAX_BIASES:
        refuse("logit_bias", f"is {show(value)}: it must be an object of at most {_MAX_BIASES} token ids and numbers")
    biases = Fields(value)
    for token in value:
        if not _TOKEN_ID.fullmatch(token):
            refuse("logit_bias", f"has the key {show(token)}: each key must be a token id, in digits")
    return tuple(
        (int(token), biases.number(token, -_MAX_BIAS, _MAX_BIAS, default=0.0, of="logit_bias")) for token in value
    )


def _read_temperature(fields: Fields) -> float:
    temperature = fields.number("temperature", 0.0, 2.0, default=1.0)
    if 0.0 < temperature < _SMALLEST_POSITIVE:
        refuse("temperature", f"is {temperature}: it must be 0 or from {_SMALLEST_POSITIVE:g} to 2")
    return temperature


def _read_prompts(fields: Fields) -> tuple[Prompt, ...]:
    value = fields.value("prompt")
    if value is None:
        refuse("prompt", "is missing")
    if isinstance(value, str) or (isinstance(value, list) and value and _is_token(value[0])):
        value = [value]
    if not isinstance(value, list) or not value:
        refuse("prompt", f"is {show(value)}: it must be a string, a list of tokens, or a list of those")
    return tuple(_read_prompt(prompt) for prompt in value)


def _read_prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        if not _is_unicode(prompt):
            refuse("prompt", "contains a lone surrogate, which is not a character")
        return prompt
    if not isinstance(prompt, list) or not all(_is_token(token) for token in prompt):
        refuse("prompt", f"contains {show(prompt)}: each prompt must be a string or a list of tokens")
    if not prompt:
        refuse("prompt", "contains an empty list: give at least one token")
    return tuple(prompt)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > _MAX_STOPS or not all(isinstance(text, str) for text in texts):
        refuse("stop", f"is {show(value)}: it must be a string or a list of at most {_MAX_STOPS} strings")
    if any(not 0 < len(text) <= _MAX_STOP_CHARS for text in texts):
        refuse("stop", f"contains a text that is empty or longer than {_MAX_STOP_CHARS} characters")
    return tuple(texts)


def _read_has_usage(fields: Fields, *, is_stream: bool) -> bool:
    options = fields.value("stream_options")
    if options is None:
        return False
    if not is_stream:
        refuse("stream_options", "requires stream: remove stream_options, or set stream to true")
    if not isinstance(options, dict):
        refuse("stream_options", f"is {show(options)}: it must be an object")
    unknown = next((name for name in options if name != "include_usage"), None)
    if unknown is not None:
        refuse("stream_options", f"has the unknown field {show(unknown)}: only include_usage is supported")
    value = options.get("include_usage")
    if value is not None and not isinstance(value, bool):
        refuse("stream_options", f"has include_usage {show(value)}: include_usage must be true or false")
    return bool(value)
