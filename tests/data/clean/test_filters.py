"""Each filter drops what it must, says why, and keeps what it must."""

from typing import Any

import pytest
from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import get_filter_result

from genesis.base.errors import UserError
from genesis.data.clean.filters import (
    FIELDS,
    LANGUAGE,
    C4Quality,
    FilterOptions,
    GopherQuality,
    Language,
    Length,
    Repetition,
    Score,
)

PROSE = (
    "The river that runs past the old mill has been rising since the morning, and the people of the village have "
    "begun to carry their belongings to the church on the hill. Nobody remembers water as high as this. The miller, "
    "who is nearly eighty, says that his grandfather told him of such a flood, but that it came in spring and not in "
    "the middle of August. By evening the lower road was gone. A boat with two boys in it went slowly along the main "
    "street, and somebody called to them from a window to bring bread."
)
GERMAN = (
    "Der Fluss, der an der alten Mühle vorbeifließt, steigt seit dem Morgen, und die Leute im Dorf haben angefangen, "
    "ihre Sachen in die Kirche auf dem Hügel zu tragen. Niemand erinnert sich an so hohes Wasser."
)


def judge(options: FilterOptions, text: str, **metadata: Any) -> tuple[bool, str | None]:
    kept, reason = get_filter_result(options.build().filter(Document(text, "id", metadata=metadata)))
    return bool(kept), reason


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        (Length(min_characters=10), "nine char", "too_few_characters"),
        (Length(max_characters=8), "nine char", "too_many_characters"),
        (Length(min_words=3), "two words", "too_few_words"),
        (Length(max_words=1), "two words", "too_many_words"),
        (Repetition(), "the same line\n" * 20, "dup_line_frac"),
        (Repetition(), "a paragraph of its own\n\n" * 20, "dup_para_frac"),
        (Repetition(), "buy now " * 40, "top_2_gram"),
        (GopherQuality(), "A short text that has the right words.", "gopher_short_doc"),
        (GopherQuality(max_doc_words=50), PROSE, "gopher_long_doc"),
        (GopherQuality(), "a b c d e f g h " * 20, "gopher_below_avg_threshold"),
        (GopherQuality(), "incomprehensibilities internationalization " * 40, "gopher_above_avg_threshold"),
        (GopherQuality(), PROSE.replace(" ", " # ", 15), "gopher_too_many_hashes"),
        (GopherQuality(), PROSE.replace(" ", " ... ", 15), "gopher_too_many_ellipsis"),
        (GopherQuality(), "\n".join("- " + line for line in PROSE.split(". ") * 3), "gopher_too_many_bullets"),
        (GopherQuality(), PROSE.replace(" ", " 12345 "), "gopher_below_alpha_threshold"),
        (GopherQuality(), GERMAN * 2, "gopher_enough_stop_words"),
        (C4Quality(), "No sentence here\nnor here", "too_few_sentences"),
        (C4Quality(), PROSE + " lorem ipsum dolor.", "lorem_ipsum"),
        (C4Quality(), PROSE + " function() { return; }.", "curly_bracket"),
        (Language(keep=("en",)), GERMAN, "is_de"),
        (Language(min_score=0.9), "xq zv", "uncertain"),
    ],
)
def test_a_filter_drops_what_it_must_and_says_why(options: FilterOptions, text: str, reason: str) -> None:
    assert judge(options, text) == (False, reason)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Length(min_characters=9, max_characters=9, min_words=2, max_words=2), "nine char"),
        (Repetition(), PROSE),
        (GopherQuality(), PROSE),
        (GopherQuality(stop_words=("der", "die", "und")), GERMAN * 2),
        (GopherQuality(min_doc_words=None, min_stop_words=None), "Two words"),
        (C4Quality(), PROSE),
        (C4Quality(min_num_sentences=None), "One sentence is enough."),
        (Language(keep=("de", "en")), PROSE),
        (Language(), GERMAN),
    ],
)
def test_a_filter_keeps_what_it_must(options: FilterOptions, text: str) -> None:
    assert judge(options, text)[0]


def test_c4_takes_lines_out_that_are_no_sentences() -> None:
    document = Document(f"Home | News | Contact\n{PROSE}\nShare this", "id")
    assert C4Quality().build().filter(document)
    assert document.text == PROSE


def test_the_language_found_is_noted() -> None:
    for text, code in ((PROSE, "en"), (GERMAN, "de"), ("这条河从早上开始一直在上涨。", "zh")):
        document = Document(text, "id")
        assert Language().build().filter(document)
        assert document.metadata[LANGUAGE] == code


@pytest.mark.parametrize(
    ("options", "value", "verdict"),
    [
        (Score(field="quality", min_score=2.5), 2.5, (True, None)),
        (Score(field="quality", min_score=2.5), 2.4, (False, "too_low")),
        (Score(field="quality", max_score=3), 4, (False, "too_high")),
        (Score(field="quality", min_score=2.5, missing="keep"), None, (True, None)),
        (Score(field="quality", min_score=2.5, missing="drop"), None, (False, "no_score")),
    ],
)
def test_a_score_is_compared_with_its_bounds(options: Score, value: Any, verdict: tuple[bool, str | None]) -> None:
    assert judge(options, "text", **{FIELDS: {"quality": value}}) == verdict


@pytest.mark.parametrize("value", [None, "high", True, float("nan"), [1]])
def test_a_score_that_is_no_number_is_refused_with_its_document(value: Any) -> None:
    with pytest.raises(UserError, match=r"^id: 'quality' is .+, not a number; .*`missing: drop`"):
        judge(Score(field="quality", min_score=1), "text", **{FIELDS: {"quality": value}})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Length(), "length has no bound"),
        (lambda: Length(min_words=3, max_words=2), "keeps nothing"),
        (lambda: Language(keep=("english",)), "language knows no english; its codes are .* en "),
        (lambda: Language(min_score=1.5), "min_score 1.5 .* not between 0 and 1"),
        (lambda: Score(min_score=1), "score has no field"),
        (lambda: Score(field="quality"), "score on quality has no bound"),
    ],
)
def test_options_that_make_no_sense_are_refused(build: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build()
