import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from genesis.base.errors import UserError
from genesis.data.corpus import open_corpus
from genesis.evaluate.heldout import measure_held_out, open_validation_set, read_texts
from genesis.evaluate.results import Measure
from genesis.model.decoder import Decoder
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from tests.data.corpora import make_documents, write_corpus
from tests.evaluate.support import write_rows
from tests.tiny_runs import build_decoder

SEQ_LEN = 16


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build_decoder(0)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return open_tokenizer(tokenizer_file)


@torch.no_grad()
def measure_slowly(decoder: Decoder, tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[float, int, int]:
    """Returns loss sum, tokens and bytes: each sequence document by document, in a forward of its own."""
    loss_sum, num_tokens, num_bytes = 0.0, 0, 0
    for start in range(0, len(tokens) - 1, SEQ_LEN):
        row = list(tokens[start : start + SEQ_LEN + 1])
        while len(row) > 1:
            end = row.index(tokenizer.eos_id) if tokenizer.eos_id in row else len(row) - 1
            document, row = row[: end + 1], row[end + 1 :]
            if len(document) > 1:
                logprobs = decoder(torch.tensor([document[:-1]]))[0].log_softmax(dim=1)
                loss_sum -= float(logprobs.gather(1, torch.tensor(document[1:])[:, None]).sum())
                num_tokens += len(document) - 1
                num_bytes += sum(int(tokenizer.token_num_bytes[token]) for token in document[1:])
    return loss_sum, num_tokens, num_bytes


def check(measures: Sequence[Measure], wanted: dict[str, tuple[float, int, int]]) -> None:
    found = {(measure.subject, measure.metric): measure for measure in measures}
    assert {subject for subject, _ in found} == wanted.keys()
    for name, (loss_sum, num_tokens, num_bytes) in wanted.items():
        bits, loss = found[name, "bits_per_byte"], found[name, "loss"]
        assert (bits.num_items, loss.num_items) == (num_bytes, num_tokens)
        assert bits.value == pytest.approx(loss_sum / num_bytes / math.log(2), rel=1e-5)
        assert loss.value == pytest.approx(loss_sum / num_tokens, rel=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 100])
def test_every_token_of_a_validation_set_counts_once_for_its_source(
    tmp_path: Path, decoder: Decoder, tokenizer: Tokenizer, batch_tokens: int
) -> None:
    validation = {"web": make_documents(9, 6, seed=3), "code": make_documents(4, 30, seed=4)}
    corpus = write_corpus(
        tmp_path, {"web": make_documents(9, 6, seed=1)}, validation, tokenizer=tokenizer.files["tokenizer.model"]
    )
    measures = measure_held_out(decoder, open_validation_set(corpus, SEQ_LEN, tokenizer), batch_tokens)
    wanted = {}
    for source in open_corpus(corpus).validation:
        tokens = np.empty(source.num_tokens, np.uint16)
        source.read(0, tokens)
        wanted[source.name] = measure_slowly(decoder, tokenizer, tokens.tolist())
    sums = [sum(column) for column in zip(*wanted.values(), strict=True)]
    check(measures, {**wanted, "all": (sums[0], int(sums[1]), int(sums[2]))})


def test_files_and_folders_of_text_are_sources(tmp_path: Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
    texts = {"pages": ["alpha beta", "\u00e9t\u00e9 \u65e5\u672c"], "notes": ["def alpha", "class beta"]}
    write_rows(tmp_path / "pages.jsonl", [{"text": text} for text in texts["pages"]])
    (tmp_path / "notes").mkdir()
    for number, text in enumerate(texts["notes"]):
        (tmp_path / "notes" / f"{number}.txt").write_text(text)
    wanted = {
        name: measure_slowly(
            decoder,
            tokenizer,
            [id for text in own for id in (tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id)],
        )
        for name, own in texts.items()
    }
    sums = [sum(column) for column in zip(*wanted.values(), strict=True)]
    held_out = read_texts(tmp_path, SEQ_LEN, tokenizer)
    check(measure_held_out(decoder, held_out, 64), {**wanted, "all": (sums[0], int(sums[1]), int(sums[2]))})
    (tmp_path / "notes" / "0.txt").write_text("def beta")
    assert read_texts(tmp_path, SEQ_LEN, tokenizer).data_hash != held_out.data_hash


def test_a_single_file_is_one_source_without_a_sum(tmp_path: Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
    (tmp_path / "book.txt").write_text("alpha beta")
    measures = measure_held_out(decoder, read_texts(tmp_path / "book.txt", SEQ_LEN, tokenizer), 64)
    assert {measure.subject for measure in measures} == {"book"}


def test_two_sources_of_one_name_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for names in (("a.txt", "a.jsonl"), ("all.txt", "b.txt")):
        folder = tmp_path / names[0]
        folder.mkdir()
        for name in names:
            (folder / name).write_text('{"text": "some"}\n')
        with pytest.raises(UserError, match=r"is a second source with the name 'a(ll)?': rename it"):
            read_texts(folder, 16, tokenizer)


def test_text_that_is_not_there_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="no such file or folder of held-out text"):
        read_texts(tmp_path / "no", SEQ_LEN, tokenizer)
    with pytest.raises(UserError, match="contains no text"):
        read_texts(tmp_path, SEQ_LEN, tokenizer)


def test_a_corpus_without_a_validation_set_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpus = write_corpus(
        tmp_path, {"web": make_documents(9, 6, seed=1)}, {}, tokenizer=tokenizer.files["tokenizer.model"]
    )
    with pytest.raises(UserError, match="has no validation set; give text by --heldout PATH"):
        open_validation_set(corpus, SEQ_LEN, tokenizer)
