"""Tokenizers of the library `tokenizers`: a `tokenizer.json`, as most open models have it, and the files beside it.

Byte-pair encoding over the bytes of the text (GPT-2, Llama 3, Qwen, SmolLM, OLMo) or over characters with a fallback to
bytes (Llama 2, Mistral), unigram models (T5, ALBERT, XLM-R) and WordPiece (BERT): `genesis.tokenizer.spelling` has the
bytes of each id.

- A *special* token of the vocabulary is a control symbol: it stands for no bytes, and no text is encoded to it. Any
  other added token (`<tool_call>` of Qwen, runs of spaces) is text and stands for its bytes.
- bos, eos and pad are those of `tokenizer_config.json` and `special_tokens_map.json`, in the order of transformers. A
  document begins with bos only where the tokenizer itself puts it before a text. Generated text stops at eos and at the
  `eos_token_id` of `generation_config.json`.
- Some tokenizers normalise texts first (NFC in Qwen2), add a space before each text (Llama 2), or drop a byte without
  a token (SmolLM2). Counts and decoded bytes refer to the text after these changes; `genesis.tokenizer.losses`
  names them.
- The unknown token of unigram models and WordPiece stands for text that is lost: it has no bytes, and is no control
  symbol, because texts are encoded to it.
- The vocabulary of a unigram model has the spellings of control symbols. They are renamed where a text has no symbols,
  by a space that no text has there.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import tokenizers
from blake3 import blake3
from numpy.typing import NDArray

from genesis.base.errors import UserError
from genesis.tokenizer.fast_form import CONFIG_NAME, FAST_NAME, SPECIAL_NAME
from genesis.tokenizer.limited import TextSearch
from genesis.tokenizer.limits import (
    can_cut,
    check_claims,
    check_stop_ids,
    has_unknown,
    iterate_steps,
    list_expressions,
    list_hard_texts,
)
from genesis.tokenizer.literal import LiteralControls, may_have_hidden
from genesis.tokenizer.spelling import NO_EXACT_BYTES, SPACE_MARK, find_model_type, find_spelling, find_unknown
from genesis.tokenizer.tokenizer import is_utf8
from genesis_callbacks.base.json_text import load_json

GENERATION_NAME: Final = "generation_config.json"
TEMPLATE_NAME: Final = "chat_template.jinja"
IDENTITY_NAMES: Final = (CONFIG_NAME, SPECIAL_NAME, TEMPLATE_NAME)
"""Optional files that are part of the tokenizer's identity."""
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBE: Final = "Probe: 1234  two spaces\t\r\n \ufb01 \u0958e\u0301 \U0001f469\u200d\U0001f467 it's \u4f60\u597d\0 end "
_MAX_COMPOSED: Final = 4
"""By how much NFC may shorten a text: a character of UTF-8 is at most three times as long when it is decomposed."""
_SPACES: Final = "a  \t\r\n\n b"
_NEVER_IN_TEXT: Final = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
"""Bytes that never occur in UTF-8."""
_BEYOND_ASCII: Final = "".join(
    map(chr, (*range(0x80, 0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x110000, 0x1000)))
)
"""A text that contains every byte above 0x7F that occurs in UTF-8."""


class HuggingFaceTokenizer:
    """A `genesis.tokenizer.tokenizer.Tokenizer` of a `tokenizer.json` and the files beside it.

    Args:
        files: The contents of the files by name; all files except `tokenizer.json` are optional.

    Raises:
        UserError: A file is invalid, or does not define the bytes of its ids.
    """

    kind: Final = "Hugging Face"
    packages: Final = ("tokenizers",)

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self.hash: str = identify(files)
        content = read_json(files, FAST_NAME)
        self._config = read_config(files)
        check_claims(content, self._config)
        self._tokenizer = self._build(has_controls_in_text=False)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        by_id = {token: piece for piece, token in vocabulary.items()}
        self.pieces: tuple[str, ...] = tuple(by_id.get(token, f"<unused {token}>") for token in range(self.vocab_size))
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token for token, one in added.items() if one.special}
        spelling = find_spelling(content)
        unknown = find_unknown(content)
        silent = special | (set(range(self.vocab_size)) - by_id.keys())
        self._bytes = [
            b"" if token in silent or piece == unknown else spelling(piece) for token, piece in enumerate(self.pieces)
        ]
        self._controls = frozenset(silent if unknown is None else silent - {vocabulary[unknown]})
        self.token_num_bytes: NDArray[np.int32] = np.array([len(one) for one in self._bytes], np.int32)
        self._is_partial = [not is_utf8(one) for one in self._bytes]
        symbols = [self.pieces[token] for token in sorted(special)]
        self._expressions = list_expressions(content)
        self.has_unknown_expressions: bool = has_unknown(self._expressions)
        self._is_unigram = find_model_type(content) == "Unigram"
        of_library = self._tokenizer.get_added_tokens_decoder().values()
        self._can_cut = can_cut(content, [token.content for token in of_library])
        self._texts = self._search(self._renamed if self._is_unigram else self._tokenizer)
        self._texts.check([_PROBE, _BEYOND_ASCII, *symbols, *list_hard_texts(self._expressions)])
        single = {one[0] for one in self._bytes if len(one) == 1}
        self._missing = sorted(set(range(256)) - single - _NEVER_IN_TEXT)
        decoders = {one.get("type") for one in iterate_steps(content.get("decoder"), "decoders")}
        self._has_metaspace = "Metaspace" in decoders
        is_marked = self.decode_bytes(self.encode("a")) == b" a" and self._spell_text("a") == "a"
        self._strips_space = is_marked or "WordPiece" in decoders
        self.altered_characters: str = SPACE_MARK if spelling(SPACE_MARK) == b" " else ""
        self.bos_id: int | None = self._find_bos()
        self.eos_id: int | None = self._find_eos()
        self.pad_id: int | None = self._find_named("pad_token")
        self.stop_ids: frozenset[int] = _read_stop_ids(files) | (frozenset() if self.eos_id is None else {self.eos_id})
        self.chat_template: str | None = _read_template(files, self._config)
        named = {key: _read_piece(self._config.get(key)) for key in _NAMED}
        self.named_tokens: Mapping[str, str] = {key: piece for key, piece in named.items() if piece is not None}
        is_plain = content.get("normalizer") is None and not self._missing
        self.is_lossless: bool = is_plain and self._round_trip(_PROBE) == _PROBE
        self._longest = self._find_longest(content, list(added.values()))
        self._check()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without bos and eos."""
        ids: list[int] = self._texts.encode(text).tolist()
        return ids

    def min_num_tokens(self, text: str) -> int:
        """Returns a number of ids that the text cannot go below: as if it had only the longest token.

        Bytes without a token do not count.
        """
        if self._longest is None:
            return 0
        return -(-len(text.encode().translate(None, bytes(self._missing))) // self._longest)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[NDArray[np.int32]]:
        """Returns the ids of each text, without bos and eos; the number of threads does not change them."""
        if num_threads == 1:  # the library starts one thread per processor
            return [self._texts.encode(text) for text in texts]
        return self._texts.encode_batch(texts)

    def encode_with_controls(self, text: str) -> list[int]:
        """Returns the ids of a text in which the spelling of a control symbol stands for that symbol."""
        ids: list[int] = self.encode_with_offsets(text)[0].tolist()
        return ids

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the ids of `encode_with_controls`, and in rows each one's start and end (exclusive) in characters."""
        if may_have_hidden(text):
            ids, offsets = self._texts_with_hidden.encode_with_offsets(self.literal.swap(text))
            return self._symbols[ids], offsets
        return self._texts_with_controls.encode_with_offsets(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`, without control symbols and with U+FFFD for bytes that are not valid UTF-8.

        The space that the tokenizer adds before a text is removed; a decoder `Metaspace` removes all of its token.
        """
        spelled = [piece for token in ids if (piece := self._bytes[token])]
        if spelled and self._strips_space:
            spelled[0] = spelled[0].replace(b" ", b"") if self._has_metaspace else spelled[0].removeprefix(b" ")
        return b"".join(spelled).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the UTF-8 bytes of `ids`, which may begin or end within a character."""
        return b"".join([self._bytes[token] for token in ids])

    def spell(self, ids: Iterable[int], *, has_controls: bool) -> str:
        """Returns the text of `ids` as transformers gives it."""
        return self._texts.decode(list(ids), has_controls=has_controls)

    def is_control(self, token: int) -> bool:
        """Whether the id stands for no text: a special token, or an id without a token."""
        return token in self._controls

    def is_byte(self, token: int) -> bool:
        """Whether the id spells bytes that do not form whole characters."""
        return self._is_partial[token]

    def huggingface_files(self, max_seq_len: int) -> Mapping[str, bytes]:
        """Returns the tokenizer's own files, with what transformers 5 spells otherwise as version 4 reads it, too."""
        return {**self.files, **_spell_for_version_4(self.files)}

    def describe(self) -> str:
        """Returns the content of `tokenizer.json` with the added tokens of all files, as the library writes it."""
        content: str = self._tokenizer.to_str()
        return content

    @cached_property
    def _texts_with_controls(self) -> TextSearch:
        return self._search(self._build(has_controls_in_text=True))

    @cached_property
    def literal(self) -> LiteralControls:
        """Returns what hides spellings of control symbols."""
        return LiteralControls(added.content for added in self._specials.values())

    @cached_property
    def _specials(self) -> Mapping[int, tokenizers.AddedToken]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token: one for token, one in added.items() if one.special and not one.single_word}

    @cached_property
    def _with_hidden(self) -> tokenizers.Tokenizer:
        """The tokenizer for which hidden spellings are the symbols, and plain ones text, split in the same places."""
        built = self._renamed if self._is_unigram else self._build(has_controls_in_text=False)
        built.add_tokens(
            [
                tokenizers.AddedToken(self.literal.swap(one.content), **{flag: getattr(one, flag) for flag in _FLAGS})
                for one in self._specials.values()
            ]
        )
        return built

    @cached_property
    def _texts_with_hidden(self) -> TextSearch:
        return self._search(self._with_hidden)

    @cached_property
    def _symbols(self) -> NDArray[np.int32]:
        """The id for each id of the tokenizer with hidden spellings."""
        by_spelling = self._with_hidden.get_vocab(with_added_tokens=True)
        ids = np.arange(max(by_spelling.values()) + 1, dtype=np.int32)
        for token, one in self._specials.items():
            ids[by_spelling[self.literal.swap(one.content)]] = token
        return ids

    @property
    def _renamed(self) -> tokenizers.Tokenizer:
        """The tokenizer with spellings of control symbols that no text has; their ids stay."""
        content = json.loads(self._tokenizer.to_str())
        special = {one["content"] for one in content["added_tokens"] if one["special"]}
        for one in content["added_tokens"]:
            one["content"] = f" {one['content']}" if one["special"] else one["content"]
        vocabulary = content["model"]["vocab"]
        content["model"]["vocab"] = [[f" {piece}" if piece in special else piece, score] for piece, score in vocabulary]
        renamed = tokenizers.Tokenizer.from_str(json.dumps(content))
        renamed.encode_special_tokens = True
        return renamed

    def _search(self, built: tokenizers.Tokenizer) -> TextSearch:
        return TextSearch(built, self._expressions, can_cut=self._can_cut)

    def _build(self, *, has_controls_in_text: bool) -> tokenizers.Tokenizer:
        built = _open(self.files, self._config)
        built.no_truncation()
        built.no_padding()
        built.encode_special_tokens = not has_controls_in_text
        return built

    def _find_eos(self) -> int | None:
        """Returns eos, or the token that separates texts if the tokenizer puts that behind a text, as BERT's does."""
        named = self._find_named("eos_token")
        between = self._find_named("sep_token")
        *_, last = self._texts.encode("a", is_framed=True).tolist()
        return between if named is None and last == between else named

    def _find_named(self, key: str) -> int | None:
        piece = _read_piece(self._config.get(key))
        token: int | None = None if piece is None else self._tokenizer.token_to_id(piece)
        return token

    def _find_bos(self) -> int | None:
        """Returns the id that `tokenizer.json` adds before a text. As in transformers, `add_bos_token` is ignored.

        Raises:
            UserError: The tokenizer adds more than one id before a text.
        """
        plain, framed = self.encode("a"), self._texts.encode("a", is_framed=True).tolist()
        start = next(start for start in range(len(framed)) if framed[start : start + len(plain)] == plain)
        if start > 1:
            raise UserError(f"it puts {start} ids before a text, but a document begins with at most one")
        return framed[0] if start else None

    def _find_longest(self, content: Mapping[str, Any], added: Sequence[tokenizers.AddedToken]) -> int | None:
        """Returns the most bytes of a text that an id can stand for, beside bytes without a token; None if unknown."""
        kinds = {one.get("type") for one in iterate_steps(content.get("normalizer"), "normalizers")}
        decoders = {one.get("type") for one in iterate_steps(content.get("decoder"), "decoders")}
        drops_spaces = self.decode_bytes(self.encode(_SPACES)).strip() != _SPACES.encode()
        if (
            "ByteLevel" not in decoders
            or kinds - {"NFC"}
            or drops_spaces
            or any(one.lstrip or one.rstrip for one in added)
        ):
            return None
        longest = max(1, *(len(one.content.encode()) for one in added), *map(len, self._bytes))
        return longest * (_MAX_COMPOSED if kinds else 1)

    def _round_trip(self, text: str) -> str:
        return self.decode(self.encode(text))

    def _spell_text(self, text: str) -> str:
        return self.spell(self.encode(text), has_controls=False)

    def _check(self) -> None:
        """Checks that ids spell what the library decodes, and that no text gives a control symbol.

        Raises:
            UserError: An id spells other text, or a text is encoded to a control symbol.
        """
        if self._round_trip(_PROBE) != self._spell_text(_PROBE):
            raise UserError(f"its decoder does not concatenate the bytes of its tokens; {NO_EXACT_BYTES}")
        unknown = {chr(byte) if byte < 0x80 else _BEYOND_ASCII for byte in self._missing}
        symbols = [self.pieces[token] for token in sorted(self._controls)]
        for text in (*symbols, *(f" {symbol}" for symbol in symbols if self._is_unigram), *unknown):
            if self._controls.intersection(self.encode(text)):
                raise UserError(f"the text {text[:40]!r} is encoded to a special token; {NO_EXACT_BYTES}")


def _spell_for_version_4(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns `tokenizer_config.json` without the class and the list that transformers 4 does not know, if it has them.

    Other programs still read by that version; version 5 reads both spellings.
    """
    config = read_json(files, CONFIG_NAME)
    changed = dict(config)
    if config.get("tokenizer_class") == "TokenizersBackend":
        changed["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        changed["additional_special_tokens"] = changed.pop("extra_special_tokens")
    return (
        {} if changed == config else {CONFIG_NAME: json.dumps(changed, indent=2, ensure_ascii=False).encode() + b"\n"}
    )


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Returns the content of one of a tokenizer's files; empty if there is no such file.

    Raises:
        UserError: The file does not hold a JSON object.
    """
    try:
        content = load_json(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{name} does not hold a JSON object")
    return content


def open_library(files: Mapping[str, bytes]) -> tokenizers.Tokenizer:
    """Returns the library's tokenizer of a `tokenizer.json`, with the tokens that the file beside it adds.

    Raises:
        UserError: The files cannot be read, or claim more than any tokenizer has.
    """
    config = read_config(files)
    check_claims(read_json(files, FAST_NAME), config)
    return _open(files, config)


def _open(files: Mapping[str, bytes], config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        built = tokenizers.Tokenizer.from_str(files[FAST_NAME].decode())
        built.add_tokens(list(iterate_missing_tokens(config, built)))
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"{FAST_NAME} cannot be read ({' '.join(str(error).split())})") from None
    return built


def read_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Returns `tokenizer_config.json`; transformers reads the other file only if this one lists no added tokens."""
    config = read_json(files, CONFIG_NAME)
    return config if "added_tokens_decoder" in config else {**config, **read_json(files, SPECIAL_NAME)}


def _read_piece(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def identify(files: Mapping[str, bytes]) -> str:
    """Returns the identity of a tokenizer: a hash of what its files say, not of how they are written.

    Spaces, line breaks and the order of keys do not matter, nor do keys that change no id, no text and no prompt of a
    chat, such as `model_max_length`. The library's version does not either.

    Raises:
        UserError: A file is no JSON object, or the template is not UTF-8.
    """
    content, config = read_json(files, FAST_NAME), read_config(files)
    try:
        template = _read_template(files, config)
    except UnicodeDecodeError:
        raise UserError(f"{TEMPLATE_NAME} is not UTF-8 text") from None
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    model = content.get("model")
    if isinstance(model, dict) and isinstance(model.get("merges"), list):  # older versions of the library wrote texts
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        content = {**content, "model": {**model, "merges": merges}}
    meaning = {
        # Genesis turns off both: they are left over from a use of the tokenizer.
        "tokenizer": {key: value for key, value in content.items() if key not in ("truncation", "padding")},
        "named": {key: config.get(key) for key in _NAMED},
        "added": config.get("added_tokens_decoder") or {},
        "extra": [*extra.values()] if isinstance(extra, dict) else extra,  # their order gives them their ids
        # As Jinja reads it.
        "template": None if template is None else template.replace("\r\n", "\n").removesuffix("\n"),
    }
    return blake3(json.dumps(meaning, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def describe_ids(files: Mapping[str, bytes]) -> str:
    """Returns what decides the ids of a text: normalisation, vocabulary, merges and special tokens, in one form.

    Two tokenizers with equal descriptions give each text the same ids. Files of different versions of the library,
    another template and options of transformers that change no id, such as `model_max_length`, do not change the
    description. The first and last id of a document are part of it, but not pad, which is in no document.

    Raises:
        UserError: A file is invalid.
    """
    tokenizer = HuggingFaceTokenizer(files)
    content = json.loads(tokenizer.describe())
    return json.dumps([content, tokenizer.bos_id, tokenizer.eos_id], sort_keys=True)


def iterate_missing_tokens(config: Mapping[str, Any], built: tokenizers.Tokenizer) -> Iterator[tokenizers.AddedToken]:
    """Yields the tokens that `tokenizer_config.json` adds to `tokenizer.json`, in the order of transformers."""
    held = {_describe(one) for one in built.get_added_tokens_decoder().values()}
    known = {one.content for one in built.get_added_tokens_decoder().values()}
    names = {piece for key in _NAMED if (piece := _read_piece(config.get(key))) is not None}
    listed: dict[str, dict[str, Any]] = config.get("added_tokens_decoder") or {}
    for _, fields in sorted(listed.items(), key=lambda item: int(item[0])):
        added = tokenizers.AddedToken(**{key: value for key, value in fields.items() if key != "__type"})
        if _describe(added) not in held:
            known.add(added.content)
            yield added if added.content not in names else tokenizers.AddedToken(**{**_fields(added), "special": True})
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    others = (*(config.get(key) for key in _NAMED), *(extra.values() if isinstance(extra, dict) else extra))
    for value in others:
        piece = _read_piece(value)
        if piece is not None and piece not in known:
            known.add(piece)
            flags = {key: value[key] for key in _FLAGS if key in value} if isinstance(value, dict) else {}
            yield tokenizers.AddedToken(piece, **{**flags, "special": True})


_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized")


def _fields(added: tokenizers.AddedToken) -> dict[str, Any]:
    return {name: getattr(added, name) for name in ("content", *_FLAGS, "special")}


def _describe(added: tokenizers.AddedToken) -> tuple[Any, ...]:
    return tuple(_fields(added).values())


def _read_stop_ids(files: Mapping[str, bytes]) -> frozenset[int]:
    named = read_json(files, GENERATION_NAME).get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    check_stop_ids(ids)
    return frozenset(token for token in ids if isinstance(token, int))


def _read_template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    if TEMPLATE_NAME in files:
        return files[TEMPLATE_NAME].decode()
    template = config.get("chat_template")
    if isinstance(template, list):  # a list of templates with names
        template = next((one.get("template") for one in template if one.get("name") == "default"), None)
    return template if isinstance(template, str) else None
