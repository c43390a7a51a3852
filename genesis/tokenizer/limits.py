"""What the files of a tokenizer may claim, checked before anything has the size of a claim.

The library `tokenizers` and our own tables follow the numbers in the files: an id makes a vocabulary of that size, and
a step that replaces may double each text. The limits are far above what tokenizers need.
"""

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from genesis.base.errors import UserError, numbered

_MAX_UNUSED_IDS: Final = 65_536
"""Ids without a token that a vocabulary may have: some models leave gaps."""
_MAX_ADDED: Final = 100_000
_MAX_PIECE_CHARS: Final = 10_000
_MAX_UNIGRAM_CHARS: Final = 256
"""The longest piece of a unigram model, which is searched from each character of a text."""
_MAX_WORD_CHARS: Final = 256
"""The longest word that WordPiece splits, in a time that grows with the square of it; longer ones are unknown."""
_MAX_STEPS: Final = 64
_MAX_STEP_CHARS: Final = 1_000
_MAX_GROWTH: Final = 256
"""How many times longer steps may make a text, apart from the forms of Unicode, which grow once."""
_MAX_TEMPLATE_IDS: Final = 64
_MAX_STOP_IDS: Final = 1_000
_MAX_DIGITS: Final = 20
_STEPS: Final = (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("decoder", "decoders"))
_RUN_CHARS: Final = 1_000
_MAX_CHARSMAP_BYTES: Final = 64
"""The longest text, in bytes, for one character in the normaliser of SentencePiece; Unicode's longest has 33."""
_SPANNING: Final = re.compile(r"^\s|[A-Za-z](?:[ \n]|$)")
"""An added token that may lie across the place of a cut, or that is found only behind the end of a word."""
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_PATHS: Final = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
LINEAR: Final = (
    " {2,}",  # of unigram models, as those of T5 and XLM-R
    r"\A | \z",  # of `genesis.tokenizer.unigram_form`
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",  # GPT-4, Llama 3, OLMo 2, SmolLM3
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",  # Qwen 2 to 3
    rf"{_LOWER}{_SUFFIX}?|{_UPPER}{_SUFFIX}?|\p{{N}}{{1,3}}|{_PATHS}",  # GPT-4o, gpt-oss, Llama 4
    rf"{_LOWER}|{_UPPER}|\p{{N}}|{_PATHS}",  # Mistral NeMo and later
)
"""Expressions of well-known tokenizers that take linear time for any text.

Each alternative looks at a run of characters of a kind at most a few times, and if it fails, a later one takes the
whole run. No test of an unknown expression could prove that.
"""
_WORDS: Final = frozenset(LINEAR[2:])
"""Those that divide any text, and always between a letter of ASCII and a space or a line feed."""


def check_claims(content: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Checks what a `tokenizer.json` and a `tokenizer_config.json` claim.

    Raises:
        UserError: An id is far beyond the number of tokens, a token is too long, there are too many added tokens, or
            the steps make texts many times longer.
    """
    model = content.get("model")
    model = model if isinstance(model, dict) else {}
    longest_word = model.get("max_input_chars_per_word", 0)
    if not isinstance(longest_word, int) or longest_word > _MAX_WORD_CHARS:
        raise UserError(
            f"its max_input_chars_per_word is {quote(longest_word)}: at most {_MAX_WORD_CHARS} characters are read"
        )
    longest_piece = _MAX_UNIGRAM_CHARS if isinstance(model.get("vocab"), list) else _MAX_PIECE_CHARS
    tokens = list(_list_tokens(content, config))
    limit = len(tokens) + _MAX_UNUSED_IDS
    for piece, token in tokens:
        if token is not None and not (type(token) is int and 0 <= token < limit):
            raise UserError(
                f"the token {quote(piece)} has the id {quote(token)}: with {numbered(len(tokens), 'tokens')}, an "
                f"id is a number from 0 to {limit - 1:,}"
            )
        if isinstance(piece, str) and len(piece) > longest_piece:
            raise UserError(
                f"the token {quote(piece)} has {numbered(len(piece), 'characters')}: at most {longest_piece:,} are read"
            )
    for name, inner in _STEPS:
        _check_growth(name, list(iterate_steps(content.get(name), inner)))
    template = content.get("post_processor")
    parts = template.get("special_tokens") if isinstance(template, dict) else None
    for part in parts.values() if isinstance(parts, dict) else ():
        ids = part.get("ids") if isinstance(part, dict) else None
        if isinstance(ids, list) and len(ids) > _MAX_TEMPLATE_IDS:
            raise UserError(
                f"its post_processor adds {numbered(len(ids), 'ids')} to a text: at most {_MAX_TEMPLATE_IDS} are read"
            )


def check_stop_ids(ids: list[Any]) -> None:
    """Checks the number of ids that end a text.

    Raises:
        UserError: There are more than any model has.
    """
    if len(ids) > _MAX_STOP_IDS:
        raise UserError(
            f"generation_config.json lists {numbered(len(ids), 'ids')} in eos_token_id: at most {_MAX_STOP_IDS:,} are "
            "read"
        )


def check_charsmap(charsmap: bytes) -> int:
    """Returns the bytes of the longest text for a character in the normaliser of a SentencePiece model.

    The normaliser is a trie after its size, then texts that end with a zero byte.

    Raises:
        UserError: The trie has another size than it claims, or one character stands for a long text.
    """
    num_bytes = int.from_bytes(charsmap[:4], "little")
    if charsmap and num_bytes > len(charsmap) - 4:
        raise UserError(f"its normaliser claims {num_bytes:,} bytes and has {max(0, len(charsmap) - 4):,}")
    texts = charsmap[4 + num_bytes :]
    longest = max(map(len, texts.split(b"\0")), default=0)
    if longest > _MAX_CHARSMAP_BYTES:
        raise UserError(
            f"its normaliser makes {longest:,} bytes of a character: at most {_MAX_CHARSMAP_BYTES} are read"
        )
    return longest


def list_expressions(content: Mapping[str, Any]) -> list[str]:
    """Returns the regular expressions in a `tokenizer.json`, apart from those that the library itself has."""
    steps = [step for name, inner in _STEPS for step in iterate_steps(content.get(name), inner)]
    patterns = [step["pattern"].get("Regex") for step in steps if isinstance(step.get("pattern"), dict)]
    return [str(pattern) for pattern in patterns if pattern]


def has_unknown(expressions: Sequence[str]) -> bool:
    """Returns whether some of the expressions are not known to take linear time."""
    return not {*expressions} <= {*LINEAR}


def can_cut(content: Mapping[str, Any], added: Iterable[str]) -> bool:
    """Returns whether a text's ids are those of its parts, cut between a letter of ASCII and a space or a line feed.

    They are for a BPE within the words of an expression that is known to end a word there, of GPT-2's among them, which
    ByteLevel has. Whatever else may look across such a place, or at the ends of a text, is not read: then False.

    Args:
        content: The content of a `tokenizer.json`, whose claims have been checked.
        added: The texts of the added tokens.
    """
    normalizers = [step.get("type") for step in iterate_steps(content.get("normalizer"), "normalizers")]
    *others, last = [*iterate_steps(content.get("pre_tokenizer"), "pretokenizers")] or [{}]
    splits = [step for step in others if step.get("type") != "Digits"]
    model = content.get("model")
    return (
        isinstance(model, dict)
        and model.get("type", "BPE") == "BPE"
        and not {*normalizers} - {"NFC"}
        and last.get("type") == "ByteLevel"
        and last.get("add_prefix_space") is False
        and (not splits if last.get("use_regex", True) else len(splits) == 1 and _divides(splits[0]))
        and all(map(_keeps_places, iterate_steps(content.get("post_processor"), "processors")))
        and not any(_SPANNING.search(piece) for piece in added)
    )


def _divides(step: Mapping[str, Any]) -> bool:
    """Whether a step divides texts into words, each of which is encoded by itself."""
    pattern, behavior = step.get("pattern"), step.get("behavior")
    is_known = step.get("type") == "Split" and isinstance(pattern, dict) and pattern.get("Regex") in _WORDS
    return is_known and (behavior == "Isolated" or (behavior == "Removed" and step.get("invert") is True))


def _keeps_places(step: Mapping[str, Any]) -> bool:
    """Whether a post-processor leaves the ids and the places of a text's tokens as they are."""
    if step.get("type") == "ByteLevel":
        return step.get("trim_offsets") is False or step.get("add_prefix_space") is False
    single = step.get("single")
    texts = [one for one in single if isinstance(one, dict) and "Sequence" in one] if isinstance(single, list) else []
    return step.get("type") == "TemplateProcessing" and len(texts) == 1


def list_hard_texts(expressions: Sequence[str]) -> list[str]:
    """Returns texts that are hard for many expressions without end: runs of each character that they name.

    No test of an expression finds every slow one, so that each text has a limit (`genesis.tokenizer.limited`).
    """
    characters = sorted({*" \na1.", *"".join(expressions)} & {*map(chr, range(128))})
    return [character * _RUN_CHARS for character in characters]


def iterate_steps(content: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a normaliser, a pre-tokenizer or a decoder in their order; `key` has those of a sequence."""
    waiting = [content]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and one.get("type") == "Sequence":
            steps = one.get(key)
            waiting += reversed(steps) if isinstance(steps, list) else ()
        elif isinstance(one, dict):
            yield one


def _list_tokens(content: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields the piece and the id of each token; None for an id that the library chooses.

    Raises:
        UserError: There are too many added tokens.
    """
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added, listed = content.get("added_tokens"), config.get("added_tokens_decoder")
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    num_added = sum(len(one) for one in (added, listed, extra) if isinstance(one, list | dict))
    if num_added > _MAX_ADDED:
        raise UserError(f"it has {numbered(num_added, 'added tokens')}: at most {_MAX_ADDED:,} are read")
    yield from vocabulary.items() if isinstance(vocabulary, dict) else ()
    for one in vocabulary if isinstance(vocabulary, list) else ():
        yield (one[0] if isinstance(one, list) and one else one), None
    for one in added if isinstance(added, list) else ():
        yield (one.get("content"), one.get("id")) if isinstance(one, dict) else (one, None)
    for key, one in listed.items() if isinstance(listed, dict) else ():
        piece = one.get("content") if isinstance(one, dict) else one
        yield piece, int(key) if key.isdecimal() and len(key) < _MAX_DIGITS else key
    for one in extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ():
        yield one.get("content") if isinstance(one, dict) else one, None


def _check_growth(name: str, steps: list[Mapping[str, Any]]) -> None:
    if len(steps) > _MAX_STEPS:
        raise UserError(f"its {name} has {numbered(len(steps), 'steps')}: at most {_MAX_STEPS} are read")
    growth = 1.0
    for step in steps:
        pattern = step.get("pattern")
        searched = str(next(iter(pattern.values()), "")) if isinstance(pattern, dict) else ""
        written = str(step.get("content") or step.get("prepend") or "")
        longest = max(len(searched), len(written))
        if longest > _MAX_STEP_CHARS:
            raise UserError(
                f"its {name} has a text of {numbered(longest, 'characters')}: at most {_MAX_STEP_CHARS:,} are read"
            )
        if step.get("type") == "Precompiled":
            growth *= max(1, check_charsmap(_read_base64(step.get("precompiled_charsmap"))))
        elif step.get("type") == "ByteLevel":
            growth *= 2  # a character for each byte, of which the next step would make two bytes
        elif step.get("type") == "Replace":
            # A regular expression may match the empty text before each character.
            is_plain = isinstance(pattern, dict) and bool(pattern.get("String"))
            growth *= max(1.0, len(written) / len(searched)) if is_plain else 1 + len(written)
    if growth > _MAX_GROWTH:
        raise UserError(
            f"its {name} makes a text up to {growth:,.0f} times longer: at most {_MAX_GROWTH:,} times is read"
        )


def _read_base64(value: Any) -> bytes:
    try:
        return base64.b64decode(value or "")
    except (ValueError, TypeError):
        raise UserError(f"its precompiled_charsmap is {quote(value)}, which is not base64") from None


def quote(value: Any) -> str:
    """Returns a value as a message shows it."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of many digits"
    return text if len(text) <= 60 else f"{text[:60]}..."
