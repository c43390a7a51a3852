"""An objective of another package: KTO, in one file, on conversations whose records say whether the answer is good."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from genesis.base.errors import UserError
from genesis.chat.options import ChatOptions
from genesis.data.corpus_data import CorpusData
from genesis.data.loader import DOCUMENTS, VALUES, Ranks
from genesis.data.prepare import PrepareOptions, prepare_corpus
from genesis.data.sources import SourceOptions
from genesis.data.training_data import TrainingOptions
from genesis.data.window import IGNORE_INDEX, AccumulationWindow
from genesis.model.adapter import AdapterConfig, adapters_off, attach_adapters, init_adapters
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.objectives.objective import ObjectiveSums, prepare
from genesis.objectives.vocabulary import WHOLE
from genesis.train.data_module import CorpusDataModule, check_data
from tests.chat.support import CHATML, write_tokenizer
from tests.data.test_conversations import run_here, write_lines
from tests.outside.kto import KTO, _mismatch

SEQ_LEN = 64
SHAPE = DecoderConfig(
    vocab_size=400, dim=32, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=SEQ_LEN
)
RECORDS: list[dict[str, Any]] = [
    {"prompt": f"question {number} " * (1 + number % 3), "completion": f"answer {number} " * (1 + number % 4)}
    | {"label": number % 3 > 0}
    for number in range(40)
]


def prepare_answers(directory: Path, records: list[dict[str, Any]] = RECORDS, name: str = "corpus") -> Path:
    """Returns a corpus of single answers with values, made in this process."""
    write_tokenizer(directory / "tokenizer")
    write_lines(directory / f"{name}.jsonl", records)
    (directory / "chatml.jinja").write_text(CHATML)
    source = SourceOptions(
        "answers", (str(directory / f"{name}.jsonl"),), chat="prompt_completion", value_field="label"
    )
    chat = ChatOptions(template=directory / "chatml.jinja")
    options = PrepareOptions(
        *(name, directory / "tokenizer", (source,)),
        out=directory / "corpora",
        validation_fraction=0.2,
        num_workers=1,
        chat=chat,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("genesis.data.prepare.run_jobs", run_here)
        prepare_corpus(options)
    return options.corpus


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_answers(tmp_path_factory.mktemp("answers"))


class Example(NamedTuple):
    prompt: list[int]
    answer: list[int]
    value: int


def open_data(answers: Path, packing: Any = None) -> CorpusData:
    options = TrainingOptions(seq_len=SEQ_LEN, micro_batch_size=4, global_batch_size=4, packing=packing)
    data = CorpusData(answers, options, verify_hashes="first_touch", tokenizer_hash=None)
    data.open(Ranks())
    return data


def split(window: AccumulationWindow) -> list[Example]:
    """Returns the prompt, the answer and the value of each document, by loops."""
    (micro_batch,) = window.micro_batches
    assert micro_batch.document_offsets is not None
    tensors = (micro_batch.input_ids, micro_batch.labels, micro_batch.extra[VALUES])
    ids, labels, values = (one.flatten().tolist() for one in tensors)
    found = []
    for start, end in pairwise(micro_batch.document_offsets.tolist()):
        first = next((place for place in range(start, end) if labels[place] != IGNORE_INDEX), None)
        if first is not None:
            answer = [label for label in labels[first:end] if label != IGNORE_INDEX]
            found.append(Example(ids[start : first + 1], answer, values[first]))
    return found


@pytest.mark.parametrize("packing", ["pad", "best_fit", "chunk"])
def test_each_answer_has_the_value_of_its_record_in_every_packing(answers: Path, packing: str) -> None:
    data = open_data(answers, packing)
    tokenizer_text = {}
    for position in range(0, 8, 4):
        window = data.window(position)
        documents = split(window)
        assert window.num_units[DOCUMENTS] == len(documents) > 0
        for prompt, answer, value in documents:
            tokenizer_text[tuple(prompt + answer)] = value
    assert set(tokenizer_text.values()) == {0, 1}
    known = {text: value for text, value in read_records(data).items() if text in tokenizer_text}
    assert packing == "chunk" or known == tokenizer_text


def read_records(data: CorpusData) -> dict[tuple[int, ...], int]:
    """Returns the value of each document by its tokens, from the files."""
    found = {}
    (source,) = data.corpus.train
    ends = np.concatenate([[0], *source.document_ends()])
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        tokens, labels = np.empty(end - start, np.int64), np.empty(end - start, np.uint8)
        source.read(start, tokens)
        source.read_labels(start, labels)
        last = int(np.flatnonzero(labels).max())
        found[tuple(tokens[: last + 1].tolist())] = int(labels.max()) - 1
    return found


def test_a_value_that_is_no_small_number_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="label, the value_field, is 'yes': it must be true, false or a whole number"):
        prepare_answers(tmp_path, [*RECORDS, {"prompt": "a", "completion": "b", "label": "yes"}])
    with pytest.raises(UserError, match="label, the value_field, is None"):
        prepare_answers(tmp_path, [{"prompt": "a", "completion": "b"}], "second")


def test_data_without_values_are_refused(tiny_corpus: Path) -> None:
    data = CorpusDataModule(str(tiny_corpus), seq_len=16, micro_batch_size=2, global_batch_size=8)
    with pytest.raises(UserError, match=r"KTO needs the value of each conversation, and the data have none"):
        check_data(KTO(), data.training)


def test_micro_batches_without_another_prompt_are_refused(tmp_path: Path) -> None:
    data = CorpusDataModule(str(prepare_answers(tmp_path)), seq_len=SEQ_LEN, micro_batch_size=1, global_batch_size=4)
    with pytest.raises(UserError, match="micro_batch_size is 1, and KTO learns from at least 2 sequences: raise it"):
        check_data(KTO(), data.training)


def make_policy() -> Decoder:
    decoder = Decoder(SHAPE)
    decoder.init_weights(0)
    attach_adapters(decoder, AdapterConfig(rank=4))
    init_adapters(decoder, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return decoder.eval()


def score(decoder: Decoder, prompt: list[int], answer: list[int]) -> float:
    """Returns log p(answer) after a prompt, from whole logits."""
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    log_probs = decoder(ids).float().log_softmax(-1)[0, len(prompt) - 1 :]
    return float(log_probs.gather(1, torch.tensor(answer)[:, None]).sum())


@torch.no_grad()
def expected_loss(decoder: Decoder, documents: list[Example], beta: float) -> tuple[float, float]:
    """Returns the mean loss and the baseline by the definition, one answer after the other."""

    def ratio(prompt: list[int], answer: list[int]) -> float:
        with adapters_off(decoder):
            reference = score(decoder, prompt, answer)
        return score(decoder, prompt, answer) - reference

    others = [*documents[1:], documents[0]]
    mismatched = [ratio(prompt, answer) for (prompt, _, _), (_, answer, _) in zip(documents, others, strict=True)]
    baseline = max(0.0, sum(mismatched) / len(documents))
    losses = []
    for prompt, answer, value in documents:
        margin = ratio(prompt, answer) - baseline
        losses.append(1 - 1 / (1 + math.exp(-beta * (margin if value else -margin))))
    return sum(losses) / len(losses), baseline


@pytest.mark.parametrize("packing", ["pad", "best_fit"])
def test_the_loss_is_that_of_the_definition(answers: Path, packing: str) -> None:
    window = open_data(answers, packing).window(0)
    decoder, objective = make_policy(), KTO(beta=0.5)
    micro_batch = prepare(objective, decoder, window.micro_batches[0], WHOLE)
    result = decoder(
        micro_batch.input_ids,
        document_ids=micro_batch.document_ids,
        document_offsets=micro_batch.document_offsets,
        head=objective.head(micro_batch, WHOLE),
    )
    figures = {name: float(value) for name, value in result.figures.items()}
    sums = ObjectiveSums({DOCUMENTS: float(result.terms[DOCUMENTS].detach())}, figures, objective.count(window))
    measured = objective.measure(sums)
    documents = split(window)
    loss, baseline = expected_loss(decoder, documents, 0.5)
    assert measured["loss"] == pytest.approx(loss, rel=1e-5)
    assert measured["baseline"] == pytest.approx(baseline, rel=1e-4)
    assert measured["good"] == pytest.approx(sum(value for *_, value in documents) / len(documents))
    result.terms[DOCUMENTS].backward()
    assert any(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in decoder.parameters())


def test_the_baseline_has_each_prompt_with_the_whole_next_answer(answers: Path) -> None:
    window = open_data(answers, "pad").window(0)
    made = _mismatch(window.micro_batches[0])
    found = split(AccumulationWindow((made.with_tensors({**made.tensors, f"extra.{VALUES}": made.labels}),), 0, 0, 0))
    documents = split(window)
    others = [*documents[1:], documents[0]]
    expected = [(prompt, answer) for (prompt, *_), (_, answer, _) in zip(documents, others, strict=True)]
    assert [(prompt, answer) for prompt, answer, _ in found] == expected
