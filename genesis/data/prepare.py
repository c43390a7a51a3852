"""Turns text into a corpus: token shards and their manifest.

The work is a function of the options and the input files, the *plan*: each source is divided into work units, each unit
into parts, and each part becomes a train and a validation shard. Workers write parts into a staging directory; only
this process renames parts into place and records them. A killed run therefore leaves finished parts with a record each,
and the next run writes the others: the result equals, byte for byte, that of a run that was never killed.

    CORPUS/.prepare/plan.json            options and input files; a later attempt must have the same
    CORPUS/.prepare/parts/….json         one record for each finished part
    CORPUS/.prepare/lock                 held while a prepare runs
    CORPUS/.prepare/staging-…/           unfinished shards, removed by the next attempt

If the options name a packing, its plan is made from the finished shards (`genesis.data.plans`).
"""

import fcntl
import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from genesis.base.errors import UserError, numbered
from genesis.base.processes import PipedWorker
from genesis.base.progress import Stage, stage
from genesis.base.run_directory import CHAT_TEMPLATE_NAME
from genesis.chat.options import ChatOptions
from genesis.chat.template import write_defaults
from genesis.data.conversations import ChatSetup, ConversationCounts, limit_conversations, open_chat_setup
from genesis.data.corpus import open_corpus
from genesis.data.manifest import (
    MANIFEST_NAME,
    CorpusManifest,
    ShardRecord,
    SourceRecord,
    Split,
    read_manifest,
    write_manifest,
)
from genesis.data.plans import PLANS_DIRECTORY, PlannedPacking, write_plan
from genesis.data.row_notes import BadRowsError
from genesis.data.shards import HASH_ALGORITHM, labels_path, publish_shard, shard_path, token_dtype
from genesis.data.sources import InputFile, SourceOptions, Span, check_sources, list_sources, plan_spans
from genesis.data.sources.files import READING, check_reading
from genesis.data.tokenize_worker import (
    Failure,
    FinishedPart,
    Job,
    Progress,
    Setup,
    Unit,
    add_notes,
    explain_write_error,
    staged_path,
)
from genesis.tokenizer.files import write_files
from genesis.tokenizer.losses import describe_losses
from genesis.tokenizer.open import has_hash, has_tokenizer, open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.locks import lock_file, open_lock
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES, read_file

MAX_VALIDATION_FRACTION = 0.5
PREPARE_DIRECTORY = ".prepare"
_PLAN_NAME = "plan.json"
_WORKER_MODULE = "genesis.data.tokenize_worker"
_UNITS_PER_SOURCE = 64
_MIN_UNIT_BYTES = 1 << 20
_INPUT_BYTES_PER_SHARD_TOKEN = 3
"""Less than the usual bytes per token, so that most units of plain text become one shard slightly below its size."""


@dataclass(frozen=True)
class PrepareOptions:
    """Options of `genesis data prepare`.

    Args:
        name: The corpus's name; the corpus is written to the directory OUT/NAME.
        tokenizer: A directory with a tokenizer, as `genesis tokenizer train` writes it, or a tokenizer file.
        sources: Named sources of text, each with paths, weight and format.
        out: The directory of corpora.
        validation_fraction: Share of the documents held out, chosen by a hash of their text: 0 to 0.5.
        shard_tokens: Number of tokens at which a shard is closed.
        seed: Seed of the choice of held-out documents.
        num_workers: Number of processes that tokenize; 0 uses one per core. It does not change the result.
        packing: Also makes the plan of this packing, for sequences of `seq_len` tokens. A finished corpus gets another
            plan, and its shards are not changed.
        seq_len: Tokens per sequence; training selects the plan by the same two options.
        chat: How the conversations of sources with `chat` become tokens with labels.
    """

    name: str
    tokenizer: Path
    sources: tuple[SourceOptions, ...]
    out: Path = Path("corpora")
    validation_fraction: float = 0.005
    shard_tokens: int = 100_000_000
    seed: int = 0
    num_workers: int = 0
    packing: PlannedPacking | None = None
    seq_len: int | None = None
    chat: ChatOptions = field(default_factory=ChatOptions)

    def __post_init__(self) -> None:
        if (self.packing is None) != (self.seq_len is None):
            raise UserError(
                f"packing is {self.packing} and seq_len {self.seq_len}; a plan needs both: give both, or neither"
            )
        if self.seq_len is not None and self.seq_len < 1:
            raise UserError(f"seq_len {self.seq_len} must be at least 1")
        if not self.name or Path(self.name).name != self.name:
            raise UserError(f"corpus name {self.name!r} is not the name of one directory; give its parent by `out`")
        if not 0 <= self.validation_fraction <= MAX_VALIDATION_FRACTION:
            raise UserError(
                f"validation_fraction is {self.validation_fraction}: it must be from 0 to {MAX_VALIDATION_FRACTION}"
            )
        if self.shard_tokens < 1:
            raise UserError(f"shard_tokens {self.shard_tokens} must be at least 1")
        if self.num_workers < 0:
            raise UserError(f"num_workers {self.num_workers} must be at least 0 (0: one per core)")
        check_sources(self.sources)
        self._check_pairs()

    def _check_pairs(self) -> None:
        if not self.is_paired:
            return
        other = next((source for source in self.sources if not source.has_pairs), None)
        if other is not None:
            raise UserError(
                f"source {other.name} has no pairs of answers, and others of this corpus have: prepare two corpora"
            )
        if self.packing is not None:
            raise UserError(f"packing is {self.packing}, and a corpus of pairs needs no plan: leave it out")
        if self.chat.labels != "assistant":
            raise UserError(
                f"chat.labels is {self.chat.labels}, and of a pair the turns of the two answers are learned, and no "
                "others: leave it out"
            )

    @property
    def is_paired(self) -> bool:
        """Returns whether the corpus has pairs of answers."""
        return any(source.has_pairs for source in self.sources)

    @property
    def corpus(self) -> Path:
        """Returns the directory of the corpus."""
        return self.out / self.name


def prepare_corpus(
    options: PrepareOptions,
    *,
    restart: bool = False,
    warn: Callable[[str], None] = lambda line: None,
    note: Callable[[str], None] = lambda line: None,
) -> CorpusManifest:
    """Makes the corpus, or finishes an earlier attempt, and returns its manifest; a finished corpus is not changed.

    Args:
        options: The options.
        restart: Whether to discard the results of an earlier attempt.
        warn: Called with lines about the rows of each source that are skipped, and the keys that have no effect.
        note: Called with lines about the files of each source.

    Raises:
        UserError: The input, the disk or a changed plan prevents the work. Finished shards are kept.
    """
    with stage("tokenizing", unit="bytes") as shown:
        tokenizer = open_tokenizer(options.tokenizer)
        lost = describe_losses(tokenizer)
        if lost is not None:
            warn(lost)
        chat = None
        if any(source.chat is not None for source in options.sources):
            plan = options.corpus / PREPARE_DIRECTORY / _PLAN_NAME
            limited = limit_conversations(options.chat, options.seq_len, None if restart else plan)
            has_values = options.sources[0].value_field is not None  # as all have, then
            which = {"is_paired": options.is_paired, "has_values": has_values}
            chat = open_chat_setup(limited, tokenizer, options.tokenizer, **which, warn=warn)
        files = list_sources(options.sources, note)
        try:
            with _locked(options.corpus):
                if restart:
                    _remove_attempt(options.corpus)
                _begin(options, tokenizer, files, chat)
                if (options.corpus / MANIFEST_NAME).exists():
                    manifest = read_manifest(options.corpus)
                else:
                    manifest = _prepare(options, tokenizer, files, chat, shown, warn)
                if options.packing is not None and options.seq_len is not None:
                    write_plan(open_corpus(options.corpus, verify_hashes="never"), options.packing, options.seq_len)
                return manifest
        except OSError as error:
            raise UserError(explain_write_error(error, options.corpus)) from None


def plan_units(source: SourceOptions, files: Sequence[InputFile], shard_tokens: int) -> list[Unit]:
    """Returns a source's work units, which depend on its files and the shard size, not on the number of workers."""
    num_bytes = sum(file.num_bytes for file in files)
    largest = max(1, shard_tokens * _INPUT_BYTES_PER_SHARD_TOKEN)
    target_bytes = min(largest, max(_MIN_UNIT_BYTES, num_bytes // _UNITS_PER_SOURCE))
    units: list[Unit] = []
    spans: list[Span] = []
    room = target_bytes
    for span in plan_spans(source, files, target_bytes):
        spans.append(span)
        room -= span.num_bytes
        if room <= 0:
            units.append(Unit(source, len(units), tuple(spans)))
            spans, room = [], target_bytes
    if spans:
        units.append(Unit(source, len(units), tuple(spans)))
    return units


def _prepare(
    options: PrepareOptions,
    tokenizer: Tokenizer,
    files: dict[str, tuple[InputFile, ...]],
    chat: ChatSetup | None,
    shown: Stage,
    warn: Callable[[str], None],
) -> CorpusManifest:
    corpus = options.corpus
    units = [
        unit for source in options.sources for unit in plan_units(source, files[source.name], options.shard_tokens)
    ]
    finished = _read_parts(corpus)
    num_workers = options.num_workers or _num_cores()
    jobs = plan_jobs(units, finished, num_workers)
    num_new_tokens, shown.total = 0, sum(unit.num_bytes for unit in units)
    shown.first = shown.done = shown.total - sum(job.unit.num_bytes - job.num_bytes_done for job in jobs)
    with _staging(corpus) as staging:
        setup = Setup(
            tokenizer=corpus,
            tokenizer_hash=tokenizer.hash,
            staging=staging,
            seed=options.seed,
            validation_fraction=options.validation_fraction,
            shard_tokens=options.shard_tokens,
            chat=chat,
        )
        for message in run_jobs(jobs, setup, num_workers):
            if isinstance(message, FinishedPart):
                _commit_part(corpus, staging, message)
                finished.append(message)
            else:
                num_new_tokens += message.num_tokens
                rate = num_new_tokens / max(1e-9, time.monotonic() - shown.begin_seconds)
                shown.note = f"{numbered(num_new_tokens, 'tokens')}, {rate:,.0f} tokens/s" if num_new_tokens else ""
                shown.advance(message.num_bytes)
    for source in options.sources:
        for line in add_notes(finished, source.name).describe(source.name):
            warn(line)
    manifest = _build_manifest(options, tokenizer, finished, chat)
    write_manifest(corpus, manifest)
    return manifest


# Worker processes


def run_jobs(jobs: Sequence[Job], setup: Setup, num_workers: int) -> Iterator[Progress | FinishedPart]:
    """Runs the jobs in worker processes, yields their messages as they arrive, and finally ends the processes.

    Raises:
        UserError: A job failed or a worker died; parts that other workers have finished are yielded first.
    """
    waiting = iter(jobs)
    workers: dict[Connection[object, object], PipedWorker] = {}
    try:
        for _, job in zip(range(num_workers), waiting, strict=False):
            worker = PipedWorker(_WORKER_MODULE)
            workers[worker.connection] = worker
            worker.connection.send(setup)
            worker.connection.send(job)
        busy = set(workers)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                message = _receive(workers[connection])
                yield message
                if isinstance(message, FinishedPart) and message.is_last:
                    job_or_none = next(waiting, None)
                    if job_or_none is None:
                        busy.remove(connection)
                    else:
                        connection.send(job_or_none)
    finally:
        for worker in workers.values():
            worker.end()


def _receive(worker: PipedWorker) -> Progress | FinishedPart:
    try:
        message = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        if worker.process.wait() == -signal.SIGPROF:
            raise UserError(
                "the tokenizer takes too long for a text: its expressions may search without end; use another one"
            ) from None
        raise UserError(
            f"a worker of data prepare ended {worker.describe_end()}; run the same command again (with fewer "
            "num_workers if memory is short): finished shards are kept"
        ) from None
    if isinstance(message, Failure):
        raise BadRowsError(message.message) if message.has_rows else UserError(message.message)
    assert isinstance(message, Progress | FinishedPart)
    return message


# Jobs and their results


def plan_jobs(units: Sequence[Unit], finished: Sequence[FinishedPart], num_workers: int) -> list[Job]:
    """Returns the remaining jobs: units without a part start at their beginning, others after their last part."""
    last_parts = _last_parts(finished)
    left = [unit for unit in units if _key(unit) not in last_parts or not last_parts[_key(unit)].is_last]
    num_threads = max(1, num_workers // max(1, len(left)))
    jobs = []
    for unit in left:
        last = last_parts.get(_key(unit))
        if last is None:
            jobs.append(Job(unit, 0, 0, 0, num_threads))
        else:
            jobs.append(Job(unit, last.part + 1, last.num_documents, last.num_bytes, num_threads))
    return jobs


def _key(item: Unit | FinishedPart) -> tuple[str, int]:
    return (item.source.name, item.number) if isinstance(item, Unit) else (item.source, item.unit)


def _last_parts(finished: Sequence[FinishedPart]) -> dict[tuple[str, int], FinishedPart]:
    return {_key(part): part for part in sorted(finished, key=lambda part: part.part)}


def _build_manifest(
    options: PrepareOptions, tokenizer: Tokenizer, finished: Sequence[FinishedPart], chat: ChatSetup | None
) -> CorpusManifest:
    ordered = sorted(finished, key=lambda part: (part.source, part.unit, part.part))
    counts = {
        source.name: sum((part.conversations for part in ordered if part.source == source.name), ConversationCounts())
        for source in options.sources
        if source.chat is not None
    }
    splits: dict[Split, tuple[SourceRecord, ...]] = {}
    for split in ("train", "validation"):
        records = [_source_record(source, ordered, split) for source in options.sources]
        splits[split] = tuple(record for record in records if record.shards)
    with_text = {record.name for records in splits.values() for record in records}
    for source in options.sources:
        if source.name not in with_text:
            if missing := counts.get(source.name, ConversationCounts()).describe_missing():
                raise UserError(f"no conversation of source {source.name} is left: {missing}; change the options")
            raise UserError(
                f"source {source.name} has no text in {', '.join(source.paths)}; correct its paths or remove it"
            )
        if source.name not in {record.name for record in splits["train"]}:
            raise UserError(
                f"all documents of source {source.name} are in the validation set; lower validation_fraction "
                f"({options.validation_fraction}) or choose another seed, and start again with --restart"
            )
    return CorpusManifest(
        name=options.name,
        hash_algorithm=HASH_ALGORITHM,
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        token_dtype=token_dtype(tokenizer.vocab_size),
        train=splits["train"],
        validation=splits["validation"],
        chat=None if chat is None else chat.record(counts),
    )


def _source_record(source: SourceOptions, parts: Sequence[FinishedPart], split: Split) -> SourceRecord:
    written = (part.train if split == "train" else part.validation for part in parts if part.source == source.name)
    shards = [shard for shard in written if shard is not None]
    return SourceRecord(
        name=source.name,
        weight=source.weight,
        num_documents=sum(shard.num_documents for shard in shards),
        num_text_bytes=sum(shard.num_text_bytes for shard in shards),
        num_tokens=sum(shard.num_tokens for shard in shards),
        shards=shards,
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# The directory of an attempt


@contextmanager
def _locked(corpus: Path) -> Iterator[None]:
    if corpus.is_dir() and not (corpus / PREPARE_DIRECTORY).is_dir() and any(corpus.iterdir()):
        raise UserError(f"{corpus} is not empty and was not made by `genesis data prepare`; choose another name or out")
    directory = corpus / PREPARE_DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    with open_lock(directory / "lock") as lock:
        try:
            lock_file(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, corpus)
        except BlockingIOError:
            raise UserError(f"another `genesis data prepare` is running in {corpus}; wait for it or stop it") from None
        yield


def _remove_attempt(corpus: Path) -> None:
    # The plan is removed last: without it, the records of parts would be taken for records of the next plan.
    (corpus / MANIFEST_NAME).unlink(missing_ok=True)
    for directory in (f"{PREPARE_DIRECTORY}/parts", PLANS_DIRECTORY, "train", "validation"):
        if (corpus / directory).exists():
            shutil.rmtree(corpus / directory)
    (corpus / PREPARE_DIRECTORY / _PLAN_NAME).unlink(missing_ok=True)


def _begin(
    options: PrepareOptions, tokenizer: Tokenizer, files: dict[str, tuple[InputFile, ...]], chat: ChatSetup | None
) -> None:
    """Writes the plan, or compares it with the plan of an earlier attempt; copies the tokenizer and the template."""
    plan = _describe_plan(options, tokenizer, files, chat)
    path = options.corpus / PREPARE_DIRECTORY / _PLAN_NAME
    if path.exists():
        old = load_json(read_file(path, MAX_DOCUMENT_BYTES))  # it lists every file
        check_reading(old, options.corpus, is_finished=(options.corpus / MANIFEST_NAME).exists())
        _compare_plans(old, plan, options.corpus, tokenizer)
    elif (options.corpus / MANIFEST_NAME).exists():
        raise UserError(f"{options.corpus} is a corpus without its plan; start again with --restart")
    if not has_tokenizer(options.corpus, tokenizer.hash):
        write_files(tokenizer.files, options.corpus)
    if chat is not None:
        template = options.corpus / CHAT_TEMPLATE_NAME
        template.parent.mkdir(exist_ok=True)
        replace_file(template, write_defaults(chat.template, chat.options.variables).encode())
    if not path.exists():
        replace_file(path, json.dumps(plan, indent=1).encode())


def _describe_plan(
    options: PrepareOptions, tokenizer: Tokenizer, files: dict[str, tuple[InputFile, ...]], chat: ChatSetup | None
) -> dict[str, Any]:
    return {
        "version": READING,
        "tokenizer": tokenizer.hash,
        "validation_fraction": options.validation_fraction,
        "shard_tokens": options.shard_tokens,
        "seed": options.seed,
        "sources": {source.name: source.describe() for source in options.sources},
        **({} if chat is None else {"chat": chat.describe()}),
        "files": {
            f"{source}: {file.path}": {
                "bytes": file.num_bytes,
                "mtime_ns": file.mtime_ns,
                **({"identity": file.identity} if file.identity else {}),  # a store's; plans of local files had none
            }
            for source, found in files.items()
            for file in found
        },
    }


def _compare_plans(old: dict[str, Any], new: dict[str, Any], corpus: Path, tokenizer: Tokenizer) -> None:
    if not has_hash(tokenizer, old.get("tokenizer", "")):
        raise UserError(
            f"{corpus} was started with tokenizer {old.get('tokenizer', '?')[:16]}, but this one is "
            f"{new['tokenizer'][:16]}; give the same tokenizer or another name, or start again with --restart"
        )
    difference = _first_difference(old | {"tokenizer": new["tokenizer"]}, new, "")
    if difference is not None:
        raise UserError(
            f"{corpus} was started with different options: {difference}; use the same, give another name, or start "
            "again with --restart"
        )


def _first_difference(old: object, new: object, place: str) -> str | None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            inner = f"{place}.{key}" if place else str(key)
            if key not in new:
                return f"{inner} is missing"
            if key not in old:
                return f"{inner} is new"
            difference = _first_difference(old[key], new[key], inner)
            if difference is not None:
                return difference
        return None if list(old) == list(new) else f"{place} is in another order"
    return None if old == new else f"{place} was {old!r} and is {new!r}"


@contextmanager
def _staging(corpus: Path) -> Iterator[Path]:
    """Creates a staging directory whose name is new, so that no process of an earlier attempt writes into it."""
    for left_over in (corpus / PREPARE_DIRECTORY).glob("staging-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    staging = corpus / PREPARE_DIRECTORY / f"staging-{secrets.token_hex(8)}"
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _commit_part(corpus: Path, staging: Path, part: FinishedPart) -> None:
    """Renames the part's shards into place, then records the part; the next attempt repeats a part without record."""
    for shard in (part.train, part.validation):
        if shard is not None:
            publish_shard(staged_path(staging, shard.path), corpus / shard.path)
    record = corpus / PREPARE_DIRECTORY / "parts" / f"{part.source}-{part.unit:05d}_{part.part:03d}.json"
    record.parent.mkdir(exist_ok=True)
    replace_file(record, json.dumps(asdict(part)).encode())


def _read_parts(corpus: Path) -> list[FinishedPart]:
    parts = []
    for path in sorted((corpus / PREPARE_DIRECTORY / "parts").glob("*.json")):
        part = FinishedPart.read(load_json(read_file(path)))
        for shard in (part.train, part.validation):
            if shard is not None:
                _check_present(corpus, shard)
        parts.append(part)
    return parts


def _check_present(corpus: Path, shard: ShardRecord) -> None:
    sizes = {shard_path(corpus, shard): shard.file_bytes}
    if shard.labels_hash:
        sizes[labels_path(shard_path(corpus, shard))] = shard.num_tokens
    path = next((path for path, size in sizes.items() if not path.exists() or path.stat().st_size != size), None)
    if path is not None:
        raise UserError(f"the finished shard {path} is missing or has another size; start again with --restart")
