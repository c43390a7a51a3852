from pathlib import Path
from typing import Any

import pytest
from datatrove.data import Document

from genesis.data.clean.filters import Length
from genesis.data.clean.stages import Account, FilterStage


def run_stage(folder: Path, documents: list[Document], **only: Any) -> list[str]:
    """Returns the identifiers of those that pass a filter which drops all."""
    account = Account(folder, 2, None)
    concerned = {"sources": (), "languages": (), **only}
    stage = FilterStage("01-length", account, Length(min_characters=10**6).build(), **concerned)
    return [document.id for document in stage.run(iter(documents))]


def make_document(identifier: str, source: str, language: str | None = None, text: str = "text") -> Document:
    return Document(text, identifier, metadata={"source": source} | ({"language": language} if language else {}))


@pytest.mark.parametrize(
    ("only", "passed"),
    [
        ({}, []),
        ({"sources": ("web",)}, ["code"]),
        ({"languages": ("de",)}, ["english", "code"]),
        ({"sources": ("code",), "languages": ("de",)}, ["english", "german", "code"]),
    ],
)
def test_a_filter_looks_at_the_sources_and_languages_that_it_is_for(
    only: dict[str, Any], passed: list[str], tmp_path: Path
) -> None:
    documents = [
        make_document("english", "web", "en"),
        make_document("german", "web", "de"),
        make_document("code", "code"),
    ]
    assert run_stage(tmp_path, documents, **only) == passed


def test_a_blank_document_never_comes_to_a_filter(tmp_path: Path) -> None:
    # Gopher's rules divide by the number of words.
    assert run_stage(tmp_path, [make_document("blank", "web", text=" \n")]) == []
    (path,) = (tmp_path / "01-length").iterdir()
    assert '"reason": "blank"' in path.read_text()


def test_examples_are_few_of_each_reason(tmp_path: Path) -> None:
    run_stage(tmp_path, [make_document(str(number), "web") for number in range(5)])
    (path,) = (tmp_path / "01-length").iterdir()
    assert path.read_text().count("too_few_characters") == 2
