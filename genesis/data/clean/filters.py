"""The filters that check one document at a time: their options, and the datatrove filters that they build.

Gopher's and C4's rules are datatrove's, with its published thresholds as defaults. A threshold of None is not applied.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol

from datatrove.data import Document
from datatrove.pipeline.filters import C4QualityFilter, GopherQualityFilter, GopherRepetitionFilter
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from genesis.base.errors import UserError
from genesis.data.clean.words import Words

LANGUAGE = "language"
"""The key of a document's metadata in which the language filter records the language."""
FIELDS = "fields"
"""The key of a document's metadata in which the reader stores the fields that score filters need."""
_LANGUAGE_CHARACTERS = 10_000
"""Number of characters at the beginning of a document from which the language is detected."""

Verdict = bool | tuple[bool, str]


class Filter(Protocol):
    """What judges documents: an object of this module, or a filter of datatrove."""

    def filter(self, doc: Document) -> Verdict:
        """Returns whether the document is kept, or why not."""


@dataclass(frozen=True)
class FilterOptions(ABC):
    """Options of every filter.

    Args:
        sources: Names of the sources whose documents the filter checks; other documents pass. All if not given.
        languages: Codes (en, de, zh) of the languages whose documents the filter checks, as detected by an earlier
            language filter; other documents pass. All if not given.
    """

    name: ClassVar[str]
    sources: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()

    @abstractmethod
    def build(self) -> Filter:
        """Returns the filter."""

    def rules(self) -> dict[str, Any]:
        """Returns the options of the filter itself, by name."""
        shared = [field.name for field in fields(FilterOptions)]
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in shared}


@dataclass(frozen=True)
class Length(FilterOptions):
    """Keeps documents of a length within bounds, in characters and in words."""

    name: ClassVar[str] = "length"
    min_characters: int | None = None
    max_characters: int | None = None
    min_words: int | None = None
    max_words: int | None = None

    def __post_init__(self) -> None:
        if self.min_characters == self.max_characters == self.min_words == self.max_words is None:
            raise UserError("length has no bound; give min_characters, max_characters, min_words or max_words")
        for low, high in ((self.min_characters, self.max_characters), (self.min_words, self.max_words)):
            if low is not None and high is not None and low > high:
                raise UserError(f"length keeps nothing: its lower bound {low} is above its upper bound {high}")

    def build(self) -> Filter:
        """Returns the filter."""
        return self

    def filter(self, doc: Document) -> Verdict:
        """Returns whether the document is kept, or why not."""
        bounds = [("characters", len(doc.text), self.min_characters, self.max_characters)]
        if self.min_words is not None or self.max_words is not None:
            bounds.append(("words", len(Words().word_tokenize(doc.text)), self.min_words, self.max_words))
        for unit, length, low, high in bounds:
            if low is not None and length < low:
                return False, f"too_few_{unit}"
            if high is not None and length > high:
                return False, f"too_many_{unit}"
        return True


@dataclass(frozen=True)
class Repetition(FilterOptions):
    """Gopher's rules on repeated lines, paragraphs and n-grams; fractions of the document, n-grams as [n, fraction]."""

    name: ClassVar[str] = "repetition"
    dup_line_frac: float | None = 0.3
    dup_para_frac: float | None = 0.3
    dup_line_char_frac: float | None = 0.2
    dup_para_char_frac: float | None = 0.2
    top_n_grams: tuple[tuple[int, float], ...] = ((2, 0.2), (3, 0.18), (4, 0.16))
    dup_n_grams: tuple[tuple[int, float], ...] = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))

    def build(self) -> Filter:
        """Returns the filter."""
        built: Filter = GopherRepetitionFilter(**self.rules(), language=Words())
        return built


@dataclass(frozen=True)
class GopherQuality(FilterOptions):
    """Gopher's rules on words, symbols, bullets and stop words; `stop_words` are English if not given.

    A character of a script without spaces counts as a word, so rules about word lengths are meaningless for such
    scripts: list the `languages` to which the rules apply.
    """

    name: ClassVar[str] = "gopher_quality"
    min_doc_words: int | None = 50
    max_doc_words: int | None = 100_000
    min_avg_word_length: float | None = 3
    max_avg_word_length: float | None = 10
    max_symbol_word_ratio: float | None = 0.1
    max_bullet_lines_ratio: float | None = 0.9
    max_ellipsis_lines_ratio: float | None = 0.3
    min_alpha_words_ratio: float | None = 0.8
    min_stop_words: int | None = 2
    stop_words: tuple[str, ...] | None = None

    def build(self) -> Filter:
        """Returns the filter."""
        rules = self.rules()
        rules["max_non_alpha_words_ratio"] = rules.pop("min_alpha_words_ratio")  # datatrove's name for the same
        built: Filter = GopherQualityFilter(**rules, language=Words())
        return built


@dataclass(frozen=True)
class C4Quality(FilterOptions):
    """C4's rules: removes lines that are not sentences, and drops documents with too few remaining sentences.

    `split_paragraph: false` checks sentences instead of lines, which suits text with hard line breaks.
    """

    name: ClassVar[str] = "c4_quality"
    split_paragraph: bool = True
    remove_citations: bool = True
    filter_no_terminal_punct: bool = True
    min_num_sentences: int | None = 5
    min_words_per_line: int | None = 3
    max_word_length: int | None = 1000
    filter_lorem_ipsum: bool = True
    filter_javascript: bool = True
    filter_curly_bracket: bool = True
    filter_policy: bool = True

    def build(self) -> Filter:
        """Returns the filter."""
        rules = {name: -1 if value is None else value for name, value in self.rules().items()}
        built: Filter = C4QualityFilter(**rules, language=Words())
        return built


@dataclass(frozen=True)
class Language(FilterOptions):
    """Detects each document's language (py3langid, whose model is in the package) and keeps those of `keep`.

    Without `keep` all languages pass. `min_score` is the minimum confidence, 0 to 1.
    """

    name: ClassVar[str] = "language"
    keep: tuple[str, ...] = ()
    min_score: float = 0.0

    def __post_init__(self) -> None:
        unknown = sorted({*self.keep, *self.languages} - set(_identifier().labels))
        if unknown:
            raise UserError(
                f"language knows no {', '.join(unknown)}; its codes are {' '.join(sorted(_identifier().labels))}"
            )
        if not 0 <= self.min_score <= 1:
            raise UserError(f"min_score {self.min_score} of language is not between 0 and 1")

    def build(self) -> Filter:
        """Returns the filter."""
        return self

    def filter(self, doc: Document) -> Verdict:
        """Records a document's language in its metadata, and returns whether the document is kept, or why not."""
        language, score = _identifier().classify(doc.text[:_LANGUAGE_CHARACTERS])
        doc.metadata[LANGUAGE] = language
        if self.keep and language not in self.keep:
            return False, f"is_{language}"
        return True if score >= self.min_score else (False, "uncertain")


@lru_cache(maxsize=1)
def _identifier() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@dataclass(frozen=True)
class Score(FilterOptions):
    """Keeps documents whose number in `field` (jsonl) or column (parquet) is within bounds.

    `missing` determines the fate of a document without the number: an error, kept, or dropped.
    """

    field: str = ""
    name: ClassVar[str] = "score"
    min_score: float | None = None
    max_score: float | None = None
    missing: Literal["error", "keep", "drop"] = "error"

    def __post_init__(self) -> None:
        if not self.field:
            raise UserError("score has no field; name the field or column that holds the number")
        if self.min_score is None and self.max_score is None:
            raise UserError(f"score on {self.field} has no bound; give min_score or max_score")

    def build(self) -> Filter:
        """Returns the filter."""
        return self

    def filter(self, doc: Document) -> Verdict:
        """Returns whether the document is kept, or why not."""
        value = doc.metadata.get(FIELDS, {}).get(self.field)
        if value is None and self.missing != "error":
            return True if self.missing == "keep" else (False, "no_score")
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise UserError(
                f"{doc.id}: {self.field!r} is {value!r}, not a number; fix it, name another field, or set "
                "`missing: drop` or `keep` for documents without it"
            )
        if self.min_score is not None and value < self.min_score:
            return False, "too_low"
        if self.max_score is not None and value > self.max_score:
            return False, "too_high"
        return True
