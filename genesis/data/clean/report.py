"""The report of a cleaning: the documents that each stage kept and dropped, examples, and the manifest.

OUT/report.json             documents, characters and tokens of each source and stage
OUT/dropped/STAGE.json      examples of dropped documents, with the reason
OUT/manifest.json           inputs, options, versions, shards with sizes and hashes, and the report; written last
"""

import importlib.metadata
import json
import platform
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from genesis import __version__
from genesis.base.errors import UserError
from genesis.data.clean.dedup import CLUSTER, read_kept
from genesis.data.clean.documents import WrittenShard, read_shard_records, write_durably
from genesis.data.clean.plan import CleanOptions
from genesis.data.clean.stages import EXAMPLE_CHARACTERS
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES, read_text

MANIFEST_NAME = "manifest.json"
_REPORT_NAME = "report.json"
_SCHEMA_VERSION = 1
_PACKAGES = ("datatrove", "py3langid", "pyarrow", "regex", "zstandard")
"""Packages whose version may change the result."""


@dataclass(frozen=True)
class Amount:
    """An amount of text; `tokens` is None if no tokenizer was given."""

    documents: int
    characters: int
    tokens: int | None


@dataclass(frozen=True)
class StageReport:
    """The input and output of a stage, and the number of dropped documents for each reason, most frequent first.

    A kept document may be shorter than before, because a stage may remove lines.
    """

    label: str
    entered: Amount
    kept: Amount
    dropped: dict[str, int]


@dataclass(frozen=True)
class SourceReport:
    """The input and output of a source; `num_blank` documents were empty or only white space, and are in neither."""

    name: str
    read: Amount
    kept: Amount
    num_blank: int = 0


@dataclass(frozen=True)
class EvaluationReport:
    """An evaluation set: the number of its texts, and of the texts that are too short to be found."""

    label: str
    num_texts: int
    num_too_short: int


@dataclass(frozen=True)
class CleanReport:
    """The report of a whole cleaning."""

    sources: tuple[SourceReport, ...]
    stages: tuple[StageReport, ...]
    evaluation: tuple[EvaluationReport, ...]

    @property
    def kept(self) -> Amount:
        """Returns the amount of text that was kept, over all sources."""
        return _sum([source.kept for source in self.sources])

    @property
    def read(self) -> Amount:
        """Returns the amount of text that was read, over all sources."""
        return _sum([source.read for source in self.sources])


class Finish(PipelineStep):  # type: ignore[misc]
    """Writes the report, the examples and finally the manifest.

    Args:
        options: The options of the cleaning.
        plan: The options and the input files, as they are recorded.
        indices: Names of the phases that made an index of evaluation sets.
    """

    name = "finish"
    type = "report"

    def __init__(self, options: CleanOptions, plan: dict[str, Any], indices: Sequence[str]) -> None:
        super().__init__()
        self._options, self._plan, self._indices = options, plan, tuple(indices)
        self._labels = tuple(map(options.label, range(len(options.stages))))

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Writes the files."""
        assert data is None
        assert world_size == 1
        shards = read_shard_records(self._options.work / "shards")
        report = self._build_report(shards)
        _check_sums(report)
        for label in self._labels:
            write_json(self._options.out / "dropped" / f"{label}.json", self._gather_examples(label))
        write_json(self._options.out / _REPORT_NAME, asdict(report))
        manifest = {
            "schema_version": _SCHEMA_VERSION,
            "plan": self._plan,
            "versions": read_versions(),
            "hash_algorithm": "blake3",
            "shards": [asdict(shard) for shard in shards],
            "report": asdict(report),
        }
        write_json(self._options.out / MANIFEST_NAME, manifest)
        yield from ()

    def _build_report(self, shards: Sequence[WrittenShard]) -> CleanReport:
        totals = _read_totals(self._options.logs)
        read = totals["reader: sources"]
        sources = []
        for name in (source.name for source in self._options.sources):
            own = [shard for shard in shards if shard.source == name]
            kept = Counter(
                documents=sum(shard.num_documents for shard in own),
                characters=sum(shard.num_characters for shard in own),
                tokens=sum(shard.num_tokens or 0 for shard in own),
            )
            num_blank = read[f"blank.{name}"]
            sources.append(SourceReport(name, self._amount(read, f".{name}"), self._amount(kept, ""), num_blank))
        stages = []
        for label in self._labels:
            counts = totals[f"stage: {label}"]
            dropped = {key.removeprefix("dropped."): n for key, n in counts.most_common() if key.startswith("dropped.")}
            stages.append(StageReport(label, self._amount(counts, "_in"), self._amount(counts, "_kept"), dropped))
        return CleanReport(tuple(sources), tuple(stages), tuple(self._evaluation_reports()))

    def _evaluation_reports(self) -> Iterator[EvaluationReport]:
        for phase in self._indices:
            counts = _read_totals(self._options.logs, phase)["decontamination: evaluation index"]
            yield EvaluationReport(phase, counts["texts"], counts["texts_too_short"])

    def _amount(self, counts: Counter[str], ending: str) -> Amount:
        tokens = counts[f"tokens{ending}"] if self._options.tokenizer is not None else None
        return Amount(counts[f"documents{ending}"], counts[f"characters{ending}"], tokens)

    def _gather_examples(self, label: str) -> list[dict[str, Any]]:
        """Returns examples of each reason, taken from the tasks in turn."""
        by_turn: list[tuple[int, dict[str, Any]]] = []
        for path in sorted((self._options.work / "examples" / label).glob("*.json")):
            turns: Counter[str] = Counter()
            for example in load_json(read_text(path, MAX_DOCUMENT_BYTES)):
                by_turn.append((turns[example["reason"]], example))
                turns[example["reason"]] += 1
        chosen: list[dict[str, Any]] = []
        num_by_reason: Counter[str] = Counter()
        for _, example in sorted(by_turn, key=lambda pair: pair[0]):
            num_by_reason[example["reason"]] += 1
            if num_by_reason[example["reason"]] <= self._options.num_examples:
                chosen.append(example)
        self._name_kept(label, chosen)
        return sorted(chosen, key=lambda example: str(example["reason"]))

    def _name_kept(self, label: str, examples: Sequence[dict[str, Any]]) -> None:
        """Adds to each example of a near-duplicate the document that was kept instead."""
        clusters = {example["notes"][CLUSTER] for example in examples if CLUSTER in example["notes"]}
        for cluster, kept in read_kept(self._options.work / "work" / label, clusters).items() if clusters else ():
            for example in examples:
                if example["notes"].get(CLUSTER) == cluster:
                    example["notes"] = {"kept": kept.id, "kept_text": kept.text[:EXAMPLE_CHARACTERS]}


def read_report(out: Path) -> CleanReport:
    """Returns the report of the finished cleaning in `out`.

    Raises:
        UserError: The report is missing or damaged.
    """
    path = out / MANIFEST_NAME
    try:
        raw = load_json(read_text(path, MAX_DOCUMENT_BYTES))["report"]
        return CleanReport(
            tuple(
                SourceReport(each["name"], Amount(**each["read"]), Amount(**each["kept"]), each.get("num_blank", 0))
                for each in raw["sources"]
            ),
            tuple(
                StageReport(each["label"], Amount(**each["entered"]), Amount(**each["kept"]), each["dropped"])
                for each in raw["stages"]
            ),
            tuple(EvaluationReport(**each) for each in raw["evaluation"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}); start again with --restart") from None


def read_versions() -> dict[str, str]:
    """Returns the versions of the packages that may change the result."""
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"genesis": __version__, "python": platform.python_version(), **packages}


def write_json(path: Path, value: object) -> None:
    """Writes `value` completely or not at all."""
    write_durably(path, json.dumps(value, indent=1, ensure_ascii=False).encode())


def _read_totals(logs: Path, phase: str = "*") -> defaultdict[str, Counter[str]]:
    """Returns the counts of each of datatrove's steps, over all tasks."""
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(logs.glob(f"{phase}/stats/*.json")):
        for step in load_json(read_text(path)):
            for key, value in step["stats"].items():
                totals[step["name"]][key] += value["total"] if isinstance(value, dict) else value
    return totals


def _sum(amounts: Sequence[Amount]) -> Amount:
    tokens = [amount.tokens for amount in amounts if amount.tokens is not None]
    return Amount(
        sum(amount.documents for amount in amounts),
        sum(amount.characters for amount in amounts),
        sum(tokens) if tokens else None,
    )


def _check_sums(report: CleanReport) -> None:
    """Checks that each document is counted exactly once."""
    before = report.read
    for stage in report.stages:
        if stage.entered != before:
            raise RuntimeError(f"{before} came to {stage.label}, which counted {stage.entered}")
        num_dropped = sum(stage.dropped.values())
        if stage.entered.documents != stage.kept.documents + num_dropped:
            raise RuntimeError(f"{stage.label} lost a document")
        before = stage.kept
    if report.kept != before:
        raise RuntimeError(f"{before} came to the shards, which hold {report.kept}")
