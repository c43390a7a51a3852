"""The tokenizer and the chat template of a GGUF file.

llama.cpp knows two kinds of byte-pair encoding. Over characters with a fallback to bytes, it joins the pair with the
best score of what it becomes; the scores follow from the order of the merges. Over bytes, it has the merges, and splits
a text by an expression that a file can only name.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from gguf import GGUFWriter, TokenType

from genesis.base.errors import UserError
from genesis.tokenizer.fast_form import FAST_NAME
from genesis.tokenizer.huggingface import read_json
from genesis.tokenizer.limits import iterate_steps
from genesis.tokenizer.tokenizer import Tokenizer

_SPACE_MARK: Final = "\u2581"
_INSTEAD: Final = "leave out --gguf, which gives files for transformers"

_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES: Final = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{one}{_LOWER}{other}" for one, other in (("*", "+"), ("+", "*")))
_PATHS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
GPT2: Final = "gpt-2"
"""Stands for the expression of GPT-2, which tokenizers of the library have built in."""
PRE_TOKENIZERS: Final[Mapping[tuple[tuple[str, ...], bool], str]] = {
    ((GPT2,), False): GPT2,
    ((r"\p{N}", GPT2), False): "smollm",
    ((rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}",), True): "llama-bpe",
    ((rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}",), False): "dbrx",
    ((rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_LINES}",), False): "qwen2",
    (
        (rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}",),
        False,
    ): "qwen35",
    ((rf"{_CASES[0]}|{_CASES[1]}|\p{{N}}|{_PATHS}|{_LINES}",), True): "tekken",
    (
        (rf"{_CASES[0]}{_ENDINGS}?|{_CASES[1]}{_ENDINGS}?|\p{{N}}{{1,3}}|{_PATHS}|{_LINES}",),
        False,
    ): "gpt-4o",
}
"""The expressions that split a text one after the other, and whether a whole piece of the vocabulary is taken without
merges, to llama.cpp's name of them."""


@dataclass(frozen=True)
class GgufTokenizer:
    """The keys of a file about a tokenizer.

    Args:
        model: llama.cpp's name of the kind.
        pre: Its name of the expressions that split a text.
        pieces: The spelling of each id.
        kinds: The kind of each id.
        scores: The score of each id, of the kind without merges.
        merges: The merges in their order, of the kind with them.
        has_space_prefix: Whether a space is added before a text.
        ids: Named tokens: the key's name to the id.
        has_bos: Whether a text begins with bos.
        template: The chat template.
        num_other_stops: Number of the model's stops that the file cannot name.
    """

    model: str
    pre: str
    pieces: Sequence[str]
    kinds: Sequence[TokenType]
    scores: Sequence[float] | None
    merges: Sequence[str] | None
    has_space_prefix: bool
    ids: Mapping[str, int]
    has_bos: bool
    template: str | None
    num_other_stops: int

    def add_to(self, writer: GGUFWriter) -> None:
        """Adds the keys to a file."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(list(self.pieces))
        writer.add_token_types([int(kind) for kind in self.kinds])
        if self.scores is not None:
            writer.add_token_scores(list(self.scores))
        if self.merges is not None:
            writer.add_token_merges(list(self.merges))
        writer.add_add_space_prefix(self.has_space_prefix)
        writer.add_add_bos_token(self.has_bos)
        writer.add_add_eos_token(False)
        for name, token in self.ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        if self.template is not None:
            writer.add_chat_template(self.template)


def describe_tokenizer(
    tokenizer: Tokenizer, vocab_size: int, max_seq_len: int, template: str | None, stops: frozenset[int]
) -> GgufTokenizer:
    """Returns the keys of a file about a tokenizer.

    Args:
        tokenizer: The tokenizer.
        vocab_size: Number of ids of the model, at least the tokenizer's.
        max_seq_len: The model's context.
        template: The text of the chat template, if any.
        stops: The ids that end a text.

    Raises:
        UserError: llama.cpp has no tokenizer like this one.
    """
    files = tokenizer.huggingface_files(max_seq_len)
    if files is None:
        raise UserError(f"llama.cpp has no tokenizers of the kind {tokenizer.kind}: {_INSTEAD}")
    content = read_json(files, FAST_NAME)
    model = content.get("model") or {}
    merges = [one.split(" ", 1) if isinstance(one, str) else one for one in model.get("merges") or []]
    is_of_bytes = any(one.get("type") == "ByteLevel" for one in iterate_steps(content.get("decoder"), "decoders"))
    if not merges:
        raise UserError(
            f"a GGUF here has byte-pair encoding alone, and this tokenizer is of type {model.get('type')}: {_INSTEAD}"
        )
    unknown = model.get("unk_token")
    merged = (model.get("vocab") or {}).keys() - {one["content"] for one in content.get("added_tokens") or []}
    pieces, kinds = [], []
    for token in range(vocab_size):
        piece, kind = _describe_piece(tokenizer, token, unknown, merged)
        if not is_of_bytes and kind == TokenType.NORMAL:
            piece = piece.replace(" ", _SPACE_MARK)
        if not is_of_bytes and kind == TokenType.USER_DEFINED:
            piece = piece.replace(_SPACE_MARK, " ")
        pieces.append(piece)
        kinds.append(kind)
    named = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "padding": tokenizer.pad_id}
    if named["bos"] is None and "bos_token" in tokenizer.named_tokens:
        named["bos"] = pieces.index(tokenizer.named_tokens["bos_token"])  # for the template
    if unknown in pieces:
        named["unknown"] = pieces.index(unknown)
    others = sorted(stops - {tokenizer.eos_id})
    named |= dict(zip(("eot", "eom"), others, strict=False))
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault((left + right).replace(" ", _SPACE_MARK), rank)
    return GgufTokenizer(
        model="gpt2" if is_of_bytes else "llama",
        pre=_find_pre_tokenizer(content) if is_of_bytes else "default",
        pieces=pieces,
        kinds=kinds,
        scores=None if is_of_bytes else [-float(ranks.get(piece, len(merges))) for piece in pieces],
        merges=[f"{left} {right}" for left, right in merges] if is_of_bytes else None,
        has_space_prefix=tokenizer.decode_bytes(tokenizer.encode("a")).startswith(b" "),
        ids={name: token for name, token in named.items() if token is not None},
        has_bos=tokenizer.bos_id is not None,
        template=template,
        num_other_stops=max(0, len(others) - 2),
    )


def _describe_piece(tokenizer: Tokenizer, token: int, unknown: str | None, merged: Set[str]) -> tuple[str, TokenType]:
    if token >= tokenizer.vocab_size:
        return f"[PAD{token}]", TokenType.UNUSED
    piece = tokenizer.pieces[token]
    if piece == unknown:
        return piece, TokenType.UNKNOWN
    if piece == f"<unused {token}>":
        return piece, TokenType.UNUSED
    if tokenizer.is_control(token):
        return piece, TokenType.CONTROL
    if piece not in merged and piece.replace(_SPACE_MARK, " ") not in merged:  # an added token that is text
        return piece, TokenType.USER_DEFINED
    is_byte = len(piece) == len("<0x41>") and piece.startswith("<0x") and tokenizer.token_num_bytes[token] == 1
    return piece, TokenType.BYTE if is_byte else TokenType.NORMAL


def _find_pre_tokenizer(content: Mapping[str, Any]) -> str:
    """Returns llama.cpp's name of how a tokenizer over bytes splits a text.

    Raises:
        UserError: It has no name for it.
    """
    expressions = tuple(_list_expressions(content))
    is_whole = bool((content.get("model") or {}).get("ignore_merges"))
    name = PRE_TOKENIZERS.get((expressions, is_whole))
    if name is None:
        shown = ", ".join(map(repr, expressions)) or None
        raise UserError(
            f"llama.cpp has no name for how this tokenizer splits a text, by {shown}"
            f"{' and whole pieces' if is_whole else ''}: {_INSTEAD}"
        )
    return name


def _list_expressions(content: Mapping[str, Any]) -> list[str]:
    found = []
    for step in iterate_steps(content.get("pre_tokenizer"), "pretokenizers"):
        kind = step.get("type")
        if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            found.append(str((step.get("pattern") or {}).get("Regex")))
        elif kind == "Digits" and step.get("individual_digits"):
            found.append(r"\p{N}")
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            found += [GPT2] if step.get("use_regex", True) else []
        else:
            found.append(f"{kind} {step}")
    return found
