"""Opens tokenizers of any kind; the files in a directory determine the kind.

`FORMATS` lists the kinds that are part of genesis. An installed distribution can add a kind by an entry point of the
group `genesis.tokenizers` whose value is a `TokenizerFormat`; every process of a run finds it there. The formats of
genesis are tried first, then those of entry points in the order of their names.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final

from genesis.base.errors import UserError, blaming
from genesis.tokenizer.addition import TokenAddition, extend_huggingface, extend_sentencepiece
from genesis.tokenizer.fast_form import FAST_NAME
from genesis.tokenizer.files import TRAIN_REMEDY, hash_files, read_file, read_files
from genesis.tokenizer.huggingface import GENERATION_NAME, IDENTITY_NAMES, HuggingFaceTokenizer, describe_ids, identify
from genesis.tokenizer.panics import without_panics_printed
from genesis.tokenizer.sentencepiece import SentencePieceTokenizer, puts_space_before_text
from genesis.tokenizer.tokenizer import Tokenizer
from genesis.tokenizer.train import MODEL_NAME
from genesis.tokenizer.unigram_form import convert_unigram, is_unigram

ENTRY_POINT_GROUP: Final = "genesis.tokenizers"


@dataclass(frozen=True)
class TokenizerFormat:
    """A kind of tokenizer.

    Args:
        kind: The kind's name for people.
        file_names: Its files; a directory that has all of them holds such a tokenizer.
        build: Builds the tokenizer from the files' contents by name. Raises UserError if the contents are invalid.
        identity_names: Optional files that are part of the tokenizer's identity.
        other_names: Optional files that are not part of its identity.
        extend: Returns the files with more special tokens. Raises UserError if the tokenizer cannot have them. None if
            tokens cannot be added to this kind.
        describe_ids: Returns what decides the ids of a text, so that files which differ otherwise have equal
            descriptions. None if every byte of the files may decide.
        identify: Returns the identity of the tokenizer from its files without `other_names`, as `Tokenizer.hash` is.
    """

    kind: str
    file_names: tuple[str, ...]
    build: Callable[[Mapping[str, bytes]], Tokenizer]
    identity_names: tuple[str, ...] = ()
    other_names: tuple[str, ...] = ()
    extend: Callable[[Mapping[str, bytes], TokenAddition], Mapping[str, bytes]] | None = None
    describe_ids: Callable[[Mapping[str, bytes]], str] | None = None
    identify: Callable[[Mapping[str, bytes]], str] = hash_files

    def find_names(self, directory: Path) -> tuple[str, ...]:
        """Returns the names of the format's files that a directory contains."""
        optional = (*self.identity_names, *self.other_names)
        return (*self.file_names, *(name for name in optional if (directory / name).exists()))


SENTENCEPIECE: Final = TokenizerFormat(
    "SentencePiece",
    (MODEL_NAME,),
    lambda files: _build_sentencepiece(files[MODEL_NAME]),
    extend=extend_sentencepiece,
)
HUGGINGFACE: Final = TokenizerFormat(
    "Hugging Face",
    (FAST_NAME,),
    HuggingFaceTokenizer,
    IDENTITY_NAMES,
    (GENERATION_NAME,),
    extend_huggingface,
    describe_ids,
    identify,
)
FORMATS: Final = (SENTENCEPIECE, HUGGINGFACE)


def _build_sentencepiece(model: bytes) -> Tokenizer:
    """Returns the tokenizer of a model's file; a unigram model that changes texts has the ids of its fast form."""
    try:
        return SentencePieceTokenizer(model)
    except UserError:
        if not is_unigram(model):
            raise
    return HuggingFaceTokenizer(convert_unigram(model))


def open_tokenizer(path: Path | str) -> Tokenizer:
    """Returns the tokenizer in the directory `path`, or the one that the file `path` belongs to.

    A file with a name that belongs to no format is read as a SentencePiece model.

    Raises:
        UserError: There is no tokenizer, or its files cannot be read or have a format other than their names suggest.
    """
    path = Path(path)
    if path.is_dir():
        found = find_format(path)
        if found is None:
            looked_for = "; ".join(
                f"it has no {' and '.join(one.file_names)} ({one.kind})" for one in _iterate_formats()
            )
            raise UserError(f"{path} has no tokenizer: {looked_for}; {TRAIN_REMEDY}")
        return _build(found, read_files(path, found.find_names(path)), path)
    owner = next((one for one in _iterate_formats() if path.name in one.file_names), None)
    if owner is None:
        return _build(SENTENCEPIECE, {MODEL_NAME: read_file(path)}, path)
    return _build(owner, read_files(path.parent, owner.find_names(path.parent)), path.parent)


def build_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """Returns the tokenizer of the files that `Tokenizer.files` gave, perhaps in another process.

    Raises:
        UserError: No format has files of these names.
    """
    return _find_owner(files).build(files)


def extend_tokenizer(tokenizer: Tokenizer, addition: TokenAddition) -> Tokenizer:
    """Returns the tokenizer with more special tokens, after checking that all other tokens stay as they are.

    Raises:
        UserError: The tokenizer cannot have the tokens.
    """
    owner = _find_owner(tokenizer.files)
    if owner.extend is None:
        raise UserError(f"tokens cannot be added to a tokenizer of the kind {tokenizer.kind}: create it with them")
    extended = owner.build(owner.extend(tokenizer.files, addition))
    wanted = (*tokenizer.pieces, *addition.tokens)
    if tuple(extended.pieces) != wanted or not all(map(extended.is_control, range(tokenizer.vocab_size, len(wanted)))):
        raise UserError("tokens cannot be added to this tokenizer: its library gives them other ids than the next ones")
    return extended


def has_same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers give each text the same ids, although their files may differ in what changes no id."""
    if one.hash == other.hash:
        return True
    owner = _find_owner(one.files)
    if owner is not _find_owner(other.files) or owner.describe_ids is None:
        return False
    return owner.describe_ids(one.files) == owner.describe_ids(other.files)


def _find_owner(files: Mapping[str, bytes]) -> TokenizerFormat:
    for one in _iterate_formats():
        if set(one.file_names) <= files.keys() <= {*one.file_names, *one.identity_names, *one.other_names}:
            return one
    raise UserError(f"unknown kind of tokenizer, with the files {', '.join(files)}; install the package that adds it")


def find_format(directory: Path) -> TokenizerFormat | None:
    """Returns the format of the tokenizer in a directory; None if the directory has no tokenizer.

    If a directory has both a SentencePiece model and a `tokenizer.json`, the former is used, because genesis writes
    both. If the SentencePiece model adds a space before each text, another project wrote the directory, and the
    `tokenizer.json` is used, as in transformers.
    """
    found = [one for one in _iterate_formats() if all((directory / name).exists() for name in one.file_names)]
    is_of_others = {SENTENCEPIECE, HUGGINGFACE} <= {*found} and puts_space_before_text(
        read_file(directory / MODEL_NAME)
    )
    return HUGGINGFACE if is_of_others else next(iter(found), None)


def hash_contents(tokenizer: Tokenizer) -> str:
    """Returns a hash of the bytes of a tokenizer's files, which were its identity in earlier versions."""
    owner = _find_owner(tokenizer.files)
    return hash_files({name: content for name, content in tokenizer.files.items() if name not in owner.other_names})


def has_hash(tokenizer: Tokenizer, recorded: str) -> bool:
    """Whether a recorded hash is that of a tokenizer: its identity, or what was its identity in earlier versions."""
    return recorded in (tokenizer.hash, hash_contents(tokenizer))


def has_tokenizer(directory: Path, recorded: str) -> bool:
    """Whether a directory has the tokenizer of a recorded hash, as `has_hash` decides; does not open the tokenizer.

    Raises:
        UserError: The tokenizer's files cannot be read.
    """
    found = find_format(directory)
    if found is None:
        return False
    files = read_files(directory, [name for name in found.find_names(directory) if name not in found.other_names])
    return recorded == hash_files(files) or recorded == found.identify(files)


def list_file_names() -> list[str]:
    """Returns the file names of all formats."""
    return [name for one in _iterate_formats() for name in (*one.file_names, *one.identity_names, *one.other_names)]


def _iterate_formats() -> Iterator[TokenizerFormat]:
    yield from FORMATS
    for point in _find_entry_points(tuple(sys.path)):
        found = point.load()
        if not isinstance(found, TokenizerFormat):
            raise UserError(
                f"the entry point {point.name} = {point.value} of {ENTRY_POINT_GROUP} is not a TokenizerFormat; "
                "fix or remove the package that defines it"
            )
        yield found


@cache
def _find_entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Returns the entry points of other packages' formats on `sys.path`. It reads a file of each installed package."""
    return tuple(sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name))


def _build(found: TokenizerFormat, files: Mapping[str, bytes], path: Path) -> Tokenizer:
    place = path / found.file_names[0] if path.is_dir() else path
    try:
        with without_panics_printed(), blaming("it", f"download it again, or {TRAIN_REMEDY}"):
            return found.build(files)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
