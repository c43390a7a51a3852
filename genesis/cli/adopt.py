"""`genesis data adopt`."""

from collections.abc import Iterator
from typing import Final

from genesis.base.errors import UserError, numbered
from genesis.cli.options import build_parser, make, parse
from genesis.data.foreign.adopt import Adoption, AdoptOptions, ForeignSource, adopt_corpus
from genesis.data.manifest import SPLITS

_DESCRIPTION = """Makes a corpus in OUT/NAME from existing token files without copying them: datatrove's .ds, Megatron's
.bin and .idx, flat .npy and .bin (nanoGPT's, llm.c's), and a Hugging Face dataset saved to disk. The corpus works like
one that `genesis data prepare` made, as long as the files are neither moved nor changed.
Give several sources in a YAML file, by --config. Example:
genesis data adopt data/train.bin --name mine --dtype uint16 --vocab_size 50257 --eos_id 50256"""

_SOURCE_SETTINGS: Final = ("format", "documents", "column", "dtype")
_PATHS_HELP = "files or directories of one source, named 'tokens', instead of --sources"


def main(argv: list[str]) -> int:
    """Runs `genesis data adopt` and returns its exit status."""
    parser = build_parser("data adopt", _DESCRIPTION)
    parser.add_argument("paths", nargs="*", help=_PATHS_HELP)
    parser.add_class_arguments(AdoptOptions, skip={"sources"})
    parser.add_argument(
        "--sources", type=tuple[ForeignSource, ...], default=(), help="named sources, preferably in a YAML file"
    )
    parser.add_class_arguments(ForeignSource, skip={"name", "paths", "validation_paths", "weight"})
    parser.add_argument("--validation_paths", nargs="+", default=[], help="files or directories of the validation set")
    arguments = parse(parser, argv, AdoptOptions, ForeignSource)
    if bool(arguments.paths) == bool(arguments.sources):
        raise UserError("genesis data adopt: give either paths or sources (see --help)")
    if arguments.paths:
        # The format and similar settings are flags here; in `sources` each source has its own.
        settings = {name: arguments[name] for name in _SOURCE_SETTINGS}
        paths, validation_paths = tuple(arguments.paths), tuple(arguments.validation_paths)
        arguments.sources = (ForeignSource("tokens", paths, validation_paths, **settings),)
    options = make(AdoptOptions, arguments)
    for line in _describe(options, adopt_corpus(options)):
        print(line)
    return 0


def _describe(options: AdoptOptions, adoption: Adoption) -> Iterator[str]:
    manifest = adoption.manifest
    yield f"{options.corpus}: {numbered(adoption.num_files, 'files')} read in place"
    for split in SPLITS:
        for source in manifest.split(split):
            counts = (
                f"{numbered(source.num_tokens, 'tokens')} in {numbered(source.num_documents, 'documents')}, "
                f"{numbered(len(source.shards), 'shards')}"
            )
            yield f"  {split} {source.name}: {counts}"
    if adoption.num_added:
        yield f"eos_id {manifest.eos_id} is missing in {numbered(adoption.num_added, 'documents')}: reads add it"
    if adoption.num_unfinished:
        what = f"eos_id {manifest.eos_id} is not at the end of {numbered(adoption.num_unfinished, 'files')}"
        yield f"{what}: the last document continues in the next file"
    if adoption.num_inner:
        what = f"eos_id {manifest.eos_id} occurs {numbered(adoption.num_inner, 'times')} within documents"
        yield f"{what}: it does not end them (with `documents: eos` it would)"
    if not manifest.tokenizer_hash:
        yield "the tokenizer is unknown: there are no bits per byte, and samples are shown as ids"
    if options.check == "sizes":
        yield "only sizes and indices were checked: ids and document ends are checked when a shard is first read"
