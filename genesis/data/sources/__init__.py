"""Sources of text: named sources, their files, and the documents in these files.

A source's files are cut into *spans*, each of which can be read alone: a range of bytes of an uncompressed file of
records, a range of row groups of a parquet file, or a whole file. Reading all spans in order gives every document once.

A file may lie in a store (`genesis.data.remote`). Such a file is listed in the store and read from a copy in the local
cache (`genesis.data.cache`), which is downloaded when a span of the file is first read.

    options.py     the options of a source                  files.py        its files and their spans
    walk.py        files below local directories            binary.py       what is no text
    blocks.py      the bytes of a file, in blocks and cut at a delimiter
    records.py     entries of text, jsonl and json files    json_values.py  the objects of a json file
    tables.py      entries of parquet, arrow, csv and tsv files             table_files.py  opens these files
    read.py        spans, entries and documents of files    sample.py       a sample of documents
"""

from genesis.data.sources.entry import BadRow, DamagedFileError, Document, Entry
from genesis.data.sources.files import InputFile, Listing, Span, check_unchanged, find_files, list_source
from genesis.data.sources.options import (
    SourceOptions,
    check_sources,
    refuse_sources,
)
from genesis.data.sources.read import (
    describe_left_out,
    describe_listing,
    is_cheap_to_reopen,
    list_sources,
    plan_spans,
    read_documents,
    read_entries,
    read_rows,
)
from genesis.data.sources.sample import sample_texts

__all__ = [
    "BadRow",
    "DamagedFileError",
    "Document",
    "Entry",
    "InputFile",
    "Listing",
    "SourceOptions",
    "Span",
    "check_sources",
    "check_unchanged",
    "describe_left_out",
    "describe_listing",
    "find_files",
    "is_cheap_to_reopen",
    "list_source",
    "list_sources",
    "plan_spans",
    "read_documents",
    "read_entries",
    "read_rows",
    "refuse_sources",
    "sample_texts",
]
