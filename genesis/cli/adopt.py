"""`genesis data adopt`."""

import sys
from collections.abc import Iterator
from typing import Final

from rich.console import Console

from genesis.cli.options import PLAIN_WIDTH, build_parser, make, parse
from genesis.data.foreign.adopt import Adoption, AdoptOptions, ForeignSource, adopt_corpus
from genesis.data.manifest import SPLITS
from genesis.errors import UserError

_DESCRIPTION = """Makes a corpus of tokens that are there already, in OUT/NAME, and copies none: datatrove's .ds,
Megatron's .bin and .idx, flat .npy and .bin (nanoGPT's, llm.c's), and a Hugging Face dataset saved to disk. Everything
after that is as with a corpus that `genesis data prepare` made; the files must stay where they are, as they are.
Several sources are best given in a YAML file, by --config. Example:
genesis data adopt data/train.bin --name mine --dtype uint16 --vocab_size 50257 --eos_id 50256"""

_SOURCE_SETTINGS: Final = ("format", "documents", "column", "dtype")
_PATHS_HELP = "files or directories of one source, called 'tokens', in place of --sources"


def main(argv: list[str]) -> int:
    """Runs `genesis data adopt` and returns its exit status."""
    parser = build_parser("data adopt", _DESCRIPTION)
    parser.add_argument("paths", nargs="*", help=_PATHS_HELP)
    parser.add_class_arguments(AdoptOptions, skip={"sources"})
    parser.add_argument(
        "--sources", type=tuple[ForeignSource, ...], default=(), help="named sources, best in a YAML file"
    )
    parser.add_class_arguments(ForeignSource, skip={"name", "paths", "validation_paths", "weight"})
    parser.add_argument("--validation_paths", nargs="+", default=[], help="of its validation set")
    arguments = parse(parser, argv, AdoptOptions, ForeignSource)
    if bool(arguments.paths) == bool(arguments.sources):
        raise UserError("genesis data adopt: give either paths or sources (--help tells all)")
    if arguments.paths:
        # Their format and the like stand among the flags; those of `sources` say their own.
        settings = {name: arguments[name] for name in _SOURCE_SETTINGS}
        paths, validation_paths = tuple(arguments.paths), tuple(arguments.validation_paths)
        arguments.sources = (ForeignSource("tokens", paths, validation_paths, **settings),)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    options = make(AdoptOptions, arguments)
    with console.status("reading tokens") as status:
        adoption = adopt_corpus(options, lambda num_tokens: status.update(f"reading tokens: {num_tokens:,}"))
    for line in _describe(options, adoption):
        print(line)
    return 0


def _describe(options: AdoptOptions, adoption: Adoption) -> Iterator[str]:
    manifest = adoption.manifest
    yield f"{options.corpus}: {adoption.num_files:,} files are read where they lie"
    for split in SPLITS:
        for source in manifest.split(split):
            counts = (
                f"{source.num_tokens:,} tokens in {source.num_documents:,} documents, {len(source.shards):,} shards"
            )
            yield f"  {split} {source.name}: {counts}"
    if adoption.num_added:
        yield f"{adoption.num_added:,} documents lack eos_id {manifest.eos_id}: it is added where they are read"
    if adoption.num_unfinished:
        what = f"{adoption.num_unfinished:,} files do not end with eos_id {manifest.eos_id}"
        yield f"{what}: their last document goes on in the next file"
    if adoption.num_inner:
        what = f"eos_id {manifest.eos_id} stands {adoption.num_inner:,} times within documents"
        yield f"{what}: they go on after it (documents eos would end them there)"
    if not manifest.tokenizer_hash:
        yield "no tokenizer is known: bits per byte are not, either, and samples are shown as ids"
    if options.check == "sizes":
        yield "nothing but sizes and indices was checked: ids and documents' ends are when a shard is first read"
