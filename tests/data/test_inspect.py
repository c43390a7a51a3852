import os
import re
from dataclasses import replace

import pytest

from genesis.base.errors import UserError
from genesis.cli.main import main
from genesis.data.corpus import find_fault, open_corpus
from genesis.data.inspect import draw_samples, verify_corpus
from genesis.data.manifest import read_manifest, write_manifest
from genesis.data.plans import measure_source
from genesis.data.prepare import prepare_corpus
from tests.data.corpus_support import make_options, make_texts, make_tokenizer


@pytest.fixture
def corpus(tmp_path):
    options = make_options(tmp_path)
    prepare_corpus(options)
    return options.corpus


def flip_bit(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_whole_corpus_verifies(corpus):
    manifest = read_manifest(corpus)
    shards = [shard for split in (manifest.train, manifest.validation) for source in split for shard in source.shards]
    assert list(verify_corpus(corpus)) == shards
    assert all(find_fault(corpus, manifest, shard) is None for shard in shards)


def test_each_kind_of_damage_is_named(corpus):
    manifest = read_manifest(corpus)
    first, second, third, fourth = manifest.train[0].shards[:4]
    flip_bit(corpus / first.path, 17)
    os.truncate(corpus / second.path, second.file_bytes - 2)
    flip_bit(corpus / f"{third.path}.index", 0)
    (corpus / fourth.path).unlink()
    assert "has hash" in find_fault(corpus, manifest, first)
    assert f"the manifest lists {second.file_bytes:,}" in find_fault(corpus, manifest, second)
    assert ".ds.index has hash" in find_fault(corpus, manifest, third)
    assert "is missing" in find_fault(corpus, manifest, fourth)
    with pytest.raises(UserError, match=rf"{first.path} has hash .*the manifest lists .* \(and 3 more\); "):
        list(verify_corpus(corpus))


def test_a_tokenizer_that_is_not_the_corpuss_is_refused(corpus, tmp_path):
    other = make_tokenizer(tmp_path / "other", vocab_size=330)
    (corpus / "tokenizer.model").write_bytes(other.read_bytes())
    with pytest.raises(UserError, match=r"has the tokenizer [0-9a-f]{16}, but was made with"):
        list(verify_corpus(corpus))


def test_samples_are_documents_of_the_split_from_their_beginning(corpus):
    texts = make_texts(120, 1) + make_texts(60, 2) + make_texts(60, 3)
    samples = draw_samples(open_corpus(corpus), "validation", num_samples=20, sample_tokens=300, seed=1)
    assert samples == draw_samples(open_corpus(corpus), "validation", 20, 300, seed=1)
    assert {sample.source for sample in samples} == {"web", "book", "table"}
    for sample in samples:
        *whole, last = sample.texts
        assert all(text in texts for text in whole)
        assert any(text.startswith(last.removesuffix("\ufffd")) for text in texts)
        assert sample.is_cut or last in texts
        assert sum(sample.num_tokens) >= 300 or not sample.is_cut


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a prepared corpus"),
        ("{", "is damaged"),
        ("[]", "has schema None"),
        ('{"schema_version": 99}', "has schema 99, but this version reads 1"),
        ('{"schema_version": 1, "train": []}', "is damaged"),
        ('{"schema_version": 1, "train": [{"shards": [{"size": 1}]}], "validation": []}', "is damaged"),
    ],
)
def test_a_directory_without_a_good_manifest_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=message):
        read_manifest(tmp_path)


def test_a_split_without_documents_is_refused(corpus):
    manifest = replace(read_manifest(corpus), validation=())
    write_manifest(corpus, manifest)
    with pytest.raises(UserError, match="has no validation documents"):
        draw_samples(open_corpus(corpus), "validation", 1, 10, 0)


def test_the_commands_show_and_verify_a_corpus(corpus, capsys):
    assert main(["data", "inspect", str(corpus), "--num_samples", "2", "--sample_tokens", "5000"]) == 0
    page = capsys.readouterr().out
    assert "web" in page
    assert page.count("</s>") >= 2
    assert main(["data", "verify", str(corpus)]) == 0
    assert "all as in the manifest" in capsys.readouterr().out
    flip_bit(corpus / read_manifest(corpus).validation[0].shards[0].path, 3)
    assert main(["data", "verify", str(corpus)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("genesis: error: ")


def rows_of_packings(page, seq_len):
    """Packing and source to the other cells, of the lines that have this seq_len."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in page.splitlines()]
    return {tuple(cells[:2]): cells[3:] for cells in lines if cells[2:3] == [str(seq_len)]}


def test_inspect_tells_what_each_packing_makes_of_each_source(corpus, capsys):
    assert main(["data", "inspect", str(corpus), "--num_samples", "0"]) == 0
    assert "best_fit" not in capsys.readouterr().out
    assert main(["data", "plan", str(corpus), "--packing", "best_fit", "--seq_len", "48"]) == 0
    planned = rows_of_packings(capsys.readouterr().out, 48)
    assert main(["data", "inspect", str(corpus), "--num_samples", "0", "--seq_len", "48"]) == 0
    rows = rows_of_packings(capsys.readouterr().out, 48)
    assert set(rows) == {(p, s) for p in ("chunk", "best_fit", "pad") for s in ("web", "book", "table")}
    assert {key: cells for key, cells in rows.items() if key[0] == "best_fit"} == planned
    for source in open_corpus(corpus).train:
        for packing, plan in (("chunk", "not needed"), ("best_fit", "ready"), ("pad", "none")):
            figures = measure_source(source, 48, packing)
            assert rows[packing, source.name] == [
                str(figures.num_sequences),
                f"{figures.fill(48):.2%}",
                f"{figures.num_truncated_tokens / figures.num_valid_tokens:.2%}",
                f"{figures.num_documents_cut} ({figures.num_documents_cut / figures.num_documents:.2%})",
                str(figures.num_labels - figures.num_valid_tokens),
                plan,
            ]
        fills = [measure_source(source, 48, packing).fill(48) for packing in ("chunk", "best_fit", "pad")]
        assert fills == sorted(fills, reverse=True)


def test_a_plan_of_other_shards_is_shown_as_such(corpus, capsys):
    assert main(["data", "plan", str(corpus), "--seq_len", "32"]) == 0
    manifest = read_manifest(corpus)
    first, *others = manifest.train
    write_manifest(corpus, replace(manifest, train=(replace(first, shards=first.shards[:-1]), *others)))
    capsys.readouterr()
    assert main(["data", "inspect", str(corpus), "--num_samples", "0"]) == 0
    assert all(cells[-1] == "of other shards" for cells in rows_of_packings(capsys.readouterr().out, 32).values())


def test_a_second_plan_has_nothing_to_do(corpus, capsys):
    for seq_len, expected in (("32", False), ("32", True), ("16", False)):
        assert main(["data", "plan", str(corpus), "--seq_len", seq_len]) == 0
        assert capsys.readouterr().out.startswith("nothing to do: the plan was complete") == expected


def test_verify_reads_plans_too(corpus, capsys):
    assert main(["data", "plan", str(corpus), "--packing", "pad", "--seq_len", "32"]) == 0
    assert main(["data", "verify", str(corpus)]) == 0
    assert "plans: pad at seq_len 32" in capsys.readouterr().out
    flip_bit(corpus / "packing/pad-32/web.lengths", 0)
    assert main(["data", "verify", str(corpus)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "web.lengths has hash" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq_len", "0"], "seq_len is 0"),
        (["--packing", "chunk", "--seq_len", "8"], "chunk"),
        (["--packing", "pad"], "seq_len"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(corpus, arguments, message, capsys):
    assert main(["data", "plan", str(corpus), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    "command", ["data prepare", "data plan", "data inspect", "data verify", "tokenizer train", "tokenizer inspect"]
)
def test_help_tells_every_option(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    page = capsys.readouterr().out
    assert f"usage: genesis {command}" in page
    assert "--config" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenzer", "x"], "did you mean tokenizer?"),
        (["--shard_tokens", "many"], "shard_tokens is many: give a whole number"),
        (["--sources", "[{name: a, paths: [x], weights: 2}]"], "did you mean weight?"),
        ([], "arguments are required: name, tokenizer, sources"),
    ],
)
def test_a_bad_option_is_one_line_with_the_nearest_name(arguments, message, capsys):
    assert main(["data", "prepare", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
