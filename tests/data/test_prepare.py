import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from genesis.base.errors import UserError
from genesis.data.manifest import read_manifest
from genesis.data.plans import list_plans
from genesis.data.prepare import plan_units, prepare_corpus
from genesis.data.shards import hash_file
from genesis.data.sources import InputFile, SourceOptions
from genesis.data.tokenize_worker import is_validation
from genesis.tokenizer.open import open_tokenizer
from tests.commands import run_module
from tests.data.corpus_support import (
    make_options,
    make_texts,
    make_tokenizer,
    read_shard,
    read_tree,
    watch_stage,
    write_jsonl,
)

COMMAND = """
import json, os, resource, signal, sys
from genesis.cli.main import main

corpus, kill_at, file_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
events = 0

def kill_at_event(event, arguments):
    # Whatever changes the disk: every file opened for writing, renamed or removed, every directory made.
    global events
    if event == "open" and not (isinstance(arguments[1], str) and "w" in arguments[1]):
        return
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and str(arguments[0]).startswith(corpus):
        events += 1
        if events == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

if file_bytes:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
sys.addaudithook(kill_at_event)
status = main(sys.argv[4:])
print("events:", events)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A directory with three sources and a corpus made of them without interruption."""
    directory = tmp_path_factory.mktemp("inputs")
    prepare_corpus(make_options(directory))
    return directory


def run_command(options, config, kill_at=0, file_bytes=0):
    fields = {key: str(value) if key in ("out", "tokenizer") else value for key, value in asdict(options).items()}
    fields["sources"] = [
        {key: list(value) if isinstance(value, tuple) else value for key, value in source.items()}
        for source in fields["sources"]
    ]
    config.write_text(yaml.safe_dump(fields))
    script = config.with_suffix(".py")
    script.write_text(COMMAND)
    arguments = (str(options.corpus), str(kill_at), str(file_bytes), "data", "prepare", "--config", str(config))
    if file_bytes:  # a forked worker would have the limits of the server that forks
        return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=120)
    return run_module(str(script), *arguments, timeout=120)


@pytest.mark.slow
def test_a_second_prepare_has_nothing_to_do_unless_a_plan_is_missing(inputs):
    options = make_options(inputs, out=inputs / "twice", num_workers=1)
    outputs = [run_command(options, inputs / "twice.yaml").stdout for _ in range(2)]
    outputs.append(run_command(replace(options, packing="pad", seq_len=16), inputs / "plan.yaml").stdout)
    assert ["nothing to do" in output for output in outputs] == [False, True, False]


def test_every_document_is_in_one_split_once_and_in_order(inputs):
    options = make_options(inputs)
    manifest = read_manifest(options.corpus)
    tokenizer = open_tokenizer(options.corpus)
    for name, texts in (("web", make_texts(120, 1)), ("book", make_texts(60, 2)), ("table", make_texts(60, 3))):
        for split, records in (("train", manifest.train), ("validation", manifest.validation)):
            (record,) = (record for record in records if record.name == name)
            wanted = [text for text in texts if is_validation(text.encode(), 0, 0.1) == (split == "validation")]
            found = [
                document
                for shard in record.shards
                for document in read_shard(options.corpus / shard.path, manifest.token_dtype)
            ]
            assert found == [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in wanted]
            assert record.num_documents == len(wanted) > 0
            assert record.num_text_bytes == sum(len(text.encode()) for text in wanted)
            assert record.num_tokens == sum(map(len, found))


def test_the_manifest_says_what_the_shards_are(inputs):
    corpus = make_options(inputs).corpus
    manifest = read_manifest(corpus)
    tokenizer = open_tokenizer(inputs)
    assert (manifest.tokenizer_hash, manifest.vocab_size) == (tokenizer.hash, tokenizer.vocab_size)
    assert (manifest.bos_id, manifest.eos_id, manifest.token_dtype) == (tokenizer.bos_id, tokenizer.eos_id, "uint16")
    assert {source.name: source.weight for source in manifest.train} == {"web": 2, "book": 1, "table": 1}
    shards = [shard for split in (manifest.train, manifest.validation) for source in split for shard in source.shards]
    assert len(shards) > 10
    for shard in shards:
        path = corpus / shard.path
        assert path.stat().st_size == shard.file_bytes == 2 * shard.num_tokens
        assert (hash_file(path), hash_file(path.with_name(path.name + ".index"))) == (shard.hash, shard.index_hash)
        assert 0 < shard.num_tokens < 2 * 2_000
    assert {str(path.relative_to(corpus)) for path in corpus.rglob("*.ds")} == {shard.path for shard in shards}


def test_a_finished_corpus_holds_no_staging(inputs):
    names = sorted(path.name for path in (make_options(inputs).corpus / ".prepare").iterdir())
    assert names == ["lock", "parts", "plan.json"]


def test_the_number_of_workers_does_not_change_a_byte(inputs):
    wanted = read_tree(make_options(inputs).corpus)
    for num_workers in (1, 8):  # 8 are more than units: a worker gets several threads
        options = make_options(inputs, out=inputs / f"workers-{num_workers}", num_workers=num_workers)
        prepare_corpus(options)
        assert read_tree(options.corpus) == wanted


def test_a_finished_corpus_is_left_as_it_is(inputs):
    options = make_options(inputs)
    times = {path: path.stat().st_mtime_ns for path in options.corpus.rglob("*.ds")}
    assert prepare_corpus(replace(options, num_workers=1)) == read_manifest(options.corpus)
    assert {path: path.stat().st_mtime_ns for path in options.corpus.rglob("*.ds")} == times


@pytest.mark.slow
def test_killed_at_one_write_after_another_it_ends_as_if_never_killed(inputs):
    options = make_options(inputs, out=inputs / "killed")
    kills = 0
    made = {}
    for kill_at in (1, 2, 3, 4, 5, 6, 7, 8, 11, 14, 17, 20, 23, 27, 10_000):
        result = run_command(options, inputs / "killed.yaml", kill_at=kill_at)
        shards = {
            path: path.stat().st_mtime_ns for path in options.corpus.rglob("*.json") if path.parent.name == "parts"
        }
        assert made.items() <= shards.items(), "a finished part was made again"
        made = shards
        if result.returncode == 0:
            break
        assert result.returncode == -signal.SIGKILL, result.stderr
        kills += 1
    assert result.returncode == 0, result.stderr
    assert kills >= 8
    assert read_tree(options.corpus) == read_tree(make_options(inputs).corpus)


@pytest.mark.slow
def test_a_kill_between_the_last_shard_and_the_manifest_leaves_the_same_corpus(inputs):
    counted = make_options(inputs, out=inputs / "counted", num_workers=1)
    num_events = int(run_command(counted, inputs / "late.yaml").stdout.rpartition("events: ")[2])
    for kill_at in (num_events - 1, num_events):  # the manifest is staged, it gets its name
        options = make_options(inputs, out=inputs / f"late-{kill_at}", num_workers=1)
        assert run_command(options, inputs / "late.yaml", kill_at=kill_at).returncode == -signal.SIGKILL
        assert not (options.corpus / "manifest.json").exists()
        assert run_command(options, inputs / "late.yaml").returncode == 0
        assert read_tree(options.corpus) == read_tree(counted.corpus) == read_tree(make_options(inputs).corpus)


@pytest.mark.usefixtures("started_workers")
def test_a_killed_worker_ends_the_run_in_one_line_and_the_next_run_goes_on(inputs, monkeypatch):
    options = make_options(inputs, out=inputs / "worker", num_workers=1)
    killed = []

    def kill_a_worker(shown):
        if shown.note and not killed:
            killed.extend(find_workers())
            for process in killed:
                os.kill(process, signal.SIGKILL)

    watch_stage(monkeypatch, "genesis.data.prepare", kill_a_worker)
    with pytest.raises(UserError, match=r"a worker .* ended by signal 9 .*run the same command again"):
        prepare_corpus(options)
    assert len(killed) == 1
    prepare_corpus(options)
    assert read_tree(options.corpus) == read_tree(make_options(inputs).corpus)


def find_workers():
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    for child in children:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if "tokenize_worker import main" in Path(f"/proc/{child}/cmdline").read_text():
                yield int(child)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_finished_shards_survive(inputs):
    write_jsonl(inputs / "large.jsonl", make_texts(2_000, seed=4))
    sources = (*make_options(inputs).sources, SourceOptions("large", (str(inputs / "large.jsonl"),)))
    options = make_options(inputs, out=inputs / "full", num_workers=1, sources=sources, shard_tokens=50_000)
    result = run_command(options, inputs / "full.yaml", file_bytes=50_000)
    assert result.returncode == 2
    *progress, line = result.stderr.splitlines()
    assert not [shown for shown in progress if "error" in shown]
    assert line.startswith(f"genesis: error: cannot write to {options.corpus}/.prepare/staging-")
    assert ".ds (File too large); " in line
    assert "run the same command again: finished shards are kept" in line
    survivors = read_tree(options.corpus)
    assert {path.split("/")[1] for path in survivors if path.endswith(".ds")} == {"web", "book", "table"}
    whole = replace(options, out=inputs / "roomy")
    prepare_corpus(whole)
    assert survivors.items() <= read_tree(whole.corpus).items()
    assert run_command(options, inputs / "full.yaml").returncode == 0
    assert read_tree(options.corpus) == read_tree(whole.corpus)


def test_progress_counts_all_bytes_and_only_new_tokens(inputs, monkeypatch):
    options = make_options(inputs, out=inputs / "progress")
    seen = []

    def stop_in_the_middle(shown):
        seen.append(replace(shown))
        if shown.done > shown.total // 2 and not is_second:
            raise KeyboardInterrupt

    is_second = False
    watch_stage(monkeypatch, "genesis.data.prepare", stop_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(options)
    first, is_second = list(seen), True
    prepare_corpus(options)
    second = seen[len(first) :]
    assert second[0].done <= first[-1].done
    assert (second[0].note, second[0].first) == ("", second[0].done)
    assert second[-1].done == second[-1].total == first[0].total
    assert second[-1].note
    assert 0 < second[-1].first < second[-1].total


def begin_and_stop(options):
    def stop(shown):
        if shown.note:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as monkeypatch:
        watch_stage(monkeypatch, "genesis.data.prepare", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard_tokens": 5_000}, "shard_tokens was 2000 and is 5000"),
        ({"validation_fraction": 0.2}, "validation_fraction was 0.1 and is 0.2"),
        ({"seed": 1}, "seed was 0 and is 1"),
    ],
)
def test_a_changed_option_is_refused_by_name(inputs, change, message):
    with pytest.raises(UserError, match=f"was started with different options: {message}; .*--restart"):
        prepare_corpus(make_options(inputs, **change))


def test_changed_inputs_are_refused_by_name_and_restart_starts_again(tmp_path):
    options = make_options(tmp_path)
    begin_and_stop(options)
    write_jsonl(tmp_path / "web.jsonl", make_texts(50, seed=9))
    with pytest.raises(UserError, match=r"files\.web: .*web\.jsonl\.bytes was \d+ and is \d+; .*--restart"):
        prepare_corpus(options)
    with pytest.raises(UserError, match=r"sources\.book is missing"):
        prepare_corpus(replace(options, sources=options.sources[:1]))
    manifest = prepare_corpus(options, restart=True)
    fresh = replace(options, out=tmp_path / "fresh")
    assert prepare_corpus(fresh) == manifest
    assert read_tree(options.corpus) == read_tree(fresh.corpus)


def test_an_attempt_of_another_version_is_refused_and_a_finished_corpus_left_as_it_is(tmp_path):
    options = make_options(tmp_path)
    manifest = prepare_corpus(options)
    plan = options.corpus / ".prepare/plan.json"
    plan.write_text(plan.read_text().replace('"version": 2', '"version": 1'))
    assert prepare_corpus(options) == manifest
    (options.corpus / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"was begun by another version of genesis, .* start again with --restart"):
        prepare_corpus(options)


def test_another_tokenizer_than_the_one_begun_with_is_refused(tmp_path):
    options = make_options(tmp_path)
    begin_and_stop(options)
    other = make_tokenizer(tmp_path / "other", vocab_size=330)
    with pytest.raises(
        UserError, match=r"was started with tokenizer [0-9a-f]{16}, but this one is [0-9a-f]{16}; .*--restart"
    ):
        prepare_corpus(replace(options, tokenizer=other))


def test_two_prepares_in_one_directory_are_refused(inputs):
    options = make_options(inputs)
    with (options.corpus / ".prepare/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another `genesis data prepare` is running in"):
            prepare_corpus(options)


def test_a_directory_of_something_else_is_left_alone(inputs):
    options = make_options(inputs, out=inputs / "mine")
    options.corpus.mkdir(parents=True)
    (options.corpus / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is not empty and was not made by `genesis data prepare`"):
        prepare_corpus(options, restart=True)
    assert [path.name for path in options.corpus.iterdir()] == ["thesis.txt"]


def test_a_finished_shard_that_was_lost_is_named(tmp_path):
    options = make_options(tmp_path)
    manifest = prepare_corpus(options)
    (options.corpus / "manifest.json").unlink()
    (options.corpus / manifest.train[0].shards[0].path).unlink()
    with pytest.raises(UserError, match=r"the finished shard .*00000\.ds is missing or has another size; .*--restart"):
        prepare_corpus(options)


def test_empty_sources_are_refused_by_name(tmp_path):
    options = make_options(tmp_path)
    (tmp_path / "empty.txt").touch()
    empty = SourceOptions("void", (str(tmp_path / "empty.txt"),))
    with pytest.raises(UserError, match=r"source void has no text in .*empty\.txt"):
        prepare_corpus(replace(options, sources=(*options.sources, empty)))
    (tmp_path / "one.txt").write_text("one")
    one = SourceOptions("one", (str(tmp_path / "one.txt"),))
    seed = next(seed for seed in range(100) if is_validation(b"one", seed, 0.5))
    with pytest.raises(UserError, match="all documents of source one are in the validation set"):
        prepare_corpus(replace(options, name="one", sources=(one,), seed=seed, validation_fraction=0.5))


def test_bad_input_met_by_a_worker_is_one_line_and_good_shards_stay(tmp_path):
    options = make_options(tmp_path, num_workers=1)
    with (tmp_path / "web.jsonl").open("ab") as file:
        file.write(b'{"txet": "misspelt"}\n')
    with pytest.raises(UserError, match=r"web\.jsonl, line 121 has no field 'text' \(it has: txet\)"):
        prepare_corpus(options)
    assert list((options.corpus / "train/web").glob("*.ds"))
    assert not (options.corpus / "manifest.json").exists()


def test_a_finished_corpus_gets_a_plan_and_keeps_its_shards(tmp_path):
    prepare_corpus(make_options(tmp_path))
    options = make_options(tmp_path, packing="best_fit", seq_len=32)
    before = read_tree(options.corpus)
    prepare_corpus(options)
    after = read_tree(options.corpus)
    assert {path: data for path, data in after.items() if not path.startswith("packing/")} == before
    assert [plan.sources.keys() for plan in list_plans(options.corpus)] == [{"web", "book", "table"}]
    prepare_corpus(make_options(tmp_path, packing="pad", seq_len=16))
    assert [(plan.packing, plan.seq_len) for plan in list_plans(options.corpus)] == [("best_fit", 32), ("pad", 16)]
    at_once = make_options(tmp_path, name="at_once", packing="best_fit", seq_len=32)
    prepare_corpus(at_once)
    assert list_plans(at_once.corpus) == list_plans(options.corpus)[:1]
    prepare_corpus(make_options(tmp_path, name="at_once", seed=1), restart=True)
    assert list_plans(at_once.corpus) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a/b"}, "corpus name 'a/b'"),
        ({"packing": "pad"}, "packing is pad and seq_len None; a plan needs both"),
        ({"seq_len": 8}, "packing is None and seq_len 8"),
        ({"packing": "pad", "seq_len": 0}, "seq_len 0 must be at least 1"),
        ({"validation_fraction": 0.6}, "validation_fraction is 0.6: it must be from 0 to 0.5"),
        ({"shard_tokens": 0}, "shard_tokens 0"),
        ({"num_workers": -1}, "num_workers -1"),
        ({"sources": ()}, "no sources are given"),
        ({"sources": (SourceOptions("a", ("x",)),) * 2}, "two sources are named a"),
    ],
)
def test_options_that_make_no_sense_are_refused(inputs, change, message):
    with pytest.raises(UserError, match=message):
        make_options(inputs, **change)


def test_units_cover_all_files_in_order_and_hold_about_a_shard():
    source = SourceOptions("web", ("x",), separator="\n")
    files = [InputFile(f"{number}.txt", size, 0) for number, size in enumerate((5, 0, 10_000_000, 3_000_000, 7))]
    units = plan_units(source, files, shard_tokens=1_000_000)
    spans = [span for unit in units for span in unit.spans]
    covered = {file.path: sum(span.num_bytes for span in spans if span.file == file) for file in files}
    assert covered == {file.path: file.num_bytes for file in files}
    assert [(int(span.file.path[0]), span.start) for span in spans] == sorted(
        (int(s.file.path[0]), s.start) for s in spans
    )
    assert [unit.number for unit in units] == list(range(len(units)))
    assert all(unit.num_bytes < 3_000_000 for unit in units)


def test_the_validation_share_is_close_to_what_was_asked_and_depends_on_text_and_seed_only():
    texts = [text.encode() for text in make_texts(4_000, seed=5)]
    chosen = np.array([is_validation(text, 0, 0.1) for text in texts])
    assert abs(chosen.mean() - 0.1) < 0.02
    assert not np.array_equal(chosen, [is_validation(text, 1, 0.1) for text in texts])
    assert not any(is_validation(text, 0, 0.0) for text in texts)
