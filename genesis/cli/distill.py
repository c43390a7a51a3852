"""`genesis data distill`: a teacher's probabilities for a corpus, on disk."""

from dataclasses import dataclass
from pathlib import Path

import torch

from genesis.base.device import check_available, is_available
from genesis.base.errors import UserError, numbered
from genesis.cli.options import build_parser, make, parse
from genesis.data.corpus_data import CorpusData
from genesis.data.loader import Ranks
from genesis.data.packing import Packing
from genesis.data.training_data import TrainingOptions
from genesis.generate.teacher import check_teacher_fits, find_teacher, load_teacher
from genesis.objectives.distillation import check_options
from genesis.objectives.teacher import TeacherDtype
from genesis.objectives.teacher_cache import CacheIdentity, LogProbsType, write_cache

_DESCRIPTION = """Stores a teacher's probabilities for each token of a corpus: those of the --top_k most probable ids,
and that of all other ids together. A student learns them by model.objective of `genesis fit`, without the teacher.
The command may be killed at any time: the same command continues. A cache belongs to one teacher, corpus, packing,
length, temperature and number of ids, and is refused with others.
Example: genesis data distill corpora/demo runs/teacher --seq_len 2048 --top_k 64"""


@dataclass(frozen=True)
class DistillOptions:
    """Options of `genesis data distill`.

    Args:
        seq_len: Tokens per sequence, equal to data.seq_len.
        packing: How documents are packed, equal to data.packing; by default best_fit for conversations, else chunk.
        top_k: Number of ids for each position whose probabilities are stored.
        temperature: The temperature of the probabilities.
        log_probs: The type on disk: float32 keeps what the teacher gives, float16 has an error of 3.5/2048 at most.
        out: The cache's directory; by default in CORPUS/distilled.
        batch_size: Number of sequences of one forward. If it is data.micro_batch_size, a CPU gives bit for bit the
            probabilities of a teacher that runs beside the training.
        device: The device: cpu, cuda, or another that torch finds; by default cuda if available.
        dtype: The dtype in which the teacher runs; by default that of its weights.
    """

    seq_len: int
    packing: Packing | None = None
    top_k: int = 64
    temperature: float = 1.0
    log_probs: LogProbsType = "float32"
    out: Path | None = None
    batch_size: int = 8
    device: str | None = None
    dtype: TeacherDtype | None = None

    def __post_init__(self) -> None:
        check_options(self.top_k, self.temperature)
        for name in ("seq_len", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")


def main(argv: list[str]) -> int:
    """Runs `genesis data distill` and returns its exit status."""
    parser = build_parser("data distill", _DESCRIPTION)
    parser.add_argument("corpus", type=Path, help="directory of a corpus")
    parser.add_argument("teacher", type=Path, help="a run, a checkpoint or an export")
    parser.add_class_arguments(DistillOptions)
    arguments = parse(parser, argv, DistillOptions)
    options = make(DistillOptions, arguments)
    for line in distill(arguments.corpus, arguments.teacher, options):
        print(line)
    return 0


def distill(path: Path, given: Path, options: DistillOptions) -> list[str]:
    """Makes the cache and returns lines about it.

    Raises:
        UserError: Teacher and corpus do not fit together, the teacher does not fit the memory, or the cache cannot be
            written.
    """
    if options.device is not None:
        check_available(options.device)
    device = torch.device(options.device or ("cuda" if is_available("cuda") else "cpu"))
    check_teacher_fits(given, device, options.dtype)
    found = find_teacher(given)
    size = options.batch_size
    data = CorpusData(
        path,
        TrainingOptions(options.seq_len, size, size, packing=options.packing),
        verify_hashes="first_touch",
        tokenizer_hash=None,
    )
    data.open(Ranks())
    sequences = data.identify_sequences()
    found.check_tokenizer(sequences["tokenizer_hash"], f"the corpus {path}", path)
    teacher, dtype = load_teacher(
        found,
        tokenizer=path if found.tokenizer_hash else None,
        vocab_size=data.vocab_size,
        seq_len=options.seq_len,
        top_k=options.top_k,
        temperature=options.temperature,
        dtype=options.dtype,
    )
    identity = CacheIdentity(
        teacher=found.hash,
        teacher_dtype=dtype,
        vocab_size=data.vocab_size,
        top_k=options.top_k,
        temperature=float(options.temperature),
        log_probs=options.log_probs,
        sequences=sequences,
    )
    out = options.out or path / "distilled" / _name(given, options, data.packing)
    total = sum(identity.num_sequences.values())
    num_bytes = total * identity.layout.sequence_bytes
    what = f"{numbered(total * options.seq_len, 'positions')} of {numbered(total, 'sequences')}"
    print(f"{out}: {what}, {num_bytes / 2**30:,.2f} GiB")
    is_new = write_cache(
        out,
        identity,
        data.read_sequences,
        lambda micro_batch: teacher.read(micro_batch.to(device)),
        batch_size=size,
    )
    return [
        "complete" if is_new else "nothing to do: the cache was complete",
        "model.objective in a recipe: "
        f"class_path: genesis.objectives.Distillation, init_args: teacher: {given}, cache: {out}, "
        f"top_k: {options.top_k}, temperature: {options.temperature:g}",
    ]


def _name(given: Path, options: DistillOptions, packing: Packing) -> str:
    """Returns the name of a cache, by what people tell caches apart."""
    teacher = "-".join(part for part in given.parts[-2:] if part not in ("/", "runs", "..", "."))
    number = f"top{options.top_k}-t{options.temperature:g}-{packing}-{options.seq_len}-{options.log_probs}"
    return f"{teacher}-{number}"
