"""Corpora of pairs: two documents under one number, whole in one split, read back as windows without mixing."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genesis.base.errors import UserError
from genesis.chat.options import ChatOptions
from genesis.chat.render import ChatRenderer
from genesis.chat.template import ChatTemplate
from genesis.cli.data import inspect_main, verify_main
from genesis.data.clean.plan import CleanOptions
from genesis.data.corpus import open_corpus
from genesis.data.corpus_data import CorpusData
from genesis.data.loader import Ranks
from genesis.data.manifest import read_manifest, write_manifest
from genesis.data.pair_windows import ANSWERS, CHOSEN_TOKENS, PAIRS, SomePairWindows
from genesis.data.pairs import PairedSource, PairSet, spread_validation
from genesis.data.plans import write_plan
from genesis.data.prepare import prepare_corpus
from genesis.data.shards import hash_file
from genesis.data.sources import SourceOptions
from genesis.data.training_data import TrainingOptions
from genesis.data.window import IGNORE_INDEX
from genesis.evaluate.heldout import open_validation_set
from genesis.tokenizer.open import open_tokenizer
from tests.chat.support import CHATML
from tests.data.corpus_support import read_tree
from tests.data.pair_corpora import NUM_PAIRS, RECORDS, SEQ_LEN, options_for, write_files
from tests.data.test_conversations import run_here, write_lines


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genesis.data.prepare.run_jobs", run_here)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pairs")
    write_files(directory)
    return directory


@pytest.fixture(scope="module")
def corpus(directory: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("genesis.data.prepare.run_jobs", run_here)
        options = options_for(directory, shard_tokens=700)
        prepare_corpus(options)
    return options.corpus


def open_pairs(corpus: Path) -> PairSet:
    opened = open_corpus(corpus)
    return PairSet([PairedSource(one) for one in opened.train], [PairedSource(one) for one in opened.validation])


def training(corpus: Path, **changes: Any) -> CorpusData:
    options = TrainingOptions(SEQ_LEN, 2, 4, **changes)
    data = CorpusData(corpus, options, verify_hashes="first_touch", tokenizer_hash=None)
    data.open(Ranks())
    return data


def rendered(directory: Path, record: dict[str, Any], side: str) -> tuple[list[int], list[bool]]:
    """The reference: the conversation as the template writes it, of which only the answer is learned."""
    renderer = ChatRenderer(open_tokenizer(directory / "tokenizer"), ChatTemplate(CHATML, "chatml"))
    chat = renderer.render([*record["prompt"], *record[side]], labels="last")
    return chat.ids.tolist(), chat.trained.tolist()


def test_each_pair_is_two_documents_under_one_number_in_one_split(directory: Path, corpus: Path) -> None:
    pairs = open_pairs(corpus)
    assert len(pairs) == NUM_PAIRS
    assert 0 < pairs.first_of_validation < NUM_PAIRS
    assert len(read_manifest(corpus).train[0].shards) > 1
    found = []
    for number in range(NUM_PAIRS):
        _, chosen, rejected, _ = pairs.read(number)
        found.append(
            tuple((tuple(answer.tokens.tolist()), tuple(answer.has_label.tolist())) for answer in (chosen, rejected))
        )
    wanted = [
        tuple(tuple(map(tuple, rendered(directory, record, side))) for side in ("chosen", "rejected"))
        for record in RECORDS
    ]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("path", ["pairs.parquet", "pairs.arrow", "openai.jsonl"])
def test_every_kind_of_file_and_form_gives_the_same_pairs(directory: Path, corpus: Path, path: str) -> None:
    options = options_for(directory, path, name=path)
    prepare_corpus(options)
    one, other = open_pairs(corpus), open_pairs(options.corpus)

    def tokens(pairs: PairSet) -> list[list[list[int]]]:
        read = (pairs.read(number) for number in range(len(pairs)))
        return sorted([pair.chosen.tokens.tolist(), pair.rejected.tokens.tolist()] for pair in read)

    assert tokens(one) == tokens(other)
    assert one.first_of_validation == other.first_of_validation


def test_a_manifest_of_pairs_has_a_schema_that_earlier_versions_refuse(corpus: Path) -> None:
    raw = json.loads((corpus / "manifest.json").read_text())
    assert raw["schema_version"] == 5
    assert raw["chat"]["is_paired"] is True
    assert raw["chat"]["sources"]["pairs"]["num_written"] == NUM_PAIRS


def test_a_manifest_of_conversations_keeps_its_schema_and_fields(corpus: Path, tmp_path: Path) -> None:
    manifest = read_manifest(corpus)
    assert manifest.chat is not None
    write_manifest(tmp_path, replace(manifest, chat=replace(manifest.chat, is_paired=False)))
    raw = json.loads((tmp_path / "manifest.json").read_text())
    assert raw["schema_version"] == 4
    assert "is_paired" not in raw["chat"]


# Windows


def read_back(window: Any) -> list[tuple[int, list[tuple[list[int], list[int]]]]]:
    """Each pair of a window with the inputs and labels of its two answers."""
    found = []
    for micro_batch in window.micro_batches:
        owners = micro_batch.extra[ANSWERS].flatten()
        inputs, labels = micro_batch.input_ids.flatten(), micro_batch.labels.flatten()
        is_padding = (micro_batch.document_ids == 1).flatten() if len(micro_batch.input_ids) > 1 else owners < 0
        for index, number in enumerate(micro_batch.extra[PAIRS].tolist()):
            sides = []
            for answer in (2 * index, 2 * index + 1):
                own = (owners == answer) & ~is_padding
                sides.append((inputs[own].tolist(), labels[own].tolist()))
            found.append((number, sides))
    return found


@pytest.mark.parametrize("pads_pairs", [False, True], ids=["joined", "padded"])
def test_a_window_holds_the_answers_of_its_pairs_and_nothing_of_others(corpus: Path, pads_pairs: bool) -> None:
    data = training(corpus)
    data.open(Ranks(), pads_pairs=pads_pairs)
    pairs = data.pairs
    assert pairs is not None
    window = data.window(0)
    for number, sides in read_back(window):
        for answer, (inputs, labels) in zip(pairs.read(number)[1:3], sides, strict=True):
            assert inputs == answer.tokens[:-1].tolist()
            assert labels == np.where(answer.has_label[1:], answer.tokens[1:], IGNORE_INDEX).tolist()
    assert window.num_units[PAIRS] == 4
    valid = [(micro.labels != IGNORE_INDEX) for micro in window.micro_batches]
    assert window.num_valid_tokens == sum(int(one.sum()) for one in valid)
    chosen = [one & (micro.extra[ANSWERS] % 2 == 0) for one, micro in zip(valid, window.micro_batches, strict=True)]
    assert window.num_units[CHOSEN_TOKENS] == sum(int(one.sum()) for one in chosen)
    shapes = {tuple(micro.input_ids.shape) for micro in window.micro_batches}
    assert (shapes == {(4, SEQ_LEN)}) == pads_pairs


@pytest.mark.parametrize("pads_pairs", [False, True], ids=["joined", "padded"])
def test_documents_are_numbered_within_rows_as_their_offsets_say(corpus: Path, pads_pairs: bool) -> None:
    data = training(corpus)
    data.open(Ranks(), pads_pairs=pads_pairs)
    for micro_batch in data.window(8).micro_batches:
        offsets = micro_batch.document_offsets
        assert offsets is not None
        assert int(offsets[-1]) == micro_batch.input_ids.numel()
        flat, owners = micro_batch.document_ids.flatten(), micro_batch.extra[ANSWERS].flatten()
        for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            assert start < end
            assert len(set(flat[start:end].tolist())) == len(set(owners[start:end].tolist())) == 1


def test_the_windows_of_two_ranks_are_those_of_one(corpus: Path) -> None:
    one, two = training(corpus), [training(corpus) for _ in range(2)]
    for rank, data in enumerate(two):
        data.open(Ranks(rank, 2))
    for position in (0, 4, 40):
        whole = read_back(one.window(position))
        assert whole == [pair for data in two for pair in read_back(data.window(position))]


def test_an_epoch_reads_every_pair_once_and_ends(corpus: Path) -> None:
    data = training(corpus, num_epochs=1)
    assert data.pairs is not None
    num_train = data.pairs.first_of_validation
    assert data.cursor.order.end == num_train
    seen = [number for position in range(0, num_train // 4 * 4, 4) for number, _ in read_back(data.window(position))]
    assert len(seen) == len(set(seen)) == num_train // 4 * 4
    assert all(number < num_train for number in seen)


def test_a_run_continues_with_the_next_pair_and_counts_its_tokens(corpus: Path) -> None:
    whole = training(corpus)
    for position in range(0, 12, 4):
        whole.advance(whole.window(position))
    state = whole.state()
    assert state["packing"] == "pairs"
    resumed = training(corpus)
    resumed.load_state(state)
    assert resumed.cursor.position == 12
    assert resumed.usage == whole.usage
    assert read_back(resumed.window(12)) == read_back(whole.window(12))


def test_a_run_does_not_continue_on_other_pairs(corpus: Path, directory: Path) -> None:
    data = training(corpus)
    data.advance(data.window(0))
    options = options_for(directory, name="reversed")
    write_lines(directory / "reversed.jsonl", RECORDS[::-1])
    prepare_corpus(replace(options, sources=(replace(options.sources[0], paths=(str(directory / "reversed.jsonl"),)),)))
    with pytest.raises(UserError, match="was trained with plans"):
        training(options.corpus).load_state(data.state())


def test_a_run_does_not_continue_with_other_margins_but_from_a_state_without_them(directory: Path) -> None:
    found = []
    for name, factor in (("rated", 1), ("rated_otherwise", 2)):
        path = directory / f"{name}.jsonl"
        write_lines(path, [{**record, "margin": factor * number % 4} for number, record in enumerate(RECORDS)])
        source = SourceOptions("pairs", (str(path),), chat="pairs", value_field="margin")
        options = options_for(directory, name=name, sources=(source,))
        prepare_corpus(options)
        found.append(training(options.corpus))
    one, other = found
    state = one.state()
    one.load_state(state)
    with pytest.raises(UserError, match=r"was trained with answers .* on, with its margins and values"):
        other.load_state(state)
    del state["answers"]
    other.load_state(state)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("limit", [None, 5])
def test_validation_reads_every_pair_once_on_equally_many_windows(
    corpus: Path, num_ranks: int, limit: int | None
) -> None:
    pairs = open_pairs(corpus)
    numbers = spread_validation(pairs, limit)
    assert len(numbers) == (limit or len(pairs) - pairs.first_of_validation)
    found = []
    for rank in range(num_ranks):
        windows = SomePairWindows(
            pairs, numbers, training(corpus).sequence_format, 2, Ranks(rank, num_ranks), is_padded=False
        )
        for index in range(len(windows)):
            window = windows.window(index)
            present = [number for number, _ in read_back(window) if number >= 0]
            assert window.num_units[PAIRS] == len(present)
            assert window.micro_batches[0].input_ids.numel() >= 1
            found += present
    assert sorted(found) == numbers


def test_a_window_moves_to_a_device_with_its_pairs(corpus: Path) -> None:
    window = training(corpus).window(0).to(torch.device("meta"))
    assert window.micro_batches[0].extra[PAIRS].device.type == "meta"
    assert window.num_units[PAIRS] == 4


# What is cut, dropped or refused


def test_long_pairs_are_refused_cut_or_dropped_whole(directory: Path, corpus: Path) -> None:
    longest = max(source.longest for source in open_pairs(corpus).train)
    limit = longest - 10

    def prepare(on_long: Any) -> dict[str, int]:
        chat = ChatOptions(template=directory / "chatml.jinja", max_tokens=limit, on_long=on_long)
        options = options_for(directory, name=f"long-{on_long}", chat=chat)
        manifest = prepare_corpus(options)
        assert max(source.longest for source in open_pairs(options.corpus).train) <= limit
        assert manifest.chat is not None
        return dict(manifest.chat.sources["pairs"])

    with pytest.raises(UserError, match=r"pairs.jsonl, line \d+: the longer answer of the pair has, with its prompt, "):
        prepare("error")
    cut, dropped = prepare("cut"), prepare("drop")
    assert cut["num_cut"] == dropped["num_long"] > 0
    assert cut["num_written"] == NUM_PAIRS
    assert dropped["num_written"] == NUM_PAIRS - dropped["num_long"]


def test_a_pair_whose_difference_is_cut_off_is_dropped(directory: Path) -> None:
    prompt = [{"role": "user", "content": "a " * 60}]
    path = write_lines(directory / "cut.jsonl", [*RECORDS[:2], {**RECORDS[0], "prompt": prompt}])
    chat = ChatOptions(template=directory / "chatml.jinja", max_tokens=60, on_long="cut")
    options = options_for(directory, path.name, name="cut", chat=chat, validation_fraction=0.0)
    manifest = prepare_corpus(options)
    assert manifest.chat is not None
    assert manifest.chat.sources["pairs"]["num_unlearned"] == 1


def test_an_answer_longer_than_a_sequence_is_refused_with_both_remedies(corpus: Path) -> None:
    data = CorpusData(corpus, TrainingOptions(8, 2, 4), verify_hashes="never", tokenizer_hash=None)
    with pytest.raises(UserError, match=r"data.seq_len is 8: raise it to \d+, or prepare the corpus with chat.max_tok"):
        data.open(Ranks())


BAD_PAIRS = {
    "differ": {
        "chosen": [{"role": "user", "content": "a"}, *RECORDS[0]["chosen"]],
        "rejected": [{"role": "user", "content": "b"}, *RECORDS[0]["rejected"]],
    },
    "is empty": {**RECORDS[0], "chosen": ""},
    "the same answer": {**RECORDS[0], "rejected": RECORDS[0]["chosen"]},
}


@pytest.mark.parametrize("line", BAD_PAIRS)
def test_a_bad_pair_is_refused_with_its_line_or_counted(directory: Path, line: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl", [RECORDS[0], BAD_PAIRS[line], *RECORDS[1:5]])
    source = SourceOptions("pairs", (str(path),), chat="pairs")
    options = options_for(directory, sources=(source,), out=tmp_path, validation_fraction=0.0)
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}, line 2: .*{line}.*chat.on_bad_row: skip"):
        prepare_corpus(options)
    options = replace(options, name="skipped", chat=replace(options.chat, on_bad_row="skip"))
    manifest = prepare_corpus(options)
    assert manifest.chat is not None
    assert manifest.chat.sources["pairs"]["num_bad"] == 1
    assert manifest.train[0].num_documents == 2 * 5


def test_a_template_that_writes_the_prompt_in_two_ways_is_refused(directory: Path, tmp_path: Path) -> None:
    template = tmp_path / "two-ways.jinja"
    template.write_text(
        "{% if messages[-1].content.startswith('bad') %}<|im_start|>system\nBad<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    options = options_for(directory, out=tmp_path, chat=ChatOptions(template=template))
    with pytest.raises(UserError, match=r"pairs.jsonl, line 1: .*writes the prompt of the pair in two ways"):
        prepare_corpus(options)


def test_what_has_no_meaning_for_pairs_is_refused_in_one_line(directory: Path, corpus: Path) -> None:
    pairs = SourceOptions("pairs", (str(directory / "pairs.jsonl"),), chat="pairs")
    chat = SourceOptions("chat", (str(directory / "openai.jsonl"),), chat="auto")
    refusals = [
        (lambda: options_for(directory, sources=(pairs, chat)), "prepare two corpora"),
        (lambda: options_for(directory, packing="best_fit", seq_len=8), "needs no plan"),
        (lambda: options_for(directory, chat=ChatOptions(labels="all")), "chat.labels is all"),
        (lambda: write_plan(open_corpus(corpus), "best_fit", 32), "reads without a plan"),
        (lambda: training(corpus, packing="pad"), "which none joins"),
        (lambda: CleanOptions((pairs,), directory / "clean", ()), "which the filters do not take"),
        (lambda: prepare_corpus(options_for(directory, sources=(chat,), name="auto")), "which chat: pairs reads"),
        (
            lambda: open_validation_set(corpus, 32, open_tokenizer(directory / "tokenizer")),
            "half of which nobody prefers",
        ),
    ]
    for refused, line in refusals:
        with pytest.raises(UserError, match=line) as raised:
            refused()
        assert "\n" not in str(raised.value)


# Forged and damaged pairs


def forge(corpus: Path, target: Path, change: Any) -> Path:
    """Copies a corpus and changes the tokens or the ends of its first shard, with a manifest that vouches for both."""
    for name, data in read_tree(corpus).items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    manifest = read_manifest(target)
    (source,) = manifest.train
    first, *rest = source.shards
    shard = target / first.path
    tokens, ends = np.fromfile(shard, "<u2"), np.fromfile(f"{shard}.index", "<u8")
    tokens, ends = change(tokens, ends)
    tokens.tofile(shard)
    ends.tofile(f"{shard}.index")
    forged = replace(
        first, hash=hash_file(shard), index_hash=hash_file(Path(f"{shard}.index")), num_documents=len(ends)
    )
    write_manifest(target, replace(manifest, train=(replace(source, shards=(forged, *rest)),)))
    return target


def change_prompt(tokens: Any, ends: Any) -> Any:
    tokens[int(ends[0])] += 1
    return tokens, ends


def lose_document(tokens: Any, ends: Any) -> Any:
    return tokens, ends[1:]


def move_border(tokens: Any, ends: Any) -> Any:
    ends[0] += 3
    return tokens, ends


def read_an_epoch(corpus: Path) -> None:
    data = training(corpus, num_epochs=1)
    for position in range(0, (data.cursor.order.end or 0) // 4 * 4, 4):
        data.window(position)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (change_prompt, "has two prompts"),
        (lose_document, "are no pairs of a chosen"),
        (move_border, "pair 0 of source"),
    ],
)
def test_forged_pairs_are_found_by_verify_and_before_they_are_trained(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, line: str
) -> None:
    forged = forge(corpus, tmp_path / "forged", change)
    assert verify_main([str(forged)]) == 1
    assert line in capsys.readouterr().err
    with pytest.raises(UserError, match=line):
        read_an_epoch(forged)


def test_verify_accepts_the_pairs_and_inspect_shows_one_with_its_learned_tokens(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_main([str(corpus)]) == 0
    capsys.readouterr()
    assert inspect_main([str(corpus), "--num_samples", "1", "--seq_len", "32"]) == 0
    shown = capsys.readouterr().out
    assert f"pairs: {NUM_PAIRS} pairs of answers" in shown
    assert "tokens of an answer with its prompt: median" in shown
    assert re.search(r"chosen: [^⟦]*⟦good \d+", shown.replace("\n", " "))
    assert re.search(r"rejected: [^⟦]*⟦bad \d+", shown.replace("\n", " "))
    assert "learned" in shown
