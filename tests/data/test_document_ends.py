"""Documents end where the index says, wherever eos stands: prepared, streamed and adopted, in every packing."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from genesis.cli.data import verify_main
from genesis.data.corpus import open_corpus
from genesis.data.foreign.adopt import AdoptOptions, ForeignSource, adopt_corpus
from genesis.data.packing import Packing
from genesis.data.plans import write_plan
from genesis.data.prepare import PrepareOptions, prepare_corpus
from genesis.data.sources import SourceOptions
from genesis.data.window import IGNORE_INDEX, AccumulationWindow
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer, frame_document
from genesis.train.data_module import CorpusDataModule
from tests.data.corpus_support import write_jsonl
from tests.data.foreign.files import write_megatron
from tests.data.stream.streams import count_pairs, make_stream, make_windows, read_to_the_end
from tests.tokenizer.byte_files import EOS, installed, make_texts, write_tokenizer

SEQ_LEN = 16
TEXTS = make_texts(60, seed=1)
KINDS = {"bos and eos": (True, True), "eos alone": (False, True), "bos alone": (True, False), "neither": (False, False)}

Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    with installed():
        yield


def frame(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    documents = [frame_document(tokenizer, ids).tolist() for ids in tokenizer.encode_batch(texts)]
    assert tokenizer.eos_id is None or sum(EOS in document[:-1] for document in documents) > 20
    return documents


def prepare(directory: Path, kind: str) -> Path:
    has_bos, has_eos = KINDS[kind]
    write_jsonl(directory / "web.jsonl", TEXTS)
    sources = (SourceOptions("web", (str(directory / "web.jsonl"),)),)
    tokenizer = write_tokenizer(directory / "tokenizer", has_bos=has_bos, has_eos=has_eos)
    options = PrepareOptions("corpus", tokenizer, sources, directory, 0.0, num_workers=1, shard_tokens=900)
    prepare_corpus(options)
    return options.corpus


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: prepare(tmp_path_factory.mktemp("prepared"), kind) for kind in ("bos and eos", "neither")}


def read_all(corpus: Path, packing: Packing) -> list[Row]:
    """Returns every row of the training set once."""
    if packing != "chunk":
        write_plan(open_corpus(corpus), packing, SEQ_LEN)
    data = CorpusDataModule(
        str(corpus), seq_len=SEQ_LEN, micro_batch_size=1, global_batch_size=1, packing=packing, max_epochs={"web": 1}
    )
    data.setup("fit")
    windows = []
    for window in data.train_dataloader():
        windows.append(window)
        data.training.advance(window)
    return [row for window in windows for row in rows_of(window)]


def rows_of(window: AccumulationWindow) -> list[Row]:
    return [
        (tuple(batch.input_ids[0].tolist()), tuple(batch.labels[0].tolist()), tuple(batch.document_ids[0].tolist()))
        for batch in window.micro_batches
    ]


def chunk_slowly(documents: list[list[int]]) -> list[Row]:
    """Each token with its document and the token after it there, cut every `SEQ_LEN` tokens."""
    tokens = [
        (token, document[place + 1] if place + 1 < len(document) else IGNORE_INDEX, number)
        for number, document in enumerate(documents)
        for place, token in enumerate(document)
    ]
    rows = []
    for start in range(0, len(tokens) - 1 - (len(tokens) - 1) % SEQ_LEN, SEQ_LEN):
        inputs, labels, numbers = zip(*tokens[start : start + SEQ_LEN], strict=True)
        rows.append((inputs, labels, tuple(number - numbers[0] for number in numbers)))
    return rows


@pytest.mark.parametrize("kind", ["bos and eos", "neither"])
def test_chunks_are_those_of_documents_that_end_by_the_index(corpora: dict[str, Path], kind: str) -> None:
    documents = frame(open_tokenizer(corpora[kind]), TEXTS)
    assert Counter(read_all(corpora[kind], "chunk")) == Counter(chunk_slowly(documents))


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
@pytest.mark.parametrize("kind", ["bos and eos", "neither"])
def test_every_label_of_a_packed_corpus_counts_once_through_eos(
    corpora: dict[str, Path], kind: str, packing: Packing
) -> None:
    documents = frame(open_tokenizer(corpora[kind]), TEXTS)
    rows = read_all(corpora[kind], packing)
    assert count_pairs(rows) == Counter(pair for document in documents for pair in pairwise(document))
    if packing == "pad":
        starts = {tuple(document[:3]) for document in documents}
        assert sum(row[0][:3] in starts for row in rows) == len(documents)
        assert all(set(ids[: SEQ_LEN - labels.count(IGNORE_INDEX)]) <= {0} for _, labels, ids in rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", ["chunk", "best_fit", "pad"])
def test_a_stream_shows_every_pair_of_a_document_and_none_across(tmp_path: Path, kind: str, packing: str) -> None:
    has_bos, has_eos = KINDS[kind]
    directory = write_tokenizer(tmp_path / "tokenizer", has_bos=has_bos, has_eos=has_eos)
    (tmp_path / "web").mkdir()
    write_jsonl(tmp_path / "web" / "0.jsonl", TEXTS)
    stream = make_stream({"web": tmp_path / "web"}, directory, packing, max_epochs=1, num_lanes=1)
    rows, _ = read_to_the_end(make_windows(stream))
    documents = frame(stream.tokenizer, TEXTS)
    wanted = Counter(pair for document in documents for pair in pairwise(document))
    assert count_pairs(rows) == wanted


def test_such_a_corpus_has_schema_3_its_tokenizer_and_verifies(
    corpora: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for corpus in corpora.values():
        assert json.loads((corpus / "manifest.json").read_text())["schema_version"] == 3
        assert open_corpus(corpus).manifest.tokenizer_hash == open_tokenizer(corpus).hash
        assert verify_main([str(corpus)]) == 0
    assert "all as in the manifest" in capsys.readouterr().out
    index = next(corpora["neither"].rglob("*.ds.index"))
    content = index.read_bytes()
    index.write_bytes(content[:-8] + bytes([content[-8] ^ 1]) + content[-7:])
    try:
        assert verify_main([str(corpora["neither"])]) == 1
        with pytest.raises(ValueError, match=r"\.ds\.index has hash .* the shard is damaged or has changed"):
            read_all(corpora["neither"], "chunk")
    finally:
        index.write_bytes(content)


@pytest.mark.parametrize("check", ["all", "sizes"])
def test_adopted_documents_end_by_their_own_index_too(tmp_path: Path, check: str) -> None:
    directory = write_tokenizer(tmp_path / "tokenizer")
    documents = frame(open_tokenizer(directory), TEXTS)
    path = write_megatron(tmp_path / "text", documents)
    options = AdoptOptions("adopted", (ForeignSource("web", (str(path),)),), tmp_path, directory, check=check)  # type: ignore[arg-type]
    adoption = adopt_corpus(options)
    assert adoption.num_inner == (0 if check == "sizes" else sum(document[:-1].count(EOS) for document in documents))
    assert Counter(read_all(options.corpus, "chunk")) == Counter(chunk_slowly(documents))
