"""Plans a cleaning: its options, and the passes over the documents that the options require.

A stage that checks one document at a time runs in the same pass as its neighbours. A deduplication ends a pass, because
the search needs all documents, and the removal begins the next pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datatrove.pipeline.base import PipelineStep

from genesis.base.errors import UserError
from genesis.data.clean.decontaminate import Decontamination, EvaluationIndex
from genesis.data.clean.dedup import ExactDuplicates, NearDuplicates
from genesis.data.clean.documents import Compression, PassReader, PassWriter, SourceReader, TextWriter
from genesis.data.clean.execute import Executor, LocalOptions, Phase, RayOptions, SlurmOptions
from genesis.data.clean.filters import (
    C4Quality,
    FilterOptions,
    GopherQuality,
    Language,
    Length,
    Repetition,
    Score,
)
from genesis.data.clean.stages import Account, FilterStage, RemovalStage
from genesis.data.sources import (
    InputFile,
    SourceOptions,
    Span,
    check_sources,
    plan_spans,
    refuse_sources,
)

CLEAN_DIRECTORY = ".clean"
_MIN_SPAN_BYTES = 1 << 16
_MAX_SPAN_BYTES = 64 << 20
_SPANS_PER_TASK = 8

StageOptions = FilterOptions | Decontamination | ExactDuplicates | NearDuplicates
STAGES: dict[str, type[StageOptions]] = {
    stage.name: stage
    for stage in (
        Length,
        Language,
        Repetition,
        GopherQuality,
        C4Quality,
        Score,
        ExactDuplicates,
        NearDuplicates,
        Decontamination,
    )
}
"""The stages by their names in recipes."""


@dataclass(frozen=True)
class CleanOptions:
    """What to clean and how.

    Args:
        sources: Named sources of text, each with paths and format, as `genesis data prepare` takes them.
        out: The directory of the result: text/SOURCE/*.jsonl.zst, report.json, dropped/ and manifest.json.
        stages: The filters in the order of their application, by name, each with its options.
        tasks: Number of parts of the work; a killed run resumes with its unfinished tasks. The number affects the order
            of the output. A compressed file is never divided, so many small files keep many workers busy.
        tokenizer: A tokenizer's directory or file, to count tokens; without it only characters are counted.
        compression: Compression of the shards: zst or gz.
        num_examples: Number of dropped documents to keep as examples, for each filter and reason.
        executor: The executor of the tasks: local processes (local), or datatrove's executors for Slurm and Ray.
        local: Options of the executor local.
        slurm: Options of the executor slurm.
        ray: Options of the executor ray.
    """

    sources: tuple[SourceOptions, ...]
    out: Path
    stages: tuple[StageOptions, ...]
    tasks: int = 16
    tokenizer: Path | None = None
    compression: Compression = "zst"
    num_examples: int = 3
    executor: Executor = "local"
    local: LocalOptions = field(default_factory=LocalOptions)
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    ray: RayOptions = field(default_factory=RayOptions)

    def __post_init__(self) -> None:
        check_sources(self.sources)
        refuse_sources(
            self.sources,
            pairs="which the filters do not take; clean the conversations that the pairs are made of",
            skipping="data clean",
            values="which the result would not have",
        )
        if self.tasks < 1:
            raise UserError(f"tasks {self.tasks} must be at least 1")
        if self.num_examples < 0:
            raise UserError(f"num_examples {self.num_examples} must be at least 0")
        names = [source.name for source in self.sources]
        has_language = False
        for number, stage in enumerate(self.stages, 1):
            for name in getattr(stage, "sources", ()):
                if name not in names:
                    raise UserError(f"stage {number} ({stage.name}): no source is named {name!r}; it is one of {names}")
            if getattr(stage, "languages", ()) and not has_language:
                raise UserError(
                    f"stage {number} ({stage.name}) asks for languages, which no language filter before it has found; "
                    "put `- filter: language` above it"
                )
            if isinstance(stage, C4Quality):
                of_stage = [source for source in self.sources if not stage.sources or source.name in stage.sources]
                remedy = f"list other sources for stage {number} (c4_quality)"
                refuse_sources(of_stage, conversations=f"which are kept or dropped whole; {remedy}")
            has_language = has_language or isinstance(stage, Language)

    @property
    def work(self) -> Path:
        """Returns the directory of the files that are needed until the result is complete."""
        return self.out / CLEAN_DIRECTORY

    @property
    def logs(self) -> Path:
        """Returns the directory of datatrove's marks, statistics and logs, with a directory for each phase."""
        return self.work / "logs"

    def label(self, number: int) -> str:
        """Returns the name of stage `number` (from 0) in reports and paths."""
        return f"{number + 1:02d}-{self.stages[number].name}"


def plan_tasks(
    sources: Sequence[SourceOptions], files: dict[str, tuple[InputFile, ...]], num_tasks: int
) -> tuple[tuple[tuple[str, Span], ...], ...]:
    """Returns the spans of each task: all spans in order, cut into tasks of about equal bytes."""
    num_bytes = sum(file.num_bytes for found in files.values() for file in found)
    target_bytes = min(_MAX_SPAN_BYTES, max(_MIN_SPAN_BYTES, num_bytes // (num_tasks * _SPANS_PER_TASK)))
    spans = [(source.name, span) for source in sources for span in plan_spans(source, files[source.name], target_bytes)]
    total = max(1, sum(span.num_bytes for _, span in spans))
    tasks: list[list[tuple[str, Span]]] = [[] for _ in range(num_tasks)]
    num_before = 0
    for name, span in spans:
        tasks[min(num_tasks - 1, num_before * num_tasks // total)].append((name, span))
        num_before += span.num_bytes
    return tuple(tuple(task) for task in tasks)


def plan_phases(options: CleanOptions, files: dict[str, tuple[InputFile, ...]]) -> list[Phase]:
    """Returns the pipelines of the cleaning, in the order in which they must run."""
    account = Account(options.work / "examples", options.num_examples, options.tokenizer)
    fields = sorted({stage.field for stage in options.stages if isinstance(stage, Score)})
    tasks = plan_tasks(options.sources, files, options.tasks)
    sources = [source.name for source in options.sources]
    phases: list[Phase] = []
    steps: list[PipelineStep] = [SourceReader(options.sources, tasks, fields, options.tokenizer)]
    for number, stage in enumerate(options.stages):
        label = options.label(number)
        work = options.work / "work" / label
        if isinstance(stage, ExactDuplicates | NearDuplicates):
            steps += [PassWriter(work / "documents"), stage.build_signature(work, sources)]
            phases.append(Phase(f"{label}-signatures", tuple(steps), options.tasks))
            phases += stage.build_searches(work, label)
            steps = [PassReader(work / "documents"), RemovalStage(label, account, stage.build_removal(work))]
        elif isinstance(stage, Decontamination):
            phases.insert(0, _index_phase(stage, label, files, work))
            inner = stage.build_filter(work)
            steps.append(FilterStage(label, account, inner, stage.sources, stage.languages))
        else:
            steps.append(FilterStage(label, account, stage.build(), stage.sources, stage.languages))
    steps.append(TextWriter(options.out, options.work / "shards", options.compression))
    phases.append(Phase("text", tuple(steps), options.tasks))
    return phases


def evaluation_key(label: str, name: str) -> str:
    """Returns the key of an evaluation set's files among the files of the sources."""
    return f"{label}/{name}"


def _index_phase(stage: Decontamination, label: str, files: dict[str, tuple[InputFile, ...]], work: Path) -> Phase:
    spans = {
        source.name: tuple(plan_spans(source, files[evaluation_key(label, source.name)], _MAX_SPAN_BYTES))
        for source in stage.evaluation
    }
    return Phase(f"{label}-index", (EvaluationIndex(stage, spans, work),), len(stage.evaluation))
