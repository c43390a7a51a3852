"""The chat of `genesis generate --chat`: turns of the user from standard input or `--prompt`, answers as they come."""

import datetime
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from genesis.base.arguments import read_text
from genesis.base.errors import UserError
from genesis.chat.harmony import HarmonyReader
from genesis.chat.options import ChatOptions
from genesis.chat.render import ChatRenderer, open_renderer
from genesis.chat.tools import HARMONY, ToolText, find_form, find_symbols
from genesis.cli.surroundings import own_output
from genesis.generate.ids import build_writer
from genesis.generate.load import Loaded
from genesis.generate.stream import GenerateOptions, generate


class Chat:
    """A conversation with a model.

    Args:
        loaded: The model.
        renderer: Turns the conversation into the model's prompt.
        options: How answers are generated.
        stop_ids: The tokens that end an answer.
        system: The system message; None for none.
    """

    def __init__(
        self,
        loaded: Loaded,
        renderer: ChatRenderer,
        options: GenerateOptions,
        stop_ids: frozenset[int],
        system: str | None = None,
    ) -> None:
        self._loaded, self._renderer, self._options, self._stop_ids = loaded, renderer, options, stop_ids
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> Iterator[str]:
        """Adds the user's turn, yields the answer piece by piece, and then adds it to the conversation.

        The reasoning of GPT-OSS comes in a line before its text, and is no part of the conversation.

        Raises:
            UserError: The template refuses the conversation, or it does not fit the model's context.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._renderer.render_prompt(messages)
        tokenizer = self._loaded.text_tokenizer
        writer = build_writer(tokenizer)
        form = find_form(self._renderer.template.text)
        reader = HarmonyReader({}) if form is HARMONY else None
        spelled = {} if reader is None else find_symbols(form, tokenizer)
        pieces, is_reasoning = list[str](), False
        for token in generate(self._loaded.decoder, [prompt], self._options, self._stop_ids):
            # The token that ends the turn belongs to the template, which writes it again in the next prompt.
            is_text = token.id < tokenizer.vocab_size and token.id not in self._stop_ids
            piece = (spelled.get(token.id) or writer.feed(token.id)) if is_text else ""
            piece += writer.flush() if token.is_last else ""
            part = ToolText(piece, []) if reader is None else reader.feed(piece, is_last=token.is_last)
            if part.reasoning:
                yield part.reasoning if is_reasoning else f"reasoning: {part.reasoning}"
                is_reasoning = True
            if part.content:
                yield f"\n{part.content}" if is_reasoning else part.content
                is_reasoning = False
            pieces.append(part.content)
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def run_chat(arguments: Namespace, loaded: Loaded, options: GenerateOptions, stop_ids: frozenset[int]) -> int:
    """Runs a chat in the terminal and returns the exit status.

    Raises:
        UserError: The model has no chat template, or a turn cannot be answered.
    """
    # A template that prints the date gets today's, as it would anywhere else.
    today = datetime.date.today().isoformat()
    chat_options = ChatOptions(template=arguments.chat_template, date=today)
    renderer = open_renderer(loaded.text_tokenizer, chat_options, is_training=False, learned=loaded.learned)
    chat = Chat(loaded, renderer, options, stop_ids, arguments.system)
    out = own_output()
    for text in _read_turns(arguments.prompt, sys.stdin, out):
        for piece in chat.answer(text):
            out.write(piece)
            out.flush()
        out.write("\n")
    return 0


def _read_turns(given: Sequence[str] | None, source: TextIO, out: TextIO) -> Iterator[str]:
    """Yields the user's turns: those of `--prompt`, or each line of standard input that is not blank."""
    if given is not None:
        for text in given:
            out.write(f"> {text}\n")
            yield text
        return
    is_terminal = source.isatty()
    if is_terminal:
        out.write("Each line is a turn; Ctrl-D ends the chat.\n")
    while True:
        if is_terminal:
            out.write("> ")
        out.flush()
        line = source.readline()
        if not line:
            break
        text = _read_line(line)
        if text:
            if not is_terminal:
                out.write(f"> {text}\n")
            yield text
    if is_terminal:
        out.write("\n")


def _read_line(line: str) -> str:
    try:
        return read_text(line.strip())
    except ArgumentTypeError as error:
        raise UserError(f"standard input: {error}") from None
