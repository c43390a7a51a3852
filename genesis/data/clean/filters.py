"""The filters that check one document at a time: their options, and the datatrove filters that they build.

Gopher's and C4's rules are datatrove's, with its published thresholds as defaults. A threshold of None is not applied.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

from datatrove.data import Document
from datatrove.pipeline.filters import C4QualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.filters.base_filter import BaseFilter
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
    def build(self) -> BaseFilter:
        """Returns the filter."""


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

    def build(self) -> BaseFilter:
        """Returns the filter."""
        return LengthFilter(self)


class LengthFilter(BaseFilter):  # type: ignore[misc]
    """Drops documents whose length is out of bounds."""

    name = "length"

    def __init__(self, options: Length) -> None:
        super().__init__()
        self._options = options
        self._words = Words()

    def filter(self, doc: Document) -> Verdict:
        """Returns whether the document is kept, or why not."""
        options = self._options
        bounds = [("characters", len(doc.text), options.min_characters, options.max_characters)]
        if options.min_words is not None or options.max_words is not None:
            bounds.append(("words", len(self._words.word_tokenize(doc.text)), options.min_words, options.max_words))
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

    def build(self) -> BaseFilter:
        """Returns the filter."""
        return GopherRepetitionFilter(
            dup_line_frac=self.dup_line_frac,
            dup_para_frac=self.dup_para_frac,
            dup_line_char_frac=self.dup_line_char_frac,
            dup_para_char_frac=self.dup_para_char_frac,
            top_n_grams=self.top_n_grams,
            dup_n_grams=self.dup_n_grams,
            language=Words(),
        )


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

    def build(self) -> BaseFilter:
        """Returns the filter."""
        return GopherQualityFilter(
            min_doc_words=self.min_doc_words,
            max_doc_words=self.max_doc_words,
            min_avg_word_length=self.min_avg_word_length,
            max_avg_word_length=self.max_avg_word_length,
            max_symbol_word_ratio=self.max_symbol_word_ratio,
            max_bullet_lines_ratio=self.max_bullet_lines_ratio,
            max_ellipsis_lines_ratio=self.max_ellipsis_lines_ratio,
            max_non_alpha_words_ratio=self.min_alpha_words_ratio,
            min_stop_words=self.min_stop_words,
            stop_words=None if self.stop_words is None else list(self.stop_words),
            language=Words(),
        )


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

    def build(self) -> BaseFilter:
        """Returns the filter."""
        return C4QualityFilter(
            split_paragraph=self.split_paragraph,
            remove_citations=self.remove_citations,
            filter_no_terminal_punct=self.filter_no_terminal_punct,
            min_num_sentences=-1 if self.min_num_sentences is None else self.min_num_sentences,
            min_words_per_line=-1 if self.min_words_per_line is None else self.min_words_per_line,
            max_word_length=-1 if self.max_word_length is None else self.max_word_length,
            filter_lorem_ipsum=self.filter_lorem_ipsum,
            filter_javascript=self.filter_javascript,
            filter_curly_bracket=self.filter_curly_bracket,
            filter_policy=self.filter_policy,
            language=Words(),
        )


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

    def build(self) -> BaseFilter:
        """Returns the filter."""
        return LanguageFilter(self)


class LanguageFilter(BaseFilter):  # type: ignore[misc]
    """Records a document's language in its metadata, and drops documents of languages that are not in `keep`."""

    name = "language"

    def __init__(self, options: Language) -> None:
        super().__init__()
        self._keep = frozenset(options.keep)
        self._min_score = options.min_score

    def filter(self, doc: Document) -> Verdict:
        """Returns whether the document is kept, or why not."""
        language, score = _identifier().classify(doc.text[:_LANGUAGE_CHARACTERS])
        doc.metadata[LANGUAGE] = language
        if self._keep and language not in self._keep:
            return False, f"is_{language}"
        return True if score >= self._min_score else (False, "uncertain")


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

    def build(self) -> BaseFilter:
        """Returns the filter."""
        return ScoreFilter(self)


class ScoreFilter(BaseFilter):  # type: ignore[misc]
    """Drops documents whose score is out of bounds."""

    name = "score"

    def __init__(self, options: Score) -> None:
        super().__init__()
        self._options = options

    def filter(self, doc: Document) -> Verdict:
        """Returns whether the document is kept, or why not."""
        options = self._options
        value = doc.metadata.get(FIELDS, {}).get(options.field)
        if value is None and options.missing != "error":
            return True if options.missing == "keep" else (False, "no_score")
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise UserError(
                f"{doc.id}: {options.field!r} is {value!r}, not a number; fix it, name another field, or set "
                "`missing: drop` or `keep` for documents without it"
            )
        if options.min_score is not None and value < options.min_score:
            return False, "too_low"
        if options.max_score is not None and value > options.max_score:
            return False, "too_high"
        return True
