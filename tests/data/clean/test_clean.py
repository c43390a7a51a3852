"""A whole cleaning: what it finds, its account, and that nothing stops it from ending as it must."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard
from blake3 import blake3

from genesis.base.errors import UserError
from genesis.base.processes import Mark, find_processes
from genesis.data.clean.clean import clean_corpus
from genesis.data.clean.decontaminate import Decontamination
from genesis.data.clean.dedup import ExactDuplicates, NearDuplicates
from genesis.data.clean.execute import LocalOptions
from genesis.data.clean.filters import C4Quality, Language, Length, Repetition, Score
from genesis.data.clean.plan import CleanOptions, plan_tasks
from genesis.data.clean.report import CleanReport, read_report
from genesis.data.manifest import read_manifest
from genesis.data.prepare import PrepareOptions, prepare_corpus
from genesis.data.sources import SourceOptions, find_files, plan_spans, read_documents
from tests.commands import PIPE, ForkedCommand, start_genesis
from tests.data.corpus_support import make_tokenizer, read_tree, without_stages, write_jsonl

DEADLINE_SECONDS = 120
MARK = "GENESIS_TEST_CLEANING"
"""Environment variable with the directory that a command cleans into."""
NOUNS = ("river", "mill", "village", "church", "hill", "flood", "spring", "road", "boat", "street", "bread", "wall")
VERBS = ["rises", "falls", "stands", "burns", "waits", "turns", "follows", "crosses", "leaves", "reaches"]
ADJECTIVES = ["old", "low", "high", "cold", "long", "grey", "quiet", "empty", "narrow", "early"]
PASSAGE = "which of these rivers rises in the black forest and leaves the continent at the far end of it"


def make_prose(seed: int, num_sentences: int = 12) -> str:
    draw = random.Random(seed)
    sentences = [
        f"The {draw.choice(ADJECTIVES)} {draw.choice(NOUNS)} {draw.choice(VERBS)} the {draw.choice(NOUNS)}, and that "
        f"{draw.choice(NOUNS)} {draw.choice(VERBS)} number {draw.randrange(10**6)} of the {draw.choice(ADJECTIVES)} "
        f"{draw.choice(NOUNS)}."
        for _ in range(num_sentences)
    ]
    return "\n".join(sentences)


PROSE = [make_prose(seed) for seed in range(60)]
NEAR = PROSE[3].replace("The", "A", 1)
GERMAN = "Der Fluss steigt seit dem Morgen, und die Leute tragen ihre Sachen in die Kirche auf dem Hügel hinauf. " * 2
CONTAMINATED = make_prose(99) + "\nThey asked: " + PASSAGE.upper().replace(" RISES", ", rises") + "?"
MENU = "Home | News | Contact\n"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with raw sources: a copied text, two exact duplicates over sources, a near-duplicate and more."""
    directory = tmp_path_factory.mktemp("inputs")
    (directory / "book").mkdir()
    for number, text in enumerate(PROSE[:5]):
        (directory / "book" / f"{number}.txt").write_text(text)
    write_jsonl(directory / "web.jsonl.zst", [*PROSE[5:40], MENU + make_prose(98), "short", "the same line\n" * 40])
    texts = [*PROSE[40:], PROSE[4], PROSE[50], NEAR, GERMAN, CONTAMINATED, make_prose(97), ""]
    scores = [3.0] * (len(texts) - 2) + [0.5, 3.0]
    table = pa.table({"text": texts, "quality": scores})
    pq.write_table(table, directory / "table.parquet", row_group_size=4)
    write_jsonl(directory / "exam.jsonl", [PASSAGE.title() + "?!", "too short to be found"])
    make_tokenizer(directory)
    clean_corpus(make_options(directory))
    return directory


def make_options(directory: Path, **changes: Any) -> CleanOptions:
    options: dict[str, Any] = {
        "sources": (
            SourceOptions("book", (str(directory / "book"),)),
            SourceOptions("web", (str(directory / "web.jsonl.zst"),)),
            SourceOptions("table", (str(directory / "table.parquet"),)),
        ),
        "out": directory / "cleaned",
        "tasks": 3,
        "tokenizer": directory / "tokenizer.model",
        "local": LocalOptions(workers=2),
        "stages": (
            Length(min_words=5),
            ExactDuplicates(),
            Language(keep=("en",)),
            Repetition(sources=("web",)),
            C4Quality(languages=("en",), sources=("web",)),
            Score(field="quality", sources=("table",), min_score=1.0),
            NearDuplicates(num_buckets=8),
            Decontamination((SourceOptions("exam", (str(directory / "exam.jsonl"),)),)),
        ),
        **changes,
    }
    return CleanOptions(**options)


def read_result(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the records of each source."""
    source = SourceOptions("lines", (str(out / "text"),), format="text", suffixes=(".jsonl",), separator="\n")
    records: dict[str, list[dict[str, Any]]] = {}
    for span in plan_spans(source, find_files(source), 1 << 30):
        for line in read_documents(source, span):
            record = json.loads(line.text)
            records.setdefault(record["source"], []).append(record)
    return records


def read_made(out: Path) -> dict[str, bytes]:
    """Returns the files of a result, without those of the way to it."""
    return {path: data for path, data in read_tree(out).items() if not path.startswith(".clean/")}


def stages_of(report: CleanReport) -> dict[str, dict[str, int]]:
    return {stage.label: stage.dropped for stage in report.stages}


def test_each_stage_drops_what_was_planted_for_it_and_nothing_else(inputs: Path) -> None:
    report = read_report(inputs / "cleaned")
    assert stages_of(report) == {
        "01-length": {"too_few_words": 1},
        "02-exact_duplicates": {"duplicate": 2},
        "03-language": {"is_de": 1},
        "04-repetition": {"dup_line_frac": 1},
        "05-c4_quality": {},
        "06-score": {"too_low": 1},
        "07-near_duplicates": {"duplicate": 1},
        "08-decontamination": {"contaminated": 1},
    }


def test_what_is_kept_is_kept_whole_and_in_order(inputs: Path) -> None:
    texts = {
        source: [record["text"] for record in records] for source, records in read_result(inputs / "cleaned").items()
    }
    (near,) = {PROSE[3], NEAR} - {*texts["book"], *texts["table"]}
    assert texts["book"] == [text for text in PROSE[:5] if text != near]
    assert texts["web"] == [*PROSE[5:40], make_prose(98)]  # without its menu
    assert texts["table"] == [text for text in [*PROSE[40:], NEAR] if text != near]


def test_of_equal_documents_that_of_the_source_listed_first_is_kept(inputs: Path) -> None:
    result = read_result(inputs / "cleaned")
    assert PROSE[4] in [record["text"] for record in result["book"]]
    assert PROSE[4] not in [record["text"] for record in result["table"]]


def test_records_name_their_origin_language_and_score(inputs: Path) -> None:
    record = read_result(inputs / "cleaned")["table"][0]
    assert record == {
        "quality": 3.0,
        "text": PROSE[40],
        "id": f"{inputs / 'table.parquet'}:0:0",
        "source": "table",
        "language": "en",
    }


def test_counts_add_up_from_stage_to_stage_in_documents_characters_and_tokens(inputs: Path) -> None:
    report = read_report(inputs / "cleaned")
    before = report.read
    assert before.documents == 5 + 38 + 26  # an empty one is none
    for stage in report.stages:
        assert stage.entered == before
        assert stage.entered.documents - stage.kept.documents == sum(stage.dropped.values())
        before = stage.kept
    assert report.kept == before
    texts = [record["text"] for records in read_result(inputs / "cleaned").values() for record in records]
    assert (before.documents, before.characters) == (len(texts), sum(map(len, texts)))
    c4 = report.stages[4]
    assert c4.entered.documents == c4.kept.documents
    assert c4.entered.characters - c4.kept.characters == len(MENU)
    assert c4.entered.tokens is not None
    assert c4.kept.tokens is not None
    assert c4.entered.tokens - c4.kept.tokens > 5


def test_examples_tell_what_was_dropped_and_why(inputs: Path) -> None:
    dropped = inputs / "cleaned" / "dropped"
    (example,) = json.loads((dropped / "04-repetition.json").read_text())
    assert example == {
        "reason": "dup_line_frac",
        "notes": {},
        "id": f"{inputs / 'web.jsonl.zst'}:0:37",
        "source": "web",
        "text": "the same line\n" * 40,
    }
    (near,) = json.loads((dropped / "07-near_duplicates.json").read_text())
    assert {near["text"], near["notes"]["kept_text"]} == {NEAR[:600], PROSE[3][:600]}
    (contaminated,) = json.loads((dropped / "08-decontamination.json").read_text())
    assert contaminated["text"] == CONTAMINATED[:600]
    assert contaminated["notes"] == {"contaminated_ngram": " ".join(PASSAGE.split()[:12]), "contaminated_task": "exam"}
    assert json.loads((dropped / "05-c4_quality.json").read_text()) == []


def test_examples_come_from_all_tasks(small: CleanOptions) -> None:
    write_jsonl(Path(small.sources[0].paths[0]), [f"short {number:9}" * 2000 for number in range(20)])
    clean_corpus(replace(small, stages=(Length(max_words=5),), tasks=4, num_examples=4))
    examples = json.loads((small.out / "dropped" / "01-length.json").read_text())
    assert len(examples) == 4
    places = [int(example["text"].split()[1].removesuffix("short")) // 5 for example in examples]
    assert sorted(places) == [0, 1, 2, 3]


def test_the_manifest_vouches_for_the_shards_and_names_the_inputs(inputs: Path) -> None:
    out = inputs / "cleaned"
    manifest = json.loads((out / "manifest.json").read_text())
    assert {shard["path"] for shard in manifest["shards"]} == {
        str(path.relative_to(out)) for path in (out / "text").rglob("*") if path.is_file()
    }
    for shard in manifest["shards"]:
        data = (out / shard["path"]).read_bytes()
        assert (shard["file_bytes"], shard["hash"]) == (len(data), blake3(data).hexdigest())
    assert set(manifest["plan"]["files"]) >= {
        f"table: {inputs / 'table.parquet'}",
        f"book: {inputs / 'book' / '0.txt'}",
    }
    assert manifest["plan"]["options"]["stages"][0]["filter"] == "length"
    assert manifest["versions"]["datatrove"]
    assert manifest["report"] == json.loads((out / "report.json").read_text())


def test_texts_too_short_to_be_found_are_reported(inputs: Path) -> None:
    (evaluation,) = read_report(inputs / "cleaned").evaluation
    assert (evaluation.label, evaluation.num_texts, evaluation.num_too_short) == ("08-decontamination-index", 2, 1)


def test_data_prepare_reads_the_result(inputs: Path, tmp_path: Path) -> None:
    # The whole directory: nothing in it but the text may look like text.
    source = SourceOptions("cleaned", (str(inputs / "cleaned"),))
    prepare_corpus(PrepareOptions("corpus", inputs, (source,), tmp_path, validation_fraction=0, num_workers=1))
    (prepared,) = read_manifest(tmp_path / "corpus").train
    assert prepared.num_documents == read_report(inputs / "cleaned").kept.documents


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_a_byte(inputs: Path) -> None:
    options = make_options(inputs, out=inputs / "one-worker", local=LocalOptions(workers=1))
    clean_corpus(options)
    assert_same_result(options.out, inputs / "cleaned", inputs)


def assert_same_result(out: Path, wanted: Path, inputs: Path) -> None:
    made, expected = (read_made(directory) for directory in (out, wanted))
    for files, directory in ((made, out), (expected, wanted)):
        # A manifest names the directory that it lies in.
        files["manifest.json"] = files["manifest.json"].replace(str(directory).encode(), b"OUT")
    assert made == expected
    assert not list(out.rglob("*.staging"))


def start_cleaning(options: CleanOptions, directory: Path) -> ForkedCommand:
    recipe = {
        "sources": [{"name": source.name, "paths": list(source.paths)} for source in options.sources],
        "out": str(options.out),
        "tasks": options.tasks,
        "tokenizer": str(options.tokenizer),
        "local": {"workers": options.local.workers},
        "stages": [
            {"filter": "length", "min_words": 5},
            {"filter": "exact_duplicates"},
            {"filter": "language", "keep": ["en"]},
            {"filter": "repetition", "sources": ["web"]},
            {"filter": "c4_quality", "languages": ["en"], "sources": ["web"]},
            {"filter": "score", "field": "quality", "sources": ["table"], "min_score": 1},
            {"filter": "near_duplicates", "num_buckets": 8},
            {
                "filter": "decontamination",
                "evaluation": [{"name": "exam", "paths": [str(directory / "exam.jsonl")]}],
            },
        ],
    }
    config = directory / "recipe.yaml"
    config.write_text(yaml.safe_dump(recipe))
    environment = {**os.environ, MARK: str(options.out)}
    return start_genesis("data", "clean", "--config", config, stdout=PIPE, stderr=PIPE, env=environment)


def wait_for(state: Callable[[], bool], process: ForkedCommand) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not state():
        assert time.monotonic() < deadline
        assert process.poll() is None, f"ended before: {process.communicate()}"


def count_finished(out: Path) -> int:
    return len(list(out.glob(".clean/logs/*/completions/*")))


@pytest.mark.slow
def test_killed_again_and_again_it_ends_as_if_never_killed(inputs: Path) -> None:
    options = make_options(inputs, out=inputs / "killed")
    finished: dict[Path, int] = {}
    for num_finished in (3, 9):
        process = start_cleaning(options, inputs)
        wait_for(lambda num=num_finished: count_finished(options.out) >= num, process)  # type: ignore[misc]
        process.kill()
        process.communicate()
        marks = {path: path.stat().st_mtime_ns for path in options.out.glob(".clean/logs/*/completions/*")}
        assert finished.items() <= marks.items(), "a finished task was run again"
        finished = marks
    assert not (options.out / "manifest.json").exists()
    process = start_cleaning(options, inputs)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, without_stages(err)) == (0, [])
    assert_same_result(options.out, inputs / "cleaned", inputs)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_and_what_is_finished_is_kept(inputs: Path) -> None:
    options = make_options(inputs, out=inputs / "worker-killed")
    process = start_cleaning(options, inputs)
    wait_for(lambda: count_finished(options.out) >= 2, process)
    for worker in find_workers(options.out):
        os.kill(worker, signal.SIGKILL)
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 2, out + err
    (line,) = without_stages(err)
    assert line.startswith("genesis: error: a worker of data clean ended by signal 9")
    clean_corpus(replace(options, local=LocalOptions(workers=1)))
    assert_same_result(options.out, inputs / "cleaned", inputs)


def find_workers(out: Path) -> list[int]:
    """Returns the processes that run tasks of the cleaning into `out`."""
    found = find_processes(Mark(MARK, str(out)))
    return [process.pid for process in found if b"genesis.data.clean.execute" in process.words]


# What stands in the way


@pytest.fixture
def small(tmp_path: Path) -> CleanOptions:
    write_jsonl(tmp_path / "web.jsonl", PROSE[:6])
    source = SourceOptions("web", (str(tmp_path / "web.jsonl"),))
    return CleanOptions((source,), tmp_path / "out", (Length(min_words=5),), tasks=1, local=LocalOptions(1))


def test_a_finished_result_is_left_as_it_is(small: CleanOptions) -> None:
    report = clean_corpus(small)
    times = read_times(small.out)
    assert clean_corpus(replace(small, local=LocalOptions(2))) == report
    assert read_times(small.out) == times


def read_times(out: Path) -> dict[Path, int]:
    """Returns when each file was written, all but the locks."""
    return {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and "lock" not in path.name}


@pytest.mark.parametrize("compression", ["zst", "gz"])
def test_either_compression_gives_the_same_text_and_always_the_same_bytes(
    compression: str, small: CleanOptions, tmp_path: Path
) -> None:
    data = []
    for out in (tmp_path / "once", tmp_path / "again"):
        clean_corpus(replace(small, out=out, compression=compression))  # type: ignore[arg-type]
        assert [record["text"] for record in read_result(out)["web"]] == PROSE[:6]
        data.append((out / "text" / "web" / f"00000.jsonl.{compression}").read_bytes())
    assert data[0] == data[1]


def test_another_recipe_or_changed_inputs_are_refused_until_restart(small: CleanOptions) -> None:
    clean_corpus(small)
    with pytest.raises(
        UserError, match=r"started with different options: options\.stages\[0\]\.min_words was 5 and is 6; .*--restart"
    ):
        clean_corpus(replace(small, stages=(Length(min_words=6),)))
    with pytest.raises(UserError, match=r"options\.stages\[1\]\.filter was missing and is 'repetition'"):
        clean_corpus(replace(small, stages=(*small.stages, Repetition())))
    write_jsonl(Path(small.sources[0].paths[0]), PROSE[:3])
    with pytest.raises(UserError, match=r"started with different options: files\.web: .*web\.jsonl\.bytes was"):
        clean_corpus(small)
    report = clean_corpus(small, restart=True)
    assert isinstance(report, CleanReport)
    assert report.kept.documents == 3


def test_a_directory_of_something_else_is_refused(small: CleanOptions) -> None:
    small.out.mkdir()
    (small.out / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not empty and was not made by `genesis data clean`"):
        clean_corpus(small, restart=True)
    assert (small.out / "thesis.txt").exists()
    with pytest.raises(UserError, match="is a file; choose another out"):
        clean_corpus(replace(small, out=small.out / "thesis.txt"))


def test_two_at_once_are_refused(small: CleanOptions) -> None:
    (small.out / ".clean").mkdir(parents=True)
    with (small.out / ".clean" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another `genesis data clean` is running"):
            clean_corpus(small)


def test_a_bad_line_is_refused_by_its_place_and_mended_the_run_goes_on(small: CleanOptions) -> None:
    path = Path(small.sources[0].paths[0])
    good = path.read_text()
    path.write_text(good + '{"text": "cut sho\n')
    with pytest.raises(UserError, match=r"web\.jsonl, line 7 is not JSON"):
        clean_corpus(small)
    assert not (small.out / "manifest.json").exists()
    path.write_text(good)
    report = clean_corpus(small, restart=True)
    assert isinstance(report, CleanReport)
    assert report.kept.documents == 6


@pytest.mark.parametrize("name", ["web.parquet", "web.jsonl.zst", "web.JSON", "web.csv", "web.arrow"])
def test_scores_are_read_from_files_in_a_store_and_belong_to_their_texts(
    name: str, small: CleanOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(tmp_path / "cache"))
    rows = [{"text": text, "q": number} for number, text in enumerate(PROSE[:6])]
    rows[2:2] = [{"text": " ", "q": 9}, {"text": "", "q": 9}]
    table = pa.Table.from_pylist(rows)
    if name.endswith(".parquet"):
        pq.write_table(table, tmp_path / name, row_group_size=2)
    elif name.endswith(".arrow"):
        with pa.OSFile(str(tmp_path / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    elif name.endswith(".csv"):
        pyarrow.csv.write_csv(table, tmp_path / name)
    elif name.endswith(".JSON"):
        (tmp_path / name).write_text(json.dumps(rows))
    else:
        (tmp_path / name).write_bytes(zstandard.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    fsspec.filesystem("memory").pipe(f"/scores/{name}", (tmp_path / name).read_bytes())
    source = SourceOptions("web", (f"memory://scores/{name}",))
    report = clean_corpus(replace(small, sources=(source,), stages=(Score(field="q", min_score=3),)))
    assert isinstance(report, CleanReport)
    assert (report.sources[0].num_blank, report.read.documents) == (2, 6)
    assert [record["text"] for record in read_result(small.out)["web"]] == PROSE[3:6]


def test_a_score_of_a_wrong_type_is_refused_by_its_document(small: CleanOptions) -> None:
    Path(small.sources[0].paths[0]).write_text('\ufeff{"text": "one", "q": 2}\n\n{"text": "two", "q": "high"}\n')
    with pytest.raises(UserError, match=r"web\.jsonl:0:1: 'q' is 'high', not a number"):
        clean_corpus(replace(small, stages=(Score(field="q", min_score=1),)))


def test_a_bad_line_beside_scores_is_refused_by_its_place_too(small: CleanOptions) -> None:
    Path(small.sources[0].paths[0]).write_text('{"text": "one", "q": 2}\n{"text": "", "q": 2}\n[]\n')
    with pytest.raises(UserError, match=r"web\.jsonl, line 3 is a JSON list"):
        clean_corpus(replace(small, stages=(Score(field="q", min_score=1),)))


@pytest.mark.slow
def test_a_full_disk_is_told_in_one_line_and_the_run_goes_on_after_it(small: CleanOptions) -> None:
    write_jsonl(Path(small.sources[0].paths[0]), [make_prose(seed, 200) for seed in range(20)])
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "from genesis.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["data", "clean", "--out", str(small.out), "--tasks", "1", "--local.workers", "1"]
    arguments += ["--sources", json.dumps([{"name": "web", "paths": list(small.sources[0].paths)}])]
    arguments += ["--stages", '[{"filter": "length", "min_words": 5}]']
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(f"genesis: error: cannot write to {small.out}/")
    assert ".staging (File too large); " in result.stderr
    assert len(result.stderr.splitlines()) == 1
    report = clean_corpus(small)
    assert isinstance(report, CleanReport)
    assert report.kept.documents == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": 0}, "tasks 0 must be at least 1"),
        ({"num_examples": -1}, "num_examples -1 must be at least 0"),
        ({"stages": (Length(min_words=1, sources=("wab",)),)}, r"stage 1 \(length\): no source is named 'wab'"),
        ({"stages": (Length(min_words=1, languages=("en",)),)}, "no language filter before it"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], message: str, small: CleanOptions) -> None:
    with pytest.raises(UserError, match=message):
        replace(small, **changes)


def test_tasks_hold_all_spans_once_and_in_order(inputs: Path) -> None:
    sources = make_options(inputs).sources
    files = {source.name: find_files(source) for source in sources}
    (whole,) = plan_tasks(sources, files, 1)
    for num_tasks in (2, 3, 7, 100):
        tasks = plan_tasks(sources, files, num_tasks)
        assert len(tasks) == num_tasks
        assert tuple(span for task in tasks for span in task) == whole
