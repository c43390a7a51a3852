"""Turns a client's conversation into the text after which the model writes the next turn, or that it scores."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from genesis.base.errors import RunEndedError, UserError
from genesis.chat.options import ChatOptions
from genesis.chat.render import ChatRenderer
from genesis.chat.template import ChatTemplate, ConversationError, EndlessTemplateError
from genesis.serve.errors import ApiError
from genesis.serve.request import ChatPrompt
from genesis.tokenizer.tokenizer import Tokenizer

_CALLS: Final = "tool_calls"


def write_conversation(prompt: ChatPrompt, tokenizer: Tokenizer | None, template: str | None) -> str:
    """Returns the text of a conversation with the beginning of the assistant's turn, or of a whole one to score.

    Control symbols that the client spells are hidden in the text, as `ChatRenderer.write_prompt` describes.

    Args:
        prompt: The conversation.
        tokenizer: The model's tokenizer; None if it has none.
        template: The text of the model's chat template; None if it has none.

    Raises:
        ApiError: The model has no chat template, or it refuses the conversation, or writes no tools or calls of them.
    """
    if tokenizer is None:
        raise ApiError(
            "this model has no tokenizer, so that it has no chat: "
            + ("name another model" if prompt.is_whole else "send token ids to /v1/completions"),
            param="model",
            code="no_tokenizer",
        )
    if template is None:
        raise ApiError(
            "this model has no chat template: "
            + ("name another model" if prompt.is_whole else "send a text to /v1/completions")
            + ", or start the server with --chat_template FILE",
            param="model",
            code="no_chat_template",
        )
    try:
        options = ChatOptions(variables=dict(prompt.variables))  # checks the variables' names
        renderer = ChatRenderer(tokenizer, _compile(template, datetime.date.today()), options.variables)
        write = renderer.write_whole if prompt.is_whole else renderer.write_prompt
        text = write(prompt.messages, prompt.tools)
        _refuse_left_out(write, prompt, text)
        return text
    except (ConversationError, EndlessTemplateError) as error:
        raise ApiError(str(error), param="messages", code="invalid_conversation") from None
    except UserError as error:
        raise ApiError(str(error), param="chat_template_kwargs" if prompt.variables else "messages") from None
    except RunEndedError as error:
        raise ApiError(str(error), status=503, code="not_rendered") from None


def _refuse_left_out(write: Callable[..., str], prompt: ChatPrompt, text: str) -> None:
    """Refuses tools, and calls of them, that the template does not write: the model would never see them.

    Many templates leave out the reasoning of earlier turns on purpose, so that it may be sent.
    """

    def is_same(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> bool:
        try:
            return write(messages, tools) == text
        except ConversationError:  # a template that fails without them writes them
            return False

    if prompt.tools and is_same(prompt.messages, None):
        raise ApiError("the model's chat template writes no tools: remove them", param="tools")
    plain = [
        {**{key: message[key] for key in message if key != _CALLS}, "content": message.get("content") or ""}
        for message in prompt.messages
    ]
    if any(message.get(_CALLS) for message in prompt.messages) and is_same(plain, prompt.tools):
        raise ApiError(f"the model's chat template writes no {_CALLS}: remove them", param="messages")


@lru_cache(maxsize=16)
def _compile(text: str, today: datetime.date) -> ChatTemplate:
    return ChatTemplate(text, "of the model", today)
