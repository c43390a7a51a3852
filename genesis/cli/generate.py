"""`genesis generate`."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from genesis.base.arguments import Parser, read_text
from genesis.base.errors import UserError
from genesis.cli.chat import run_chat
from genesis.cli.device import add_device_options, read_device
from genesis.cli.surroundings import own_output
from genesis.generate.batch import DEFAULT_NEW_TOKENS
from genesis.generate.grammar import compile_grammar, write_schema
from genesis.generate.ids import build_writer, parse_ids, write_ids
from genesis.generate.load import Loaded, load_decoder
from genesis.generate.sampling_options import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from genesis.tokenizer.tokenizer import Tokenizer, encode_prompt
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import MAX_TEXT_BYTES, read_file

_DESCRIPTION = """Continues prompts with the model of a checkpoint, and prints tokens as they are generated. Several
prompts are generated in one batch and printed one below the other. --prompt_ids continues token ids and prints ids,
also for models that were trained without a tokenizer. --chat talks to a model that has a chat template: each line of
standard input, or each --prompt, is a turn of one conversation.
Example: genesis generate runs/demo/run --prompt "class Stack:" --prompt "import os" --temperature 0.6"""


class Printer:
    """Prints prompts and their generated texts while tokens arrive.

    Several texts each get a heading, and are printed in order: a later text waits until the earlier ones have ended.
    An incomplete character waits for its remaining bytes. Without a tokenizer, tokens are printed as their ids.
    """

    def __init__(self, prompts: Sequence[str], tokenizer: Tokenizer | None, out: TextIO) -> None:
        self._prompts, self._out = prompts, out
        self._num_ids = None if tokenizer is None else tokenizer.vocab_size  # a model may have more ids, without a text
        self._decoders = [build_writer(tokenizer) for _ in prompts]
        self._waiting = ["" for _ in prompts]
        self._has_ended = [False for _ in prompts]
        self._shown = 0
        self._begin()

    def feed(self, prompt: int, token: int, *, is_last: bool) -> None:
        """Adds the next token of one prompt and prints all text that can be printed."""
        if self._num_ids is None or token < self._num_ids:
            self._waiting[prompt] += self._decoders[prompt].feed(token)
        if is_last:
            self._waiting[prompt] += self._decoders[prompt].flush()
            self._has_ended[prompt] = True
        while self._shown < len(self._prompts):
            self._out.write(self._waiting[self._shown])
            self._waiting[self._shown] = ""
            if not self._has_ended[self._shown]:
                break
            self._out.write("\n")
            self._shown += 1
            self._begin()
        self._out.flush()

    def _begin(self) -> None:
        if self._shown == len(self._prompts):
            return
        if len(self._prompts) > 1:
            self._out.write(f"--- prompt {self._shown + 1} of {len(self._prompts)}\n")
        self._out.write(self._prompts[self._shown])


def main(argv: list[str]) -> int:
    """Runs `genesis generate` and returns its exit status."""
    arguments = _build_parser().parse_args(argv)
    options = GenerateOptions(
        max_new_tokens=arguments.max_new_tokens,
        sampling=SamplingOptions(
            arguments.temperature,
            arguments.top_k,
            arguments.top_p,
            arguments.min_p,
            arguments.presence_penalty,
            arguments.frequency_penalty,
            arguments.repetition_penalty,
        ),
        seed=arguments.seed,
        has_cache=not arguments.no_cache,
    )
    device, dtype = read_device(arguments)
    if arguments.prompt and arguments.prompt_ids:
        raise UserError("--prompt and --prompt_ids exclude each other: give one of them")
    if not arguments.chat and (arguments.system is not None or arguments.chat_template is not None):
        raise UserError("--system and --chat_template belong to a chat: add --chat")
    if arguments.chat and arguments.prompt_ids:
        raise UserError("--chat takes text: give --prompt instead of --prompt_ids")
    schema = None if arguments.json_schema is None else _read_schema(arguments.json_schema)
    loaded = load_decoder(
        arguments.checkpoint, arguments.tokenizer, device=device, dtype=dtype, chat_template=arguments.chat_template
    )
    stop_ids = frozenset(read_token(text, loaded) for text in arguments.eos_id or ()) or loaded.stop_ids
    if schema is not None:
        vocab_size = loaded.decoder.config.vocab_size
        try:
            grammar = compile_grammar("start: " + write_schema(schema), loaded.text_tokenizer, vocab_size, stop_ids)
        except UserError as error:
            raise UserError(f"--json_schema {arguments.json_schema} {error}") from None
        options = replace(options, grammar=grammar)
    if arguments.chat:
        return run_chat(arguments, loaded, options, stop_ids)
    prompts, shown = _read_prompts(arguments, loaded)
    tokens = generate(loaded.decoder, prompts, options, stop_ids)
    printer = Printer(shown, None if arguments.prompt_ids else loaded.tokenizer, own_output())
    for token in tokens:
        printer.feed(token.prompt, token.id, is_last=token.is_last)
    return 0


def read_token(text: str, loaded: Loaded) -> int:
    """Returns the id of a token that is given by its number, or by the spelling of a special token.

    Raises:
        UserError: The model has no such token.
    """
    vocab_size = loaded.decoder.config.vocab_size
    if text.isdecimal() and int(text) < vocab_size:
        return int(text)
    ids = [] if loaded.tokenizer is None else loaded.tokenizer.encode_with_controls(text)
    if len(ids) != 1:
        raise UserError(f"--eos_id is {text!r}: give an id below {vocab_size}, or the spelling of one token")
    return ids[0]


def _read_schema(path: Path) -> dict[str, Any]:
    """Returns a JSON schema in a file.

    Raises:
        UserError: The file cannot be read, or is no JSON object.
    """
    try:
        schema = load_json(read_file(path, MAX_TEXT_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read --json_schema {path}: {error}; give a file with a JSON schema") from None
    if not isinstance(schema, dict):
        raise UserError(f"--json_schema {path} is no JSON object; give a file with a JSON schema")
    return schema


def _read_prompts(arguments: Namespace, loaded: Loaded) -> tuple[list[tuple[int, ...]], list[str]]:
    """Returns the prompts as ids, and as the texts to print before their continuations.

    Raises:
        UserError: An id is not in the model's vocabulary, or a text is given for a model without a tokenizer.
    """
    if arguments.prompt_ids:
        prompts = [parse_ids(text, loaded.decoder.config.vocab_size) for text in arguments.prompt_ids]
        return prompts, [write_ids(ids) for ids in prompts]
    if loaded.tokenizer is None:
        raise UserError(
            f"{loaded.checkpoint} was trained on tokens without a tokenizer; give --prompt_ids, or --tokenizer for text"
        )
    tokenizer, texts = loaded.tokenizer, arguments.prompt or [""]
    return [encode_prompt(tokenizer, text) for text in texts], texts


def _build_parser() -> Parser:
    parser = Parser(prog="genesis generate", description=_DESCRIPTION)
    add = parser.add_argument
    add(
        "checkpoint",
        type=Path,
        help="a run (its newest checkpoint), RUN/best, RUN/STEP, or the path of an export",
    )
    add(
        "--prompt",
        type=read_text,
        action="append",
        help="text to continue; repeatable; without a prompt the model starts a new text",
    )
    add("--prompt_ids", action="append", help="token ids to continue, as '5 17 300', instead of text; prints ids")
    add(
        "--eos_id",
        action="append",
        help="token that ends a text, as its id or its spelling; repeatable; default: the tokenizer's stop tokens and "
        "those that close the assistant's turns in the chat template, none without a tokenizer",
    )
    add("--chat", action="store_true", help="talk to the model by its chat template")
    add("--system", type=read_text, help="system message of the chat")
    add(
        "--chat_template",
        type=Path,
        help="file of a Jinja chat template; default: the one that the model has learned, or the tokenizer's own",
    )
    add("--max_new_tokens", type=int, help=f"new tokens per prompt; default at most {DEFAULT_NEW_TOKENS}")
    add("--temperature", type=float, default=1.0, help="divisor of the logits; 0 selects the most likely token")
    add("--top_k", type=int, help="sample only from the k most likely tokens")
    add("--top_p", type=float, default=1.0, help="sample only from the most likely tokens that reach this probability")
    add("--min_p", type=float, default=0.0, help="sample only tokens with this share of the largest probability")
    add("--presence_penalty", type=float, default=0.0, help="what the logit of a token loses if the new text has it")
    add("--frequency_penalty", type=float, default=0.0, help="what it loses each time that the new text has the token")
    add(
        "--repetition_penalty",
        type=float,
        default=1.0,
        help="divisor of the logit of a token that the prompt or the new text has",
    )
    add("--json_schema", type=Path, help="file of a JSON schema that each text follows; needs the extra `grammar`")
    add("--seed", type=int, default=0, help="sampling seed; a seed and prompt give the same text in any batch")
    add(
        "--no_cache",
        action="store_true",
        help="recompute the whole text for each token, without a cache; with `dynamic` and `longrope` positions the "
        "text may then be another one beyond the original context",
    )
    add("--tokenizer", type=Path, help="tokenizer file or directory; default: the checkpoint's own tokenizer")
    add_device_options(parser)
    return parser
