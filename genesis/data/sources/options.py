"""The options of a source of text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from genesis.base.errors import UserError
from genesis.chat.conversation import Form
from genesis.chat.options import OnBadRow
from genesis.data.manifest import check_source_name

ChatForm = Form | Literal["auto", "pairs"]
Kind = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]
Format = Literal["auto"] | Kind

TEXT_FIELD: Final = "text"


@dataclass(frozen=True)
class SourceOptions:
    """One named source of text.

    Args:
        name: The source's name, also of its directory in the corpus: letters, digits, ".", "_" and "-".
        paths: Files, directories (searched through all levels) or globs ("**" crosses levels); also URLs of these, such
            as s3://bucket/web/*.jsonl.zst, https://host/a.parquet or any other URL that fsspec supports.
        format: How files hold documents: text (a file is one document; also source code), jsonl, json (an array of
            objects), csv, tsv (with a line of column names), parquet, arrow (a dataset that Hugging Face's `datasets`
            saved); auto decides by the name of each file. Files other than parquet and arrow may be compressed (.gz,
            .zst).
        suffixes: Suffixes of the files taken from directories, such as [.py, .md]; [.txt, .jsonl, .parquet, .arrow] if
            not given. Upper and lower case are the same, and hidden files are not taken.
        text_field: Field or column that holds the text, or the path to one in objects, such as meta.text; of
            conversations in the forms messages and sharegpt the turns, which are looked for in messages, conversations
            and conversation if it is not given.
        separator: The text between documents of a text file, such as "\\n" or "<|endoftext|>"; without it a file is one
            document. A line break in it also matches that of Windows.
        weight: Share in the training mix, an integer in proportion to the other sources' weights.
        on_undecodable: What to do with bytes that are not UTF-8: error, or replace them by U+FFFD.
        chat: Form of the conversations in the records, not of text files: messages (OpenAI's), sharegpt, alpaca,
            prompt_completion or prompt; auto goes by the names of the fields; pairs are two answers to one prompt, of
            which one is preferred, in the forms of OpenAI, TRL or ShareGPT. Not given for plain text.
        on_bad_row: What to do with a record without a text, such as a null, or without a conversation: error, or skip
            it and count it.
        ignored_keys: Fields of records and keys of messages that have no effect, though they look like marks on what
            is learned, such as [toxic, redacted].
        value_field: Field of each record of a conversation that is true, false or a whole number from 0 to 254, such as
            whether its answer is good. Objectives that ask for it, as KTO does, get it with the conversation. Of a
            pair, how much better the chosen answer is, for RewardModel.
    """

    name: str
    paths: tuple[str, ...]
    format: Format = "auto"
    suffixes: tuple[str, ...] = ()
    text_field: str = TEXT_FIELD
    separator: str | None = None
    weight: int = 1
    on_undecodable: Literal["error", "replace"] = "error"
    chat: ChatForm | None = None
    on_bad_row: OnBadRow = "error"
    ignored_keys: tuple[str, ...] = ()
    value_field: str | None = None

    def __post_init__(self) -> None:
        check_source_name(self.name)
        if not self.paths:
            raise UserError(f"source {self.name} has no paths; name files, directories or globs")
        if self.weight < 1:
            raise UserError(f"source {self.name} has weight {self.weight}; give a whole number of at least 1")
        if self.separator == "":
            raise UserError(f'source {self.name} has an empty separator; leave it out or give one, as "\\n"')
        if self.chat is not None and self.format == "text":
            raise UserError(f"source {self.name} has conversations, which text files cannot hold; give another format")
        if self.ignored_keys and self.chat is None:
            raise UserError(f"source {self.name} has ignored_keys, and only conversations have marks; leave it out")

        if self.value_field is not None and self.chat is None:
            raise UserError(
                f"source {self.name} has value_field, and only conversations and pairs of answers have a value: leave "
                "it out"
            )

    @property
    def has_pairs(self) -> bool:
        """Returns whether each record is a pair of answers."""
        return self.chat == "pairs"

    def describe(self) -> dict[str, Any]:
        """Returns the options that decide the documents, in plain types, as plans of a corpus keep them."""
        # Plans of earlier versions have none of them.
        later = {"chat": None, "on_bad_row": "error", "ignored_keys": (), "value_field": None}
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
            if key not in later or value != later[key]
        }

    @property
    def turn_field(self) -> str | None:
        """Returns the field that holds the turns of a conversation; None for the usual ones."""
        return None if self.text_field == TEXT_FIELD else self.text_field


def refuse_sources(
    sources: Sequence[SourceOptions],
    *,
    conversations: str | None = None,
    pairs: str | None = None,
    values: str | None = None,
    skipping: str | None = None,
) -> None:
    """Refuses sources with options that have no meaning where they are read; each reason ends a line about one.

    Args:
        sources: The sources.
        conversations: The reason why only plain text can be read, None to accept conversations.
        pairs: The reason why pairs of answers cannot be read, None to accept them.
        values: The reason why nothing would keep values, None to accept them.
        skipping: The command that does not count rows, None to accept that bad ones are skipped.

    Raises:
        UserError: A source has one of these options.
    """
    for source in sources:
        has = f"source {source.name} has"
        if conversations is not None and source.chat is not None:
            raise UserError(f"{has} conversations (chat: {source.chat}), {conversations}")
        if values is not None and source.value_field is not None:
            raise UserError(f"{has} value_field {source.value_field}, {values}: leave it out")
        if pairs is not None and source.has_pairs:
            raise UserError(f"{has} pairs of answers (chat: pairs), {pairs}")
        if skipping is not None and source.on_bad_row == "skip":
            raise UserError(
                f"{has} on_bad_row: skip, and {skipping} does not count what it skips: leave it out, and remove bad "
                "rows"
            )


def check_sources(sources: Sequence[SourceOptions]) -> None:
    """Checks that there are sources, each with its own name, and that all or none have values.

    Raises:
        UserError: There is no source, two have the same name, or only some have a value_field.
    """
    if not sources:
        raise UserError("no sources are given; list at least one under `sources`")
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two sources are named {name}; give each its own name")
    without = [source.name for source in sources if source.value_field is None]
    if without and len(without) < len(sources):
        raise UserError(
            f"source {without[0]} has no value_field, and others of this corpus have: give it one, or prepare two "
            "corpora"
        )
