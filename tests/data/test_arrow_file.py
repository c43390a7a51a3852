"""The text of a dataset that Hugging Face's `datasets` saved, as a source like others."""

from pathlib import Path

import datasets
import pytest

from genesis.base.errors import UserError
from genesis.data.sources import SourceOptions, Span, find_files, plan_spans, read_documents, read_entries
from tests.data.corpus_support import make_texts

TEXTS = make_texts(40, seed=1)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a saved dataset of two files with several batches each."""
    monkeypatch.setattr(datasets.config, "DEFAULT_MAX_BATCH_SIZE", 7)
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_dict({"number": list(range(len(TEXTS))), "text": TEXTS})
    dataset.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    return tmp_path / "saved"


def spans_of(source: SourceOptions, target_bytes: int) -> list[Span]:
    return list(plan_spans(source, find_files(source), target_bytes))


@pytest.mark.parametrize("target_bytes", [1, 500, 1 << 20])
def test_its_rows_are_documents_however_it_is_cut(saved: Path, target_bytes: int) -> None:
    source = SourceOptions("web", (str(saved),))
    spans = spans_of(source, target_bytes)
    assert len(spans) == {1: 6, 1 << 20: 2}.get(target_bytes, len(spans))
    found = [document.text for span in spans for document in read_documents(source, span)]
    assert found == TEXTS


def test_its_rows_are_read_from_any_of_them_on(saved: Path) -> None:
    source = SourceOptions("web", (str(saved),))
    (first, _) = spans_of(source, 1 << 20)
    texts = [document.text for document in read_documents(source, first)]
    for start in range(len(texts) + 1):
        assert [entry.read(True).text for entry in read_entries(source, first, start)] == texts[start:]


def test_a_file_that_is_no_stream_or_has_no_text_is_refused(saved: Path) -> None:
    with pytest.raises(UserError, match=r"\.arrow: column 'number' is int64, not text"):
        spans_of(SourceOptions("web", (str(saved),), text_field="number"), 1)
    with pytest.raises(UserError, match=r"\.arrow has no column 'body' \(it has: number, text\)"):
        spans_of(SourceOptions("web", (str(saved),), text_field="body"), 1)
    file = sorted(saved.glob("*.arrow"))[0]
    for content in (file.read_bytes()[:-8], file.read_bytes()[:-500], b"no stream at all", b""):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"\.arrow is not a complete arrow file|cannot read .*\.arrow") as error:
            spans_of(SourceOptions("web", (str(saved),)), 1)
        assert "\n" not in str(error.value)
