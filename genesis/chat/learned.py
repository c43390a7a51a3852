"""The chat template that a model has learned, and the tokens that end its texts. All commands ask here.

A corpus keeps the template of its conversations, and a run that learns from it keeps that template under the same name:
`chat/template.jinja`. It takes precedence over the template of the tokenizer (`genesis.chat.render.open_template`). The
file holds the variables of the template as defaults, so that it writes what was learned by itself.
"""

import logging
from datetime import date
from pathlib import Path

from genesis.base.errors import UserError
from genesis.base.run_directory import RunDirectory
from genesis.chat.options import ChatOptions
from genesis.chat.render import open_template, read_template
from genesis.chat.stops import find_turn_ends
from genesis.chat.template import ChatTemplate
from genesis.chat.training import find_trained_end
from genesis.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def find_stop_ids(tokenizer: Tokenizer, learned: Path | None, given: Path | None = None) -> frozenset[int]:
    """Returns the tokens that end a model's texts: the stops of its tokenizer, and what closes the assistant's turns.

    Args:
        tokenizer: The model's tokenizer.
        learned: The file of the template that the model has learned; None for the template of its tokenizer, if any.
        given: The file of a template that the user chose.

    Raises:
        UserError: A file of a template cannot be read, is no template, or computes without end.
    """
    stops = set(tokenizer.stop_ids)
    for file in {learned, given} - {None}:
        assert file is not None
        stops |= set(find_turn_ends(read_template(file), tokenizer).ids)
    if learned is None and given is None and tokenizer.chat_template is not None:
        try:
            stops |= set(find_turn_ends(open_template(tokenizer, ChatOptions()), tokenizer).ids)
        except UserError as error:  # texts without a template can still be generated
            _log.warning("%s; no token that ends the assistant's turns is known", error)
    return frozenset(stops)


def find_recorded(directory: Path) -> Path | None:
    """Returns the chat template that a corpus or a run keeps; None if it keeps none."""
    file = RunDirectory(directory).chat_template
    return file if file.is_file() else None


def describe_other_template(given: Path | None, learned: Path | None) -> str | None:
    """Returns a line if the user's template is not the one that the model has learned; None if there is no such choice.

    Raises:
        UserError: A file cannot be read.
    """
    if given is None or learned is None or read_template(given).text == read_template(learned).text:
        return None
    return f"the model has learned the chat template {learned}, and {given} writes conversations in another format"


def build_prompt_form(text: str, tokenizer: Tokenizer) -> str:
    """Returns the template of prompts for a template of training: the tokenizer's own, if it was trained in its place.

    A family's training template writes the same text, but for reasoning of earlier turns, which clients do not send. It
    stays where it alone ends turns, so that the model stops.
    """
    if tokenizer.chat_template is None:
        return text
    own = ChatTemplate(tokenizer.chat_template, "of the tokenizer", date.today())
    end = find_trained_end(text, own, tokenizer.named_tokens)
    if end is None:
        return text
    form = text.removesuffix(end) + own.text
    trained, kept = (set(find_turn_ends(ChatTemplate(one, own.name, own.today), tokenizer).ids) for one in (text, form))
    return text if trained - kept else form
