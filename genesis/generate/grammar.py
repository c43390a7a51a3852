"""Grammars that a generated text follows: JSON, JSON of a schema, a regular expression or any other grammar.

The library llguidance computes which tokens may come next. A grammar is a text in its form of Lark, so that a server
can pass it on before any tokenizer is known. Work and memory of each step have limits of the library. To compile a
stranger's grammar takes a process with limits: some need gigabytes. This module imports no torch, so that such a
process starts fast.
"""

import json
import re
from collections.abc import Hashable, Mapping, Sequence, Set
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from genesis.base.errors import UserError
from genesis.tokenizer.losses import moves_spaces
from genesis.tokenizer.tokenizer import Tokenizer

_PACKAGE: Final = "llguidance"
MAX_GRAMMAR_CHARS: Final = 2**16
_STEP_FUEL: Final = 100_000
"""Work of the lexer in a step, about 7 ms."""
_STEP_ITEMS: Final = 25_000
"""Work of the parser in a step, about 1 ms."""
_LEXER_STATES: Final = 50_000
"""States of the lexer in memory, each of 1 to 2 kB."""
_WHITESPACE: Final = r"[ \t\r\n]{0,20}"
"""Between parts of JSON: some models would write spaces without end."""
_CONTROL_MARK: Final = b"\xff"
"""What the library expects before the spelling of a control symbol, which no text contains."""
_MAX_PROBLEM_CHARS: Final = 200
_PLACE: Final = re.compile(r"^(at )?\d+\(\d+\): ")


def write_schema(schema: Mapping[str, Any]) -> str:
    """Returns a schema as a part of a grammar: JSON that the schema accepts.

    Example:
        >>> print("start:", write_schema({"type": "integer"})[:24])
        start: %json {"type": "integer"
    """
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}})


def write_pattern(pattern: str) -> str:
    r"""Returns a regular expression as a part of a grammar.

    Example:
        >>> print(write_pattern("a/b"))
        /a\/b/
    """
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)
    return "/" + escaped.replace("\n", r"\n") + "/"


def write_words(words: Sequence[str]) -> str:
    """Returns a part of a grammar: one of the words."""
    return "(" + " | ".join(json.dumps(word, ensure_ascii=False) for word in words) + ")"


class TokenGrammar:
    """A grammar, and how far one text has come in it.

    Args:
        matcher: The library's.
        vocab_size: The number of the model's tokens.

    Raises:
        UserError: The grammar is invalid or takes too much work.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._check()

    def copy(self) -> "TokenGrammar":
        """Returns the same grammar for another text, as far as this one has come."""
        return TokenGrammar(self._matcher.deep_copy(), self._vocab_size)

    def mask(self) -> NDArray[np.bool_]:
        """Returns which tokens may come next.

        Raises:
            UserError: No token may, or finding them takes too much work.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)

    def accept(self, token: int) -> bool:
        """Adds the next token, and returns whether the text is complete.

        Raises:
            UserError: The token takes too much work.
        """
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        problem = self._matcher.get_error()
        if problem:
            lines = problem.split("\n")
            named = (line for line in lines if line.startswith("error: "))  # under the expression that it is about
            line = _PLACE.sub("", next(named, lines[0])).removeprefix("failed to compile JSON schema: ")
            line = "no text follows it" if line.startswith("NoExtension") else line[:_MAX_PROBLEM_CHARS]
            raise UserError(f"cannot be followed: {line}; change or simplify it")


def compile_grammar(text: str, tokenizer: Tokenizer, vocab_size: int, stop_ids: Set[int]) -> TokenGrammar:
    """Returns a grammar at the beginning of a text.

    Args:
        text: The grammar.
        tokenizer: The tokenizer of the model.
        vocab_size: The number of the model's tokens, which may be more than the tokenizer's.
        stop_ids: The tokens that may end a text.

    Raises:
        UserError: The grammar is invalid or takes too much work, the tokenizer puts a space before each word, or
            llguidance is not installed.
    """
    if moves_spaces(tokenizer):
        raise UserError("cannot be followed by this model, whose tokenizer puts a space before each word: leave it out")
    library = _load_library()
    limits = library.LLParserLimits(
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=_LEXER_STATES,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    tokens = _build_tokens(library, cast("Hashable", tokenizer), vocab_size, frozenset(stop_ids))
    grammar = TokenGrammar(library.LLMatcher(tokens, text, log_level=0, limits=limits), vocab_size)
    grammar.copy().mask()  # a grammar that no text follows is refused now
    return grammar


@lru_cache(maxsize=4)
def _build_tokens(library: Any, tokenizer: Any, vocab_size: int, stop_ids: frozenset[int]) -> Any:
    """Returns the library's form of a vocabulary, which takes a tenth of a second."""
    spellings = [
        tokenizer.decode_bytes([token]) if tokenizer.token_num_bytes[token] else _CONTROL_MARK + piece.encode()
        for token, piece in enumerate(tokenizer.pieces)
    ]
    spellings += [b""] * (vocab_size - len(spellings))
    vocabulary = _Vocabulary([*spellings, _CONTROL_MARK + b"end"], min(stop_ids, default=vocab_size))
    ends = sorted(stop_ids) or [vocab_size]  # the library asks for one: of a model without, a token that it lacks
    vocabulary.built = library.LLTokenizer(library.TokenizerWrapper(vocabulary), eos_token=ends)
    return vocabulary.built


class _Vocabulary:
    """What the library asks of a tokenizer.

    It encodes what the grammar determines. The longest tokens from the left do for that: no text of a client is
    searched by the tokenizer's expressions.
    """

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int) -> None:
        self.tokens, self.eos_token_id = tokens, eos_token_id
        self.special_token_ids = [id_ for id_, token in enumerate(tokens) if token.startswith(_CONTROL_MARK)]
        self.built: Any = None

    def __call__(self, text: bytes) -> list[int]:
        return [] if self.built is None else list(self.built.greedy_tokenize(text.decode()))


def _load_library() -> Any:
    try:
        version(_PACKAGE)
    except PackageNotFoundError:
        raise UserError(
            f"needs {_PACKAGE}, which is not installed: pip install 'genesis-lm[grammar]', or leave it out"
        ) from None
    return import_module(_PACKAGE)
